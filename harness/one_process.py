"""The stages of a pipeline case one after the other in one process, in the case's dtype and micro-batches: the bits of
a pipeline that adds gradients in the order of the micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from harness.stages import Seen, StageModule, build
from reference.pipeline import PipelineCase, Tensors
from reference.pipeline_gradients import token_weights
from reference.pipeline_stages import parameters, starts, tied


class OneProcess:
    """The steps of one pipeline, with the random numbers that the ranks have."""

    def __init__(self, case: PipelineCase, given: Tensors, values: Tensors, replica: int) -> None:
        self.case, self.given, self.replica = case, given, replica
        self.stages = [build(case, given, values, number, Seen()) for number in range(case.stages)]
        self._drawn = [seeded(c).get_state() for c in range(case.parallel_size)]

    def step(self, step: int) -> Tensors:
        """The gradient of every parameter that trains after a step, by name."""
        if not self.case.accumulate:
            for stage in self.stages:
                stage.zero_grad(set_to_none=True)
        before = self._taken_aside()
        weights = token_weights(self.case, step)[self.replica].to(self.case.loss_format.torch_dtype)
        inputs = inputs_of(self.case, self.given, self.replica, step)
        for begin, end in zip(starts(self.case)[:-1], starts(self.case)[1:], strict=True):
            self._micro_batch([x[begin:end] for x in inputs], weights[begin:end])
        self._sum_tied(before)
        named = {name: p for stage in self.stages for name, p in stage.named().items()}
        return {name: _gradient(named[name]).clone() for name, p in parameters(self.case).items() if p.trains}

    def _micro_batch(self, inputs: Sequence[torch.Tensor], weights: torch.Tensor) -> None:
        entered: list[tuple[torch.Tensor, ...]] = []
        left: list[tuple[torch.Tensor, ...]] = []
        for stage in self.stages:
            entered.append(tuple(inputs))
            found = self._forward(stage, inputs)
            left.append(found)
            inputs = [x.detach().contiguous().requires_grad_(x.requires_grad) for x in found]
        (losses,) = left.pop()
        (losses * weights).sum().backward()  # type: ignore[no-untyped-call]
        for outputs, after in zip(left[::-1], entered[:0:-1], strict=True):
            roots = [x for x in outputs if x.requires_grad]
            gradients = [_gradient(x) for x in after if x.requires_grad]
            torch.autograd.backward(roots, gradients)

    def _forward(self, stage: StageModule, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        rank, outside = self.case.coordinate_of(stage.number), torch.get_rng_state()
        torch.set_rng_state(self._drawn[rank])
        try:
            found = stage(*inputs)
            self._drawn[rank] = torch.get_rng_state()
        finally:
            torch.set_rng_state(outside)
        return found if isinstance(found, tuple) else (found,)

    def _taken_aside(self) -> list[torch.Tensor | None]:
        held = [self.stages[block.stage].tied for block in tied(self.case)]
        before = [None if p is None else p.grad for p in held]
        for p in held:
            if p is not None:
                p.grad = None
        return before

    def _sum_tied(self, before: Sequence[torch.Tensor | None]) -> None:
        held = [p for block in tied(self.case) if (p := self.stages[block.stage].tied) is not None]
        if not held:
            return
        total = _gradient(held[0]).clone()
        for p in held[1:]:
            total = total + _gradient(p)
        for p, earlier in zip(held, before, strict=True):
            p.grad = total.clone() if earlier is None else total + earlier


def seeded(coordinate: int) -> torch.Generator:
    """The random numbers of a rank, which go on from step to step."""
    return torch.Generator().manual_seed(coordinate)


def inputs_of(case: PipelineCase, given: Tensors, replica: int, step: int) -> list[torch.Tensor]:
    """What enters the first stage, of the whole batch."""
    found = [given[f"input[{step}]"][replica].to(case.format.torch_dtype)]
    if case.ids:
        found.append(given[f"ids[{step}]"][replica].to(torch.int64))
    return [x.clone(memory_format=torch.contiguous_format) for x in found]


def _gradient(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x) if x.grad is None else x.grad
