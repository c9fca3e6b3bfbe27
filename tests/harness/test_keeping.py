"""What keeps a buffer for the next micro-batch, or a total in too low a precision, is found by what is drawn."""

from __future__ import annotations

import pytest
from trials import candidate

from harness import verify


@pytest.mark.parametrize(
    ("name", "subject"), [("OneBufferForEachShape", "collectives"), ("MainGradientInTheDtype", "embedding")]
)
def test_it_is_found(name: str, subject: str) -> None:
    spec = candidate(f"keeping.py:{name}")
    (row,) = verify(spec, subjects=[subject], examples=200, max_world=4, seed=1, save=None).rows
    assert row.result == "fault", f"{name} was not found in {row.examples} examples"
    case = row.failures[0].reproducer.case
    assert case.mesh.size <= 2, case
    shapes = case.shapes if subject == "collectives" else case.leading
    assert len(shapes) > 1, "one micro-batch alone does not show it"
