"""What is seen of the dropout masks that a module draws, and how it is read."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from harness.drawn import Drawn, Draws, masks_of
from harness.local import WrongResult

X = torch.ones(6, 50)


def own_dropout(x: torch.Tensor, p: float) -> torch.Tensor:
    """Draws what is dropped."""
    return x.masked_fill(torch.empty_like(x, dtype=torch.bool).bernoulli_(p), 0) / (1 - p)


def by_probabilities(x: torch.Tensor, p: float) -> torch.Tensor:
    return x * torch.bernoulli(torch.full_like(x, 1 - p)) / (1 - p)


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize(
    ("drop", "ones_are_kept"),
    [
        (F.dropout, True),
        (lambda x, p: torch.nn.Dropout(p)(x), True),
        (lambda x, p: torch.native_dropout(x, p, True)[0], True),
        (by_probabilities, True),
        (own_dropout, False),
    ],
)
def test_every_way_to_drop_is_seen(drop: Any, ones_are_kept: bool, p: float) -> None:
    with Draws() as draws:
        made = drop(X, p)
    (one,) = draws.found
    kept = one.kept(p, ones_are_kept)
    assert (kept == (made != 0).numpy()).all()
    assert 0 < kept.sum() < kept.size


def test_a_fault_is_not_smoothed_over() -> None:
    """Who keeps what should be dropped is read as one who drops with probability 0.1, so that values tell."""
    with Draws() as draws:
        made = X * torch.empty_like(X).bernoulli_(0.1)
    assert (draws.found[0].kept(0.1, True) == (made == 0).numpy()).all()


def test_what_is_kept_is_a_copy_in_the_order_of_drawing() -> None:
    buffer = torch.empty(4)
    with Draws() as draws:
        for p in (0.0, 1.0):
            buffer.bernoulli_(p)
    assert [one.ones.all() for one in draws.found] == [False, True]
    assert [one.p for one in draws.found] == [0.0, 1.0]
    buffer.bernoulli_(0.5)
    assert len(draws.found) == 2


def drawn(*shapes: tuple[int, ...]) -> list[Drawn]:
    return [Drawn(np.ones(shape, dtype=bool), 0.5) for shape in shapes]


def test_masks_are_taken_in_the_order_that_is_declared() -> None:
    found = masks_of(1, drawn((4, 3), (12,)), {"o": (12,), "down": (2, 6)})
    assert {key: one.ones.shape for key, one in found.items()} == {(1, "o"): (12,), (1, "down"): (2, 6)}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(12,)], "forward of micro-batch 1 drew 1 dropout masks; expected 2: o, down"),
        ([(12,), (2, 6), (1,)], "forward of micro-batch 1 drew 3 dropout masks; expected 2: o, down"),
        ([(12,), (2, 5)], "the dropout mask of down in micro-batch 1 has shape (2, 5); expected (2, 6)"),
    ],
)
def test_other_masks_are_refused(shapes: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(WrongResult, match=re.escape(message)):
        masks_of(1, drawn(*shapes), {"o": (12,), "down": (2, 6)})
