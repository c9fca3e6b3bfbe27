"""The loss scaler's class: a state machine against the transition function, agreement on ranks, and bad input."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from sharded_ranks import Check, run_world

from reference.loss_scale import ScalerState, Scaling, after, begin
from sharded import mutants
from sharded.loss_scale import ConstantLossScaler, DynamicLossScaler, has_overflow
from sharded.process_groups import ProcessGroups


def made(scaling: Scaling, **groups: Any) -> DynamicLossScaler:
    options = {name: value for name, value in dataclasses.asdict(scaling).items() if name != "kind"}
    return DynamicLossScaler(**options, **groups)


class Scaler(RuleBasedStateMachine):
    """One process; an overflow is agreed before."""

    @initialize(
        initial=st.sampled_from([1.0, 8.0, 2.0**16, 2.0**126]),
        factors=st.sampled_from([(2.0, 0.5), (4.0, 0.25)]),
        interval=st.integers(1, 4),
        hysteresis=st.integers(1, 3),
        replenish=st.sampled_from(["growth", "good"]),
        minimum=st.sampled_from([0.0, 0.25, 1.0]),
    )
    def begin(self, initial: float, factors: tuple[float, float], interval: int, hysteresis: int, replenish: Any, minimum: float) -> None:  # fmt: skip  # noqa: E501
        self.scaling = Scaling("dynamic", initial, factors[0], interval, factors[1], hysteresis, replenish, minimum)
        self.first = self.scaling
        self.scaler, self.state = made(self.scaling), begin(self.scaling)
        self.save()

    @rule(overflow=st.booleans())
    def step(self, overflow: bool) -> None:
        assert self.scaler.update(overflow) == overflow
        self.state = after(self.scaling, self.state, overflow)

    @rule()
    def save(self) -> None:
        self.saved = copy.deepcopy(self.scaler.save()), self.state, self.scaling

    @rule(fresh=st.booleans())
    def load(self, fresh: bool) -> None:
        self.scaler = made(self.first) if fresh else self.scaler
        state, self.state, self.scaling = self.saved
        self.scaler.load(copy.deepcopy(state))

    @rule(interval=st.integers(1, 4))
    def change(self, interval: int) -> None:
        self.scaler.set_growth_interval(interval)
        self.scaling = dataclasses.replace(self.scaling, growth_interval=interval)

    @invariant()
    def is_alike(self) -> None:
        if hasattr(self, "scaler"):
            assert seen(self.scaler) == self.state


def seen(scaler: DynamicLossScaler) -> ScalerState:
    state = scaler.state()
    return ScalerState(scaler.scale, state["good"], state["left"])


TestScaler = Scaler.TestCase
TestScaler.settings = settings(max_examples=40, stateful_step_count=25)


@pytest.mark.parametrize("mutant", ["F27", "F28", "F28b", "F29a", "F29b", "F29c", "F29d", "F29g"])
def test_the_machine_finds_a_planted_fault(mutant: str) -> None:
    """The same runs whatever the profile."""
    with mutants.applied(mutant), pytest.raises(AssertionError):
        run_machine()


def run_machine() -> None:
    from hypothesis import Phase
    from hypothesis.stateful import run_state_machine_as_test

    fixed = settings(max_examples=200, stateful_step_count=20, derandomize=True, database=None, phases=[Phase.generate])
    run_state_machine_as_test(Scaler, settings=fixed)


def on_ranks() -> Mapping[str, Check]:
    """tp 2 x pp 2 x dp 2: an overflow on each single rank in turn, on real groups, then rules at random."""
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

    def random_rules() -> list[str]:
        scaler, state = made(scaling, groups=over), begin(scaling)
        stream = torch.Generator().manual_seed(1)
        saved = scaler.save(), state
        for number in range(40):
            what = int(torch.randint(0, 8, (), generator=stream))
            hit = int(torch.randint(0, 8, (), generator=stream))
            if what < 6:
                skipped = scaler.update(what > 2 and rank == hit)
                state = after(scaling, state, what > 2)
                if skipped != (what > 2):
                    return [f"step {number}: skipped is {skipped}"]
            elif what == 6:
                saved = copy.deepcopy(scaler.save()), state
            else:
                scaler = made(scaling, groups=over) if hit % 2 else scaler
                scaler.load(saved[0])
                state = saved[1]
            if any(one != state for one in everyone(seen(scaler))):
                return [f"step {number}: {everyone(seen(scaler))}, expected {state}"]
        return []

    checks: dict[str, Check] = {"random rules": random_rules}
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
    assert len(found) == 17


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"initial": 0.0}, "initial is 0.0: expected above 0"),
        ({"initial": -1.0}, "initial is -1.0"),
        ({"initial": math.nan}, "initial is nan"),
        ({"growth_factor": 0.0}, "growth_factor is 0.0: expected a number above 1"),
        ({"growth_factor": -2.0}, "growth_factor is -2.0"),
        ({"growth_interval": 0}, "growth_interval is 0: expected at least 1"),
        ({"growth_interval": -3}, "growth_interval is -3"),
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
