"""What the known mistakes of a transformer layer give: parts of a sum add up to it, and what is planted is named."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from harness.observation import LocalTensor, Observation
from harness.oracle.expectation import expect
from harness.oracle.statistics import Expected
from harness.properties.base import Description
from harness.properties.modules import one_thread
from harness.properties.transformer import judge, layouts
from harness.properties.transformer_pieces import Layer
from harness.properties.transformer_suspects import suspects
from harness.verdict import Verdict
from reference.layout import Layout, Split, Whole, window, with_each
from reference.mesh import Mesh
from reference.transformer import TransformerCase, expected, shapes, tensors

PLAIN = TransformerCase(
    Mesh.of(tp=2, dp=2), hidden=8, heads=4, kv_heads=4, ffn=6, leading=((4, 2), (2, 1)), qk_norm=True, bias=True
)
SHARED = dataclasses.replace(PLAIN, mesh=Mesh.of(tp=4), kv_heads=2, ffn=8, leading=((4, 1),))
CUT = dataclasses.replace(PLAIN, sequence_parallel=True)


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with one_thread():
        yield


def layer_of(case: TransformerCase) -> Layer:
    return Layer(case, tensors(case))


@pytest.mark.parametrize("name", ["norm1_weight", "norm2_bias", "o_bias", "down_bias"])
def test_what_the_tokens_of_each_rank_give_adds_up(name: str) -> None:
    layer = layer_of(CUT)
    parts = layer.of_own_tokens(f"{name}.grad")
    assert len(parts) == 2
    assert not np.allclose(parts[0], parts[1])
    np.testing.assert_allclose(sum(parts), layer.of(f"{name}.grad", layer.right), atol=1e-12)


@pytest.mark.parametrize("name", ["q_norm_weight", "k_norm_weight", "k_weight", "v_bias", "q_weight"])
@pytest.mark.parametrize("case", [PLAIN, SHARED], ids=["own", "shared"])
def test_what_the_heads_of_each_rank_give_adds_up(case: TransformerCase, name: str) -> None:
    layer = layer_of(case)
    parts = layer.of_own_heads(f"{name}.grad")
    np.testing.assert_allclose(sum(parts), layer.of(f"{name}.grad", layer.right), atol=1e-12)


@pytest.mark.parametrize(
    ("where", "name"),
    [
        (("inner",), "norm2_weight.grad"),
        (("queries", "keys", "values"), "norm1_weight.grad"),
        (("inner",), "o_bias.grad"),
    ],
)
def test_what_each_rank_lets_through_adds_up(where: tuple[str, ...], name: str) -> None:
    """Beside what goes past the half of the layer, along the residual, which each has."""
    layer = layer_of(PLAIN)

    def blocked(place: str, x: torch.Tensor) -> torch.Tensor:
        return x.detach() + 0 * x if place in where else x

    past = layer.of(name, layer.gradients(blocked))
    parts = [layer.of(name, layer.gradients(way)) - past for way in layer.ways(where)]
    assert all(np.abs(part).max() > 1e-3 for part in parts)
    np.testing.assert_allclose(sum(parts) + past, layer.of(name, layer.right), atol=1e-12)


def test_on_one_rank_there_is_nothing_to_forget_but_micro_batches() -> None:
    case = dataclasses.replace(PLAIN, mesh=Mesh.of(tp=1, dp=2))
    for name in [f"{name}.grad" for name in shapes(case)]:
        causes = [suspect.cause for suspect in suspects(case, tensors(case), name)]
        assert [cause.partition(":")[0] for cause in causes] == [
            f"has the contribution of micro-batch {m} alone" for m in range(2)
        ]
    assert suspects(case, tensors(case), "output[0]") == []
    assert suspects(case, tensors(case), "input[1].grad") == []


def cut(case: TransformerCase, name: str) -> Layout:
    base = name.removesuffix(".grad").partition("[")[0]
    if base in ("input", "output"):
        return layouts(case)[base]
    part, _, kind = base.rpartition("_")
    if part in ("q", "k", "v", "gate", "up"):
        placement: Layout = Split(0, case.axis, copies=case.kv_copies if part in "kv" else 1)
    else:
        placement = Split(1, case.axis) if part in ("o", "down") and kind == "weight" else Whole()
    return with_each(placement, case.replica_axes)


@cache
def expectations(case: TransformerCase) -> dict[str, Expected | None]:
    given = tensors(case)
    return expect(lambda: expected(case, given), case.format, given=given)


def judged(case: TransformerCase, name: str, wrong: Any) -> Verdict:
    """The verdict on ranks whose results are right, but for one that is what a suspect says."""
    want, ranks = expectations(case), []
    for rank in range(case.mesh.size):
        held: dict[str, LocalTensor | None] = {}
        cuts = {}
        for result, value in want.items():
            assert isinstance(value, Expected)
            cuts[result] = cut(case, result)
            whole: NDArray[np.float64] = value.want
            if result == name:
                whole = wrong[rank] if isinstance(wrong, tuple) else wrong
            part = window(whole.shape, cuts[result], case.mesh, rank).take(whole)
            rounded = torch.from_numpy(np.array(part)).to(case.format.torch_dtype)
            held[result] = LocalTensor(rounded.to(torch.float64).numpy(), "float32")
        ranks.append(Observation(held, cuts))
    return judge(case, Description("some", "some"), dict(want), [ranks])


#: One of each kind.
PARAMETERS = ("down_bias", "norm2_weight", "q_norm_weight", "k_weight", "norm1_bias")
RESULTS = ["output[0]", "input[0].grad", *(f"{name}.grad" for name in PARAMETERS)]


@pytest.mark.parametrize("case", [PLAIN, CUT, SHARED], ids=["plain", "sequence", "shared"])
def test_every_suspect_is_named_where_it_is_what_the_ranks_hold(case: TransformerCase) -> None:
    given, named = tensors(case), set()
    for name in RESULTS:
        for suspect in suspects(case, given, name):
            verdict = judged(case, name, suspect.values)
            assert not verdict.holds, (name, suspect.cause)
            assert suspect.cause in str(verdict.findings[0].cause), (name, suspect.cause, verdict.findings[0])
            named.add(suspect.cause)
    assert len(named) > 10, named


def test_right_ranks_hold() -> None:
    for case in (PLAIN, CUT, SHARED):
        assert judged(case, "", None).holds


def test_causes_of_one_result_differ() -> None:
    for case, name in itertools.product((PLAIN, CUT, SHARED), RESULTS):
        causes = [suspect.cause for suspect in suspects(case, tensors(case), name)]
        assert len(causes) == len(set(causes))
