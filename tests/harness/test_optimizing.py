"""Sharded optimizers as the harness judges them: what is right holds, and each fault is told as what it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness import ShardedOptimizer
from harness.bench import Bench
from harness.oracle.patterns.evidence import Evidence
from harness.oracle.patterns.suspected import suspected
from harness.properties import property_of
from harness.properties.optimizer_mistakes import mistakes
from harness.properties.sharded_optimizer_suspects import suspects
from harness.verdict import Verdict
from reference.layout import Whole
from reference.mesh import Mesh
from reference.recipe import Recipe
from reference.sharded_optimizer import (
    Parameter,
    ShardedOptimizerCase,
    ShardedOptimizerRecipes,
    expected,
    reduced,
    tensors,
)

HERE = Path(__file__).parent / "candidates_for_tests" / "optimizing.py"
SHARDED_OPTIMIZER = property_of("sharded_optimizer")

PLAIN = ShardedOptimizerCase(Mesh.of(dp=2), (Parameter((3,)), Parameter(()), Parameter((2, 2))))
ROUNDS = ShardedOptimizerRecipes(Recipe("normal"), Recipe("normal"))
ADAMW = dataclasses.replace(PLAIN, optimizer="adamw", lr=0.1, weight_decay=0.1, recipes=ROUNDS)
MOMENTUM = dataclasses.replace(PLAIN, momentum=0.9, recipes=ROUNDS)
LOADS = dataclasses.replace(MOMENTUM, steps=2, load=1)
MOVES = dataclasses.replace(ADAMW, mesh=Mesh.of(dp=2, tp=1), steps=3, load=1, load_axis="tp")


def verdict_of(candidate: str, case: ShardedOptimizerCase) -> Verdict:
    with Bench(f"{HERE}:{candidate}") as bench:
        return bench.once(SHARDED_OPTIMIZER, case).verdict


def said(verdict: Verdict) -> str:
    return "\n".join(f"{one.kind}: {one.message}; {one.cause}; {one.details}" for one in verdict.findings)


CASES = {
    "plain": PLAIN,
    "adamw": ADAMW,
    "momentum": MOMENTUM,
    "loads": LOADS,
    "moves": MOVES,
    "moves to more": dataclasses.replace(MOVES, axis="tp", load_axis="dp"),
    "two axes": dataclasses.replace(ADAMW, mesh=Mesh.of(dp=2, tp=2)),
    "master": dataclasses.replace(ADAMW, dtype="bf16", master=True, reduce_dtype="fp32"),
    "mixed": dataclasses.replace(MOMENTUM, dtype="bf16", parameters=(Parameter((3,)), Parameter((2,), fp32=True))),
    "missing": dataclasses.replace(
        ADAMW, parameters=(*PLAIN.parameters, Parameter((2,), kind="some"), Parameter(kind="none"))
    ),
    "frozen": dataclasses.replace(ADAMW, parameters=(*PLAIN.parameters, Parameter((2,), kind="frozen"))),
    **{kind: dataclasses.replace(PLAIN, invalid=kind) for kind in ("number", "shape", "dtype", "order", "empty")},
    **{
        kind: dataclasses.replace(PLAIN, steps=2, load=1, invalid=kind)
        for kind in ("state_number", "state_shape", "state_optimizer")
    },
}


@pytest.fixture(scope="module")
def builtin() -> Iterator[Bench]:
    with Bench("builtin") as bench:
        yield bench


@pytest.mark.parametrize("name", CASES)
def test_the_shipped_candidate_is_right(builtin: Bench, name: str) -> None:
    verdict = builtin.once(SHARDED_OPTIMIZER, CASES[name]).verdict
    assert verdict.holds, said(verdict)


@pytest.mark.parametrize(
    ("candidate", "case", "kind", "words"),
    [
        ("OwnsAll", PLAIN, "mismatch", "element 0 of 3 of parameter0 has 2 owners, ranks 0, 1 among the ranks [0, 1]"),
        ("OwnsTooMuch", PLAIN, "mismatch", "rank 0 owns 0 to 4 of parameter0, which has 3 elements, in step 0"),
        ("SilentOnOne", PLAIN, "disagree", "does not say what it owns, and rank 0 does"),
        ("ForgetsState", MOMENTUM, "mismatch", "momentum0[0] differs from one process"),
        ("ForgetsState", ADAMW, "mismatch", "exp_avg_sq2[0] differs from one process"),
        (
            "LoadsInexactly",
            LOADS,
            "mismatch",
            "has other bits after saving and loading at step 1 than without",
        ),
        ("ChangesOneReplica", MOMENTUM, "disagree", "parameter0[0]"),
        ("GathersTwice", PLAIN, "traffic", "more traffic than needed in the finish: all_reduce on group [0, 1]"),
        ("AcceptsAnything", CASES["state_shape"], "mismatch", "states with a parameter of another shape were accepted"),
        (
            "TakesHalf",
            dataclasses.replace(MOMENTUM, steps=2, load=1, invalid="state_shape"),
            "mismatch",
            "a load that was refused changed momentum0",
        ),
        ("AcceptsAnything", MOVES, "mismatch", "is as if the optimizer began anew where a state was loaded"),
    ],
)
def test_a_fault_is_told(candidate: str, case: ShardedOptimizerCase, kind: str, words: str) -> None:
    verdict = verdict_of(candidate, case)
    assert kind in [one.kind for one in verdict.findings], said(verdict)
    assert words in said(verdict)


def test_the_same_faults_hide_where_they_must() -> None:
    assert verdict_of("ForgetsState", PLAIN).holds, "plain SGD keeps nothing"
    assert verdict_of("LoadsInexactly", MOMENTUM).holds, "nothing is loaded"


@pytest.mark.parametrize("parameters", [PLAIN.parameters, (Parameter((2,)), Parameter((3,), kind="frozen"))])
def test_what_is_not_said_is_not_checked(parameters: Any) -> None:
    """An adapter that says neither what it owns nor its state; its traffic is its own, and must be declared."""
    case = dataclasses.replace(MOMENTUM, parameters=parameters)
    verdict = verdict_of("Declared", case)
    assert verdict.holds, said(verdict)
    assert {one.kind for one in verdict_of("Simple", case).findings} == {"traffic"}


@pytest.mark.parametrize(
    ("candidate", "case", "words"),
    [
        ("ShortState", MOMENTUM, "momentum0[0] of the elements owned has local shape"),
        ("Nothing", PLAIN, "expected ShardedOptimizer(step)"),
        ("NoSave", LOADS, "the sharded optimizer has no save"),
    ],
)
def test_what_does_not_fit_is_said(candidate: str, case: ShardedOptimizerCase, words: str) -> None:
    with Bench(f"{HERE}:{candidate}") as bench:
        checked = bench.check(SHARDED_OPTIMIZER, case)
    assert words in f"{said(checked.verdict)} {checked}"


def test_a_state_needs_owners() -> None:
    with pytest.raises(TypeError, match="without owned=: say of which elements the state is"):
        ShardedOptimizer(lambda: None, state=lambda name, kind: None)  # type: ignore[arg-type, return-value]


#: Not AdamW, to which it is all the same by what gradients are multiplied.
SUM = dataclasses.replace(MOMENTUM, reduction="sum", steps=2)


@pytest.mark.parametrize("case", [dataclasses.replace(LOADS, weight_decay=0.1), SUM, MOVES])
def test_suspects_are_not_what_is_right(case: ShardedOptimizerCase) -> None:
    given = tensors(case)
    name = f"parameter0[{case.steps - 1}]"
    right = expected(case, given)[name]
    assert right is not None
    found = suspects(case, given, name)
    assert len({one.cause for one in found}) == len(found) >= 4
    for one in found:
        values = one.values if isinstance(one.values, tuple) else (one.values,)
        assert any(not np.allclose(value, right.numpy(), rtol=1e-12) for value in values), one.cause


def _torch_steps(case: ShardedOptimizerCase, optimizer: Any, **options: Any) -> Any:
    """What an optimizer of torch's makes of the right gradients, one rank's parameter 0."""
    given = tensors(case)
    parameter = torch.nn.Parameter(given["parameter0"].clone())
    stepping = optimizer([parameter], lr=case.lr, weight_decay=case.weight_decay, **options)
    for step in range(case.steps):
        parameter.grad = reduced(case, given, 0, step)[0]
        stepping.step()
    return parameter.detach().numpy()


@pytest.mark.parametrize(
    ("case", "optimizer", "options", "cause"),
    [
        (ADAMW, torch.optim.Adam, {"betas": ADAMW.betas, "eps": ADAMW.eps}, "as in Adam and not in AdamW"),
        (MOMENTUM, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}, "is as with Nesterov's momentum"),
        (MOMENTUM, torch.optim.SGD, {}, "is as without momentum"),
    ],
)
def test_mistakes_are_what_other_optimizers_do(
    case: ShardedOptimizerCase, optimizer: Any, options: Any, cause: str
) -> None:
    """The formulas of the suspects, by optimizers that torch has."""
    case = dataclasses.replace(case, steps=3)
    made = _torch_steps(case, optimizer, **options)
    (one,) = [one for one in suspects(case, tensors(case), "parameter0[2]") if cause in one.cause]
    np.testing.assert_allclose(np.asarray(one.values)[0], made, rtol=1e-12)


@pytest.mark.parametrize(
    "case", [dataclasses.replace(ADAMW, steps=3, eps=0.1), dataclasses.replace(MOMENTUM, steps=3, weight_decay=0.1)]
)
def test_a_mistaken_formula_is_told(case: ShardedOptimizerCase) -> None:
    """Each alone explains ranks that hold what it gives."""
    given, name = tensors(case), "parameter0[2]"
    want = expected(case, given)[name]
    assert want is not None
    causes = {cause for cause, _ in mistakes(case)}
    for one in [one for one in suspects(case, given, name) if one.cause in causes]:
        values = np.asarray(one.values)
        held = tuple(values for _ in range(case.mesh.size))
        evidence = Evidence(
            name,
            want.numpy(),
            Whole(),
            case.mesh,
            held,
            np.full(want.shape, 1e-6),
            suspects=lambda: suspects(case, given, name),
        )
        assert one.cause in str(suspected(evidence)), one.cause


def test_a_state_tensor_and_a_frozen_parameter_have_no_suspects() -> None:
    case = CASES["frozen"]
    assert suspects(case, tensors(case), "exp_avg0[0]") == suspects(case, tensors(case), "parameter3[0]") == []
