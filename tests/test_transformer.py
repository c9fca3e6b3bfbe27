"""The transformer layers of the shipped candidates, on real ranks, against one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import cases as drawn
from harness import check, verify
from harness.bench import Bench
from harness.properties.transformer import TRANSFORMER
from reference.mesh import Mesh
from reference.transformer import TransformerCase


@pytest.mark.parametrize("candidate", ["builtin", "torch", "megatron-core"])
@given(data=st.data())
def test_transformer_layers_compute_what_one_process_computes(candidate: str, data: st.DataObject) -> None:
    check("transformer", candidate, data.draw(drawn("transformer", candidate)))


#: Words of the cause that the failing run names.
CAUSES = {
    "F04": "has the bias after attention and of the mlp 2 times",
    "F07": "covers only the rank's own tokens: the sum over tp after the last backward is missing",
    "F08": "is averaged over tp where a sum is due: 1/2 of what it should be",
    "F09": "covers only the rank's own heads: the sum over tp after the last backward is missing",
    "F10": "lacks the other ranks' part of the gradient into the key/value heads that several ranks hold",
    "F13": "every shard was initialised from the same seed",
    "F14": "lacks the other ranks' part of the gradient into the mlp: an all-reduce over tp is missing in backward",
    "F48": "recomputation draws other dropout masks than forward did",
    "F47": "the same on rank 0 (tp=0) and rank 1 (tp=1): as if the random stream of each rank were never entered",
}


@pytest.mark.parametrize("mutant", CAUSES)
def test_a_planted_fault_is_found(mutant: str) -> None:
    done = verify(f"builtin+{mutant}", subjects=["transformer"], examples=200, seed=1, max_world=4, save=None)
    (row,) = done.rows
    assert row.result == "fault", f"{mutant} was not found in {row.examples} examples"
    cases = [failure.reproducer.case for failure in row.failures]
    assert all(case.mesh.size <= 2 for case in cases), cases
    # Replicas that disagree within the tolerance need a low precision, and some values, to be seen alone.
    assert min(max(case.hidden, case.ffn) for case in cases) <= 8, cases
    found = [finding for failure in row.failures for finding in failure.verdict.findings]
    assert any(CAUSES[mutant] in f"{finding.message} {finding.cause} {finding.details}" for finding in found), found


ADAPTERS = Path(__file__).parent / "faulty_adapters.py"
PLAIN = TransformerCase(Mesh.of(tp=2), 8, 4, 2, 4, ((4, 1), (2, 2)), bias=True)


@pytest.mark.parametrize(
    ("library", "adapter", "options", "cause"),
    [
        ("megatron-core", "MegatronUnfinished", {"sequence_parallel": True}, "covers only the rank's own tokens"),
        ("megatron-core", "MegatronUnfinished", {"qk_norm": True, "hidden": 16}, "covers only the rank's own heads"),
        ("megatron-core", "MegatronKeysForValues", {}, "output[0] differs from one process"),
        ("megatron-core", "MegatronUpForGate", {"activation": "swiglu"}, "output[0] differs from one process"),
        (
            "megatron-core",
            "MegatronOneStream",
            {"dropout": 0.5},
            "mask of sharded regions is the same on rank",
        ),
        (
            "megatron-core",
            "MegatronForgetful",
            {"dropout": 0.5},
            "recomputation draws other dropout masks",
        ),
        ("builtin", "BuiltinUnmasked", {"dropout": 0.5}, "with the masks that forward drew"),
        ("builtin", "BuiltinUnmasked", {"dropout": 0.1, "mask": "padding"}, "with the masks that forward drew"),
        ("builtin", "BuiltinUnscaled", {"dropout": 0.5, "sequence_parallel": True}, "with the masks that forward drew"),
        ("torch", "TorchUnreduced", {"sequence_parallel": True}, "covers only the rank's own tokens"),
        ("torch", "TorchHeadNormsUnplanned", {"qk_norm": True, "hidden": 16}, "covers only the rank's own heads"),
    ],
)
def test_a_mistake_in_an_adapter_of_a_library_is_found(
    library: str, adapter: str, options: dict[str, Any], cause: str
) -> None:
    if library == "megatron-core":
        pytest.importorskip("megatron.core")
    case = replace(PLAIN, **options)
    with Bench(library) as right:
        assert right.check(TRANSFORMER, case).verdict.holds
    with Bench(f"{ADAPTERS}:{adapter}") as wrong:
        found = wrong.check(TRANSFORMER, case).verdict.findings
    assert {finding.kind for finding in found} <= {"mismatch", "disagree"}, found
    assert any(cause in f"{finding.message} {finding.cause} {finding.details}" for finding in found), found


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ("BuiltinUndropped", "drew 1 dropout masks; expected 3: probabilities, o, down"),
        ("BuiltinOneMask", "the dropout mask of o in micro-batch 1 has shape (2, 1, 8); expected (2, 2, 8)"),
    ],
)
def test_masks_of_another_number_or_size_are_refused(adapter: str, message: str) -> None:
    with Bench(f"{ADAPTERS}:{adapter}") as wrong:
        (found,) = wrong.check(TRANSFORMER, replace(PLAIN, dropout=0.5)).verdict.findings
    assert found.kind == "error"
    assert message in found.message


def test_heads_that_ranks_share_are_cut_as_megatron_cuts_them() -> None:
    """Four ranks, two key/value heads: q1 q2 | k1 v1 | q3 q4 | k2 v2."""
    pytest.importorskip("megatron.core")
    case = TransformerCase(Mesh.of(tp=4), 16, 4, 2, 4, ((2, 1),), bias=True, qk_norm=True)
    with Bench("megatron-core") as right:
        assert right.check(TRANSFORMER, case).verdict.holds
