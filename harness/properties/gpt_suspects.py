"""What losses and gradients of a GPT would be with each of the known mistakes of combined parallelism."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from harness.oracle.patterns.evidence import Suspect
from reference.gpt import GptCase
from reference.gpt_parameters import EMBEDDING, OUTPUT, stage_of, valid_tokens
from reference.gpt_step import divisors, loss_of, reduced, units, value_of

Tensors = dict[str, torch.Tensor]


def suspects(case: GptCase, given: Tensors, name: str) -> list[Suspect]:
    """The wrong values that known mistakes give for the loss, a gradient, or an updated parameter."""
    return list(_Suspected(case, given, name.removesuffix(".grad")).all())


class _Suspected:
    """parts, shares: what each micro-batch of each rank gives, [N, D, M, ...]: most mistakes add them up wrongly."""

    def __init__(self, case: GptCase, given: Tensors, base: str) -> None:
        self.case, self.given, self.base = case, given, base
        self.parts, self.shares = units(case, given, divisors(case))
        names = (EMBEDDING, OUTPUT) if case.tied and base in (EMBEDDING, OUTPUT) else (base,)
        self.parts = {name: self.parts[name] for name in names if name in self.parts}

    def all(self) -> Iterator[Suspect]:
        case, D, M = self.case, self.case.data_parallel_size, self.case.micro_batches
        ones = torch.ones(case.replicas, D, M, dtype=torch.float64)
        of_loss = self.base == "loss"
        for d in range(D if D > 1 else 0):
            alone = torch.zeros_like(ones)
            alone[:, d] = 1
            yield self._weighted(f"is that of dp={d} alone: it is not summed over dp", alone)
        if D > 1:
            yield self._weighted("is divided by the size of dp: the mean over all tokens is one already", ones / D)
            yield self._weighted("is summed over dp twice", ones * D)
        if M > 1:
            if not of_loss:
                below = case.stages - stage_of(case, self.base)
                cause = f"is divided by the number of micro-batches, {M}, at every stage"
                yield self._weighted(cause, ones * float(M) ** -below)
            yield self._weighted(f"is divided by the number of micro-batches, {M}", ones / M)
            for m in range(M):
                alone = torch.zeros_like(ones)
                alone[:, :, m] = 1
                yield self._weighted(f"is that of micro-batch {m} alone: the others are not added", alone)
        if len(self.parts) > 1:
            yield from self._tied()
        for cause, factors in self._normalised():
            yield self._weighted(cause, factors)

    def _tied(self) -> Iterator[Suspect]:
        case = self.case
        of_rank = {name: part.sum(2) for name, part in self.parts.items()}
        for name, where in ((EMBEDDING, "embedding's"), (OUTPUT, "output's")):
            cause = f"is the {where} part alone: the tied weight is not summed over its two stages"
            yield self._suspect(cause, of_rank[name].sum(1))
        other = OUTPUT if self.base == EMBEDDING else EMBEDDING
        if case.update == "sharded" and case.data_parallel_size > 1:
            # An owner's shard has the sum over dp of its own copy, and of the other copy what one rank has.
            for d in range(case.data_parallel_size):
                late = of_rank[self.base].sum(1) + of_rank[other][:, d]
                yield self._suspect("is summed over its two stages after the reduction over dp, in part", late)

    def _normalised(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Means over other sets than the whole batch, as factors of each micro-batch's part, [N, D, M]."""
        case, valid = self.case, valid_tokens(self.case).sum(-1)
        D, M = case.data_parallel_size, case.micro_batches
        of_unit = torch.stack([one.sum(-1) for one in torch.split(valid, list(case.sizes), -1)], -1).to(torch.float64)
        right = of_unit.sum((1, 2), keepdim=True).clamp(min=1)
        own, of_rank = of_unit.clamp(min=1), of_unit.sum(2, keepdim=True).clamp(min=1)
        means = "is the mean of the micro-batches' means, and not the mean over all tokens"
        yield means, right / (own * M * D)
        yield f"{means}; and it is summed over dp", right / (own * M)
        yield "is the sum of the micro-batches' means, and not the mean over all tokens", right / own
        yield "is the mean of the means of the ranks along dp, and not the mean over all tokens", right / (of_rank * D)
        yield "is the sum over the tokens, and not their mean", right
        yield "is divided by the number of all tokens, and not by that of the valid ones", right / case.tokens

    def _weighted(self, cause: str, factors: torch.Tensor) -> Suspect:
        """What comes of it where each micro-batch's part has a factor, [N, D, M] or broadcast to it."""
        whole = factors.expand(self.shares.shape)
        if self.base == "loss":
            return Suspect(cause, loss_of(self.case, self.shares * whole).numpy())
        dims = (..., *(None,) * (self.parts[self.base].dim() - 3))
        parts = {name: part * whole[dims] for name, part in self.parts.items()}
        return self._suspect(cause, reduced(self.case, parts)[self.base])

    def _suspect(self, cause: str, gradient: torch.Tensor) -> Suspect:
        if self.case.update == "sharded":
            gradient = value_of(self.case, self.given, self.base) - gradient
        return Suspect(cause, gradient.detach().numpy())
