"""The transition function against written-out histories, cases that survive their JSON, and what is no case."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, get_args

import pytest
from drawing import sample

import strategies.loss_scale
from reference.codec import decode, encode
from reference.loss_scale import (
    LARGEST,
    OF_CONFIGURATION,
    OF_STATE,
    Event,
    Invalid,
    LossScaleCase,
    Scaling,
    begin,
    expected,
    needed,
)
from reference.mesh import Mesh
from strategies.loss_scale import FEATURES, simpler, within
from strategies.scope import Scope

FULL = Scope(max_world=8, features=frozenset(FEATURES))
DRAWN = strategies.loss_scale.cases(FULL)
NAMES = {"g": "good", "o": "overflow", "s": "save", "l": "load", "f": "fresh"}


def history(text: str, **scaling: Any) -> list[float]:
    """The scales after a string of events, of which a digit is another interval."""
    events = tuple(Event("interval", interval=int(c)) if c.isdigit() else Event(NAMES[c]) for c in text)  # type: ignore[arg-type]
    return [step.state.scale for step in expected(LossScaleCase(Mesh(()), events, Scaling(**scaling)))]


@pytest.mark.parametrize(
    ("events", "scaling", "scales"),
    [
        ("gggg", {}, [8, 16, 16, 32]),
        ("ggg", {"growth_interval": 3}, [8, 8, 16]),
        ("gogg", {}, [8, 4, 4, 8]),
        ("oog", {"growth_interval": 1}, [4, 2, 4]),
        ("oogooo", {"hysteresis": 3}, [8, 8, 8, 4, 2, 1]),
        ("oogooo", {"hysteresis": 3, "replenish": "good"}, [8, 8, 8, 8, 8, 4]),
        ("oggooo", {"hysteresis": 2}, [8, 8, 16, 16, 8, 4]),
        ("ooo", {"minimum": 3.0}, [4, 3, 3]),
        ("gg", {"initial": 2.0**127}, [2.0**127, 2.0**127]),
        ("gggg", {"initial": 2.0**127, "growth_interval": 1, "hysteresis": 2}, [2.0**127] * 4),
        ("gogo", {"kind": "constant"}, [8, 8, 8, 8]),
        ("gsglg", {}, [8, 8, 16, 8, 16]),
        ("gsoflg", {}, [8, 8, 4, 8, 8, 16]),
        ("oos1lg", {"hysteresis": 2}, [8, 4, 4, 4, 4, 4]),
        ("g1g", {}, [8, 8, 16]),
        ("g4ggg", {}, [8, 8, 8, 8, 16]),
        ("go", {"growth_interval": 1, "growth_factor": 1.5, "backoff_factor": 0.75}, [12, 9]),
    ],
)
def test_scales_by_hand(events: str, scaling: dict[str, Any], scales: list[float]) -> None:
    assert history(events, **scaling) == scales


def test_who_is_hit() -> None:
    mesh = Mesh.of(tp=2, pp=2, dp=2)
    hit = lambda event: [rank for rank in range(8) if event.hits(mesh, rank)]  # noqa: E731
    assert hit(Event("overflow")) == list(range(8))
    assert hit(Event("overflow", axes=("tp",), at=3)) == [1, 3, 5, 7]
    assert hit(Event("overflow", axes=("tp", "pp", "dp"), at=5)) == [5]
    assert hit(Event()) == []
    case = LossScaleCase(mesh, (Event("overflow", axes=("tp", "pp", "dp"), at=5), Event()), agree=True)
    assert [step.skipped for step in expected(case)] == [True, False]
    assert [(t.micro_batch, t.axis, t.elements) for t in needed(case)] == [
        (step, axis, 1) for step in (0, 1) for axis in mesh.names
    ]
    assert needed(dataclasses.replace(case, events=(Event("save"),))) == ()


def test_every_field_has_values_that_are_refused() -> None:
    assert set(get_args(Invalid)) == {*OF_CONFIGURATION, *OF_STATE}
    for invalid in OF_CONFIGURATION:
        with pytest.raises(ValueError, match="expected"):
            LossScaleCase(Mesh(()), invalid=invalid).asked.require_valid()  # type: ignore[arg-type]
    for invalid, field in OF_STATE.items():
        scaling = Scaling("constant") if invalid == "state_initial" else Scaling()
        if field:
            case = LossScaleCase(Mesh(()), scaling=scaling, invalid=invalid)  # type: ignore[arg-type]
            assert [
                f.name for f in dataclasses.fields(Scaling) if getattr(case.other, f.name) != getattr(scaling, f.name)
            ] == [field]
            case.other.require_valid()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"events": (Event("overflow", axes=("tp",)),)}, "expected agree"),
        ({"events": (Event("overflow", axes=("dp",)),), "agree": True}, "expected axes of the mesh"),
        ({"scaling": Scaling("constant"), "events": (Event("interval"),)}, "no interval to change"),
        ({"scaling": Scaling("constant"), "invalid": "hysteresis_zero"}, "a constant scale has no such thing"),
        ({"scaling": Scaling("other")}, "kind is 'other'"),  # type: ignore[arg-type]
        ({"scaling": Scaling(growth_factor=1.1, growth_interval=1)}, "is not exact in fp32"),
        ({"scaling": Scaling(initial=2 * LARGEST)}, "initial is"),
        ({"scaling": Scaling(minimum=9.0)}, "minimum is 9.0: expected from 0 to the initial scale, 8.0"),
        ({"invalid": "what"}, "invalid is 'what'"),
        ({"invalid": "state_initial"}, "a dynamic scale has no such thing"),
        ({"gradients": "fp64"}, "gradients is 'fp64'"),
    ],
)
def test_what_is_no_case_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LossScaleCase(Mesh.of(tp=2)), **changes)


@pytest.mark.parametrize("event", [{"what": "other"}, {"value": "0"}, {"at": -1}, {"interval": 0}, {"axes": ("x",)}])
def test_what_is_no_event_is_refused(event: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Event(**event)


def test_what_is_drawn_is_within_its_scope_and_survives_its_json() -> None:
    for case in sample(DRAWN, 500)[:100]:
        assert within(case, FULL)
        assert decode(LossScaleCase, encode(case)) == case
    for missing in FEATURES:
        scope = dataclasses.replace(FULL, features=FULL.features - {missing})
        for case in sample(strategies.loss_scale.cases(scope), 10):
            assert within(case, scope), missing
            for one in itertools.islice(simpler(case, scope), 5):
                assert within(one, scope)
                assert one != case
                assert one.mesh.size <= case.mesh.size


@pytest.mark.parametrize(
    "wanted",
    [
        lambda c: c.scaling.hysteresis == 3 and c.scaling.replenish == "good" and c.mesh.size > 2,
        lambda c: any(len(e.axes) > 1 for e in c.events) and c.mesh.size == 8,
        lambda c: [e.what for e in c.events].count("fresh") > 1,
        lambda c: c.relaunched is not None and c.agree and any(e.is_step for e in c.events[c.relaunched :]),
        lambda c: any(e.value == "nan" for e in c.events) and c.scaling.minimum,
        lambda c: c.scaling.growth_factor == 1.5 and len(c.events) > 3,
        lambda c: c.scaling.kind == "constant" and any(e.what == "load" for e in c.events),
        lambda c: c.scaling.initial > 2.0**100 and not c.agree,
        *(lambda c, kind=kind: c.invalid == kind for kind in get_args(Invalid)),
    ],
)
def test_it_is_drawn(wanted: Any) -> None:
    assert any(map(wanted, sample(DRAWN, 500)))


def test_new_processes_load_what_is_not_the_beginning() -> None:
    """Otherwise what the state lacks does not show."""
    relaunched = [case for case in sample(DRAWN, 500) if case.relaunched is not None]
    assert len(relaunched) > 20
    for name in ("good", "left", "scale"):
        loaded = [(getattr(expected(case)[case.relaunched or 0].state, name), case) for case in relaunched]
        shown = [case for value, case in loaded if value != getattr(begin(case.scaling), name)]
        assert len(shown) > 1, name


def test_the_plainest_case_is_a_good_step_on_one_rank() -> None:
    plain = LossScaleCase(Mesh(()))
    assert list(simpler(plain, FULL)) == []
    assert plain in simpler(LossScaleCase(Mesh.of(tp=2)), FULL)
