"""What ranks of a state machine do with a loss scaler: they keep it from rule to rule."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from harness.world.context import RankContext
from sharded import loss_scale, mutants
from sharded.loss_scale import DynamicLossScaler
from sharded.process_groups import ProcessGroups

AXES = (("tp", 2), ("pp", 2), ("dp", 2))

#: Scale, counters, and whether the last step was skipped.
Seen = tuple[float, int, int, bool | None]


class _Kept:
    """Of this rank."""

    options: dict[str, Any]
    scaler: DynamicLossScaler
    saved: Any = None


@functools.cache
def _groups() -> list[Any]:
    groups = ProcessGroups(AXES, combined=())
    return [groups.group(axis) for axis, _ in AXES]


def obey(context: RankContext, rule: str, argument: Any, mutant: str) -> Seen:
    """Obeys a rule on this rank. ``argument`` of begin: the scaler's options; of step: the ranks that overflow; of
    load: whether into a fresh scaler; of change: the interval."""
    if not mutant:
        return _obey(context.rank, rule, argument)
    with mutants.applied(mutant):
        return _obey(context.rank, rule, argument)


def _obey(rank: int, rule: str, argument: Any) -> Seen:
    skipped = None
    if rule == "begin":
        _Kept.options = argument
        _Kept.scaler = _made()
    elif rule == "step":
        skipped = _Kept.scaler.update(loss_scale.has_overflow(_gradients(rank, argument)))
    elif rule == "save":
        _Kept.saved = copy.deepcopy(_Kept.scaler.save())
    elif rule == "load":
        _Kept.scaler = _made() if argument else _Kept.scaler
        _Kept.scaler.load(copy.deepcopy(_Kept.saved))
    else:
        assert rule == "change"
        _Kept.scaler.set_growth_interval(argument)
    state = _Kept.scaler.state()
    return _Kept.scaler.scale, state["good"], state["left"], skipped


def _made() -> DynamicLossScaler:
    return DynamicLossScaler(**_Kept.options, groups=_groups())


def _gradients(rank: int, over: Sequence[int]) -> list[torch.Tensor | None]:
    bad = (math.inf, -math.inf, math.nan)[rank % 3] if rank in over else 1.0
    return [torch.ones(2), None, torch.tensor([1.0, bad])]
