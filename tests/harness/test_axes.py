"""Candidates that deal with other axes than tp, as a trainer of replicas does."""

from __future__ import annotations

import pytest
from drawing import sample
from trials import candidate

from harness import verify
from harness.properties import PROPERTIES
from reference.mesh import AXES
from strategies.scope import Scope

ON_PAPER = "schedule"


def offered_along(axis: str) -> list[str]:
    return [subject for subject, one in PROPERTIES.items() if not one.axes or axis in one.axes]


@pytest.mark.parametrize(
    ("axis", "subject"),
    [(axis, subject) for axis in AXES for subject in offered_along(axis) if subject != ON_PAPER],
)
def test_no_other_axis_is_drawn_and_this_one_has_several_ranks(axis: str, subject: str) -> None:
    one = PROPERTIES[subject]
    features = frozenset(one.features)
    scope = Scope(max_world=4, dtypes=("fp32", "bf16"), axes=(axis,), parts=frozenset(one.methods), features=features)
    drawn = sample(one.cases(scope), 20)
    assert all(set(case.mesh.names) <= {axis} for case in drawn)
    assert any(case.mesh.axis_size(axis) > 1 for case in drawn)


@pytest.mark.parametrize(("name", "axis"), [("AlongDp", "dp"), ("AlongPp", "pp"), ("AlongCp", "cp")])
def test_they_hold(name: str, axis: str) -> None:
    done = verify(candidate(f"other_axes.py:{name}"), examples=2, max_world=2, seed=1, save=None)
    rows = {row.subject: row.result for row in done.rows}
    offered = offered_along(axis)
    assert rows == {subject: "held" if subject in offered else "not offered" for subject in PROPERTIES}
