"""The suspects of linear layers: each is recognised when it is planted, and is what its cause says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from harness.observation import LocalTensor, Observation
from harness.oracle.compare import different
from harness.oracle.diagnose import Diagnosis
from harness.oracle.patterns.evidence import Suspect
from harness.oracle.patterns.formats import format_named, rounded
from harness.properties.base import Description
from harness.properties.linear import layouts
from harness.properties.linear_suspects import explain, suspects
from reference.layout import Each, Layout, Split, window
from reference.linear import LinearCase, expected, tensors
from reference.mesh import Mesh

Values = NDArray[np.float64]
DESCRIPTION = Description("planted", "planted")
TP2, TP3, TP4, TP_DP = Mesh.of(tp=2), Mesh.of(tp=3), Mesh.of(tp=4), Mesh.of(tp=2, dp=3)
TOKENS = ((3,), (4,))

CASES = {
    "column": LinearCase(TP3, "column", 6, 7, leading=TOKENS, bias=True),
    "column with replicas": LinearCase(TP_DP, "column", 6, 7, leading=((3, 2),), bias=True),
    "column gathered": LinearCase(TP3, "column", 6, 7, leading=TOKENS, bias=True, gather_output=True),
    "column of sequence pieces": LinearCase(TP3, "column", 6, 7, leading=((5, 2), (4, 2)), sequence_parallel=True),
    "row": LinearCase(TP3, "row", 7, 6, leading=TOKENS, bias=True),
    "row with replicas": LinearCase(TP_DP, "row", 7, 6, leading=((3,), (2,)), bias=True),
    "row that splits": LinearCase(TP3, "row", 7, 6, leading=TOKENS, bias=True, input_is_parallel=False),
    "row of sequence pieces": LinearCase(TP3, "row", 7, 6, leading=((5,), (4,)), bias=True, sequence_parallel=True),
    "row, bias returned": LinearCase(TP3, "row", 7, 6, leading=TOKENS, bias=True, skip_bias_add=True),
    "explicit group": LinearCase(TP_DP, "column", 6, 8, leading=((3,),), axis="dp", explicit_group=True),
    "delayed": LinearCase(TP3, "column", 6, 7, leading=((3,), (3,), (3,)), backward="delayed"),
    "bf16": LinearCase(TP3, "row", 7, 6, leading=TOKENS, bias=True, dtype="bf16", main_grad=True),
}


def given(case: LinearCase) -> dict[str, Values]:
    return {name: tensor.numpy() for name, tensor in tensors(case).items()}


def wants(case: LinearCase) -> dict[str, Values]:
    return {name: want.numpy() for name, want in expected(case, tensors(case)).items() if want is not None}


def layout_of(case: LinearCase, name: str) -> Layout:
    """That of a result, where a candidate says nothing else."""
    base = name.removesuffix(".grad").partition("[")[0]
    if base not in ("weight", "bias"):
        return layouts(case)[base]
    each = Each(case.replica_axes)
    if case.kind == "column":
        return each, Split(0, case.axis)
    return (each, Split(1, case.axis)) if base == "weight" else (each,)


def dtype_of(case: LinearCase, name: str) -> str:
    wide = case.main_grad and name in ("weight.grad", "bias.grad")
    return "float32" if wide else str(case.format.torch_dtype).removeprefix("torch.")


def explained(case: LinearCase, name: str, suspect: Suspect | Values, *, exact: bool = True) -> Diagnosis | None:
    """The diagnosis of ranks that hold what a suspect says: rounded to the dtype or, where not exact, with noise below
    the tolerance."""
    want, layout, dtype = wants(case)[name], layout_of(case, name), dtype_of(case, name)
    values = suspect.values if isinstance(suspect, Suspect) else suspect
    whole = values if isinstance(values, tuple) else (values,) * case.mesh.size
    rng, observed = np.random.default_rng(0), []
    tolerance = None if exact else np.full(want.shape, 1e-3)
    for rank in range(case.mesh.size):
        part = window(want.shape, layout, case.mesh, rank).take(whole[rank])
        held = rounded(part, format_named(dtype)) if exact else part + rng.uniform(-1e-4, 1e-4, part.shape)
        observed.append(Observation({name: LocalTensor(held, dtype)}))
    return explain(case, DESCRIPTION, name, observed, layout, want, tolerance, dtype)


def results(case: LinearCase) -> list[str]:
    return list(wants(case))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "within tolerance"])
def test_each_suspect_is_recognised(case: LinearCase, exact: bool) -> None:
    tried = sure = 0
    for name in results(case):
        for suspect in suspects(case, given(case), name):
            found = explained(case, name, suspect, exact=exact)
            if found is None:
                continue  # nothing that this rank's window shows, as the bias of a case without one
            tried += 1
            named = [found.sentence or "", *found.possible]
            alike = sum(explains_alike(case, name, suspect, other) for other in suspects(case, given(case), name))
            if alike <= 2:
                assert any(suspect.cause in text for text in named), (name, suspect.cause, found.lines())
                sure += found.sentence is not None
    assert tried > 5
    assert sure >= 0.9 * tried


def explains_alike(case: LinearCase, name: str, one: Suspect, other: Suspect) -> bool:
    """Whether the ranks hold the same with both."""
    want, layout = wants(case)[name], layout_of(case, name)
    for rank in range(case.mesh.size):
        part = window(want.shape, layout, case.mesh, rank)
        a, b = ((s.values if isinstance(s.values, tuple) else (s.values,) * 99)[rank] for s in (one, other))
        if different(part.take(np.asarray(a)), part.take(np.asarray(b))).any():
            return False
    return True


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_is_right_needs_no_explanation(case: LinearCase) -> None:
    for name, want in wants(case).items():
        assert explained(case, name, want) is None
        assert explained(case, name, want, exact=False) is None


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_no_suspect_gives_has_no_cause(case: LinearCase) -> None:
    rng = np.random.default_rng(0)
    for name, want in wants(case).items():
        found = explained(case, name, want + rng.integers(1, 20, size=want.shape))
        assert found is not None
        assert found.pattern in (None, "past_an_index")
        assert not found.possible


def of(case: LinearCase, name: str, cause: str) -> tuple[Values, ...]:
    """What the suspect with this cause gives on each rank, in the global shape."""
    (values,) = (s.values for s in suspects(case, given(case), name) if s.cause.startswith(cause))
    return values if isinstance(values, tuple) else (values,) * case.mesh.size


@pytest.mark.parametrize("name", ["output[0]", "input[0].grad"])
def test_the_parts_before_a_sum_add_up_to_the_sum(name: str) -> None:
    case = replace(CASES["row" if name == "output[0]" else "column"], bias=False)
    parts = of(case, name, "equals the rank's own part before the sum over tp")
    assert np.array_equal(sum(parts), wants(case)[name])


def test_the_tokens_of_all_ranks_and_all_micro_batches_add_up_to_the_gradient() -> None:
    case = CASES["row of sequence pieces"]
    for name in ("weight.grad", "bias.grad"):
        assert np.array_equal(sum(of(case, name, "covers only the rank's own tokens")), wants(case)[name])
        alone = [of(case, name, f"has the contribution of micro-batch {m} alone")[0] for m in range(2)]
        assert np.array_equal(sum(alone), wants(case)[name])
    gathered = of(case, "input[0].grad", "has only the rank's own tokens")
    assert np.array_equal(sum(gathered), wants(case)["input[0].grad"])
    split = CASES["row that splits"]
    assert np.array_equal(sum(of(split, "input[1].grad", "has only the rank's own")), wants(split)["input[1].grad"])


def test_the_sum_over_another_group_is_that_of_its_ranks() -> None:
    case = CASES["explicit group"]  # along dp; replicas along tp
    parts = of(case, "input[0].grad", "equals the rank's own part before the sum over dp")
    sums = of(case, "input[0].grad", "is summed over tp instead of dp in backward")
    for rank, replica in enumerate(case.mesh.coordinate(r, "tp") for r in range(6)):
        group = case.mesh.group_of(rank, "tp")
        total = sum(parts[q][case.mesh.coordinate(q, "tp")] for q in group)
        assert np.array_equal(sums[rank][replica], total)


def test_there_are_no_suspects_for_other_tensors() -> None:
    case = CASES["row"]
    for name in ("weight.initial", "bias.initial", "output[0].grad", "unknown"):
        assert suspects(case, given(case), name) == []


def test_a_layer_on_one_rank_has_no_mistakes_of_groups() -> None:
    case = LinearCase(Mesh.of(tp=1), "row", 4, 3, bias=True)
    for name in results(case):
        assert not any("tp" in suspect.cause for suspect in suspects(case, given(case), name))
