"""Candidates that deal with other axes than tp, as a trainer of replicas does."""

from __future__ import annotations

import pytest
from drawing import sample
from trials import candidate

from harness import verify
from harness.properties import PROPERTIES
from reference.mesh import AXES
from strategies.scope import Scope

ANY = [subject for subject, one in PROPERTIES.items() if one.axis is None]


@pytest.mark.parametrize("subject", [subject for subject in ANY if subject != "schedule"])
@pytest.mark.parametrize("axis", AXES)
def test_no_other_axis_is_drawn(subject: str, axis: str) -> None:
    one = PROPERTIES[subject]
    features = frozenset(one.features)
    scope = Scope(max_world=4, dtypes=("fp32", "bf16"), axes=(axis,), parts=frozenset(one.methods), features=features)
    drawn = sample(one.cases(scope), 20)
    assert all(set(case.mesh.names) <= {axis} for case in drawn)


@pytest.mark.parametrize("name", ["AlongDp", "AlongPp", "AlongCp"])
def test_they_hold(name: str) -> None:
    done = verify(candidate(f"other_axes.py:{name}"), examples=2, max_world=2, seed=1, save=None)
    rows = {row.subject: row.result for row in done.rows}
    assert rows == dict.fromkeys(ANY, "held") | dict.fromkeys(set(PROPERTIES) - set(ANY), "not offered")
