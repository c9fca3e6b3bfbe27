"""harness.properties.gpt_dropout: masks that come twice, also where each of them is small."""

from __future__ import annotations

import numpy as np
import pytest

from harness.drawn import DRAWN, Drawn
from harness.observation import Observation
from harness.properties.gpt_dropout import judge_with_masks
from harness.verdict import Finding, Verdict
from reference.gpt import GptCase
from reference.gpt_dropout import mask_shape, places
from reference.mesh import Mesh

#: At most 24 elements a mask: 24 bits each, which two masks may share by chance.
SMALL = GptCase(Mesh.of(tp=1), 5, 4, 1, 1, 2, sizes=(1, 1), length=3, counts=(3, 2), depths=(1,), dropout=0.5)
Masks = dict[tuple[int, str], Drawn]


def step_of(case: GptCase, seed: int) -> Masks:
    random = np.random.default_rng(seed)
    return {
        (m, place): Drawn(random.random(mask_shape(case, place, m)[1:]) < 0.5, 0.5)
        for m in range(case.micro_batches)
        for place in places(case, 0)
    }


def found(case: GptCase, *steps: Masks) -> tuple[Finding, ...]:
    seen = [Observation(facts={DRAWN: dict(enumerate(steps))})]
    return judge_with_masks(case, seen, lambda kept, careful: Verdict()).findings


@pytest.mark.parametrize("seed", range(20))
def test_masks_that_differ_are_right(seed: int) -> None:
    assert not found(SMALL, step_of(SMALL, 2 * seed), step_of(SMALL, 2 * seed + 1))


def test_what_is_all_of_a_step_and_all_of_a_place_comes_once() -> None:
    case = GptCase(Mesh.of(tp=1), 5, 32, 1, 1, 2, sizes=(1,), length=3, counts=(3,), depths=(0,), dropout=0.5)
    assert not found(case, step_of(case, 0))


def test_a_step_with_the_masks_of_another() -> None:
    (one,) = found(SMALL, step_of(SMALL, 0), step_of(SMALL, 1), step_of(SMALL, 0))
    assert "the dropout masks of step 0 on rank 0, and of step 2 on rank 0, are the same" in one.message


def test_a_micro_batch_with_the_masks_of_another() -> None:
    case = GptCase(Mesh.of(tp=1), 5, 4, 1, 1, 2, sizes=(1, 1), length=4, counts=(3, 2), depths=(1,), dropout=0.5)
    step = step_of(case, 0)
    (one,) = found(case, {(m, place): step[0, place] for m, place in step})
    assert "micro-batch 0 of step 0 on rank 0, and of micro-batch 1 of step 0 on rank 0, are the same" in one.message


def test_too_few_elements_say_nothing() -> None:
    case = GptCase(Mesh.of(tp=1), 5, 4, 1, 1, 2, sizes=(1,), length=3, counts=(3,), depths=(0,), dropout=0.5)
    assert not found(case, step_of(case, 0), step_of(case, 0)), "12 bits are no proof"
