"""What the known mistakes of a parallel cross entropy are made of: one micro-batch, in elementary numpy.

Legend: R replicas, T tokens, V vocabulary, W its padding included, K the columns of one rank that are in the
vocabulary.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from reference.cross_entropy import CrossEntropyCase, Tensors, shares
from reference.layout import Rule, cut

Values: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class Batch:
    """The micro-batch ``m`` of a case."""

    case: CrossEntropyCase
    given: Tensors
    m: int
    uneven: Rule

    @cached_property
    def x(self) -> Values:
        """[R, T, W]"""
        logits = self.given[f"logits[{self.m}]"]
        return logits.reshape(self.case.replicas, -1, self.case.width).numpy()

    @cached_property
    def t(self) -> NDArray[np.int64]:
        """[R, T]; of an ignored token any class that there is."""
        targets = self.given[f"targets[{self.m}]"].reshape(self.case.replicas, -1).numpy()
        return np.asarray(np.clip(targets, 0, self.case.vocabulary - 1))

    @cached_property
    def valid(self) -> NDArray[np.bool_]:
        """[R, T]"""
        targets = self.given[f"targets[{self.m}]"].reshape(self.case.replicas, -1).numpy()
        return np.asarray(targets != self.case.ignore_index)

    @cached_property
    def pieces(self) -> list[slice]:
        """The columns of each coordinate that are in the vocabulary."""
        ends = np.minimum(np.cumsum([0, *cut(self.case.width, self.n, self.uneven)]), self.case.vocabulary)
        return [slice(int(a), int(b)) for a, b in itertools.pairwise(ends)]

    @property
    def n(self) -> int:
        return self.case.parallel_size

    @cached_property
    def hit(self) -> Values:
        """[R, T, W]: 1 where the target is."""
        here = np.arange(self.case.width) == self.t[..., None]
        return np.asarray(here & self.valid[..., None], dtype=np.float64)

    @cached_property
    def count(self) -> Values:
        """[R, 1]: the tokens that a mean is over."""
        return np.asarray(np.maximum(1, self.valid.sum(-1, keepdims=True)).astype(np.float64))

    def per_rank(self, made: list[Values]) -> tuple[Values, ...]:
        """What each coordinate has, for each rank."""
        mesh = self.case.mesh
        return tuple(made[mesh.coordinate(rank, self.case.axis)] for rank in range(mesh.size))

    @cached_property
    def right(self) -> Parts:
        """What the loss is made of, without a mistake."""
        top = self.x[..., : self.case.vocabulary].max(-1)
        return Parts.of(self, top, slice(0, self.case.vocabulary), shares(self.case))

    def local_shares(self, c: int) -> tuple[float, float]:
        """Of label smoothing, as if the columns of one coordinate were the vocabulary."""
        width = self.pieces[c].stop - self.pieces[c].start
        if width < 1 + (self.case.smoothing == "megatron"):
            return shares(self.case)
        return shares(replace(self.case, vocabulary=width, ignore_index=-100, invalid=""))

    def loss(self, parts: Parts, valid: NDArray[np.bool_] | None = None, count: Values | None = None) -> Values:
        """Of the global shape. valid, count: where not the right ones."""
        log_total = np.log(parts.total)
        z = log_total + parts.top
        loss = log_total - parts.aim + (self.case.z_loss * z * z if self.case.z_loss else 0.0)
        loss = np.where(self.valid if valid is None else valid, loss, 0.0)
        if self.case.reduction != "none":
            loss = loss.sum(-1, keepdims=True)
        if self.case.reduction == "mean":
            loss = loss / (self.count if count is None else count)
        return np.asarray(loss.reshape(self.case.loss_shape(self.m)))

    def probabilities(self, parts: Parts) -> Values:
        """[R, T, W], 0 in the padding."""
        p = np.exp(self.x - parts.top[..., None]) / parts.total[..., None]
        return np.where(np.arange(self.case.width) < self.case.vocabulary, p, 0.0)

    def gradient(
        self,
        p: Values | None = None,
        aim: Values | None = None,
        valid: NDArray[np.bool_] | None = None,
        count: Values | float | None = None,
    ) -> Values:
        """Of the global shape: the output gradient times p - aim, [R, T, W]; each where not the right one."""
        p = self.probabilities(self.right) if p is None else p
        if self.case.z_loss:
            p = p * (1 + 2 * self.case.z_loss * (np.log(self.right.total) + self.right.top))[..., None]
        weight = self.given[f"loss[{self.m}].grad"].reshape(self.case.replicas, -1).numpy()
        if self.case.reduction == "mean":
            weight = weight / (self.count if count is None else count)
        valid = self.valid if valid is None else valid
        grad = np.where(valid[..., None], weight[..., None] * (p - (self.aim() if aim is None else aim)), 0.0)
        return np.asarray(grad.reshape(self.given[f"logits[{self.m}]"].shape))

    def aim(self, of_shares: tuple[float, float] | None = None, hit: Values | None = None) -> Values:
        """The distribution that is aimed at, [R, T, W]."""
        of_target, of_every = shares(self.case) if of_shares is None else of_shares
        known = np.where(np.arange(self.case.width) < self.case.vocabulary, of_every, 0.0)
        return np.asarray(of_target * (self.hit if hit is None else hit) + known)

    def by_columns(self, made: list[Values]) -> Values:
        """[R, T, W], of each coordinate what it has in its own columns; zero in the padding."""
        joined = np.zeros_like(self.x)
        for columns, one in zip(self.pieces, made, strict=True):
            joined[..., columns] = one[..., columns]
        return joined


@dataclass(frozen=True)
class Parts:
    """What a loss is made of, each [R, T]: the maximum that was subtracted, the sum of exponentials, and the weighted
    sum of logits that is aimed at."""

    top: Values
    total: Values
    aim: Values

    @staticmethod
    def of(batch: Batch, top: Values, columns: slice, of_shares: tuple[float, float]) -> Parts:
        """Over some columns."""
        below = batch.x[..., columns] - top[..., None]
        of_target, of_every = of_shares
        aim = of_target * np.where(batch.hit[..., columns] > 0, below, 0.0).sum(-1)
        if batch.case.label_smoothing:
            aim = aim + of_every * below.sum(-1)
        return Parts(top, np.exp(below).sum(-1), aim)
