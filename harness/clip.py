"""How a candidate presents the clipping of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from harness.module import require_callables

if TYPE_CHECKING:
    import torch


class Clipper:
    """How a trainer clips the gradients of the parameters that it was given. Only ``clip`` must be given; what else is
    not given is not checked.

    clip: divides the gradients by the loss scale, clips them in place, and returns their norm before that, without the
        loss scale, a number or a scalar tensor, the same on every rank.
    coefficient: ``coefficient()``, after it: by what the gradients were multiplied beside the inverse loss scale.
    skips: ``skips()``, after it: whether the step is to be skipped, as the norm is not finite.
    gradient: ``gradient(name)``: the clipped gradient of a parameter, its flat elements on this rank (default: its
        ``grad``).
    """

    def __init__(
        self,
        clip: Callable[[], float | torch.Tensor],
        *,
        coefficient: Callable[[], float | torch.Tensor] | None = None,
        skips: Callable[[], object] | None = None,
        gradient: Callable[[str], torch.Tensor | None] | None = None,
    ) -> None:
        require_callables("Clipper", {"clip": clip, "coefficient": coefficient, "skips": skips, "gradient": gradient})
        self.clip = clip
        self.coefficient = coefficient
        self.skips = skips
        self.gradient = gradient
