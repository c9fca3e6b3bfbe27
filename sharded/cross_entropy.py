"""Cross entropy of logits whose columns are cut over the ranks of a group (Megatron-LM, arXiv 1909.08053, section 3).

No rank ever holds the whole logits. For each token the ranks agree on three numbers, and each then knows the loss and
its own columns of the gradient:

| | forward | backward |
|---|---|---|
| maximum logit | all-reduce T | none |
| logit of the target, with label smoothing also the mean of all logits, as one weighted sum | all-reduce T | none |
| sum of exponentials | all-reduce T | none |

All arithmetic is in fp32 (fp64 for fp64 logits), and so is the loss; the gradient is in the logits' dtype. The logits
are not written to.

Legend: T tokens (any dimensions), w this rank's columns of the logits, k those of them that are in the vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypedDict, get_args

import torch
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from sharded import wire
from sharded.autograd import apply
from sharded.cut import piece
from sharded.process_groups import default_group

Reduction = Literal["none", "mean", "sum"]
Smoothing = Literal["torch", "megatron"]


class Options(TypedDict, total=False):
    """The keywords of `vocab_parallel_cross_entropy`, but for the group."""

    vocabulary: int | None
    columns: int | None
    reduction: Reduction
    label_smoothing: float
    smoothing: Smoothing
    ignore_index: int
    z_loss: float


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    group: ProcessGroup | None = None,
    vocabulary: int | None = None,
    columns: int | None = None,
    reduction: Reduction = "none",
    label_smoothing: float = 0.0,
    smoothing: Smoothing = "torch",
    ignore_index: int = -100,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """-log softmax(logits)[target]: logits [T, w], targets int64 [T], alike on all ranks of the group.

    columns: of the whole logits, cut in balance (cut.py); without it every rank has w of them. vocabulary: the columns
    that stand for a token, by default all; those after it are padding, without probability and gradient.
    reduction: the loss of each token [T], their sum, or their mean over the tokens that are not ignored [], which is 0
    where there are none. label_smoothing: alpha, which is spread over all classes alike (``torch``, as by
    torch.nn.functional.cross_entropy) or over the others than the target (``megatron``, as by Megatron-Core).
    ignore_index: a target that gives no loss and no gradient, whatever the logits hold there. z_loss: coefficient of
    the squared log of the normaliser, added for each token (PaLM, arXiv 2204.02311, section 5).

    Raises TypeError or ValueError, before anything is sent, for what it cannot work with: targets out of range too.
    """
    group = default_group() if group is None else group
    _check_tensors(logits, targets, group)
    columns = logits.shape[-1] * group.size() if columns is None else columns
    first, own = piece(columns, group.size(), group.rank())
    if logits.shape[-1] != own:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} have {logits.shape[-1]} columns: expected {own}, piece "
            f"{group.rank()} of {columns} cut over {group.size()} ranks"
        )
    vocabulary = columns if vocabulary is None else vocabulary
    _check_options(vocabulary, columns, reduction, label_smoothing, smoothing, z_loss)
    _check_range(targets, vocabulary, ignore_index)
    own = min(own, max(0, vocabulary - first))
    plan = Plan(group, first, own, columns, vocabulary, reduction, label_smoothing, smoothing, ignore_index, z_loss)
    return loss_of(logits, targets.long(), plan)


@dataclass(frozen=True)
class Plan:
    """What is computed, and which of the vocabulary is here: ``own`` columns from ``first``, of ``columns`` in all."""

    group: ProcessGroup
    first: int
    own: int
    columns: int
    vocabulary: int
    reduction: Reduction
    label_smoothing: float
    smoothing: Smoothing
    ignore_index: int
    z_loss: float

    def shares(self) -> tuple[float, float]:
        """What label smoothing leaves to the target, and what every class gets, the target too."""
        alpha, k = self.label_smoothing, self.vocabulary
        spread = alpha * k / (k - 1) if alpha and self.smoothing == "megatron" else alpha
        return 1 - spread, spread / k

    def here(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which targets are columns of this rank, and which column; 0 for the others."""
        column = targets - self.first
        here = (column >= 0) & (column < self.own)
        return here, column.masked_fill(~here, 0)


def loss_of(logits: torch.Tensor, targets: torch.Tensor, plan: Plan) -> torch.Tensor:
    """Of arguments that are known to be right."""
    return apply(CrossEntropy, logits, targets, plan)


class CrossEntropy(torch.autograd.Function):
    """logits [T, w], targets [T] -> [T] or []"""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor, plan: Plan) -> torch.Tensor:
        x = logits[..., : plan.own].to(torch.promote_types(logits.dtype, torch.float32))
        top = largest(x, plan)
        x = below(x, top)
        here, column = plan.here(targets)
        aim = aimed_at(x, here, column, plan)
        p = x.exp()
        total = wire.all_reduced(p.sum(-1), plan.group)
        p.div_(total.unsqueeze(-1))
        log_z = total.log() + top
        loss = total.log() - aim
        if plan.z_loss:
            loss = loss + plan.z_loss * log_z.square()
        valid = targets != plan.ignore_index
        count = counted(valid, loss.dtype) if plan.reduction == "mean" else loss.new_ones(())
        ctx.plan, ctx.padding, ctx.dtype = plan, logits.shape[-1] - plan.own, logits.dtype
        ctx.save_for_backward(p, log_z, here, column, valid, count)
        loss = loss.masked_fill(~valid, 0)  # not multiplied: the logits of an ignored token may be anything
        return loss if plan.reduction == "none" else loss.sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        p, log_z, here, column, valid, count = ctx.saved_tensors
        own = p * (1 + 2 * ctx.plan.z_loss * log_z).unsqueeze(-1) if ctx.plan.z_loss else p.clone()
        subtract_shares(own, here, column, ctx.plan)
        weight = (grad / count).expand(valid.shape).unsqueeze(-1)
        own = (own * weight).masked_fill_(~valid.unsqueeze(-1), 0).to(ctx.dtype)
        return torch.nn.functional.pad(own, (0, ctx.padding)) if ctx.padding else own, None, None


# The steps, x [T, k]. A rank may have no column at all.


def largest(x: torch.Tensor, plan: Plan) -> torch.Tensor:
    """The maximum over the whole vocabulary, [T]."""
    own = x.amax(-1) if plan.own else x.new_full(x.shape[:-1], -math.inf)
    return wire.maximum(own, plan.group)


def below(x: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """A tensor of its own: of fp32 logits, x is a view."""
    return x - top.unsqueeze(-1)


def aimed_at(x: torch.Tensor, here: torch.Tensor, column: torch.Tensor, plan: Plan) -> torch.Tensor:
    """The logit of the target or, with label smoothing, of the distribution that is aimed at, [T]: a weighted sum of
    logits, so that both take one reduction."""
    own = x.new_zeros(column.shape)
    if plan.own:
        own = x.gather(-1, column.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0)
    if plan.label_smoothing:
        of_target, of_every = plan.shares()
        own = of_target * own + of_every * x.sum(-1)
    return wire.all_reduced(own, plan.group)


def counted(valid: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """How many tokens a mean is over, at least 1, []."""
    return valid.sum().clamp(min=1).to(dtype)


def subtract_shares(grad: torch.Tensor, here: torch.Tensor, column: torch.Tensor, plan: Plan) -> None:
    """The distribution that is aimed at, from this rank's columns of the probabilities, in place."""
    of_target, of_every = plan.shares()
    if plan.own:
        grad.scatter_add_(-1, column.unsqueeze(-1), -(of_target * here.to(grad.dtype)).unsqueeze(-1))
    if plan.label_smoothing:
        grad.sub_(of_every)


def _check_tensors(logits: torch.Tensor, targets: torch.Tensor, group: object) -> None:
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"group={group!r}: expected a process group that this rank is in, or None for the default")
    if not logits.dtype.is_floating_point or logits.dim() < 1:
        raise TypeError(
            f"logits of dtype {logits.dtype} and shape {tuple(logits.shape)}: expected a floating-point dtype and at "
            "least one dimension"
        )
    if targets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"targets of dtype {targets.dtype}: expected int64 or int32")
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"targets of shape {tuple(targets.shape)}: expected {tuple(logits.shape[:-1])}, one for each token of the "
            "logits"
        )


def _check_options(
    vocabulary: int, columns: int, reduction: object, label_smoothing: float, smoothing: object, z_loss: float
) -> None:
    if not 1 <= vocabulary <= columns:
        raise ValueError(f"vocabulary={vocabulary} in {columns} columns: expected from 1 to their number")
    for name, value, kinds in (("reduction", reduction, Reduction), ("smoothing", smoothing, Smoothing)):
        if value not in get_args(kinds):
            raise ValueError(f"{name}={value!r}: expected one of {', '.join(get_args(kinds))}")
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing={label_smoothing}: expected a number from 0 up, and below 1")
    if label_smoothing and smoothing == "megatron" and vocabulary == 1:
        raise ValueError("smoothing='megatron' spreads over the other classes: with vocabulary=1 there are none")
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"z_loss={z_loss}: expected a finite number from 0 up")


def _check_range(targets: torch.Tensor, vocabulary: int, ignore_index: int) -> None:
    wrong = ((targets < 0) | (targets >= vocabulary)) & (targets != ignore_index)
    if bool(wrong.any()):
        raise ValueError(
            f"target {int(targets[wrong][0])} is out of range: expected from 0 to {vocabulary - 1}, or "
            f"ignore_index={ignore_index}"
        )
