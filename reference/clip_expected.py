"""What one process computes of a case of clipping. Shapes as in `reference.clip`."""

from __future__ import annotations

import math

import torch

from reference.clip import ClipCase, Tensors, measured, names, norm_of, with_gradient
from reference.precision import computed_in, rounded_to


def expected(case: ClipCase, given: Tensors) -> dict[str, torch.Tensor | None]:
    """Norm, coefficient and clipped gradients, float64. Where the norm is not finite there is no coefficient; gradients
    are as they came where the step is skipped, and else none of this subject's concern."""
    norm, limit = measured(case)
    if not math.isfinite(norm):
        out: dict[str, torch.Tensor | None] = {"norm": torch.tensor([norm], dtype=torch.float64)}
        return out | _by_stage(
            case, {i: given[f"gradient{i}"].clone() for i in with_gradient(case)}, case.policy == "skip"
        )
    with computed_in(case.wide.name):
        total = norm_of(case, given)
        # A number divided by a tensor is multiplied by its inverse, which rounds twice.
        share = torch.full_like(total, limit) / (total + case.eps) if norm else torch.ones_like(total)
        # The limit may be reached by rounding only: then both are right, and nearly alike.
        coefficient = torch.clamp(share, max=1.0)
        clipped = {i: given[f"gradient{i}"] / case.loss_scale * coefficient for i in with_gradient(case)}
    if case.wide != case.format:
        clipped = {i: rounded_to(case.format.name)(values) for i, values in clipped.items()}
    return {"norm": total.view(1), "coefficient": coefficient.view(1), **_by_stage(case, clipped, True)}


def _by_stage(case: ClipCase, values: dict[int, torch.Tensor], compared: bool) -> dict[str, torch.Tensor | None]:
    """Every gradient under the name of each stage that holds it; zeros where there is none."""
    out: dict[str, torch.Tensor | None] = {}
    for i, one in enumerate(case.parameters) if compared else ():
        found = values.get(i, torch.zeros(one.size, dtype=torch.float64))
        for name in names(case, i):
            out[name] = found.clone()
    return out
