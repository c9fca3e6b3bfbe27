"""The faults of the linear mutants, on real ranks: the diagnosis names the cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from harness.bench import Bench
from harness.observation import Observation
from harness.properties.linear import LINEAR, layouts
from harness.properties.linear_suspects import explain
from reference.linear import LinearCase, expected, tensors
from reference.mesh import Mesh

TP2, TP4, TP_DP = Mesh.of(tp=2), Mesh.of(tp=4), Mesh.of(tp=2, dp=3)
TOKENS = ((3,), (4,))


@dataclass(frozen=True)
class Trial:
    """A mutant, a case in which it fails, and for some tensors words that the diagnosis must say."""

    mutant: str
    case: LinearCase
    says: dict[str, str]

    def __str__(self) -> str:
        return f"{self.mutant} {self.case.kind} {self.case.mesh}"


MISSING = "equals the rank's own part before the sum over {}: an all-reduce is missing in backward, or not waited for"
JOINED = "gathered along the first dimension and viewed, where a gather along dimension {} is due"
DOUBLED = "is 2 times too large: the backward of the gather sums 2 equal gradients (a reduce-scatter)"
SEED = "is the same on all ranks of tp: every shard was initialised from the same seed"
BOTH = {"axis": "dp", "explicit_group": True, "leading": TOKENS}
PLAIN = LinearCase(TP2, "column", 4, 6, leading=((3,),), bias=True)
ROW = LinearCase(TP2, "row", 4, 6, leading=((3,),), bias=True)

TRIALS = [
    Trial(
        "F03",
        LinearCase(Mesh.of(tp=2, dp=2), "column", 4, 6, **BOTH),
        {"input[0].grad": "is summed over tp instead of dp in backward"},
    ),
    Trial(
        "F03",
        LinearCase(Mesh.of(dp=2), "column", 4, 6, **BOTH),
        {"input[1].grad": f"{MISSING.format('dp')}, or is done over tp, a group of one rank, instead of dp"},
    ),
    Trial("F04", ROW, {"output[0]": "has the bias 2 times: added on every rank before the sum over tp"}),
    Trial(
        "F04",
        replace(ROW, mesh=TP4, sequence_parallel=True, leading=((5,),)),
        {
            "output[0]": "has the bias 4 times: added on every rank before the sum over tp",
            "bias.grad": "is 4 times too large: summed over tp where every rank has the whole gradient",
        },
    ),
    Trial("F05", ROW, {"bias.grad": "is 1/2 of what it should be: the bias is divided by the size of tp in the graph"}),
    Trial("F05", replace(ROW, mesh=TP4, main_grad=True), {"bias.grad": "is 1/4 of what it should be: the bias is"}),
    Trial(
        "F06",
        replace(PLAIN, transposed=True),
        {"input[0].grad": f"{MISSING.format('tp')}, or reduces a contiguous copy and returns the original"},
    ),
    Trial("F11", replace(PLAIN, gather_output=True), {"output[0]": JOINED.format(1)}),
    Trial(
        "F11",
        replace(PLAIN, gather_output=True, out_features=5, leading=((2, 3),)),
        {"output[0]": JOINED.format(2)},
    ),
    Trial("F11", replace(ROW, input_is_parallel=False, in_features=5), {"input[0].grad": JOINED.format(1)}),
    Trial(
        "F12",
        replace(PLAIN, gather_output=True),
        dict.fromkeys(("input[0].grad", "weight.grad", "bias.grad"), DOUBLED),
    ),
    Trial("F13", replace(PLAIN, init=True), {"weight.initial": SEED, "bias.initial": SEED}),
    Trial("F13", replace(ROW, init=True, in_features=7), {"weight.initial": SEED}),
    Trial("F14", PLAIN, {"input[0].grad": MISSING.format("tp")}),
    Trial(
        "F14",
        replace(PLAIN, mesh=TP_DP, out_features=7, leading=((3,), (2, )), dtype="bf16"),
        {"input[0].grad": MISSING.format("tp"), "input[1].grad": MISSING.format("tp")},
    ),
]  # fmt: skip


def diagnoses(bench: Bench, case: LinearCase) -> dict[str, str | None]:
    """What is said of each wrong tensor of the case on real ranks."""
    seen: list[tuple[Any, ...]] = []

    def judge(*arguments: Any) -> Any:
        seen.append(arguments)
        return LINEAR.judge(*arguments)

    bench.once(replace(LINEAR, judge=judge), case)
    _, description, _, worlds = seen[-1]
    observed: Sequence[Observation] = worlds[0]
    want = {name: value.numpy() for name, value in expected(case, tensors(case)).items() if value is not None}
    if len(worlds) > 1:
        want |= {f"{name}.initial": worlds[1][0].tensors[f"{name}.initial"].values for name in ("weight", "bias")}
    cuts = layouts(case, description.uneven)
    found = {}
    for name, values in want.items():
        layout = observed[0].layouts.get(name) or cuts[name.removesuffix(".grad").partition("[")[0]]
        dtype = next(o.tensors[name].dtype for o in observed)
        made = explain(case, description, name, observed, layout, values, None, dtype)
        if made is not None:
            found[name] = made.sentence
    return found


@pytest.mark.parametrize("trial", TRIALS, ids=str)
def test_the_fault_of_a_mutant_is_named(trial: Trial) -> None:
    with Bench(f"builtin+{trial.mutant}") as bench:
        found = diagnoses(bench, trial.case)
    for name, words in trial.says.items():
        assert words in (found.get(name) or ""), (name, found)


def test_right_layers_have_no_diagnosis() -> None:
    with Bench("builtin") as bench:
        for trial in TRIALS:
            assert diagnoses(bench, trial.case) == {}
