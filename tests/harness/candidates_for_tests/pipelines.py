"""Pipelines that are right, and some that are not."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from harness import Candidate, Pipeline, new_group
from harness.candidates.builtin import Builtin


class Simple(Candidate):
    """The lines of the documentation: GPipe with blocking sends, one tensor across a border."""

    supports = ("pipeline_gpipe", "pipeline_few", "pipeline_uneven", "pipeline_sizes", "pipeline_widths")

    def open(self, mesh: Any) -> None:
        self.group = new_group(mesh, "pp") if "pp" in mesh.names else None

    def pipeline(self, case: Any, stages: Any) -> Pipeline:
        (stage,), group = stages, self.group
        first, last, rank = stage.number == 0, stage.last, dist.get_rank(group)

        def step(inputs: Any, valid: Any) -> Any:
            tokens = valid.sum().clamp(min=1) if case.loss == "token_mean" else 1
            kept = []
            for x, mask in zip(inputs[0].split(case.sizes), valid.split(case.sizes), strict=True):
                if not first:
                    ((shape, dtype),) = stage.takes
                    x = torch.empty(len(mask), *shape[1:], dtype=dtype)
                    dist.recv(x, group=group, group_src=rank - 1)
                    x.requires_grad_()
                out = stage(x)
                if last:
                    out = torch.where(mask, out, 0).sum() / tokens
                else:
                    dist.send(out.detach(), group=group, group_dst=rank + 1)
                kept.append((x, out))
            for x, out in kept:
                grad = None if last else torch.empty_like(out)
                if grad is not None:
                    dist.recv(grad, group=group, group_src=rank + 1)
                out.backward(grad)
                if not first:
                    dist.send(x.grad, group=group, group_dst=rank - 1)
            return torch.stack([out.detach() for _, out in kept]).sum() if last else None

        return Pipeline(step)


class _Changed(Builtin):
    def pipeline(self, case: Any, stages: Any) -> Any:
        made = super().pipeline(case, stages)
        step = made.step
        made.step = lambda inputs, valid: self.step(case, step, inputs, valid)
        return self.change(case, stages, made)

    def step(self, case: Any, step: Any, inputs: Any, valid: Any) -> Any:
        return step(inputs, valid)

    def change(self, case: Any, stages: Any, made: Pipeline) -> Any:
        return made


class ReturnsTheStages(_Changed):
    def change(self, case: Any, stages: Any, made: Pipeline) -> Any:
        return stages


class NoLoss(_Changed):
    def step(self, case: Any, step: Any, inputs: Any, valid: Any) -> Any:
        step(inputs, valid)


class LossEverywhere(_Changed):
    def step(self, case: Any, step: Any, inputs: Any, valid: Any) -> Any:
        found = step(inputs, valid)
        return torch.zeros(()) if found is None else found


class AcceptsAll(_Changed):
    def pipeline(self, case: Any, stages: Any) -> Any:
        loss = torch.zeros((), dtype=case.loss_format.torch_dtype)
        return Pipeline(lambda inputs, valid: loss if any(stage.last for stage in stages) else None)


class AnotherError(_Changed):
    def step(self, case: Any, step: Any, inputs: Any, valid: Any) -> Any:
        try:
            return step(inputs, valid)
        except Exception:
            raise ValueError("something failed") from None


class DrawsNumbers(_Changed):
    def step(self, case: Any, step: Any, inputs: Any, valid: Any) -> Any:
        torch.rand(1)
        return step(inputs, valid)


class ChangesTheInput(_Changed):
    def step(self, case: Any, step: Any, inputs: Any, valid: Any) -> Any:
        found = step(inputs, valid)
        inputs[0].add_(1)
        return found


class SendsMore(_Changed):
    """Tells the next rank a number that it does not need."""

    def step(self, case: Any, step: Any, inputs: Any, valid: Any) -> Any:
        group = self.groups.group(case.axis)
        found, one = step(inputs, valid), torch.ones(1)
        if group.rank() == 0:
            dist.send(one, group=group, group_dst=1)
        elif group.rank() == 1:
            dist.recv(one, group=group, group_src=0)
        return found


class Reduces(_Changed):
    """Ends each step with a sum that nobody needs."""

    def step(self, case: Any, step: Any, inputs: Any, valid: Any) -> Any:
        found = step(inputs, valid)
        dist.all_reduce(torch.ones(2), group=self.groups.group(case.axis))
        return found


class Switches(_Changed):
    """Leaves gradients switched off."""

    def step(self, case: Any, step: Any, inputs: Any, valid: Any) -> Any:
        found = step(inputs, valid)
        torch.set_grad_enabled(False)
        return found


class RingOfEight(_Changed):
    """Buffers for eight micro-batches, used round and round: the ninth has the inputs of the first."""

    def step(self, case: Any, step: Any, inputs: Any, valid: Any) -> Any:
        for x in inputs:
            parts = x.split(case.sizes)
            for m in range(8, len(parts)):
                if parts[m].shape == parts[m - 8].shape:
                    parts[m].copy_(parts[m - 8])
        return step(inputs, valid)


class NoStep(_Changed):
    def change(self, case: Any, stages: Any, made: Pipeline) -> Any:
        return Pipeline(None)  # type: ignore[arg-type]


class ZeroesText(_Changed):
    def change(self, case: Any, stages: Any, made: Pipeline) -> Any:
        return Pipeline(made.step, zero_grad="now")  # type: ignore[arg-type]


class SameMasks(_Changed):
    def change(self, case: Any, stages: Any, made: Pipeline) -> Any:
        for stage in stages:
            stage.register_forward_pre_hook(lambda *_: torch.manual_seed(0) and None)
        return made


class LastBit(_Changed):
    """One unit in the last place off."""

    def change(self, case: Any, stages: Any, made: Pipeline) -> Any:
        made.read_grad = lambda p: None if p.grad is None else torch.nextafter(p.grad, p.grad + 1)
        return made


class LastBitRecomputed(LastBit):
    supports = tuple(feature for feature in Builtin.supports if feature != "pipeline_same_bits")

    def change(self, case: Any, stages: Any, made: Pipeline) -> Any:
        return super().change(case, stages, made) if case.recompute else made


class NotTied(_Changed):
    def pipeline(self, case: Any, stages: Any) -> Any:
        for stage in stages:
            stage.tied = None
        return super().pipeline(case, stages)


class KeepsEverything(_Changed):
    """GPipe where 1F1B is asked."""

    def pipeline(self, case: Any, stages: Any) -> Any:
        return super().pipeline(dataclasses.replace(case, schedule="gpipe"), stages)
