"""What can be said of a layer with dropout without expected values: its masks, and that recomputing repeats them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from harness.candidate import Candidate
from harness.local import WrongResult, local_tensor
from harness.observation import LocalTensor
from harness.oracle.compare import different, held_values, must_be_absent, replicas_disagree, same_bits
from harness.properties.base import World
from harness.properties.tensors import Form
from harness.session import phase
from harness.verdict import Finding
from reference.mesh import Mesh
from reference.transformer import TransformerCase

#: The fact of an observation: this rank's masks by region.
MASKS = "dropout masks"
REGIONS = ("replicated", "sharded")

#: How often a right mask is refused.
FALSE_ALARMS = 1e-9

#: Two masks of so many elements with p = 0.1 are alike by chance in (0.1^2 + 0.9^2)^128 = 1e-11 of all pairs.
ENOUGH = 128


def read_masks(candidate: Candidate, case: TransformerCase) -> dict[str, LocalTensor]:
    """The masks of this rank; none where the candidate does not show them. Raises WrongResult where they are no masks
    of the known regions, or too small to be told apart."""
    if not candidate.offers("dropout_masks"):
        return {}
    with phase("dropout_masks"):
        masks = candidate.dropout_masks(case)
    if not isinstance(masks, Mapping) or not set(masks) <= set(REGIONS):
        raise WrongResult(f"dropout_masks returned {masks!r}; expected a tensor for each of {', '.join(REGIONS)}")
    read = {region: local_tensor(f"the {region} dropout mask", mask) for region, mask in masks.items()}
    for region, mask in read.items():
        if mask.values is None or mask.values.size < ENOUGH:
            raise WrongResult(f"the {region} dropout mask is too small to be judged: expected {ENOUGH} elements")
    return read


def judge_masks(case: TransformerCase, observed: World) -> Iterator[Finding]:
    """Masks of replicated regions are equal on all ranks along the layer's axis, those of sharded ones all different;
    each has its share of zeros, and the right scale elsewhere. The first that is wrong of each region."""
    for region in REGIONS:
        masks = {}
        for rank, seen in enumerate(observed):
            mask = seen.facts[MASKS].get(region)
            if mask is not None:
                masks[rank] = mask
        wrong = next(_wrong(case, region, masks), None)
        if wrong is not None:
            yield wrong


def _wrong(case: TransformerCase, region: str, masks: Mapping[int, LocalTensor]) -> Iterator[Finding]:
    mesh = case.mesh
    for group in mesh.groups(case.axis):
        members = [int(rank) for rank in group if int(rank) in masks]
        for i, rank in enumerate(members):
            for other in members[:i]:
                alike = same_bits(_values(masks[rank]), _values(masks[other]))
                pair = f"{mesh.describe(other)} and {mesh.describe(rank)}"
                name = f"the dropout mask of {region} regions"
                if region == "replicated" and not alike:
                    message = f"{name} differs between {pair}: replicas drift apart"
                    yield Finding("disagree", message, rank, mesh.describe(rank))
                elif region == "sharded" and alike:
                    message = f"{name} is the same on {pair}: as if the random stream of each rank were never entered"
                    yield Finding("mismatch", message, rank, mesh.describe(rank))
    for rank, mask in masks.items():
        problem = _problem(mask, case.dropout)
        if problem is not None:
            message = f"the dropout mask of {region} regions {problem} on {mesh.describe(rank)}"
            yield Finding("mismatch", message, rank, mesh.describe(rank))


def _problem(mask: LocalTensor, p: float) -> str | None:
    values = _values(mask)
    scale = 1 / (1 - p)
    kept = values[values != 0]
    off = float(np.abs(kept / scale - 1).max(initial=0.0))
    # Rounded once to the mask's format, and once more where the factor was rounded before.
    if not off <= 2 * _roundoff(mask.dtype):
        found = kept[np.argmax(np.nan_to_num(np.abs(kept / scale - 1), nan=np.inf))]
        return f"keeps elements times {found:.6g} where 1 / (1 - {p}) = {scale:.6g} is due"
    zeros = values.size - kept.size
    if chance_of(zeros, values.size, p) < FALSE_ALARMS:
        return f"drops {zeros} of {values.size} elements where p is {p}"
    return None


def _roundoff(dtype: str) -> float:
    return {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}.get(dtype, 0.0)


def chance_of(zeros: int, size: int, p: float) -> float:
    """The chance that a binomial number is as far from its mean as this one or farther, to either side (twice the
    smaller tail)."""
    k = np.arange(size + 1)
    log_choose = math.lgamma(size + 1) - np.array([math.lgamma(i + 1) + math.lgamma(size - i + 1) for i in k])
    chances = np.exp(log_choose + k * math.log(p) + (size - k) * math.log1p(-p))
    return float(min(1.0, 2 * min(chances[: zeros + 1].sum(), chances[zeros:].sum())))


def _values(mask: LocalTensor) -> NDArray[np.float64]:
    assert mask.values is not None
    return mask.values


def judge_alone(
    shapes: Mapping[str, tuple[int, ...] | None], forms: Mapping[str, Form], mesh: Mesh, observed: World
) -> Iterator[Finding]:
    """What a result must be whatever its values: there, of its form, finite, and the same on all replicas. shapes: the
    global ones; None where there must be no such tensor."""
    for name, shape in shapes.items():
        if shape is None:
            finding = must_be_absent(name, mesh, observed)
        else:
            held = held_values(name, shape, forms[name].layout, forms[name].dtype, mesh, observed)
            finding = held if isinstance(held, Finding) else _not_finite(name, mesh, held)
            finding = finding or replicas_disagree(name, forms[name].layout, mesh, observed, shape)
        if finding is not None:
            yield finding


def _not_finite(name: str, mesh: Mesh, held: Sequence[NDArray[np.float64]]) -> Finding | None:
    for rank, values in enumerate(held):
        if not np.isfinite(values).all():
            message = f"{name} is not finite on {mesh.describe(rank)}, although all that is given is"
            return Finding("mismatch", message, rank, mesh.describe(rank), name)
    return None


def judge_recomputed(case: TransformerCase, other: TransformerCase, worlds: Sequence[World]) -> Iterator[Finding]:
    """Backward may compute activations again or keep them: every result has the same bits. The first that has not."""
    for rank, (one, two) in enumerate(zip(*worlds, strict=True)):
        for name, tensor in one.tensors.items():
            repeated = two.tensors.get(name)
            values, again = (None if t is None else t.values for t in (tensor, repeated))
            if values is None or again is None or same_bits(values, again):
                continue
            wrong = int(different(values, again).sum()) if values.shape == again.shape else values.size
            ways = f"recompute={case.recompute!r} and recompute={other.recompute!r}"
            message = f"{name} differs between {ways} on {case.mesh.describe(rank)}: {wrong} of {values.size} elements"
            cause = "recomputation draws other dropout masks than forward did, or computes something else"
            yield Finding("mismatch", message, rank, case.mesh.describe(rank), name, cause=cause)
            return
