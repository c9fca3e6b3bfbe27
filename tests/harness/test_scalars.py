"""Tensors without dimensions, such as a norm or a loss: judged and explained as others are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from harness.oracle.diagnose import diagnose
from harness.oracle.patterns.evidence import Evidence
from reference.layout import Whole
from reference.mesh import Mesh

GOT = (0.0, 2.0, 3.0, float("nan"), float("inf"))
WANT = (1.0, 0.0, float("inf"))


@pytest.mark.parametrize("tolerance", [None, np.array(0.1)])
@pytest.mark.parametrize(("got", "want"), list(itertools.product(GOT, WANT)))
def test_a_wrong_scalar_is_explained(got: float, want: float, tolerance: np.ndarray | None) -> None:
    held = np.array(got), np.array(want)
    found = diagnose(Evidence("loss", np.array(want), Whole(), Mesh.of(tp=2), held, tolerance))
    assert (found is None) == (got == want)
    if found is not None:
        assert found.damage.lines()
