"""The loss scaler as a state machine on real ranks, against the transition function."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from scaler_on_ranks import AXES, Seen, obey

from harness.world.pool import Pool
from reference.loss_scale import Scaling, after, begin
from reference.mesh import Mesh

MESH = Mesh(AXES)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(MESH.size) as ranks:
        yield ranks


class Scaler(RuleBasedStateMachine):
    """A scaler on each rank, told the same but for overflows; after every rule all have the state that must be."""

    pool: ClassVar[Pool]
    mutant: ClassVar[str] = ""

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
        self.state, self.skipped = begin(self.scaling), None
        options = {name: value for name, value in dataclasses.asdict(self.scaling).items() if name != "kind"}
        self.tell("begin", options)
        self.save()

    @rule()
    def good_step(self) -> None:
        self._step(frozenset())

    @rule(over=st.frozensets(st.integers(0, MESH.size - 1), min_size=1, max_size=2))
    def overflow(self, over: frozenset[int]) -> None:
        self._step(over)

    def _step(self, over: frozenset[int]) -> None:
        self.state, self.skipped = after(self.scaling, self.state, bool(over)), bool(over)
        self.tell("step", over)

    @rule()
    def save(self) -> None:
        self.saved, self.skipped = (self.state, self.scaling), None
        self.tell("save")

    @rule(fresh=st.booleans())
    def load(self, fresh: bool) -> None:
        (self.state, self.scaling), self.skipped = self.saved, None
        self.tell("load", fresh)

    @rule(interval=st.integers(1, 4))
    def change(self, interval: int) -> None:
        self.scaling, self.skipped = dataclasses.replace(self.scaling, growth_interval=interval), None
        self.tell("change", interval)

    def tell(self, what: str, argument: Any = None) -> None:
        self.seen: list[Seen] = self.pool.run(obey, what, argument, self.mutant).values()

    @invariant()
    def is_alike_on_all_ranks(self) -> None:
        if hasattr(self, "state"):
            expected = self.state.scale, self.state.good, self.state.left, self.skipped
            assert self.seen == [expected] * MESH.size


def run_machine(pool: Pool, mutant: str = "", **options: Any) -> None:
    machine = type("Scaler", (Scaler,), {"pool": pool, "mutant": mutant})
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    run_state_machine_as_test(machine, settings=settings(deadline=None, suppress_health_check=slow, **options))


def test_scale_counters_and_decisions_are_alike_after_every_rule(pool: Pool) -> None:
    run_machine(pool, max_examples=10, stateful_step_count=20)


@pytest.mark.parametrize("mutant", ["F27", "F28", "F28b", "F29a", "F29b", "F29c", "F29d", "F29e", "F29f", "F29g"])
def test_a_planted_fault_is_found(mutant: str, pool: Pool) -> None:
    """The same runs whatever the profile."""
    with pytest.raises(AssertionError):
        run_machine(
            pool,
            mutant,
            max_examples=200,
            stateful_step_count=20,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
        )
