"""Mixed-precision optimizers as the harness drives and judges them: what is right holds, and each fault is told as what
it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import harness.properties
from harness import MixedPrecision
from harness.candidate import NotOffered
from harness.local import WrongAdapter, WrongResult
from harness.mixed_precision_steps import MOVED, OWNED, SEEN, attempt, run
from harness.observation import CHANGED, REFUSED, LocalTensor, Observation
from harness.properties.base import Description
from harness.session import CandidateRaised
from harness.verdict import Verdict
from reference.layout import window
from reference.loss_scale import Scaling
from reference.mesh import Mesh
from reference.mixed_precision import MixedPrecisionCase, MixedPrecisionRecipes
from reference.mixed_precision_parts import Group, MixedParameter, Overflow
from reference.mixed_precision_steps import Changed, expected, names, plan, tensors
from reference.recipe import Recipe

MIXED = harness.properties.property_of("mixed_precision")
SCALING = Scaling(initial=2.0**10, growth_interval=2)
ROUNDS = MixedPrecisionRecipes(Recipe("normal", 1), Recipe("normal", 1), Recipe("normal", 1))
#: Three steps over two axes, of which the second is skipped.
CASE = MixedPrecisionCase(
    Mesh.of(tp=2, pp=2),
    (MixedParameter(4, split=True, tied=True), MixedParameter(2, stage=1)),
    dtype="bf16",
    momentum=0.5,
    scaling=SCALING,
    steps=3,
    overflows=(Overflow(1, "inf", ("pp",), 1),),
    recipes=ROUNDS,
)
SHARDED = dataclasses.replace(CASE, mesh=Mesh.of(dp=2, pp=2), sharded=True)
CLIPPED = dataclasses.replace(CASE, clip=0.5)

World = list[Observation]


def observed(case: MixedPrecisionCase, values: Mapping[str, torch.Tensor | None] | None = None) -> World:
    """What ranks see that decide right and have these values, by default the right ones, rounded to the dtypes."""
    given = tensors(case)
    plans = plan(case, given)
    values = expected(case, given, plans) if values is None else values
    seen = [
        {
            "by": one.scale, "skipped": one.skipped, "scale": one.after.scale, "good": one.after.good,
            "left": one.after.left, "steps": one.t + (not one.skipped),
        }
        for one in plans
    ]  # fmt: skip
    made = []
    for rank in range(case.mesh.size):
        held: dict[str, LocalTensor | None] = {}
        for step in range(case.steps):
            for what in ("norm", "coefficient"):
                number = values.get(f"{what}[{step}]")
                if number is not None:
                    held[f"{what}[{step}]"] = LocalTensor(number.numpy().copy(), "float64")
            for i in range(len(case.parameters)):
                master = values[f"master{i}[{step}]"]
                assert master is not None
                stored = {"parameter": master.float().to(case.format_of(i).torch_dtype), "master": master.float()}
                for kind in ("parameter", "master", *case.states):
                    for name, stage in zip(names(case, kind, i, step), case.stages(i), strict=True):
                        whole = values[name]
                        assert whole is not None
                        kept = stored.get(kind, whole.float())
                        part = window(tuple(kept.shape), case.layout(i, stage), case.mesh, rank).take(kept)
                        dtype = str(kept.dtype).removeprefix("torch.")
                        held[name] = LocalTensor(part.double().numpy().copy(), dtype)
        own = [i for i in range(len(case.parameters)) if case.holds(i, rank)]
        length = {i: case.window(i, rank).stop - case.window(i, rank).start for i in own}
        owned = {step: {f"parameter{i}": ((0, length[i]),) for i in own} for step in range(case.steps)}
        facts: dict[Any, Any] = {
            SEEN: [dict(one) for one in seen], OWNED: owned, MOVED: [[] for _ in range(case.steps)]
        }  # fmt: skip
        made.append(Observation(held, facts=facts))
    return made


def verdict(case: MixedPrecisionCase, *worlds: World) -> Verdict:
    return MIXED.judge(case, Description("x", "x"), MIXED.expected(case), worlds)


def said(found: Verdict) -> str:
    return "\n".join(f"{one.kind}: {one.message}; {one.cause}; {one.details}" for one in found.findings)


@pytest.mark.parametrize("case", [CASE, CLIPPED, SHARDED, dataclasses.replace(CASE, parameters=CASE.parameters[1:])])
def test_what_is_right_holds(case: MixedPrecisionCase) -> None:
    assert plan(case, tensors(case))[1].skipped
    found = verdict(case, observed(case))
    assert found.holds, said(found)


def decide(rank: int | None, step: int, name: str, value: Any) -> Callable[[World], object]:
    """On a rank, or on all."""

    def change(world: World) -> None:
        for one in world if rank is None else [world[rank]]:
            one.facts[SEEN][step][name] = value

    return change


def add(rank: int, name: str, value: float) -> Callable[[World], object]:
    def change(world: World) -> None:
        held = world[rank].tensors[name]
        assert held is not None
        assert held.values is not None
        held.values[0] += value

    return change


def times(name: str, factor: float) -> Callable[[World], object]:
    def change(world: World) -> None:
        for one in world:
            held = one.tensors[name]
            assert held is not None
            assert held.values is not None
            held.values[...] *= factor

    return change


WHY, NONE = "(inf at 1 along pp)", "(no gradient overflows); expected False"
MOVES = "and it changed momentum1 on rank 3"
KEPT = "2 ranks keep element 0 of 4 of parameter0, among the ranks [0, 1] in step 2: expected exactly one"
ALONE = "expected True: ranks differ, in training they take different steps"


@pytest.mark.parametrize(
    ("case", "change", "kind", "words"),
    [
        (CASE, decide(0, 1, "skipped", False), "disagree", f"is False on rank 0 (tp=0, pp=0) in step 1 {WHY}; {ALONE}"),
        (CASE, decide(None, 0, "skipped", True), "mismatch", f"is True on every rank in step 0 {NONE}"),
        (CASE, decide(2, 1, "scale", 1024.0), "disagree", "the scale is 1024.0 on rank 2"),
        (CASE, decide(None, 2, "good", 0), "mismatch", "the count of good steps in a row is 0 on every rank in step 2"),
        (CASE, decide(None, 1, "left", 1), "mismatch", "the count of overflows until the scale backs off is 1"),
        (CASE, decide(None, 1, "steps", 2), "mismatch", "the count of steps that were not skipped is 2"),
        (CASE, lambda w: w[3].facts[MOVED][1].append("momentum1"), "mismatch", f"is to be skipped {WHY}, {MOVES}"),
        (CASE, add(0, "master0[0]", 1e-4), "mismatch", "master0[0] differs from one process on rank 0"),
        (CASE, times("momentum1[2]", 1.001), "mismatch", "momentum1[2] differs from one process"),
        (CASE, add(3, "master1[2]", 2.0**-24), "disagree", "master1[2] is replicated on rank 2"),
        (CASE, add(2, "momentum0.copy[2]", 2.0**-24), "disagree", "momentum0 is tied, and after step 2 has other bits"),
        (CLIPPED, times("norm[0]", 1.001), "mismatch", "norm[0] differs from one process on every rank"),
        (CLIPPED, times("coefficient[2]", 1.001), "mismatch", "coefficient[2] differs from one process"),
        (SHARDED, lambda w: w[0].facts[OWNED][2].update(parameter0=((0, 2),)), "mismatch", KEPT),
    ],
)  # fmt: skip
def test_a_fault_is_told(case: MixedPrecisionCase, change: Callable[[World], object], kind: str, words: str) -> None:
    world = observed(case)
    change(world)
    found = verdict(case, world)
    assert kind in [one.kind for one in found.findings], said(found)
    assert words in said(found)


def test_a_model_that_is_not_the_rounded_master_is_told() -> None:
    """By one unit in the last place of bf16, which its tolerance allows."""
    world = observed(CASE)
    for rank in (2, 3):
        held = world[rank].tensors["parameter1[0]"]
        assert held is not None
        assert held.values is not None
        held.values[0] *= 1 + 2.0**-7
    found = verdict(CASE, world)
    assert "parameter1[0] is not the master rounded to bf16 on rank 2" in said(found)


def test_parts_that_owners_keep_are_joined() -> None:
    world, half = observed(SHARDED), {0: slice(0, 1), 1: slice(1, 4)}
    for rank, one in enumerate(world):
        own = half[SHARDED.mesh.coordinate(rank, "dp")]
        for step in range(3):
            one.facts[OWNED][step].update(parameter0=((own.start, own.stop),))
        for name, held in one.tensors.items():
            if name.startswith(("master0", "momentum0")) and held is not None and held.values is not None:
                object.__setattr__(held, "values", held.values[own] if held.values.size else held.values)
    found = verdict(SHARDED, world)
    assert found.holds, said(found)


def test_a_load_that_changes_a_bit_is_told() -> None:
    case = dataclasses.replace(CASE, load=1)
    resumed, whole = observed(case), observed(case)
    assert verdict(case, resumed, whole).holds
    add(0, "master0[2]", 2.0**-24)(resumed)
    assert "after saving and loading at step 1 than without" in said(verdict(case, resumed, whole))


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"by": "scaled"}, "is as if the loss scale were not divided out"),
        ({"clip": 0.0}, "is as if nothing were clipped"),
        ({"reload": 0}, "is as if masters were not refreshed after the weights were loaded"),
        ({"t": "steps"}, "is as if steps that are skipped counted for the learning rate"),
    ],
)
def test_a_cause_is_told(changes: dict[str, Any], cause: str) -> None:
    """The values that come of it are those of another case, or of other gradients."""
    base = dataclasses.replace(CASE, clip=0.25 if "clip" in changes else 0.0, reload=2, warmup=4)
    given = tensors(base)
    plans = plan(base, given)
    other = dataclasses.replace(base, **{k: v for k, v in changes.items() if k in ("clip", "reload")})
    if "by" in changes:
        given |= {name: x * 1024 for name, x in given.items() if name.startswith("gradient")}
    if "t" in changes:
        plans = tuple(dataclasses.replace(one, t=step) for step, one in enumerate(plans))
    assert cause in said(verdict(base, observed(base, expected(other, given, plans))))


ADAMW = dataclasses.replace(CASE, groups=(Group(0.1),), optimizer="adamw", momentum=0.0, warmup=4)
HALF = dataclasses.replace(CASE, dtype="fp16", clip=0.5)


@pytest.mark.parametrize(
    ("case", "change", "words"),
    [
        *(
            (case, Changed(remade=when), "is as if masters were made anew from the rounded model in each step")
            for case in (CASE, ADAMW, HALF)
            for when in ("before", "after")
        ),
        (CASE, Changed(decays=True), "is as if momentum decayed in steps that are skipped"),
        (ADAMW, Changed(decays=True), "is as if exp_avg and exp_avg_sq decayed in steps that are skipped"),
        (ADAMW, Changed(rate_counts=True), "is as if steps that are skipped counted for the learning rate;"),
        (ADAMW, Changed(moments_count=True), "counted where Adam's moments are corrected for their start;"),
        (ADAMW, Changed(rate_counts=True, moments_count=True), "for the learning rate and where Adam's moments"),
        (HALF, Changed(norm_scaled=True), "is as if gradients were clipped before the loss scale was divided out"),
        (
            # With a scale it may be that it was not divided out: then gradients are clipped to the limit as well.
            dataclasses.replace(CASE, clip=4.0, clip_eps=1e-6, scaling=Scaling("constant", 1.0)),
            Changed(unlimited=True),
            "is as if gradients within the limit were scaled up to it",
        ),
    ],
)
@pytest.mark.parametrize("kinds", [("master", "momentum", "exp_avg", "norm", "coefficient"), ("master",)])
def test_a_cause_is_told_by_values(case: Any, change: Changed, words: str, kinds: tuple[str, ...]) -> None:
    """Also where masters alone are shown, and neither moments nor norms."""
    given = tensors(case)
    world = observed(case, expected(case, given, plan(case, given), change))
    for one in world:
        shown = {name: x for name, x in one.tensors.items() if name.startswith(("parameter", *kinds))}
        object.__setattr__(one, "tensors", shown)
    found = verdict(case, world)
    assert words in said(found), said(found)
    assert "either" not in said(found)


class Simple:
    """SGD with a constant scale in one process, right where nothing is changed."""

    def __init__(self, case: MixedPrecisionCase, parameters: Mapping[str, nn.Parameter]) -> None:
        self.case, self.model = case, dict(parameters)
        self.masters = {name: p.detach().float().clone() for name, p in parameters.items()}
        self.made = 0

    def step(self) -> bool:
        scale, model = self.case.scaling.initial, self.model.items()
        gradients = {name: p.grad.float() / scale for name, p in model if p.grad is not None}
        if not all(bool(g.isfinite().all()) for g in gradients.values()):
            return True
        with torch.no_grad():
            for name, gradient in gradients.items():
                self.masters[name] -= self.case.groups[0].lr * gradient
                self.model[name].copy_(self.masters[name])
        self.made += 1
        return False

    def reload(self) -> None:
        for name, p in self.model.items():
            self.masters[name].copy_(p.detach())

    def save(self) -> dict[str, Any]:
        return {"masters": self.masters, "made": self.made}

    def load(self, saved: dict[str, Any]) -> None:
        if set(saved) != {"masters", "made"}:
            raise ValueError("cut short")
        if any(x.shape != self.masters[name].shape for name, x in saved["masters"].items()):
            raise ValueError("of other parameters")
        self.made = saved["made"]
        for name, x in saved["masters"].items():
            self.masters[name].copy_(x)

    def presented(self, **changes: Any) -> MixedPrecision:
        options: dict[str, Any] = {
            "steps": lambda: self.made, "master": lambda name: self.masters[name], "reload": self.reload,
            "save": self.save, "load": self.load,
        }  # fmt: skip
        step = changes.pop("step", self.step)
        scale = changes.pop("scale", lambda: self.case.scaling.initial)
        return MixedPrecision(step, scale, **options | changes)


ONE = MixedPrecisionCase(
    Mesh(()), (MixedParameter(3), MixedParameter(2)), dtype="fp16", scaling=Scaling("constant", 2.0**8), steps=4,
    overflows=(Overflow(1),), reload=2, load=3,
)  # fmt: skip


def driven(case: MixedPrecisionCase, **changes: Any) -> Observation:
    return run(case, tensors(case), 0, lambda c, p: Simple(c, p).presented(**changes))


def test_an_adapter_of_few_lines_is_driven_and_holds() -> None:
    worlds = [[driven(ONE)], [driven(dataclasses.replace(ONE, load=0))]]
    found = verdict(ONE, *worlds)
    assert found.holds, said(found)
    assert worlds[0][0].facts[SEEN][1]["skipped"]


def test_what_is_not_given_is_not_checked() -> None:
    case = dataclasses.replace(ONE, load=0)
    found = verdict(case, [driven(case, master=None, steps=None)])
    assert found.holds, said(found)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"step": lambda: None}, WrongResult, "step returned None; expected whether the step was skipped, a bool"),
        ({"scale": lambda: "8"}, WrongResult, "scale returned '8'; expected a number"),
        ({"counters": lambda: {"bad": 1}}, WrongAdapter, "expected 'good' and 'left', or one"),
        ({"master": lambda name: torch.zeros(1)}, WrongResult, "master0 of the elements kept has local shape"),
        ({"owned": lambda name: 3}, WrongAdapter, "expected a list of ranges"),
        ({"reload": None}, NotOffered, "has no reload"),
        ({"save": None}, NotOffered, "has no save"),
        ({"load": None}, NotOffered, "has no load"),
        ({"reload": lambda: 1 / 0}, CandidateRaised, "in reload: ZeroDivisionError"),
    ],
)
def test_what_does_not_fit_is_said(changes: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        driven(ONE, **changes)
    with pytest.raises(WrongAdapter, match=r"expected MixedPrecision\(step, scale\)"):
        run(ONE, tensors(ONE), 0, lambda case, parameters: None)


def test_what_moves_in_a_skipped_step_is_seen() -> None:
    def build(case: MixedPrecisionCase, parameters: Mapping[str, nn.Parameter]) -> MixedPrecision:
        made = Simple(case, parameters)

        def step() -> bool:
            skipped = made.step()
            if skipped:
                made.masters["parameter1"] += 0.0
                torch.nextafter(made.masters["parameter0"], torch.tensor(9.0), out=made.masters["parameter0"])
            return skipped

        return made.presented(step=step)

    seen = run(ONE, tensors(ONE), 0, build)
    assert seen.facts[MOVED][1] == ["master0"]


@pytest.mark.parametrize(
    ("invalid", "changes", "refused", "changed"),
    [
        ("state_truncated", {}, True, []),
        ("state_shape", {}, True, []),
        ("lr_negative", {}, False, None),
        ("state_truncated", {"load": lambda saved: None}, False, None),
    ],
)
def test_refusals_are_seen(invalid: Any, changes: dict[str, Any], refused: bool, changed: list[str] | None) -> None:
    case = dataclasses.replace(ONE, invalid=invalid, reload=0, load=0)
    seen = attempt(case, tensors(case), 0, lambda c, p: Simple(c, p).presented(**changes))
    assert (seen.facts[REFUSED] is not None) == refused
    assert seen.facts.get(CHANGED) == changed
    assert verdict(case, [seen]).holds == refused


def test_a_half_loaded_state_is_told() -> None:
    case = dataclasses.replace(ONE, invalid="state_truncated", reload=0, load=0)

    def build(c: MixedPrecisionCase, parameters: Mapping[str, nn.Parameter]) -> MixedPrecision:
        made = Simple(c, parameters)

        def load(saved: Any) -> None:
            made.masters["parameter0"] += 1
            raise ValueError("no")

        return made.presented(load=load)

    assert "a load that was refused changed master0" in said(verdict(case, [attempt(case, tensors(case), 0, build)]))

    def counting(c: MixedPrecisionCase, parameters: Mapping[str, nn.Parameter]) -> MixedPrecision:
        made = Simple(c, parameters)

        def load(saved: Any) -> None:
            made.made += 100
            raise ValueError("no")

        return made.presented(load=load)

    assert "a load that was refused changed steps" in said(verdict(case, [attempt(case, tensors(case), 0, counting)]))


@pytest.mark.parametrize("lr", [1.0, 0.0])
def test_a_state_to_refuse_is_not_that_of_the_beginning(lr: float) -> None:
    """Else what is taken over of it is what was there."""
    case = dataclasses.replace(ONE, groups=(Group(lr),), invalid="state_truncated", reload=0, load=0)

    def copying(c: MixedPrecisionCase, parameters: Mapping[str, nn.Parameter]) -> MixedPrecision:
        made = Simple(c, parameters)

        def load(saved: Any) -> None:
            made.masters["parameter0"].copy_(saved["masters"]["parameter0"])
            raise ValueError("no")

        return made.presented(load=load)

    assert "a load that was refused changed master0" in said(verdict(case, [attempt(case, tensors(case), 0, copying)]))
