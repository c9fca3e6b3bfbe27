"""The reference of clipping against torch on one process, its exactness, what is drawn, and what is no case."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any, get_args

import pytest
import torch
from drawing import sample

import strategies.clip
from reference.clip import (
    ClipCase,
    ClipParameter,
    ClipRecipes,
    Invalid,
    Kind,
    has_empty_piece,
    held,
    local,
    measured,
    names,
    tensors,
)
from reference.clip_expected import expected
from reference.codec import decode, encode
from reference.mesh import Mesh
from reference.recipe import Recipe
from strategies.clip import FEATURES, simpler, within
from strategies.scope import Scope

FULL = Scope(max_world=8, features=frozenset(FEATURES))
DRAWN = strategies.clip.cases(FULL)
THREE = Mesh((("tp", 2), ("pp", 2), ("dp", 2)))


def test_norms_and_gradients_are_those_of_torch() -> None:
    """Both are in float64; torch adds 1e-6 to every norm, so that only norms are compared where the case does not."""
    compared = 0
    for case in sample(DRAWN, 500)[:100]:
        norm, limit = measured(case)
        if not math.isfinite(norm):
            continue
        given, want = tensors(case), expected(case, tensors(case))
        weights = [torch.nn.Parameter(torch.zeros(one.size, dtype=torch.float64)) for one in case.parameters]
        for i, weight in enumerate(weights):
            weight.grad = given[f"gradient{i}"] / case.loss_scale if case.has_gradient(i) else None
        found = torch.nn.utils.clip_grad_norm_(weights, limit, case.p)
        torch.testing.assert_close(want["norm"], found.view(1), rtol=1e-12, atol=0.0)
        assert norm == want["norm"].item()  # type: ignore[union-attr]
        if not case.eps:
            continue
        compared += 1
        for i, weight in enumerate(weights):
            if weight.grad is not None:
                for name in names(case, i):
                    torch.testing.assert_close(want[name], weight.grad, rtol=1e-12, atol=0.0)
    assert compared > 20


def test_every_element_is_on_ranks_and_counts_once() -> None:
    for case in sample(DRAWN, 500)[:100]:
        given = tensors(case)
        for i, one in enumerate(case.parameters):
            for name in names(case, i):
                seen = [local(case, given, i, rank) for rank in range(case.mesh.size) if held(case, i, rank) == name]
                copies = len(seen) * sum(x.numel() for x in seen) / max(1, len(seen)) / one.size
                cut = case.mesh.axis_size(("tp",) * one.split + ("dp",) * one.sharded)
                assert copies == len(seen) / cut


@pytest.mark.parametrize(
    ("changes", "norm", "coefficient"),
    [
        ({}, 5.0, 0.5),
        ({"norm_type": "1"}, 7.0, 0.5),
        ({"norm_type": "inf"}, 4.0, 0.5),
        ({"norm_type": "3"}, 91 ** (1 / 3), 0.5),
        ({"ratio": 1.0}, 5.0, 1.0),
        ({"ratio": 2.0}, 5.0, 1.0),
        ({"scale": 3}, 5 / 8, 0.5),
        ({"magnitude": 100}, 5 * 2.0**100, 0.5),
        ({"eps": 1e-6}, 5.0, 2.5 / (5 + 1e-6)),
    ],
)
def test_a_norm_by_hand(changes: dict[str, Any], norm: float, coefficient: float) -> None:
    case = dataclasses.replace(ClipCase(Mesh(()), (ClipParameter(), ClipParameter())), **changes)
    given = {"gradient0": torch.tensor([3.0]).double(), "gradient1": torch.tensor([-4.0]).double()}
    given = {name: x * 2.0**case.magnitude for name, x in given.items()}
    from reference import clip, clip_expected

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clip, "tensors", lambda case: given)
        patch.setattr(clip_expected, "measured", clip.measured.__wrapped__)
        found = expected(case, given)
    assert found["norm"].item() == pytest.approx(norm, rel=1e-15)  # type: ignore[union-attr]
    assert found["coefficient"].item() == pytest.approx(coefficient, rel=1e-15)  # type: ignore[union-attr]
    clipped = given["gradient1"] / case.loss_scale * coefficient
    torch.testing.assert_close(found["gradient1"], clipped, rtol=1e-15, atol=0.0)


def test_who_holds_what() -> None:
    parameters = (
        ClipParameter(4, split=True, sharded=True, stage=1),
        ClipParameter(2, tied=True),
        ClipParameter(3, "some", split=True, stage=3),
        ClipParameter(1, "none"),
    )
    case = ClipCase(THREE, parameters)
    # tp varies fastest, then pp, then dp: ranks 2, 3, 6 and 7 are of stage 1
    assert [held(case, 0, rank) for rank in range(4)] == [None, None, "gradient0", "gradient0"]
    assert [held(case, 1, rank) for rank in range(4)] == ["gradient1", "gradient1", "copy1", "copy1"]
    given = tensors(case)
    assert [local(case, given, 0, rank).tolist() for rank in (2, 6, 3, 7)] == [[x] for x in given["gradient0"].tolist()]
    assert [case.is_without(2, rank) for rank in range(8)] == [False, True] * 4
    assert not given["gradient2"][2:].any()
    assert "gradient3" not in given
    assert not has_empty_piece(case)
    assert has_empty_piece(dataclasses.replace(case, parameters=(ClipParameter(3, split=True, sharded=True),)))


def test_what_is_not_finite_is_where_some_rank_has_a_gradient() -> None:
    parameters = (ClipParameter(), ClipParameter(4, "some", split=True))
    for at in range(6):
        case = ClipCase(THREE, parameters, nonfinite="nan", bad=3, at=at, policy="skip")
        given = tensors(case)
        assert given["gradient1"].isnan().tolist() == [at % 2 == 0, at % 2 == 1, False, False]
        want = expected(case, given)
        assert want["norm"].isnan().all()  # type: ignore[union-attr]
        assert "coefficient" not in want
        torch.testing.assert_close(want["gradient1"], given["gradient1"], equal_nan=True)
        assert set(expected(dataclasses.replace(case, policy="propagate"), given)) == {"norm"}


def test_what_rounds_is_not_exact() -> None:
    plain = ClipCase(THREE, norm_type="1")
    assert plain.exact
    for changes in ({"norm_type": "2"}, {"ratio": 0.3}, {"eps": 1e-6}, {"recipes": ClipRecipes(Recipe("normal"))}):
        assert not dataclasses.replace(plain, **changes).exact, changes  # type: ignore[arg-type]
    assert dataclasses.replace(plain, ratio=2.0, eps=1e-6).exact
    assert dataclasses.replace(plain, recipes=ClipRecipes(Recipe("zeros")), ratio=0.3, eps=1e-6).exact


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mesh": Mesh.of(cp=2)}, "expected axes of tp, pp, dp"),
        ({"parameters": ()}, "expected one parameter or more"),
        ({"ratio": 0.0}, "a ratio above 0"),
        ({"norm_type": "0"}, "norm_type is '0'"),
        ({"policy": "ignore"}, "policy is 'ignore'"),
        ({"parameters": (ClipParameter(kind="frozen"),), "nonfinite": "inf"}, "without a gradient"),
        ({"nonfinite": "inf", "invalid": "limit_zero"}, "either nonfinite or invalid"),
        ({"invalid": "what"}, "invalid 'what'"),
    ],
)
def test_what_is_no_case_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(ClipCase(THREE), **changes)


@pytest.mark.parametrize("values", [{"size": 0}, {"stage": -1}, {"kind": "some"}, {"kind": "other"}])
def test_what_is_no_parameter_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected|alone"):
        ClipParameter(**values)


def test_what_is_drawn_is_within_its_scope_and_survives_its_json() -> None:
    for case in sample(DRAWN, 500)[:100]:
        assert within(case, FULL)
        assert decode(ClipCase, encode(case)) == case
    for missing in FEATURES:
        scope = dataclasses.replace(FULL, features=FULL.features - {missing})
        for case in sample(strategies.clip.cases(scope), 15):
            assert within(case, scope), (missing, case)
            for one in itertools.islice(simpler(case, scope), 5):
                assert within(one, scope)
                assert one != case
                assert one.mesh.size <= case.mesh.size


@pytest.mark.parametrize(
    "wanted",
    [
        lambda c: len(c.mesh.axes) == 3 and c.mesh.size == 8,
        lambda c: c.exact and c.mesh.size > 2 and c.ratio == 1.0,
        lambda c: c.dtype == "fp16" and c.magnitude == 8 and not c.exact,
        lambda c: c.dtype == "fp32" and c.magnitude == 100 and c.norm_type == "2",
        lambda c: c.magnitude == -100 and c.ratio == 0.5,
        lambda c: c.scale and c.ratio == 2.0 and c.norm_type == "inf",
        lambda c: c.nonfinite == "nan" and c.norm_type == "inf" and c.mesh.size > 1 and c.policy == "raise",
        lambda c: any(len(c.stages(i)) > 1 for i in range(len(c.parameters))) and c.mesh.size > 4,
        lambda c: has_empty_piece(c) and c.norm_type == "inf",
        lambda c: measured(c)[0] == 0 and c.mesh.size > 1,
        lambda c: len({one.sharded for one in c.parameters}) == 2 and c.mesh.axis_size("dp") > 1,
        *(lambda c, kind=kind: any(p.kind == kind for p in c.parameters) for kind in get_args(Kind)),
        *(lambda c, kind=kind: c.invalid == kind for kind in get_args(Invalid)),
    ],
)
def test_it_is_drawn(wanted: Any) -> None:
    assert any(map(wanted, sample(DRAWN, 500)))


def test_the_plainest_case_is_one_element_on_one_rank() -> None:
    plain = ClipCase(Mesh(()))
    assert list(simpler(plain, FULL)) == []
    assert plain in simpler(dataclasses.replace(plain, mesh=Mesh.of(tp=2)), FULL)
