"""What the rounding model leaves alone: what only moves or compares, equal values, and what is not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from roundings import RUNS, X, Y, disturbed

from reference.dtypes import FORMATS

EXACT: dict[str, Callable[..., Any]] = {
    "neg": lambda x, y: -x,
    "abs": lambda x, y: x.abs(),
    "relu": lambda x, y: F.relu(x),
    "maximum": torch.maximum,
    "clamp": lambda x, y: x.clamp(-0.5, 0.5),
    "sign": lambda x, y: x.sign(),
    "where": lambda x, y: torch.where(x > y, x, y),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, 7.0),
    "floor": lambda x, y: x.floor(),
    "round": lambda x, y: x.round(),
    "to": lambda x, y: x.to(torch.float32).to(torch.float64),
    "cat": lambda x, y: torch.cat([x, y]),
    "stack": lambda x, y: torch.stack([x, y]),
    "transpose": lambda x, y: x.T.contiguous(),
    "expand": lambda x, y: x[:, None].expand(-1, 3, -1).reshape(6, 15),
    "gather": lambda x, y: x.gather(0, torch.zeros(2, 5, dtype=torch.int64)),
    "index": lambda x, y: x[[0, 2, 0]],
    "write": lambda x, y: x.index_put([torch.tensor([0, 2])], y[:2]),
    "scatter": lambda x, y: x.scatter(0, torch.zeros(2, 5, dtype=torch.int64), y),
    "embedding": lambda x, y: F.embedding(torch.tensor([0, 2, 0]), x),
    "sort": lambda x, y: x.sort(-1).values,
    "topk": lambda x, y: x.topk(2).values,
    "amax": lambda x, y: x.amax(0),
    "max": lambda x, y: x.max(0).values,
    "argmax": lambda x, y: x.argmax(0),
    "compare": lambda x, y: x >= y,
    "tril": lambda x, y: x.tril(),
    "pad": lambda x, y: F.pad(x, (1, 1)),
    "roll": lambda x, y: x.roll(1, 0),
    "max_pool": lambda x, y: F.max_pool1d(x[None], 2),
    "double": lambda x, y: x * 2,
    "quarter": lambda x, y: x / 4,
    "whole part": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "infinity norm": lambda x, y: torch.linalg.vector_norm(x, math.inf),
    "zeros": lambda x, y: torch.zeros_like(x) + 0.0,
    "constant": lambda x, y: torch.full((3,), 1.5, dtype=torch.float64),
}


@pytest.mark.parametrize("name", EXACT)
def test_what_moves_chooses_or_compares_leaves_bits_alone(name: str) -> None:
    function = EXACT[name]
    want = function(X, Y)
    for fmt in FORMATS.values():
        for got in disturbed(function, X, Y, runs=4, fmt=fmt):
            assert got.dtype == want.dtype
            assert torch.equal(got, want)
    assert not torch.equal(disturbed(torch.mul, X, Y, runs=1)[0], X * Y), "the mode disturbs what is not exact"


def test_equal_values_are_rounded_equally_where_strides_show_it() -> None:
    got = disturbed(lambda x: x.expand(6, 5) / 3, X[:1, :1])
    assert (got == got[:, :1, :1]).all()
    got = disturbed(lambda x, y: torch.mm(x.expand(4, 5), y), X[:1], Y.T[:, :3])
    assert (got == got[:, :1]).all()
    assert (got[:, :, 0] != got[:, :, 1]).any()
    assert (disturbed(torch.mul, torch.ones(6, 5).double(), torch.ones(6, 5).double())[:, 0] != 1).any()


def test_masks_with_infinities_do_not_become_nan() -> None:
    scores = X.masked_fill(torch.ones(6, 5).triu(1).bool(), -math.inf)
    want = scores.softmax(-1)
    for name, function in (
        ("fused", lambda x: x.softmax(-1)),
        ("by hand", lambda x: (x - x.amax(-1, True)).exp() / (x - x.amax(-1, True)).exp().sum(-1, True)),
        ("scaled", lambda x: (x / 3 + 1).mul(3.0)),
        ("logs", lambda x: x.log_softmax(-1)),
    ):
        plain, runs = function(scores), disturbed(function, scores)
        assert torch.equal(runs.isneginf(), plain.isneginf().expand_as(runs)), name
        assert torch.equal(runs.isnan(), plain.isnan().expand_as(runs)), name
        assert (runs != plain).any(), name
    assert torch.equal(disturbed(lambda x: x.softmax(-1), scores) == 0, (want == 0).expand(RUNS, 6, 5))


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_left_alone(bad: float) -> None:
    x = X.clone()
    x[0, 0] = bad
    for function in (lambda x: x + 1, lambda x: x @ Y.T, lambda x: x.sum(0), lambda x: x.mean(1), lambda x: x * 0.1):
        plain, runs = function(x), disturbed(function, x)
        finite = plain.isfinite()
        assert not finite.all()
        assert finite.any()
        assert torch.equal(runs[:, ~finite].nan_to_num(7.0), plain[~finite].nan_to_num(7.0).expand(RUNS, -1))
        assert (runs[:, finite] != plain[finite]).any(0).all()
