"""How trainers are driven and judged: adapters that are wrong, and what is said of ranks that went wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import harness.properties
from harness import NotOffered, Trainer
from harness.local import WrongAdapter, WrongResult
from harness.mixed_precision_steps import MOVED, OWNED, SEEN
from harness.observation import LocalTensor, Observation
from harness.properties.base import Description
from harness.saved import APART
from harness.train_step_run import run
from harness.verdict import Finding
from reference.gpt import GptCase
from reference.gpt_parameters import owner_of, shapes, tensors
from reference.layout import Layout, Split, Whole, window
from reference.loss_scale import Scaling
from reference.mesh import Mesh
from reference.mixed_precision_parts import Overflow
from reference.train_step import TrainStepCase
from reference.train_step_expected import expected, plan

TRAIN_STEP = harness.properties.property_of("train_step")
MODEL = GptCase(Mesh.of(pp=2, dp=2), 5, 4, 1, 1, 1, length=2, counts=(2, 1), depths=(0,), dtype="bf16", tied=True)
CASE = TrainStepCase(
    MODEL, steps=2, momentum=0.75, clip=1.0, scaling=Scaling(initial=2.0**8), overflows=(Overflow(1, axes=("pp",)),)
)
RIGHT = expected(CASE, tensors(MODEL), plan(CASE))
ROWS = list(shapes(MODEL))


def observed(case: TrainStepCase = CASE, cut: bool = False) -> list[Observation]:
    """What ranks see that do everything right; masters and state are cut over dp in the middle, or parameters too, by
    their rows."""
    return [_seen(case, rank, cut) for rank in range(case.mesh.size)]


def _seen(case: TrainStepCase, rank: int, cut: bool) -> Observation:
    stage, at = case.mesh.coordinate(rank, "pp"), case.mesh.coordinate(rank, "dp")
    layouts: dict[str, Layout] = {}
    found: dict[str, LocalTensor | None] = {}
    owned = {}
    for name, shape in shapes(case.model).items():
        owner = owner_of(case.model, name)
        own = Split(0, "dp", rule="chunk") if cut else Whole()
        layouts[name] = (Split(0, "pp", tuple(shape[0] * (c == owner) for c in range(2))), own)
        rows = window(shape, own, case.mesh, rank)
        master = rows.take(_values(f"{name}.master").to(torch.float32))
        half = master.numel() // 2
        start, stop = (0, half) if at == 0 else (half, master.numel())
        start, stop = (0, master.numel()) if cut else (start, stop)
        for what in (name, *(f"{name}.{kind}" for kind in case.kept)):
            beside = what != name
            values = rows.take(_values(what).to(torch.float32)) if beside else master.to(torch.bfloat16)
            values = values.reshape(-1)[start:stop] if beside else values
            values = values if owner == stage else torch.zeros((0, *shape[1:]))
            found[what] = LocalTensor(values.double().numpy(), "float32" if beside else "bfloat16")
        if owner == stage:
            owned[name] = ((start, stop),)
    for step in range(case.steps):
        loss = _values(f"loss[{step}]").float() if stage == 1 else torch.zeros(0)
        found[f"loss[{step}]"] = LocalTensor(loss.double().numpy(), "float32")
    for what in ("norm[0]", "coefficient[0]"):
        found[what] = LocalTensor(_values(what).numpy().copy(), "float64")
    plans = plan(case)
    seen = [
        {"by": one.scale, "skipped": one.skipped, "scale": one.after.scale, "steps": one.t + (not one.skipped)}
        for one in plans
    ]
    return Observation(found, layouts, facts={SEEN: seen, MOVED: [[] for _ in plans], APART: [], OWNED: owned})


def _values(name: str) -> torch.Tensor:
    found = RIGHT[name]
    assert found is not None
    return found


def judged(world: Sequence[Observation], *others: Sequence[Observation]) -> tuple[Finding, ...]:
    return TRAIN_STEP.judge(CASE, Description("mine", "mine"), TRAIN_STEP.expected(CASE), [world, *others]).findings


def damaged(rank: int, name: str, by: Callable[[np.ndarray[Any, Any]], object]) -> list[Observation]:
    world = observed()
    tensor = world[rank].tensors[name]
    assert tensor is not None
    assert tensor.values is not None
    by(tensor.values)
    return world


def test_right_ranks_are_right() -> None:
    assert judged(observed()) == ()
    assert judged(observed(), observed()) == ()


def add(to: Any) -> None:
    to[...] += 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("loss[1]", "loss[1] differs from one process"),
        ("norm[0]", "norm[0] differs from one process"),
        ("coefficient[0]", "coefficient[0] differs from one process"),
        ("norm_weight", "norm_weight differs from one process"),
        ("norm_weight.master", "norm_weight.master differs from one process"),
        ("norm_weight.momentum", "norm_weight.momentum differs from one process"),
    ],
)
def test_a_value_that_is_wrong(name: str, words: str) -> None:
    rank = next(rank for rank in range(4) if CASE.mesh.coordinate(rank, "pp") == 1)
    assert words in judged(damaged(rank, name, add))[0].message


def test_a_model_that_is_not_its_masters_rounded() -> None:
    def last_bit(values: Any) -> None:
        values[0] = np.nextafter(np.float32(values[0]), np.float32(9)) * (1 + 2.0**-7)

    world = observed()
    for rank in range(4):
        if CASE.mesh.coordinate(rank, "pp") == 1:
            last_bit(world[rank].tensors["norm_weight"].values)  # type: ignore[union-attr]
    (found,) = judged(world)
    assert found.message.startswith("norm_weight is not its master rounded to bf16 on rank")
    assert found.local_index == (0,)


def test_copies_of_the_embedding_that_differ() -> None:
    world = observed()
    for one in world:
        held = one.tensors["output_weight.momentum"]
        assert held is not None
        assert held.values is not None
        held.values[...] = np.float32(held.values) * np.float32(1 + 2.0**-23)
    (found,) = judged(world)
    assert "embedding_weight.momentum and output_weight.momentum are copies of one weight" in found.message


def test_who_keeps_what() -> None:
    world = observed()
    rank = next(rank for rank in range(4) if CASE.mesh.coordinate(rank, "pp") == 1)
    world[rank].facts[OWNED]["norm_weight"] = ((0, 1),)
    (found,) = judged(world)
    assert "no ranks keep element 1 of 4 of norm_weight" in found.message


def test_ranks_that_have_parts_of_their_own() -> None:
    """Five rows on two ranks: three and two, of which each rank keeps all."""
    assert judged(observed(cut=True)) == ()
    rank = next(rank for rank in range(4) if CASE.mesh.coordinate(rank, "pp") == 0)
    for name, owned, words in (
        ("embedding_weight", ((0, 3),), "no ranks keep element 3 of"),
        ("embedding_weight", ((0, 24),), "elements 0 to 24 of"),
        ("embedding_weight", ((0, 4), (0, 12)), "2 ranks keep element 0 of 12 of embedding_weight, on rank"),
    ):
        world = observed(cut=True)
        world[rank].facts[OWNED][name] = owned
        (found,) = judged(world)
        assert words in found.message


def test_values_of_ranks_that_have_parts_of_their_own() -> None:
    """One element of one rank's part; and all copies of a tied part."""
    world = observed(cut=True)
    rank = next(r for r in range(4) if [CASE.mesh.coordinate(r, axis) for axis in ("pp", "dp")] == [0, 1])
    held = world[rank].tensors["embedding_weight.momentum"]
    assert held is not None
    assert held.values is not None
    held.values[0] += 1
    found = judged(world)
    assert found[0].tensor == "embedding_weight.momentum"
    assert found[0].index == (3, 0)
    world = observed(cut=True)
    for one in world:
        held = one.tensors["output_weight.momentum"]
        assert held is not None
        assert held.values is not None
        held.values[...] = np.float32(held.values) * np.float32(1 + 2.0**-23)
    (copies,) = judged(world)
    assert "embedding_weight.momentum and output_weight.momentum are copies of one weight" in copies.message


@pytest.mark.parametrize(
    ("what", "value", "words"),
    [
        ("skipped", False, "the decision to skip the step is 0.0"),
        ("scale", 2.0**8, "the scale is 256.0"),
        ("steps", 2, "the count of steps that were not skipped is 2"),
    ],
)
def test_a_decision_that_is_wrong_on_one_rank(what: str, value: float, words: str) -> None:
    world = observed()
    world[2].facts[SEEN][1][what] = float(value)
    (found,) = judged(world)
    assert found.kind == "disagree"
    assert words in found.message
    assert "inf at 0 along pp" in found.message


def test_what_moves_in_a_step_that_is_skipped() -> None:
    world = observed()
    world[1].facts[MOVED][1].append("norm_bias.momentum")
    (found,) = judged(world)
    assert "step 1 is to be skipped" in found.message
    assert "changed norm_bias.momentum" in found.message


def test_a_resumed_run_with_other_bits() -> None:
    def little(values: Any) -> None:
        values[...] = values * (1 + 2.0**-40)

    findings = judged(observed(), damaged(0, "norm[0]", little))
    assert "norm[0] has other bits after saving and loading at step 0 than without" in findings[0].message


def test_a_trainer_that_goes_on_otherwise_than_what_it_saved() -> None:
    world = observed()
    world[3].facts[APART].extend(("norm_bias.momentum", "scale"))
    (found,) = judged(world)
    assert "saving changed something: after step 0 who saved the state before it, and went on, has" in found.message
    assert found.message.endswith("in norm_bias.momentum, scale")
    assert found.rank == 3


# Adapters, on one rank and without a world.

ONE = TrainStepCase(GptCase(Mesh.of(tp=1), 5, 4, 1, 1, 2, length=2, counts=(2,), depths=(0,)))


def held() -> dict[str, torch.Tensor]:
    rows = {"embedding_weight": (5, 4), "norm_weight": (4,), "norm_bias": (4,), "output_weight": (5, 4)}
    return {name: torch.zeros(shape, requires_grad=True) for name, shape in rows.items()}


def trainer(step: Any = lambda *tokens: torch.zeros(()), parameters: Any = None, **more: Any) -> Trainer:
    options = {"scale": lambda: 1.0, "skipped": lambda: False, **more}
    return Trainer(step, held() if parameters is None else parameters, {}, **options)


def changes_its_batch(*tokens: torch.Tensor) -> torch.Tensor:
    tokens[0].add_(1)
    return torch.zeros(())


WRONG: dict[str, tuple[dict[str, Any], Callable[[], object], type[Exception], str]] = {
    "no Trainer": ({}, lambda: None, WrongAdapter, "train_step returned None; expected Trainer"),
    "lacks one": ({}, lambda: trainer(parameters={}), WrongAdapter, "lacks embedding_weight, which pp=0 holds"),
    "no loss": ({}, lambda: trainer(lambda *tokens: None), WrongResult, "expected a scalar tensor"),
    "skipped, perhaps": ({}, lambda: trainer(skipped=lambda: 1), WrongResult, "skipped returned 1; expected whether"),
    "two scales": ({}, lambda: trainer(scale=lambda: torch.ones(2)), WrongResult, "scale returned"),
    "a batch that is changed": ({}, lambda: trainer(changes_its_batch), WrongResult, "step 0 changed its batch"),
    "a state of another shape": (
        {"momentum": 0.5}, lambda: trainer(state=lambda name, kind: torch.zeros(1)), WrongResult,
        r"embedding_weight.momentum of the elements kept has local shape \(1,\); expected \(20,\)",
    ),
    "owned, somehow": ({}, lambda: trainer(owned=lambda name: 3), WrongAdapter, "expected a list of ranges"),
    "owned beyond": (
        {}, lambda: trainer(owned=lambda name: [(0, 2), (2, 21)]), WrongAdapter,
        r"owned\('embedding_weight'\) returned .*\(2, 21\).* of its 20 elements here",
    ),
    "owned, reversed": ({}, lambda: trainer(owned=lambda name: [(2, 0)]), WrongAdapter, "of its 20 elements here"),
    "no hook": ({"overflows": (Overflow(),)}, trainer, NotOffered, "no after_backward"),
    "no save": ({"steps": 2, "load": 1}, trainer, NotOffered, "no save"),
    "no load": ({"steps": 2, "load": 1}, lambda: trainer(save=dict), NotOffered, "no load"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_an_adapter_that_is_wrong_is_told_so(what: str) -> None:
    changes, build, kind, words = WRONG[what]
    with pytest.raises(kind, match=words):
        run(dataclasses.replace(ONE, **changes), 0, lambda case: build())


@pytest.mark.parametrize("gives", ["master", "state", "neither"])
def test_what_is_not_given_is_not_looked_for_on_other_stages(gives: str) -> None:
    here = {name: shape for name, shape in shapes(MODEL).items() if owner_of(MODEL, name) == 0}
    parameters = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in here.items()}
    options: dict[str, Any] = {
        "master": {"master": lambda name: torch.zeros(parameters[name].numel())},
        "state": {"state": lambda name, kind: torch.zeros(parameters[name].numel())},
    }.get(gives, {})
    case = dataclasses.replace(CASE, overflows=())
    found = run(case, 0, lambda asked: trainer(lambda *tokens: None, parameters, **options))
    kinds = {"master": ["master"], "state": ["momentum"], "neither": []}[gives]
    assert {what for what in found.tensors if "." in what} == {f"{name}.{kind}" for name in ROWS for kind in kinds}


def test_a_trainer_is_closed_before_the_next_is_built() -> None:
    seen: list[str] = []

    def build(asked: TrainStepCase) -> Trainer:
        seen.append("build")
        return trainer(save=dict, load=lambda state: seen.append("load"), close=lambda: seen.append("close"))

    run(dataclasses.replace(ONE, steps=2, load=1), 0, build)
    assert seen == ["build", "close", "build", "load", "close"]


@pytest.mark.parametrize("fault", ["none", "saving changes it", "kept elsewhere", "the scale is kept elsewhere"])
def test_the_trainer_that_saved_goes_on_for_a_step(fault: str) -> None:
    """Each step adds its number; the state is that number, and it may be nowhere else."""
    elsewhere = [0.0]

    def build(asked: TrainStepCase) -> Trainer:
        parameters, done = held(), [0.0]

        def step(*tokens: torch.Tensor) -> torch.Tensor:
            done[0] += 1
            elsewhere[0] += 1
            with torch.no_grad():
                parameters["norm_bias"].add_(elsewhere[0] if fault == "kept elsewhere" else done[0])
            return torch.zeros(())

        def save() -> dict[str, Any]:
            state = {"done": done[0], "values": {name: p.detach().clone() for name, p in parameters.items()}}
            done[0] += fault == "saving changes it"
            return state

        def load(state: dict[str, Any]) -> None:
            done[0] = state["done"]
            for name, p in parameters.items():
                p.data.copy_(state["values"][name])

        made = trainer(step, parameters, save=save, load=load)
        if fault.startswith("the scale"):
            made.scale = lambda: 1 + elsewhere[0]
        return made

    found = run(dataclasses.replace(ONE, steps=3, load=2), 0, build)
    wrong = {"none": [], "the scale is kept elsewhere": ["scale"]}
    assert found.facts[APART] == wrong.get(fault, ["norm_bias"])


def test_a_trainer_needs_functions() -> None:
    with pytest.raises(TypeError, match="scale, skipped"):
        Trainer(lambda *tokens: None, {}, {}, None, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected a function"):
        trainer(norm=3.0)


def test_what_moves_is_seen_and_overflows_are_put_in() -> None:
    parameters, hooks = held(), list[Callable[[], None]]()
    seen: list[bool] = []

    def step(*tokens: torch.Tensor) -> torch.Tensor:
        for p in parameters.values():
            p.grad = torch.zeros_like(p)
        hooks[-1]()
        gradients = [p.grad for p in parameters.values()]
        seen.append(all(bool(g.isfinite().all()) for g in gradients if g is not None))
        with torch.no_grad():
            parameters["norm_bias"].add_(1)
        return torch.zeros(())

    case = dataclasses.replace(ONE, steps=2, overflows=(Overflow(1, "nan", parameter=2, element=6),))
    found = run(case, 0, lambda asked: trainer(step, parameters, after_backward=hooks.append))
    assert seen == [True, False]
    assert found.facts[MOVED] == [["norm_bias"]] * 2
    gradient = parameters["norm_bias"].grad
    assert gradient is not None
    assert gradient.isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize(("at", "says"), [("build", False), ("load", False), ("step", True)])
def test_random_numbers_are_drawn_where_they_may_be(at: str, says: bool) -> None:
    """A constructor fills its weights, and a load sets the generator back."""

    def draw(where: str) -> None:
        if at == where:
            torch.rand(1)

    def build(asked: TrainStepCase) -> Trainer:
        draw("build")

        def step(*tokens: torch.Tensor) -> torch.Tensor:
            draw("step")
            return torch.zeros(())

        return trainer(step, save=dict, load=lambda state: draw("load"))

    found = run(dataclasses.replace(ONE, steps=2, load=1), 0, build)
    assert found.side_effects == (("drew from the default random generator and did not restore it",) if says else ())


def test_a_trainer_is_hooked_once() -> None:
    """ "From then on" may well be a list to which the trainer appends."""
    hooks: list[Callable[[], None]] = []
    parameters, seen = held(), list[bool]()

    def step(*tokens: torch.Tensor) -> torch.Tensor:
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        for hook in hooks:
            hook()
        gradients = [parameter.grad for parameter in parameters.values() if parameter.grad is not None]
        seen.append(all(bool(gradient.isfinite().all()) for gradient in gradients))
        return torch.zeros(())

    case = dataclasses.replace(ONE, steps=4, overflows=(Overflow(0), Overflow(2)))
    run(case, 0, lambda asked: trainer(step, parameters, after_backward=hooks.append))
    assert seen == [False, True, False, True]
    assert len(hooks) == 1


def test_the_hook_of_a_trainer_that_is_closed_does_nothing() -> None:
    hooks: list[Callable[[], None]] = []
    parameters, calls = held(), list[int]()

    def step(*tokens: torch.Tensor) -> torch.Tensor:
        for parameter in parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        for hook in hooks:
            hook()
        calls.append(
            sum(int((parameter.grad != 0).sum()) for parameter in parameters.values() if parameter.grad is not None)
        )
        return torch.zeros(())

    # The state is loaded before the second step, which whoever saved it has made as well.
    case = dataclasses.replace(ONE, steps=3, load=1, overflows=(Overflow(1), Overflow(2, element=1)))
    options: dict[str, Any] = {"after_backward": hooks.append, "save": dict, "load": lambda state: None}
    run(case, 0, lambda asked: trainer(step, parameters, **options))
    assert calls == [0, 1, 1, 1]
    assert len(hooks) == 2
