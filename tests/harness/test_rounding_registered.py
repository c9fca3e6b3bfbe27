"""Operations that the rounding model does not know, and those that a user registers."""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from roundings import FP32, X, Y, assert_scale, disturbed, largest

from harness.errors import WrongUse
from harness.oracle import operations
from harness.oracle.operations import Kind, UnknownOperation, register
from harness.oracle.rounding import Rounding, spread
from reference.dtypes import FORMATS


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    """A namespace of its own, taken back afterwards with everything that was said about it."""
    made = torch.library.Library(f"rounding_{uuid.uuid4().hex}", "DEF")
    before = dict(operations._registered)
    yield made
    made._destroy()
    operations._registered.clear()
    operations._registered.update(before)
    operations._rules.clear()


def _define(library: torch.library.Library, schema: str, function: Callable[..., Any]) -> Any:
    name = library.define(schema)
    library.impl(name, function, "CompositeExplicitAutograd")
    return getattr(getattr(torch.ops, library.ns), name)


def test_unknown_operations_are_reported_by_name(library: torch.library.Library) -> None:
    gate = _define(library, "gate(Tensor x) -> Tensor", lambda x: x * 1.5)
    fill = _define(library, "fill(Tensor(a!) x) -> ()", lambda x: (x.fill_(0.1), None)[1])
    count = _define(library, "count(Tensor x) -> Tensor", lambda x: (x > 0).sum())
    note = _define(library, "note(Tensor x) -> int", lambda x: 3)
    for operation, call in ((gate, lambda: gate(X)), (fill, lambda: fill(X.clone()))):
        for run in (lambda call=call: disturbed(call, runs=1), lambda call=call: spread(lambda: {"x": call()}, FP32)):
            with pytest.raises(UnknownOperation) as caught:
                run()
            assert caught.value.name == f"{library.ns}::{operation._qualified_op_name.partition('::')[2]}"
            assert f'register("{caught.value.name}", Kind.ELEMENTWISE)' in str(caught.value)
    with Rounding(FP32, 0):
        assert count(X) == (X > 0).sum(), "integers do not round"
        assert note(X) == 3
    with pytest.raises(UnknownOperation, match="aten::linalg_qr"):
        disturbed(torch.linalg.qr, X, runs=1)
    with pytest.raises(UnknownOperation, match="no complex numbers"):
        disturbed(lambda x: x.to(torch.complex128) * 3, X, runs=1)


def test_registered_operations_round_as_they_are_said_to(library: torch.library.Library) -> None:
    gate = _define(library, "gate(Tensor x) -> Tensor", lambda x: x * 1.5)
    dots = _define(library, "dots(Tensor x, Tensor y) -> Tensor", lambda x, y: (x * y).sum(-1))
    name = f"{library.ns}::gate"
    register(name, Kind.ELEMENTWISE, roundings=3)
    register(dots, Kind.CONTRACTION)
    assert_scale(largest(gate, X), 3 * (X * 1.5).abs())
    assert_scale(largest(dots, X, Y, fmt=FORMATS["fp16"]), (X * Y).abs().sum(-1))
    register(gate.default, Kind.MOVEMENT)
    assert largest(gate, X).max() == 0
    register(name, decomposition=lambda x: x * 0.75 + x * 0.75)
    assert (largest(gate, X) > (X * 1.5).abs()).any()
    s = spread(lambda: {"y": gate(X)}, FP32)["y"]
    assert s is not None
    assert (s.deviation > 0).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "expected either a kind or a decomposition"),
        ({"kind": Kind.MOVEMENT, "decomposition": abs}, "expected either a kind or a decomposition"),
        ({"kind": Kind.ELEMENTWISE, "roundings": -1}, "roundings -1 must not be negative"),
        ({"kind": Kind.ELEMENTWISE, "roundings": math.nan}, "roundings nan must not be negative"),
    ],
)
def test_contradictory_registrations_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongUse, match="mylib::gate") as caught:
        register("mylib::gate", **given)
    assert message in str(caught.value)
    assert "mylib::gate" not in operations._registered
