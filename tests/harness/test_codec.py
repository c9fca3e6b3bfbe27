"""Cases to JSON and back."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, Literal

import pytest
from drawing import FULL
from hypothesis import assume, given
from hypothesis import strategies as st

import strategies.linear
import strategies.mesh
from reference.codec import MalformedCase, decode, encode
from reference.linear import LinearCase, LinearRecipes
from reference.mesh import Mesh, MeshCase
from reference.recipe import EXACT_KINDS, INJECTIONS, Recipe

any_recipe = st.builds(
    Recipe,
    st.sampled_from(EXACT_KINDS),
    st.integers(0, 2**64),
    st.sampled_from([None, *INJECTIONS]),
    st.integers(0, 10**6),
)
linear_cases = st.builds(
    lambda case, recipes: dataclasses.replace(case, recipes=recipes),
    strategies.linear.cases(FULL),
    st.builds(LinearRecipes, *[any_recipe] * 4),
)
cases = linear_cases | strategies.mesh.cases(FULL)
#: JSON values, each of another type.
FOREIGN: list[Any] = [None, True, 7, 2.5, math.nan, "seven", [1], {"seven": 7}]

PLAIN = {"mesh": "tp=2", "kind": "row", "in_features": 2, "out_features": 3}


@given(cases)
def test_what_is_written_is_read_again(case: Any) -> None:
    text = json.dumps(encode(case), allow_nan=False)
    again = decode(type(case), json.loads(text))
    assert again == case
    assert json.dumps(encode(again)) == text


def test_fields_at_their_default_are_left_out() -> None:
    assert encode(MeshCase(Mesh.of(dp=3, tp=2, order="dp-tp"))) == {"mesh": "dp=3,tp=2"}
    case = LinearCase(Mesh.of(tp=2), "row", 2, 3)
    assert encode(case) == PLAIN
    recipes = LinearRecipes(bias=Recipe("zeros"), input=Recipe(seed=4, inject="nan"))
    assert encode(dataclasses.replace(case, bias=True, leading=((1, 2), (3,)), recipes=recipes)) == {
        **PLAIN,
        "bias": True,
        "leading": [[1, 2], [3]],
        "recipes": {"bias": {"kind": "zeros"}, "input": {"seed": 4, "inject": "nan"}},
    }


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside JSON data, with the outermost."""
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(place for key, value in inside for place in places(value, (*path, key)))]


def replaced(data: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copy = dict(data) if isinstance(data, dict) else list(data)
    copy[path[0]] = replaced(copy[path[0]], path[1:], value)
    return copy


def at(data: Any, path: tuple[Any, ...]) -> Any:
    return data if not path else at(data[path[0]], path[1:])


@given(cases, st.data())
def test_a_value_of_another_type_is_refused_with_its_place(case: Any, data: st.DataObject) -> None:
    encoded = encode(case)
    path = data.draw(st.sampled_from(places(encoded)), label="path")
    foreign = data.draw(st.sampled_from(FOREIGN), label="foreign")
    assume(type(foreign) is not type(at(encoded, path)))
    assume(not (foreign is None and path[-1:] == ("inject",)))
    where = type(case).__name__ + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path)
    with pytest.raises(MalformedCase) as caught:
        decode(type(case), replaced(encoded, path, foreign))
    message = str(caught.value)
    assert message.startswith(f"{where}: expected ")
    assert message.endswith(f"found {foreign!r}")


@given(cases, st.data())
def test_a_field_too_many_or_too_few_is_refused(case: Any, data: st.DataObject) -> None:
    encoded = encode(case)
    with pytest.raises(MalformedCase, match=r"unknown field 'extra'; the fields are mesh, "):
        decode(type(case), {**encoded, "extra": 1})
    required = ["mesh", "kind", "in_features", "out_features"] if isinstance(case, LinearCase) else ["mesh"]
    name = data.draw(st.sampled_from(required))
    del encoded[name]
    with pytest.raises(MalformedCase, match=rf"missing field '{name}'; the fields are mesh, "):
        decode(type(case), encoded)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "diagonal"}, "LinearCase.kind: expected one of 'column', 'row', found 'diagonal'"),
        ({"mesh": "xp=2"}, "LinearCase.mesh: unknown mesh axis 'xp': expected one of tp, cp, ep, dp, pp"),
        ({"mesh": "tp"}, "LinearCase.mesh: cannot read 'tp' as an axis: write AXIS=SIZE"),
        ({"mesh": "tp=²"}, "LinearCase.mesh: cannot read 'tp=²' as an axis"),
        ({"mesh": "tp=0"}, "LinearCase.mesh: mesh axis 'tp' has size 0: expected a whole number"),
        ({"mesh": "dp=2"}, "LinearCase: the layer's axis 'tp' is not in the mesh dp=2"),
        ({"dtype": "fp8"}, "LinearCase: unknown dtype 'fp8': expected one of fp32, "),
        ({"in_features": 0}, "LinearCase: in_features 0 and out_features 3 must be at least 1"),
        ({"in_features": 2.0}, "LinearCase.in_features: expected int, found 2.0"),
        ({"in_features": math.nan}, "LinearCase.in_features: expected int, found nan"),
        ({"in_features": True}, "LinearCase.in_features: expected int, found True"),
        ({"bias": 1}, "LinearCase.bias: expected bool, found 1"),
        ({"skip_bias_add": True}, "LinearCase: skip_bias_add goes only with bias"),
        ({"leading": [[1], []]}, "LinearCase: leading ((1,), ()): expected one or more micro-batches"),
        ({"leading": [[1], [2, "3"]]}, "LinearCase.leading[1][1]: expected int, found '3'"),
        ({"recipes": {"weight": {"kind": "odd"}}}, "LinearCase.recipes.weight: unknown recipe kind 'odd'"),
        ({"recipes": {"weight": {"seed": -1}}}, "LinearCase.recipes.weight: seed -1 and position 0 must not be negat"),
        ({"recipes": {"wait": {}}}, "LinearCase.recipes: unknown field 'wait'; the fields are input, weight, bias, "),
        ({1: 2, "extra": 3}, "LinearCase: unknown field 'extra', unknown field 1; the fields are mesh, "),
    ],
)
def test_what_is_no_case_is_refused(changes: dict[Any, Any], message: str) -> None:
    with pytest.raises(MalformedCase) as caught:
        decode(LinearCase, {**PLAIN, **changes})
    assert message in str(caught.value)


@dataclasses.dataclass(frozen=True)
class Other:
    """Types that later subjects use."""

    pair: tuple[int, str]
    ratio: float = 1.0
    level: int | None = None
    step: Literal[1, 2] = 1


def test_other_types_of_fields() -> None:
    assert decode(Other, {"pair": [1, "a"], "ratio": 2, "level": 3}) == Other((1, "a"), 2.0, 3)
    assert isinstance(decode(Other, {"pair": [1, "a"], "ratio": 2}).ratio, float)
    for changes, message in (
        ({"pair": [1]}, "Other.pair: expected 2 items, found 1"),
        ({"pair": [1, "a", "b"]}, "Other.pair: expected 2 items, found 3"),
        ({"pair": [1, 2]}, "Other.pair[1]: expected str, found 2"),
        ({"ratio": True}, "Other.ratio: expected float, found True"),
        ({"ratio": "1"}, "Other.ratio: expected float, found '1'"),
        ({"level": "a"}, "Other.level: expected int, found 'a'"),
        ({"step": True}, "Other.step: expected one of 1, 2, found True"),
        ({"step": 3}, "Other.step: expected one of 1, 2, found 3"),
    ):
        with pytest.raises(MalformedCase) as caught:
            decode(Other, {"pair": [1, "a"], **changes})
        assert str(caught.value) == message
