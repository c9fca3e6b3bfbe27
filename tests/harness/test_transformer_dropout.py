"""A layer with dropout is judged by the masks that it drew: right and planted wrong, without ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from test_reference_transformer import with_masks

from harness.drawn import DRAWN, Drawn
from harness.observation import LocalTensor, Observation
from harness.properties.modules import forms_of
from harness.properties.transformer import layouts
from harness.properties.transformer_dropout import judge_values, mask_results
from reference.layout import Layout, Whole, with_each
from reference.mesh import Mesh
from reference.transformer import TransformerCase, shapes
from reference.transformer_dropout import mask_name

CASE = TransformerCase(Mesh.of(tp=1), hidden=8, heads=2, kv_heads=2, ffn=4, leading=((3, 2), (2, 1)), dropout=0.5)
Facts = dict[tuple[int, str], Drawn]


def world(case: TransformerCase) -> tuple[dict[str, torch.Tensor], Facts]:
    """What torch's modules compute on one rank, and the masks that they drew."""
    made, masks = with_masks(case)
    facts = {
        (m, place): Drawn(masks[mask_name(place, m)][0].numpy(), 1 - case.dropout)
        for m in range(len(case.leading))
        for place in mask_results(case, m)
    }
    return {name: value for name, value in made.items() if value is not None}, facts


def messages(case: TransformerCase, ranks: list[tuple[Mapping[str, torch.Tensor], Facts]]) -> list[str]:
    whole: Layout = with_each(Whole(), case.replica_axes)
    observed = [
        Observation(
            {name: LocalTensor(value[0].numpy(), "float64") for name, value in made.items()},
            dict.fromkeys(made, whole),
            facts={DRAWN: facts},
        )
        for made, facts in ranks
    ]
    cuts = {**layouts(case), **dict.fromkeys(shapes(case), whole)}
    forms = forms_of(list(ranks[0][0]), cuts, case.format, [], observed[0])
    return [f"{found.kind}: {found.message}" for found in judge_values(case, forms, observed).findings]


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("mask", ["causal", "padding"])
def test_what_is_computed_with_the_masks_holds(p: float, mask: str) -> None:
    case = dataclasses.replace(CASE, dropout=p, mask=mask, dtype="fp64")
    assert messages(case, [world(case)]) == []


def test_half_may_be_what_is_dropped_too() -> None:
    case = dataclasses.replace(CASE, dtype="fp64")
    made, facts = world(case)
    assert messages(case, [(made, {key: Drawn(~one.ones, one.p) for key, one in facts.items()})]) == []


@pytest.mark.parametrize("place", ["probabilities", "o", "down"])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_one_other_element_of_a_mask_is_seen(place: str, p: float) -> None:
    case = dataclasses.replace(CASE, dropout=p, mask="none", dtype="fp64")
    made, facts = world(case)
    wrong = facts[0, place].ones.copy()
    wrong.flat[0] ^= True
    found = messages(case, [(made, {**facts, (0, place): Drawn(wrong, 1 - p)})])
    assert found
    assert found[0].startswith("mismatch: output[0] differs from one process on rank 0")
    assert all(message.endswith("with the masks that forward drew") for message in found)


def test_nothing_is_said_of_masks_that_nobody_shows() -> None:
    made, _ = world(CASE)
    assert messages(CASE, [({**made, "output[0]": made["output[0]"] + 1}, {})]) == []


def test_replicas_must_drop_the_same() -> None:
    case = dataclasses.replace(CASE, mesh=Mesh.of(tp=2), dtype="fp64")
    made, facts = world(case)
    halves = [{**facts, **{(m, "probabilities"): half(facts[m, "probabilities"], r) for m in (0, 1)}} for r in (0, 1)]
    assert messages(case, [(made, one) for one in halves]) == []
    drawn = facts[1, "down"].ones
    other = {**halves[1], (1, "down"): Drawn(np.roll(drawn, 1), 0.5)}
    assert not (np.roll(drawn, 1) == drawn).all()
    assert messages(case, [(made, halves[0]), (made, other)]) == [
        "disagree: the dropout mask of down in micro-batch 1 differs between rank 0 (tp=0) and rank 1 (tp=1): replicas "
        "drift apart"
    ]


def half(drawn: Drawn, rank: int) -> Drawn:
    """The rank's heads of [B, A, S, S]."""
    return Drawn(drawn.ones[:, rank : rank + 1], drawn.p)
