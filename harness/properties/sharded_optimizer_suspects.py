"""What parameters would be with each of the known mistakes of sharded optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from harness.oracle.patterns.evidence import Suspect, Values
from harness.properties.optimizer_mistakes import after, mistakes
from reference.sharded_optimizer import ShardedOptimizerCase, Tensors, local_gradients, reduced, updated


def suspects(case: ShardedOptimizerCase, given: Tensors, name: str) -> list[Suspect]:
    """The wrong values that known mistakes give for ``parameter{i}[step]``."""
    base, _, rest = name.partition("[")
    i, step = base.removeprefix("parameter"), int(rest.partition("]")[0])
    if not i.isdigit() or case.parameters[int(i)].kind == "frozen":
        return []
    return list(_Suspected(case, given, int(i), step).all())


class _Suspected:
    def __init__(self, case: ShardedOptimizerCase, given: Tensors, i: int, step: int) -> None:
        self.case, self.given, self.i, self.step = case, given, i, step
        self.start = given[f"parameter{i}"].expand(case.groups, *case.parameters[i].shape)
        self.right = [reduced(case, given, i, at) for at in range(step + 1)]
        self.sizes = [case.mesh.axis_size(case.axis_at(at)) for at in range(step + 1)]

    def all(self) -> Iterator[Suspect]:
        case = self.case
        if max(self.sizes) > 1:
            too_small = [g / n for g, n in zip(self.right, self.sizes, strict=True)]
            too_large = [g * n for g, n in zip(self.right, self.sizes, strict=True)]
            average = case.reduction == "average"
            twice = "averaged twice" if average else "averaged where the sum is due"
            yield Suspect(f"is as if gradients were {twice}", self._after(case, too_small))
            if average:
                yield Suspect("is as if gradients were summed and not averaged", self._after(case, too_large))
            yield Suspect("is as if each rank used its own gradient: it is not reduced", self._own())
        world = case.mesh.size
        if case.reduction == "average" and world > max(self.sizes):
            less = [g * n / world for g, n in zip(self.right, self.sizes, strict=True)]
            yield Suspect(
                f"is as if gradients were averaged over the world and not over {case.axis}", self._after(case, less)
            )
        yield Suspect("is as before the first step: it is not updated", self.start.numpy())
        if self.step:
            yield Suspect("is as before this step: it is not updated", self._after(case, self.right[:-1]))
        if case.weight_decay:
            without = replace(case, weight_decay=0.0)
            yield Suspect("is as without weight decay", self._after(without, self.right))
        for cause, update in mistakes(case):
            yield Suspect(cause, after(case, self.start, self.right, update).numpy())
        if case.load and self.step >= case.load:
            anew = list(updated(case, self.i, self.start, iter(self.right[: case.load])))[-1][0]
            cause = "is as if the optimizer began anew where a state was loaded"
            yield Suspect(cause, self._after(case, self.right[case.load :], anew))

    def _after(
        self, case: ShardedOptimizerCase, gradients: list[torch.Tensor], start: torch.Tensor | None = None
    ) -> Values:
        begin = self.start if start is None else start
        *_, (values, _) = updated(case, self.i, begin, iter(gradients))
        return values.numpy()

    def _own(self) -> tuple[Values, ...]:
        """For each rank, [R, *shape] with its own in every place."""
        case, found = self.case, []
        locals_ = [local_gradients(case, self.given, self.i, at) for at in range(self.step + 1)]
        for rank in range(case.mesh.size):
            own = [
                one[:, case.mesh.coordinate(rank, case.axis_at(at))] / (n if case.reduction == "average" else 1)
                for at, (one, n) in enumerate(zip(locals_, self.sizes, strict=True))
            ]
            found.append(self._after(case, own))
        return tuple(found)
