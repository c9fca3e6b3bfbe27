"""Draws what happens to a loss scaler: good steps, overflows on some ranks, saving and loading, another interval."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, get_args

from hypothesis import strategies as st

from reference.loss_scale import (
    GRADIENTS,
    OF_CONFIGURATION,
    OF_STATE,
    Event,
    LossScaleCase,
    Scaling,
    Value,
    What,
    begin,
    expected,
)
from reference.mesh import Mesh
from strategies.layers import one_in
from strategies.mesh import meshes, smaller_meshes
from strategies.scope import Scope

#: The optional features of the subject.
FEATURES = {
    "loss_scale_constant": "a scale that never moves",
    "loss_scale_hysteresis": "overflows that it bears before it backs off, given again as the scale grows",
    "loss_scale_replenished_by_good": "and by every good step",
    "loss_scale_minimum": "a scale below which it does not back off",
    "loss_scale_ceiling": "stays at the largest scale that fp32 holds, instead of growing to infinity",
    "loss_scale_agrees": "makes all ranks agree about an overflow on some of them",
    "loss_scale_low_precision": "looks at gradients in bf16 and fp16 too",
    "loss_scale_load": "a state that is saved and loaded, in the same scaler or in a new one",
    "loss_scale_interval": "a growth interval that can be changed",
    "loss_scale_refuses": "refuses an initial scale, factors, an interval, a hysteresis and a minimum without sense",
    "loss_scale_refuses_state": "refuses a state of another configuration, or one that is cut short",
}

MOST_EVENTS = 12
_FACTORS = ((2.0, 0.5), (2.0, 0.5), (4.0, 0.5), (2.0, 0.25), (1.5, 0.75))
_INITIAL = (8.0, 8.0, 1.0, 2.0**16)


@st.composite
def cases(draw: st.DrawFn, scope: Scope) -> LossScaleCase:
    """A case within the scope. The plainest one is a good step on one rank."""
    agrees = scope.has("loss_scale_agrees")
    # Where ranks have nothing to do with each other, two show all that there is to see.
    mesh = draw(meshes(scope.axes, scope.max_world if agrees else min(2, scope.max_world), most=3 if agrees else 1))
    agree = agrees and mesh.size > 1 and not one_in(draw, 8)
    scaling = draw(_scalings(scope))
    events = tuple(draw(st.lists(_events(scope, mesh if agree else None, scaling), min_size=1, max_size=MOST_EVENTS)))
    if scope.has("loss_scale_interval") and scaling.kind == "dynamic" and one_in(draw, 4):
        scaling, first = draw(_interval_passed(scaling))
        events = (*first, *events[: MOST_EVENTS - len(first)])
    low = scope.has("loss_scale_low_precision") and one_in(draw, 3)
    case = LossScaleCase(mesh, (), scaling, agree, gradients=draw(st.sampled_from(GRADIENTS[1:])) if low else "fp32")
    # What would round is not drawn: steps that are all good, or none, are left of it then.
    for chosen in (events, events[:6], events[:3]):
        try:
            case = replace(case, events=chosen)
            break
        except ValueError:
            continue
    invalid: list[str] = []
    if scope.has("loss_scale_refuses"):
        invalid += [name for name in OF_CONFIGURATION if _may_be(name, case, scope)]
    if scope.has("loss_scale_refuses_state"):
        invalid += [name for name in OF_STATE if _may_be(name, case, scope)]
    # There are many, and each is another fault.
    if invalid and one_in(draw, 3):
        wrong: Any = draw(st.sampled_from(invalid))
        return replace(case, invalid=wrong)
    return draw(_relaunched(case)) if scope.has("loss_scale_load") and one_in(draw, 4) else case


@st.composite
def _relaunched(draw: st.DrawFn, case: LossScaleCase) -> LossScaleCase:
    """The state is saved where it is not that of the beginning, and new processes go on with it, until what is lost of
    it shows."""
    events, start = case.events, begin(case.scaling)
    if all(step.state.good == start.good for step in expected(case)):
        events = (Event(), *events)
    try:
        steps = expected(replace(case, events=events))
        moved = {
            name: [at for at, step in enumerate(steps) if getattr(step.state, name) != getattr(start, name)]
            for name in ("good", "left", "scale")
        }
        name = draw(st.sampled_from([name for name, found in moved.items() if found] or ["scale"]))
        at = draw(st.sampled_from(moved[name] or [0]))
        later = draw(st.integers(at + 1, len(events)))
        between = tuple(event for event in events[at + 1 : later] if event.is_step)
        saved, intervals = steps[at].state, [event.interval for event in events[: at + 1] if event.what == "interval"]
        interval = intervals[-1] if intervals else case.scaling.growth_interval
        # A candidate may not tell its counters: what they are shows in the scale, in time.
        until = {"good": (Event(),) * max(1, interval - saved.good), "left": (Event("overflow"),) * max(1, saved.left)}
        events = (*events[: at + 1], Event("save"), *between, Event("relaunch"), *until.get(name, ()), *events[later:])
        return replace(case, events=events if events[-1].is_step else (*events, Event()))
    except ValueError:  # a step more may make a scale that rounds
        return case


def _may_be(invalid: str, case: LossScaleCase, scope: Scope) -> bool:
    """Whether such a value can be handed over at all."""
    needs = {
        "minimum": "loss_scale_minimum",
        "hysteresis": "loss_scale_hysteresis",
        "replenish": "loss_scale_replenished_by_good",
    }
    feature = needs.get(invalid.removeprefix("state_").partition("_")[0])
    return case.has(invalid) and (feature is None or scope.has(feature))


@st.composite
def _interval_passed(draw: st.DrawFn, scaling: Scaling) -> tuple[Scaling, tuple[Event, ...]]:
    """A growth interval that is set to no more than the good steps that were made already, and a good step."""
    good = draw(st.integers(1, 3))
    first = (*(Event(),) * good, Event("interval", interval=draw(st.integers(1, good))), Event())
    return replace(scaling, growth_interval=4), first


@st.composite
def _scalings(draw: st.DrawFn, scope: Scope) -> Scaling:
    if scope.has("loss_scale_constant") and one_in(draw, 8):
        return Scaling("constant", draw(st.sampled_from(_INITIAL)))
    growth, backoff = draw(st.sampled_from(_FACTORS))
    initial = draw(st.sampled_from(_INITIAL))
    if scope.has("loss_scale_ceiling") and one_in(draw, 10):
        initial, growth, backoff = 2.0**126, 2.0, 0.5
    minima = (0.0, initial / 2, initial / 4, initial) if scope.has("loss_scale_minimum") else (0.0,)
    return Scaling(
        initial=initial,
        growth_factor=growth,
        growth_interval=draw(st.integers(1, 4)),
        backoff_factor=backoff,
        hysteresis=draw(st.integers(1, 3)) if scope.has("loss_scale_hysteresis") else 1,
        replenish="good" if scope.has("loss_scale_replenished_by_good") and draw(st.booleans()) else "growth",
        minimum=draw(st.sampled_from(minima)),
    )


@st.composite
def _events(draw: st.DrawFn, scope: Scope, mesh: Mesh | None, scaling: Scaling) -> Event:
    """mesh: where an overflow may be on some ranks only."""
    kinds: list[What] = ["good"] * 4 + ["overflow"] * 3  # type: ignore[assignment]
    kinds += ["save", "load", "fresh"] if scope.has("loss_scale_load") else []
    kinds += ["interval"] if scope.has("loss_scale_interval") and scaling.kind == "dynamic" else []
    what = draw(st.sampled_from(kinds))
    if what == "interval":
        return Event("interval", interval=draw(st.integers(1, 4)))
    if what != "overflow":
        return Event(what)
    value = draw(st.sampled_from(get_args(Value)))
    if mesh is None:
        return Event(what, value)
    axes = [(), *((name,) for name in mesh.names), mesh.names]
    chosen = draw(st.sampled_from(axes))
    return Event(what, value, chosen, draw(st.integers(0, mesh.axis_size(chosen) - 1)) if chosen else 0)


def simpler(case: LossScaleCase, scope: Scope) -> Iterator[LossScaleCase]:
    """Simpler cases within the scope: smaller meshes, fewer events, then plainer ones and a plainer scaling."""
    for mesh in [*smaller_meshes(case.mesh), case.mesh]:
        events = tuple(_on(mesh, event) for event in case.events)
        yield from _changed(case, scope, mesh=mesh, events=events)
        yield from _changed(case, scope, mesh=mesh, events=events, scaling=Scaling())
    many = case.events
    yield from _changed(case, scope, scaling=Scaling())
    for length in range(1, len(many)):
        yield from _changed(case, scope, events=many[:length])
    for i, j in itertools.combinations(range(len(many)), 2):
        yield from _changed(case, scope, events=many[:i] + many[j:])
    for i in range(len(many)):
        yield from _changed(case, scope, events=many[:i] + many[i + 1 :])
        for plainer in _plainer(many[i]):
            yield from _changed(case, scope, events=(*many[:i], plainer, *many[i + 1 :]))
    yield from _changed(case, scope, agree=False)
    yield from _changed(case, scope, gradients="fp32")
    yield from _changed(case, scope, agree=False, events=tuple(replace(e, axes=(), at=0) for e in many))
    for f in fields(Scaling):
        yield from _changed(case, scope, scaling=_with(case.scaling, **{f.name: f.default}))
    for name, value in (("growth_interval", 1), ("hysteresis", 2), ("minimum", case.scaling.initial)):
        yield from _changed(case, scope, scaling=_with(case.scaling, **{name: value}))


def _with(scaling: Scaling, **changes: Any) -> Scaling:
    made = replace(scaling, **changes)
    return replace(made, minimum=min(made.minimum, made.initial))


def _on(mesh: Mesh, event: Event) -> Event:
    axes = tuple(name for name in event.axes if name in mesh.names)
    return replace(event, axes=axes, at=event.at % mesh.axis_size(axes) if axes else 0)


def _plainer(event: Event) -> Iterator[Event]:
    yield Event()
    if event.what == "overflow":
        yield Event("overflow")
        yield replace(event, value="inf")
        yield replace(event, at=0)
        if len(event.axes) > 1:
            yield from (replace(event, axes=(axis,)) for axis in event.axes)
    if event.what == "relaunch":
        yield Event("fresh")
    if event.what in ("fresh", "relaunch"):
        yield Event("load")


def _changed(case: LossScaleCase, scope: Scope, **changes: Any) -> Iterator[LossScaleCase]:
    try:
        made = replace(case, **changes)
    except ValueError:
        return
    if made.events and _measure(made) < _measure(case) and within(made, scope):
        yield made


def _measure(case: LossScaleCase) -> tuple[Any, ...]:
    """What is simpler has the smaller measure."""
    options = sum(getattr(case.scaling, f.name) != f.default for f in fields(Scaling))
    order = get_args(What)
    kinds = sum(order.index(e.what) + (e.value != "inf") + 2 * len(e.axes) + e.at for e in case.events)
    numbers = case.scaling.growth_interval, case.scaling.hysteresis, case.scaling.minimum
    return (
        case.mesh.size,
        len(case.mesh.axes),
        len(case.events),
        options,
        kinds,
        case.agree,
        case.gradients != "fp32",
        numbers,
    )


def within(case: LossScaleCase, scope: Scope) -> bool:
    """Whether a case is such as the scope allows."""
    scaling, kinds = case.scaling, {event.what for event in case.events}
    needs = {
        "loss_scale_constant": scaling.kind == "constant",
        "loss_scale_hysteresis": scaling.hysteresis > 1,
        "loss_scale_replenished_by_good": scaling.replenish == "good",
        "loss_scale_minimum": scaling.minimum > 0,
        "loss_scale_ceiling": scaling.initial > 2.0**100,
        "loss_scale_agrees": case.agree,
        "loss_scale_load": bool(kinds & {"save", "load", "fresh", "relaunch"}),
        "loss_scale_interval": "interval" in kinds,
        "loss_scale_low_precision": case.gradients != "fp32",
        "loss_scale_refuses": case.invalid in OF_CONFIGURATION,
        "loss_scale_refuses_state": case.invalid in OF_STATE,
    }
    return all(scope.has(feature) for feature, needed in needs.items() if needed)
