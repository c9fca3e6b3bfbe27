"""The loss scaler's class: agreement on ranks, and bad input."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_ranks import Check, run_world

from reference.loss_scale import Scaling
from sharded import mutants
from sharded.loss_scale import ConstantLossScaler, DynamicLossScaler, has_overflow
from sharded.process_groups import ProcessGroups


def made(scaling: Scaling, **groups: Any) -> DynamicLossScaler:
    options = {name: value for name, value in dataclasses.asdict(scaling).items() if name != "kind"}
    return DynamicLossScaler(**options, **groups)


def on_ranks() -> Mapping[str, Check]:
    """tp 2 x pp 2 x dp 2: an overflow on each single rank in turn, on real groups."""
    groups = ProcessGroups([("tp", 2), ("pp", 2), ("dp", 2)], combined=())
    over = [groups.group(axis) for axis in ("tp", "pp", "dp")]
    rank, scaling = dist.get_rank(), Scaling(initial=2.0**16, hysteresis=2, growth_interval=3)

    def everyone(value: object) -> list[Any]:
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, value)
        return found

    def alone(hit: int, value: float) -> list[str]:
        scaler = made(scaling, groups=over)
        gradients = [torch.ones(2), None, torch.full((2,), value if rank == hit else 1.0)]
        skips = everyone(scaler.update(has_overflow(gradients)))
        return [] if skips == [True] * 8 else [f"overflow on rank {hit}: {skips.count(True)} of 8 skip"]

    checks: dict[str, Check] = {}
    for hit in range(8):
        for value in (math.inf, math.nan):
            checks[f"{value} on rank {hit}"] = lambda hit=hit, value=value: alone(hit, value)

    def with_fault() -> list[str]:
        with mutants.applied("F29e"):
            return alone(1, math.inf) + alone(7, math.inf)

    checks["F29e"] = with_fault
    return checks


def test_all_ranks_skip_where_any_overflows() -> None:
    found = run_world(8, on_ranks)
    assert found.pop("F29e"), "agreed over one group only: not seen"
    assert not any(found.values()), found
    assert len(found) == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"initial": 0.0}, "initial is 0.0: expected above 0"),
        ({"initial": -1.0}, "initial is -1.0"),
        ({"initial": math.nan}, "initial is nan"),
        ({"growth_factor": 0.0}, "growth_factor is 0.0: expected a number above 1"),
        ({"growth_factor": -2.0}, "growth_factor is -2.0"),
        ({"growth_interval": 0}, "growth_interval is 0: expected a whole number, at least 1"),
        ({"growth_interval": -3}, "growth_interval is -3"),
        ({"growth_interval": 1.5}, "growth_interval is 1.5"),
        ({"growth_interval": math.inf}, "growth_interval is inf"),
        ({"hysteresis": None}, "hysteresis is None: expected a whole number"),
        ({"initial": "8"}, "initial is '8': expected above 0"),
        ({"backoff_factor": 0.0}, "backoff_factor is 0.0: expected a number between 0 and 1"),
        ({"backoff_factor": 1.0}, "backoff_factor is 1.0"),
        ({"hysteresis": 0}, "hysteresis is 0"),
        ({"replenish": "never"}, "replenish is 'never': expected one of growth, good"),
        ({"minimum": -1.0}, "minimum is -1.0"),
        ({"initial": 1.0, "minimum": 2.0}, "minimum is 2.0: expected from 0, for none, to the initial scale, 1.0"),
    ],
)
def test_a_configuration_without_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DynamicLossScaler(**changes)


def test_a_constant_scale_stays_and_skips() -> None:
    scaler = ConstantLossScaler(4.0)
    assert [scaler.update(found) for found in (False, True, True)] == [False, True, True]
    assert scaler.scale == 4.0
    scaler.load(scaler.save())
    with pytest.raises(ValueError, match=r"scale is -1\.0"):
        ConstantLossScaler(-1.0)
    with pytest.raises(ValueError, match=r"saved with scale 4\.0, and here it is 8\.0"):
        ConstantLossScaler(8.0).load(scaler.save())
    with pytest.raises(ValueError, match="saved with kind constant, and here it is dynamic"):
        DynamicLossScaler().load(scaler.save())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: None, "this is no saved state of a loss scaler"),
        (lambda s: {}, "this is no saved state"),
        (lambda s: {"configuration": s["configuration"]}, "this is no saved state"),
        (lambda s: {**s, "state": None}, "this is no saved state"),
        (lambda s: {**s, "state": {**s["state"], "scale": math.nan}}, "the state's scale is nan: expected above 0"),
        (lambda s: {**s, "state": {**s["state"], "good": -5}}, "the state's good is -5: expected a whole"),
        (lambda s: {**s, "state": {**s["state"], "interval": 0}}, "the state's interval is 0"),
        (lambda s: {**s, "state": {**s["state"], "left": None}}, "the state's left is None"),
        (lambda s: {**s, "configuration": {}}, "saved with kind missing, and here it is dynamic"),
        (lambda s: {**s, "state": {"scale": 2.0}}, "the state has no good, left, interval: it is cut short"),
        (
            lambda s: {**s, "configuration": {**s["configuration"], "hysteresis": 5}},
            "saved with hysteresis 5, and here it is 1: build the scaler that was saved",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(change: Any, message: str) -> None:
    scaler = DynamicLossScaler(8.0, growth_interval=3)
    scaler.update(False)
    other = DynamicLossScaler(2.0, growth_interval=3)
    before = scaler.state()
    with pytest.raises(ValueError, match=message):
        scaler.load(change(other.save()))
    assert scaler.state() == before
