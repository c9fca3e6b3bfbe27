"""Sharded optimizers that are right, and some that are wrong in what only ownership, state or a load shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from harness import Candidate, ShardedOptimizer, new_group
from harness.candidates.builtin import Builtin
from harness.candidates.torch_sharded_optimizer import all_reduces_and_broadcasts


class Simple(Candidate):
    """The adapter of the documentation, around a trainer's own optimizer; here one that reduces and updates all."""

    supports = ("sharded_optimizer_frozen", "sharded_optimizer_mixed")

    def open(self, mesh: Any) -> None:
        self.group = new_group(mesh, "dp") if "dp" in mesh.names else None

    def sharded_optimizer(self, case: Any, parameters: Mapping[str, nn.Parameter]) -> ShardedOptimizer:
        trained = [p for p in parameters.values() if p.requires_grad]
        inner = torch.optim.SGD(trained, case.lr, case.momentum, weight_decay=case.weight_decay)

        def step() -> None:
            for p in trained:
                assert p.grad is not None
                dist.all_reduce(p.grad.div_(case.parallel_size), group=self.group)
            inner.step()

        return ShardedOptimizer(step)


class Declared(Simple):
    """The same, which says what it sends."""

    def traffic(self, case: Any, needed: Sequence[Any]) -> Sequence[Any]:
        return [one for one in all_reduces_and_broadcasts(case) if one.operation == "all_reduce"]


class _Changed(Builtin):
    def sharded_optimizer(self, case: Any, parameters: Mapping[str, nn.Parameter]) -> ShardedOptimizer:
        made = super().sharded_optimizer(case, parameters)
        self.change(case, parameters, made)
        return made

    def change(self, case: Any, parameters: Mapping[str, nn.Parameter], made: ShardedOptimizer) -> None:
        raise NotImplementedError


class OwnsAll(_Changed):
    """Every rank says that it owns everything."""

    def change(self, case: Any, parameters: Mapping[str, nn.Parameter], made: ShardedOptimizer) -> None:
        made.owned = lambda name: [(0, parameters[name].numel())]
        made.state = None


class OwnsTooMuch(_Changed):
    """Ranges that end behind the parameter."""

    def change(self, case: Any, parameters: Mapping[str, nn.Parameter], made: ShardedOptimizer) -> None:
        made.owned = lambda name: [(0, parameters[name].numel() + 1)]
        made.state = None


class SilentOnOne(_Changed):
    """Only the first rank says what it owns."""

    def change(self, case: Any, parameters: Mapping[str, nn.Parameter], made: ShardedOptimizer) -> None:
        made.state = None
        made.owned = made.owned if dist.get_rank() == 0 else None


class ForgetsState(_Changed):
    """A state that stays at zero, with right parameters."""

    def change(self, case: Any, parameters: Mapping[str, nn.Parameter], made: ShardedOptimizer) -> None:
        state = made.state
        assert state is not None
        made.state = lambda name, kind: torch.zeros_like(state(name, kind))


class ShortState(_Changed):
    """A state of fewer elements than are owned."""

    def change(self, case: Any, parameters: Mapping[str, nn.Parameter], made: ShardedOptimizer) -> None:
        state = made.state
        assert state is not None
        made.state = lambda name, kind: state(name, kind)[1:]


class LoadsInexactly(_Changed):
    """A state whose last bits change in a file: within the tolerance, but not the same."""

    def change(self, case: Any, parameters: Mapping[str, nn.Parameter], made: ShardedOptimizer) -> None:
        load = made.load
        assert load is not None

        def change(saved: Any) -> Any:
            for kept in saved["parameters"].values():
                for kind, x in kept.items():
                    kept[kind] = torch.nextafter(x, torch.full_like(x, torch.inf))
            return load(saved)

        made.load = change


class ChangesOneReplica(_Changed):
    """A last bit of a parameter that only one rank has."""

    def change(self, case: Any, parameters: Mapping[str, nn.Parameter], made: ShardedOptimizer) -> None:
        step = made.step

        def change() -> None:
            step()
            if dist.get_rank() == 0:
                with torch.no_grad():
                    for p in parameters.values():
                        p.copy_(torch.nextafter(p, torch.full_like(p, torch.inf)))

        made.step = change


class GathersTwice(_Changed):
    """Right values, by one collective too many."""

    def change(self, case: Any, parameters: Mapping[str, nn.Parameter], made: ShardedOptimizer) -> None:
        step = made.step

        def change() -> None:
            step()
            dist.all_reduce(torch.zeros(3), group=self.groups.group(case.axis))

        made.step = change


class AcceptsAnything(_Changed):
    """Loads nothing, and refuses nothing."""

    def change(self, case: Any, parameters: Mapping[str, nn.Parameter], made: ShardedOptimizer) -> None:
        made.load = lambda saved: None


class TakesHalf(_Changed):
    """Changes its state before it refuses."""

    def change(self, case: Any, parameters: Mapping[str, nn.Parameter], made: ShardedOptimizer) -> None:
        load, state, taken = made.load, made.state, list[int]()
        assert load is not None
        assert state is not None

        def taking(saved: Any) -> None:
            taken.append(1)
            load(saved)

        made.load = taking
        made.state = lambda name, kind: state(name, kind) + len(taken)


class NoSave(_Changed):
    """Says that it can save, and cannot."""

    def change(self, case: Any, parameters: Mapping[str, nn.Parameter], made: ShardedOptimizer) -> None:
        made.save = None


class Nothing(Candidate):
    """Returns no ShardedOptimizer."""

    def sharded_optimizer(self, case: Any, parameters: Any) -> Any:
        return torch.optim.SGD([p for p in parameters.values() if p.requires_grad], 0.1)
