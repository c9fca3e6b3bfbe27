"""What losses and gradients of a GPT would be with each of the known mistakes of combined parallelism."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from harness.oracle.patterns.evidence import Suspect
from reference.gpt import GptCase
from reference.gpt_parameters import EMBEDDING, OUTPUT, stage_of, valid_tokens
from reference.gpt_step import reduced, token_weights, units, value_of

Tensors = dict[str, torch.Tensor]


def suspects(case: GptCase, given: Tensors, name: str) -> list[Suspect]:
    """The wrong values that known mistakes give for the loss, a gradient, or an updated parameter."""
    base = name.removesuffix(".grad")
    if base == "loss":
        found = [Suspect(cause, units(case, given, other)[1].numpy()) for cause, other in _normalised(case)]
        return [*found, *_of_ranks(case, given)]
    return list(_Gradient(case, given, base).all())


class _Gradient:
    def __init__(self, case: GptCase, given: Tensors, base: str) -> None:
        self.case, self.given, self.base = case, given, base
        self.parts = units(case, given, token_weights(case))[0]

    def all(self) -> Iterator[Suspect]:
        case, D, M = self.case, self.case.data_parallel_size, self.case.micro_batches
        right = reduced(case, self.parts)[self.base]
        if D > 1:
            for d in range(D):
                alone = {name: part[:, d : d + 1] for name, part in self.parts.items()}
                cause = f"is that of dp={d} alone: it is not summed over dp"
                yield self._suspect(cause, reduced(case, alone)[self.base])
            yield self._suspect("is divided by the size of dp: the loss is a mean over all tokens already", right / D)
            yield self._suspect("is summed over dp twice", right * D)
        if M > 1:
            below = case.stages - stage_of(case, self.base)
            cause = f"is divided by the number of micro-batches, {M}, at every stage"
            yield self._suspect(cause, right * float(M) ** -below)
            yield self._suspect(f"is divided by the number of micro-batches, {M}", right / M)
            for m in range(M):
                alone = {name: part[:, :, m : m + 1] for name, part in self.parts.items()}
                yield self._suspect(f"is that of micro-batch {m} alone", reduced(case, alone)[self.base])
        if case.tied and self.base in (EMBEDDING, OUTPUT):
            yield from self._tied()
        for cause, other in _normalised(case):
            parts = units(case, self.given, other)[0]
            yield self._suspect(cause, reduced(case, parts)[self.base])

    def _tied(self) -> Iterator[Suspect]:
        case = self.case
        of_rank = {name: self.parts[name].sum(2) for name in (EMBEDDING, OUTPUT)}
        for name in (EMBEDDING, OUTPUT):
            where = "embedding's" if name == EMBEDDING else "output's"
            cause = f"is the {where} part alone: the tied weight is not summed over its two stages"
            yield self._suspect(cause, of_rank[name].sum(1))
        other = OUTPUT if self.base == EMBEDDING else EMBEDDING
        if case.update == "sharded" and case.data_parallel_size > 1:
            # An owner's shard has the sum over dp of its own copy, and of the other copy what one rank has.
            for d in range(case.data_parallel_size):
                late = of_rank[self.base].sum(1) + of_rank[other][:, d]
                yield self._suspect("is summed over its two stages after the reduction over dp, in part", late)

    def _suspect(self, cause: str, gradient: torch.Tensor) -> Suspect:
        if self.case.update == "sharded":
            gradient = value_of(self.case, self.given, self.base) - gradient
        return Suspect(cause, gradient.detach().numpy())


def _normalised(case: GptCase) -> Iterator[tuple[str, torch.Tensor]]:
    """Means over other sets than the whole batch: what the tokens' losses are divided by, [N, D, B, S]."""
    valid, M, D = valid_tokens(case), case.micro_batches, case.data_parallel_size
    counts = torch.empty(valid.shape, dtype=torch.float64)
    at = 0
    for size in case.sizes:
        of_this = valid[:, :, at : at + size]
        counts[:, :, at : at + size] = of_this.sum((2, 3), keepdim=True).clamp(min=1)
        at += size
    whole = torch.full(valid.shape, float(case.tokens), dtype=torch.float64)
    own = valid.sum((2, 3), keepdim=True).clamp(min=1).to(torch.float64).expand(valid.shape)

    def where_valid(divisors: torch.Tensor) -> torch.Tensor:
        return torch.where(valid, divisors, torch.inf)

    yield "is the mean of the micro-batches' means, and not the mean over all tokens", where_valid(counts * M * D)
    yield "is the mean of means of micro-batches, summed over dp", where_valid(counts * M)
    yield "is the sum of the micro-batches' means, and not the mean over all tokens", where_valid(counts)
    yield "is the mean of the means of the ranks along dp, and not the mean over all tokens", where_valid(own * D)
    yield "is the sum over the tokens, and not their mean", where_valid(torch.ones_like(whole))
    yield "counts tokens that are not valid, in the divisor", where_valid(whole)
    yield "counts tokens that are not valid", whole


def _of_ranks(case: GptCase, given: Tensors) -> Iterator[Suspect]:
    """The loss of one rank along dp."""
    right = token_weights(case)
    for d in range(case.data_parallel_size if case.data_parallel_size > 1 else 0):
        alone = torch.full_like(right, torch.inf)
        alone[:, d] = right[:, d]
        yield Suspect(f"is the part of dp={d} alone: it is not summed over dp", units(case, given, alone)[1].numpy())
