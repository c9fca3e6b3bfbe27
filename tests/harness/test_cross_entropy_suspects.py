"""The suspects of cross entropy: each is named when it is planted, and the right values are what the reference says."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from numpy.typing import NDArray
from test_reference_cross_entropy import cases

from harness.observation import LocalTensor, Observation
from harness.oracle.patterns.evidence import Suspect
from harness.properties.base import Description
from harness.properties.cross_entropy import CROSS_ENTROPY, layouts
from harness.properties.cross_entropy_pieces import Batch
from harness.properties.cross_entropy_suspects import suspects
from harness.verdict import Verdict
from reference.cross_entropy import CrossEntropyCase, CrossEntropyRecipes, expected, tensors
from reference.layout import window
from reference.mesh import Mesh
from reference.recipe import Recipe

Values = NDArray[np.float64]
DESCRIPTION = Description("planted", "planted")
PLAIN = CrossEntropyCase(
    Mesh.of(tp=3, dp=2), 11, ((4, 2), (5, 1)), recipes=CrossEntropyRecipes(Recipe("normal"), Recipe("normal", 1))
)

CASES = {
    "plain": PLAIN,
    "padded": dataclasses.replace(PLAIN, padding=2),
    "smoothed": dataclasses.replace(PLAIN, label_smoothing=0.1),
    "smoothed as by Megatron-Core": dataclasses.replace(PLAIN, label_smoothing=0.3, smoothing="megatron", padding=1),
    "mean": dataclasses.replace(PLAIN, reduction="mean", ignored="some", z_loss=0.1),
    "sum": dataclasses.replace(PLAIN, reduction="sum", ignored="some", label_smoothing=0.1),
    "bf16": dataclasses.replace(PLAIN, dtype="bf16", ignored="some"),
    "one rank": dataclasses.replace(PLAIN, mesh=Mesh.of(tp=1), padding=3, label_smoothing=0.2, ignored="some"),
}
PLANTED = [
    (label, name, suspect)
    for label, case in CASES.items()
    for name in ("loss[0]", "logits[1].grad")
    for suspect in suspects(case, tensors(case), name, "balanced")
]


def judged(case: CrossEntropyCase, planted: dict[str, Suspect]) -> Verdict:
    """Ranks that hold the right values but for those planted."""
    right = {name: value for name, value in expected(case, tensors(case)).items() if value is not None}
    observed = []
    for rank in range(case.mesh.size):
        held = {}
        for name, value in right.items():
            wrong = planted[name].values if name in planted else value.numpy()
            whole = wrong[rank] if isinstance(wrong, tuple) else wrong
            base = name.removesuffix(".grad").partition("[")[0]
            part = window(whole.shape, layouts(case)[base], case.mesh, rank).take(whole)
            dtype = case.loss_format.torch_dtype if base == "loss" else case.format.torch_dtype
            stored = torch.from_numpy(np.array(part)).to(dtype).double().numpy()
            held[name] = LocalTensor(stored, str(dtype).removeprefix("torch."))
        observed.append(Observation(held, due=()))
    return CROSS_ENTROPY.judge(case, DESCRIPTION, CROSS_ENTROPY.expected(case), [observed])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_right_values_hold(case: CrossEntropyCase) -> None:
    assert judged(case, {}).findings == ()


@pytest.mark.parametrize(
    ("label", "name", "suspect"), PLANTED, ids=[f"{label}-{name}-{s.cause[:60]}" for label, name, s in PLANTED]
)
def test_a_planted_mistake_is_named(label: str, name: str, suspect: Suspect) -> None:
    finding, *others = judged(CASES[label], {name: suspect}).findings
    assert others == []
    assert finding.tensor == name
    assert suspect.cause in f"{finding.cause}\n{finding.details}", finding


def test_the_known_mistakes_are_all_planted() -> None:
    said = {suspect.cause for _, _, suspect in PLANTED}
    assert len(said) == 21, sorted(said)


@given(cases)
def test_without_a_mistake_it_is_what_the_reference_says(case: CrossEntropyCase) -> None:
    made = tensors(case)
    want = expected(dataclasses.replace(case, logits_require_grad=True, backward="immediate"), made)
    scale = 1e-13 * max(1.0, float(made["logits[0]"].abs().max()))
    for m in range(len(case.leading)):
        batch = Batch(case, made, m, "balanced")
        with np.errstate(all="ignore"):  # as in a diagnosis
            results = {f"loss[{m}]": batch.loss(batch.right), f"logits[{m}].grad": batch.gradient()}
        for name, values in results.items():
            right = want[name]
            assert right is not None
            # A probability is rounded beside 1, however little of it is left.
            largest = max(1e-290, float(right.abs().max()), float(made[f"loss[{m}].grad"].abs().max()))
            np.testing.assert_allclose(values, right.numpy(), rtol=1e-9, atol=scale * largest, err_msg=name)


def test_no_token_at_all_has_a_suspect_of_nan() -> None:
    case = dataclasses.replace(PLAIN, reduction="mean", ignored="all")
    with np.errstate(invalid="ignore"):
        found = [s for s in suspects(case, tensors(case), "loss[0]", "balanced") if "0/0" in s.cause]
    assert [bool(np.isnan(s.values).all()) for s in found] == [True]
    assert math.isnan(np.asarray(found[0].values).flat[0])
