"""Parameters that several stages hold, as an embedding that is also the output's weight: their gradients are summed.

Every holder ends with the sum over all copies, in the order of the stages, and so with the same bits. It must be there
before gradients are reduced over data-parallel ranks into shards: what is added afterwards to an owner's shard would
lack the other ranks' part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from sharded import pipeline_border
from sharded.main_grad import buffer_of

#: By name, the copies on this rank, each with its stage.
Copies = Mapping[str, Sequence[tuple[int, torch.nn.Parameter]]]


class TiedParameters:
    """The copies of tied parameters on this rank of a pipeline group.

    Every rank of the group must construct it, those without a copy too. Raises ValueError, on every rank, where copies
    of one name differ in shape, dtype or need of a gradient.
    """

    def __init__(self, copies: Copies, group: ProcessGroup) -> None:
        self._copies = {name: sorted(found, key=lambda one: one[0]) for name, found in copies.items() if found}
        self._group = group
        self._before: dict[tuple[str, int], torch.Tensor] = {}
        mine = {
            name: [
                (stage, f"{tuple(p.shape)} {p.dtype} {'trains' if p.requires_grad else 'frozen'}") for stage, p in found
            ]
            for name, found in self._copies.items()
        }
        everyone: list[Any] = [mine]
        if group.size() > 1:
            everyone = [None] * group.size()
            dist.all_gather_object(everyone, mine, group=group)
        #: By name: (stage, rank in the group) of every copy, by stage.
        self.holders: dict[str, list[tuple[int, int]]] = {}
        for name in sorted({name for theirs in everyone for name in theirs}):
            found = sorted(
                (stage, rank, text) for rank, theirs in enumerate(everyone) for stage, text in theirs.get(name, ())
            )
            first = found[0]
            for stage, _, text in found:
                if text != first[2]:
                    raise ValueError(
                        f"the tied parameter {name!r} is {text} on stage {stage} and {first[2]} on stage {first[0]}: "
                        "build all copies alike"
                    )
            self.holders[name] = embedding_group([(stage, rank) for stage, rank, _ in found], group.size())

    def begin(self) -> None:
        """Sets aside what was summed before, so that it is not summed again."""
        self._before = {}
        for name, found in self._copies.items():
            for stage, parameter in found:
                found_before = _gradient(parameter)
                if found_before is not None:
                    self._before[name, stage] = found_before.clone()
                    _set_gradient(parameter, None)

    @torch.no_grad()
    def finish(self) -> None:
        """Sums the gradients that came since `begin`, and adds what was there before. Every rank must call it."""
        for name, holders in self.holders.items():
            self._sum(name, holders)
        for (name, stage), before in self._before.items():
            parameter = dict(self._copies[name])[stage]
            gradient = _gradient(parameter)
            _set_gradient(parameter, before if gradient is None else gradient + before)
        self._before = {}

    def _sum(self, name: str, holders: Sequence[tuple[int, int]]) -> None:
        mine = dict(self._copies.get(name, ()))
        me, ranks = self._group.rank(), sorted({rank for _, rank in holders})
        if me not in ranks or not any(p.requires_grad for p in mine.values()):
            return
        own = {stage: _gradient_or_zeros(p) for stage, p in mine.items()}
        first = holders[0][1]
        if len(ranks) == 2 or me == first:
            # Two exchange their copies, and each adds them up; of more, the first one does it for the others.
            others = [rank for rank in ranks if rank != me]
            theirs = self._exchanged(own, holders, others, sends=others if len(ranks) == 2 else [])
            total = in_order({**own, **theirs})
            if len(ranks) > 2:
                self._move([], [(total, rank) for rank in others])
        else:
            like = next(iter(own.values()))
            total = torch.empty_like(like)
            self._move([], [(own[stage], first) for stage, rank in holders if rank == me])
            self._move([(total, first)], [])
        for p in mine.values():
            _set_gradient(p, total.clone())

    def _exchanged(
        self,
        own: Mapping[int, torch.Tensor],
        holders: Sequence[tuple[int, int]],
        others: Sequence[int],
        sends: Sequence[int],
    ) -> dict[int, torch.Tensor]:
        """The copies of the other ranks, by stage."""
        like = next(iter(own.values()))
        theirs = {stage: torch.empty_like(like) for stage, rank in holders if rank in others}
        at = dict(holders)
        self._move(
            [(x, at[stage]) for stage, x in theirs.items()],
            [(own[stage], rank) for rank in sends for stage in own],
        )
        return theirs

    def _move(self, receives: Sequence[tuple[torch.Tensor, int]], sends: Sequence[tuple[torch.Tensor, int]]) -> None:
        works = [dist.irecv(x, group=self._group, group_src=rank) for x, rank in receives]
        works += [dist.isend(x, group=self._group, group_dst=rank) for x, rank in sends]
        pipeline_border.wait_for(works)


def embedding_group(holders: Sequence[tuple[int, int]], ranks: int) -> list[tuple[int, int]]:
    """Who sums: every (stage, rank) that holds a copy, in a pipeline of so many ranks."""
    return list(holders)


def in_order(gradients: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """Their sum, added in the order of the stages, a new tensor."""
    total, *rest = [gradients[stage] for stage in sorted(gradients)]
    total = total.clone()
    for gradient in rest:
        total += gradient
    return total


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """``main_grad`` where there is one, else ``grad``."""
    buffer = buffer_of(parameter)
    return parameter.grad if buffer is None else buffer


def _gradient_or_zeros(parameter: torch.Tensor) -> torch.Tensor:
    found = _gradient(parameter)
    return torch.zeros_like(parameter, requires_grad=False) if found is None else found.contiguous()


@torch.no_grad()
def _set_gradient(parameter: torch.Tensor, value: torch.Tensor | None) -> None:
    """A buffer stays the same tensor: backward adds to it."""
    buffer = buffer_of(parameter)
    if buffer is None:
        parameter.grad = value
    elif value is None:
        buffer.zero_()
    else:
        buffer.copy_(value)
