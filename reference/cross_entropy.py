"""Vocabulary-parallel cross entropy: the case as data, and what one process computes.

Shapes: R replicas (one for each coordinate outside the loss' axis, with data of its own), ``leading`` the token
dimensions of a micro-batch, V the vocabulary, W = V + padding the width of the logits.

    logits[m]       [R, *leading, W]          loss[m]         [R, *leading], or [R] where it is reduced
    targets[m]      [R, *leading], int64      logits[m].grad  [R, *leading, W]
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch

from reference.cases import AlongAxis
from reference.cross_entropy_targets import targets_of
from reference.dtypes import FORMATS, Format, format_of
from reference.ids import Ids
from reference.linear import Backward
from reference.mesh import Mesh
from reference.precision import computed_in, rounded_to
from reference.recipe import Recipe, fill

#: One loss a token; their sum; or their mean over the tokens that are not ignored, which is 0 where there are none.
Reduction = Literal["none", "mean", "sum"]
#: Who else gets the alpha of label smoothing: all V classes alike (torch.nn.functional.cross_entropy), or the V - 1
#: others (Megatron-Core).
Smoothing = Literal["torch", "megatron"]
#: Which targets are ignored, beside those that are ``ignore_index`` by chance: none, about a third, all of the last
#: micro-batch, all of the first replica, or all there are.
Ignored = Literal["none", "some", "micro_batch", "replica", "all"]
#: What is wrong with the targets of a case that must be refused: one of them is below zero, or past the vocabulary.
Invalid = Literal["", "negative", "past"]
Tensors = dict[str, torch.Tensor]

#: Of lattice logits: larger ones leave one class with all the probability.
_LARGEST_LOGIT = 4
_CHOICES = {
    "reduction": Reduction,
    "smoothing": Smoothing,
    "ignored": Ignored,
    "invalid": Invalid,
    "backward": Backward,
}


@dataclass(frozen=True)
class CrossEntropyRecipes:
    """How each tensor of the case is filled."""

    logits: Recipe = field(default_factory=Recipe)
    loss_grad: Recipe = field(default_factory=Recipe)


@dataclass(frozen=True)
class CrossEntropyCase(AlongAxis):
    """The loss of logits whose columns are cut over the ranks along ``axis``, forward and backward for each
    micro-batch.

    The ``padding`` columns after the vocabulary belong to no token: they have no probability and no gradient, whatever
    they hold. ``label_smoothing`` is alpha, spread as ``smoothing`` says. A target that is ``ignore_index`` gives no
    loss and no gradient, whatever its logits hold; ``ignored`` says how many there are. ``z_loss`` is the coefficient
    of the squared logarithm of the normaliser (PaLM, arXiv 2204.02311, section 5), added for each token. ``scale``
    multiplies the logits. ``targets`` says how they are chosen. ``invalid`` puts one target out of range into the first
    micro-batch, which every rank must refuse. The rest as in `reference.linear.LinearCase`.

    The loss is in fp32 (fp64 for fp64 logits), and so is all arithmetic inside; the gradient is in the logits' dtype.
    """

    mesh: Mesh
    vocabulary: int
    leading: tuple[tuple[int, ...], ...] = ((1,),)
    axis: str = "tp"
    dtype: str = "fp32"
    padding: int = 0
    reduction: Reduction = "none"
    label_smoothing: float = 0.0
    smoothing: Smoothing = "torch"
    ignored: Ignored = "none"
    ignore_index: int = -100
    z_loss: float = 0.0
    scale: int = 1
    explicit_group: bool = False
    logits_require_grad: bool = True
    transposed: bool = False
    backward: Backward = "immediate"
    invalid: Invalid = ""
    targets: Ids = field(default_factory=Ids)
    recipes: CrossEntropyRecipes = field(default_factory=CrossEntropyRecipes)

    def __post_init__(self) -> None:
        format_of(self.dtype)
        if self.axis not in self.mesh.names:
            raise ValueError(f"the loss' axis {self.axis!r} is not in the mesh {self.mesh}")
        if self.vocabulary < 1 or self.padding < 0 or self.scale < 1:
            raise ValueError(
                f"vocabulary {self.vocabulary} and scale {self.scale} must be at least 1, padding {self.padding} at "
                "least 0"
            )
        if not self.leading or any(not dims or min(dims) < 1 for dims in self.leading):
            raise ValueError(f"leading {self.leading}: expected one or more micro-batches of dimensions of at least 1")
        if self.axis != "tp" and not self.explicit_group:
            raise ValueError(f"axis {self.axis!r} is not the default group: the loss must be given an explicit group")
        for name, kinds in _CHOICES.items():
            if getattr(self, name) not in get_args(kinds):
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}: expected one of {', '.join(map(repr, get_args(kinds)))}"
                )
        if not 0 <= self.label_smoothing < 1 or not 0 <= self.z_loss < math.inf:
            raise ValueError(
                f"label_smoothing {self.label_smoothing} and z_loss {self.z_loss}: expected from 0 up, and below 1"
            )
        if self.label_smoothing and self.smoothing == "megatron" and self.vocabulary < 2:
            raise ValueError("Megatron-Core's label smoothing is spread over the other classes: there are none")
        if self.label_smoothing and self.recipes.logits.inject == "-inf":
            raise ValueError("label smoothing and a logit of -inf: the order of the sum decides what comes out")
        if self.recipes.loss_grad.inject in ("inf", "-inf"):
            raise ValueError("an infinite gradient: which probabilities round to zero decides what comes out")

    @property
    def loss_format(self) -> Format:
        """Of the loss and all arithmetic."""
        return FORMATS["fp64" if self.dtype == "fp64" else "fp32"]

    @property
    def width(self) -> int:
        """Of the whole logits."""
        return self.vocabulary + self.padding

    @property
    def trains(self) -> bool:
        return self.logits_require_grad and self.backward != "never"

    @property
    def out_of_range(self) -> int:
        """The target that is wrong in an ``invalid`` case."""
        wrong, away = (-1, -1) if self.invalid == "negative" else (self.vocabulary, 1)
        return wrong if wrong != self.ignore_index else wrong + away

    def loss_shape(self, m: int) -> tuple[int, ...]:
        """Global."""
        return (self.replicas, *(self.leading[m] if self.reduction == "none" else ()))


def tensors(case: CrossEntropyCase) -> Tensors:
    """Every global tensor of the case: targets int64, the others float64, filled by recipe and rounded to the dtype."""
    made: Tensors = {}
    for m, dims in enumerate(case.leading):
        name, shape = f"logits[{m}]", (case.replicas, *dims, case.width)
        made[name] = _scaled(case, fill(case.recipes.logits, name, shape, case.format, _LARGEST_LOGIT))
        made[f"targets[{m}]"] = targets_of(case, m)
        name = f"loss[{m}].grad"
        made[name] = fill(case.recipes.loss_grad, name, case.loss_shape(m), case.loss_format, _LARGEST_LOGIT)
    return made


def _scaled(case: CrossEntropyCase, logits: torch.Tensor) -> torch.Tensor:
    """Times the scale, within the format; infinities are what the recipe put there."""
    largest = case.format.largest
    scaled = torch.where(logits.isfinite(), (logits * case.scale).clamp(-largest, largest), logits)
    return scaled.to(case.format.torch_dtype).to(torch.float64)


def shares(case: CrossEntropyCase) -> tuple[float, float]:
    """What label smoothing leaves to the target, and what every class gets, the target too."""
    alpha, v = case.label_smoothing, case.vocabulary
    spread = alpha * v / (v - 1) if alpha and case.smoothing == "megatron" else alpha
    return 1 - spread, spread / v


def expected(case: CrossEntropyCase, given: Tensors) -> dict[str, torch.Tensor | None]:
    """Losses and the logits' gradients of one process, float64; None where there must be no gradient.

    With lse = log sum exp(x): -log p = lse - x, so loss = lse - (x[t] times its share + every class' share of sum x),
    and its gradient is exp(x - lse) - the shares.
    """
    out: dict[str, torch.Tensor | None] = {}
    for m, dims in enumerate(case.leading):
        with computed_in(case.loss_format.name):
            loss_RT, grad_RTV = _one(case, given, m)
        out[f"loss[{m}]"] = loss_RT.reshape(case.loss_shape(m))
        if not case.trains:
            out[f"logits[{m}].grad"] = None
            continue
        held = rounded_to(case.dtype)(grad_RTV)
        padded = torch.cat([held, torch.zeros(*held.shape[:-1], case.padding, dtype=torch.float64)], -1)
        out[f"logits[{m}].grad"] = padded.reshape(case.replicas, *dims, case.width)
    return out


def _one(case: CrossEntropyCase, given: Tensors, m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss [R, T], or [R, 1] where it is reduced, and the gradient [R, T, V]."""
    x_RTV = given[f"logits[{m}]"].flatten(1, -2)[..., : case.vocabulary]
    t_RT = given[f"targets[{m}]"].flatten(1)
    g = given[f"loss[{m}].grad"].reshape(case.replicas, -1)
    valid_RT = t_RT != case.ignore_index
    hit_RTV = torch.arange(case.vocabulary) == t_RT.unsqueeze(-1)

    top_RT1 = x_RTV.amax(-1, keepdim=True)
    below_RTV = x_RTV - top_RT1
    log_total_RT1 = below_RTV.exp().sum(-1, keepdim=True).log()
    lse_RT1 = log_total_RT1 + top_RT1
    # 0: but where it is disturbed, x - lse may round as x - max - log(total) does not. Both are usual.
    slack_RT1 = rounded_to(case.loss_format.name)(lse_RT1) - lse_RT1
    log_total_RT1 = log_total_RT1 + slack_RT1

    target_share, every_share = shares(case)
    target_RT1 = t_RT.masked_fill(~valid_RT, 0).unsqueeze(-1)
    loss_RT1 = log_total_RT1 - below_RTV.gather(-1, target_RT1)
    if case.label_smoothing:
        mean_RT1 = below_RTV.sum(-1, keepdim=True) / case.vocabulary
        loss_RT1 = target_share * loss_RT1 + (every_share * case.vocabulary) * (log_total_RT1 - mean_RT1)
    if case.z_loss:
        loss_RT1 = loss_RT1 + case.z_loss * lse_RT1 * lse_RT1
    loss_RT = torch.where(valid_RT, loss_RT1.squeeze(-1), 0.0)

    p_RTV = (below_RTV - log_total_RT1).exp()
    if case.z_loss:
        p_RTV = p_RTV * (1 + 2 * case.z_loss * lse_RT1)
    grad_RTV = p_RTV - hit_RTV.to(torch.float64) * target_share
    if case.label_smoothing:
        grad_RTV = grad_RTV - every_share
    if case.reduction != "none":
        loss_RT = loss_RT.sum(-1, keepdim=True)
        # All tokens have one weight: where their gradients are equal, so are the roundings, as if it were rounded.
        g = rounded_to(case.dtype)(g)
    if case.reduction == "mean":
        count_R1 = valid_RT.sum(-1, keepdim=True).clamp(min=1).to(torch.float64)
        loss_RT, g = loss_RT / count_R1, g / count_R1
    return loss_RT, torch.where(valid_RT.unsqueeze(-1), g.unsqueeze(-1) * grad_RTV, 0.0)
