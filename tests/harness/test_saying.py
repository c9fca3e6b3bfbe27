"""Layouts that a candidate gives beside those of its parameters, argument by argument, and names that do not exist."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from trials import BAD, ON_PAPER, bench, judge, only_finding

from harness import Sharded, Whole
from harness.exercise import Names
from harness.local import WrongAdapter
from harness.wiring import require_known
from reference.mesh import Mesh, MeshCase

REPLICAS = dataclasses.replace(BAD, mesh=Mesh.of(dp=2, tp=2), leading=((2,), (3,)))


@pytest.mark.parametrize("name", ["Usual", "WithEach", "PartialInput", "SummedLater", "PartialOutput", "Gathered"])
def test_what_is_said_rightly_holds(name: str) -> None:
    with bench(f"saying.py:{name}") as made:
        for case in (BAD, REPLICAS):
            found = judge(made, case)
            assert found.holds, found.findings


@pytest.mark.parametrize("name", ["PartialInput", "SummedLater", "PartialOutput", "Gathered"])
def test_what_is_said_is_used(name: str) -> None:
    """The same layers are wrong when they say nothing."""
    with bench(f"saying.py:{name}Unsaid") as made:
        assert judge(made, BAD).kind == "mismatch"


def test_a_sum_over_the_axes_of_the_replicas_does_not_fit() -> None:
    with bench("saying.py:GradientOverReplicas") as made:
        (finding,) = judge(made, REPLICAS).findings
    assert finding.kind == "error"
    assert "of weight does not fit, correct it in Sharded(...): axis 'dp' is used twice" in finding.message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "MisspeltLayout",
            "Sharded(..., wieght=Split(0, 'tp')) is the layout of no parameter: expected weight, bias, or",
        ),
        ("MisspeltGradient", "Sharded(..., grads=...) names 'biass': expected some of weight, bias, input"),
        ("MisspeltInput", "Sharded(..., inputs=...) names 'x': expected some of input"),
        ("MisspeltOutput", "Sharded(..., outputs=...) names 'out': expected some of output, output_bias"),
        ("MisspeltParameter", "Sharded(..., parameters=...) names 'wt': expected some of weight, bias"),
    ],
)
def test_a_name_that_the_subject_does_not_have(name: str, message: str) -> None:
    finding = only_finding(f"saying.py:{name}")
    assert finding.kind == "error"
    assert message in finding.message


def test_a_name_where_the_subject_has_none() -> None:
    names = Names(parameters=(), inputs=("input",), outputs=("output",))
    with pytest.raises(WrongAdapter, match=r"weight=Whole\(\)\) is the layout of no parameter: the subject has none"):
        require_known(names, Sharded(lambda x: x, weight=Whole()))
    with pytest.raises(WrongAdapter, match=r"parameters=...\) names 'weight': the subject has none, leave it out"):
        require_known(names, Sharded(lambda x: x, parameters={"weight": torch.ones(1)}))


def test_groups_may_be_listed_in_any_order() -> None:
    case = MeshCase(Mesh.of(tp=2, dp=3))
    with bench("groups.py:AnotherOrder") as made:
        assert judge(made, case).holds
        assert judge(made, ON_PAPER).holds
    with bench("groups.py:AnotherOrderAndWrong") as made:
        assert judge(made, MeshCase(Mesh.of(tp=2, dp=2))).findings[0].message == (
            "a tp group holds ranks [0, 2]; expected [0, 1]"
        )
