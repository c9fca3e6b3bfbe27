"""Losses that are the shipped one but for one thing."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from harness import Sharded
from harness.candidates.builtin import Builtin
from reference.cross_entropy import CrossEntropyCase

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Changed(Builtin):
    def cross_entropy(self, case: CrossEntropyCase) -> Sharded:
        right: Loss = super().cross_entropy(case).forward
        return Sharded(lambda logits, targets: self.changed(case, right, logits, targets))

    def changed(self, case: CrossEntropyCase, right: Loss, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return right(logits, targets)


class InTheDtypeOfTheLogits(Changed):
    def changed(self, case, right, logits, targets):
        return right(logits, targets).to(logits.dtype)


class TakesAnyTarget(Changed):
    def changed(self, case, right, logits, targets):
        return right(logits, targets.clamp(0, case.vocabulary - 1))


class TakesAnyTargetOnRank1(Changed):
    """Without a collective, so that it does not wait for rank 0."""

    def changed(self, case, right, logits, targets):
        return logits.sum(-1).float() if dist.get_rank() == 1 else right(logits, targets)


class AgreesOnTheLossOnceMore(Changed):
    def changed(self, case, right, logits, targets):
        loss = right(logits, targets)
        dist.all_reduce(loss.detach().clone())
        return loss


class OneLossForAll(Changed):
    def changed(self, case, right, logits, targets):
        return right(logits, targets).sum()
