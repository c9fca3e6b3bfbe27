"""What gradients and losses would be with each of the known mistakes of pipelines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from harness.oracle.diagnose import POSSIBLE
from harness.oracle.patterns.evidence import Suspect
from harness.verdict import Finding
from reference.pipeline import PipelineCase, Tensors
from reference.pipeline_gradients import at_start, micro_batch, summed_over_copies, token_weights, updated
from reference.pipeline_stages import parameters, starts, tied, valid_tokens


def suspects(case: PipelineCase, given: Tensors, name: str) -> list[Suspect]:
    """The wrong values that known mistakes give for ``weight{j}[step].grad``, a bias', ``weight{j}[step]`` or
    ``loss[step]``; of the first step only, where parameters or gradients carry on."""
    base, _, rest = name.removesuffix(".grad").partition("[")
    step = int(rest.partition("]")[0])
    if step and (case.update == "sharded" or case.accumulate):
        return []
    return list(_Suspected(case, given, base, step).all())


def without_tying(findings: Sequence[Finding], copies: Sequence[str]) -> tuple[Finding, ...]:
    """The findings; where other parameters are wrong too, no mistake of tying is the cause: it changes no others."""
    wrong = {str(one.tensor).partition("[")[0] for one in findings if one.kind == "mismatch" and one.tensor}
    if wrong - {"loss"} <= set(copies):
        return tuple(findings)
    return tuple(
        replace(one, cause=None, details=f"{POSSIBLE}: {one.cause}\n{one.details}".rstrip())
        if one.cause and any(words in one.cause for words in _OF_TYING)
        else one
        for one in findings
    )


#: How the causes of `_Suspected._tied` can be told.
_OF_TYING = ("is that of this stage's copy alone", "is that of the copy on stage", "is summed over the")


class _Suspected:
    def __init__(self, case: PipelineCase, given: Tensors, base: str, step: int) -> None:
        self.case, self.given, self.base, self.step = case, given, base, step
        self.values = at_start(case, given)
        self.valid = valid_tokens(case, step).to(torch.float64)
        self.weights = token_weights(case, step)

    def all(self) -> Iterator[Suspect]:
        case, M = self.case, self.case.micro_batches
        if self.base == "loss":
            yield from self._normalised()
            return
        of_batch = self._gradients(self.weights)
        if self.base not in of_batch[0]:
            return
        right = self._result(of_batch)
        if M > 1 and case.update == "none":
            below = case.stages - parameters(case)[self.base].stage
            cause = f"is divided by the number of micro-batches, {M}, at every stage"
            yield Suspect(cause, (right * float(M) ** -below).numpy())
            yield Suspect(f"is divided by the number of micro-batches, {M}", (right / M).numpy())
        for m in range(M) if M > 1 else ():
            which = "the last micro-batch" if m == M - 1 else f"micro-batch {m}"
            cause = f"is that of {which} alone: the others are not accumulated"
            yield Suspect(cause, self._result(of_batch[m : m + 1]).numpy())
            rest = [*of_batch[:m], *of_batch[m + 1 :]]
            yield Suspect(f"lacks that of {which}", self._result(rest).numpy())
        copies = [block.copy for block in tied(case)]
        if self.base in copies:
            yield from self._tied(of_batch, copies)
        yield from self._normalised()
        if M > 1:
            yield from self._reordered()

    def _tied(self, of_batch: list[Tensors], copies: list[str]) -> Iterator[Suspect]:
        case, total = self.case, self._accumulated(of_batch)
        alone = {**total, self.base: total[self.base]}
        cause = "is that of this stage's copy alone: the tied weight is not summed over its stages"
        yield Suspect(cause, self._seen(alone).numpy())
        for name in copies:
            if name != self.base:
                cause = f"is that of the copy on stage {parameters(case)[name].stage} alone"
                yield Suspect(cause, self._seen({**total, self.base: total[name]}).numpy())
        if len(copies) > 2:
            ends = total[copies[0]] + total[copies[-1]]
            cause = "is summed over the first and the last stage alone, and not over all that hold a copy"
            yield Suspect(cause, self._seen({**total, self.base: ends}).numpy())
        if case.update == "sharded" and case.replicas > 1:
            # An owner's shard has the sum over the pipelines of its own copy, and of the others what one rank has.
            own = total[self.base].sum(0)
            for replica in range(case.replicas):
                late = own + sum(total[name][replica] for name in copies if name != self.base)
                value = self.values[self.base][0] - late
                cause = f"is summed over the stages after the reduction over {case.replica_axes[0]}, in part"
                yield Suspect(cause, value.numpy())

    def _normalised(self) -> Iterator[Suspect]:
        """Means that are taken over other sets than the whole batch."""
        case, M = self.case, self.case.micro_batches
        if case.loss != "token_mean":
            return
        means = torch.zeros_like(self.valid)
        for begin, end in zip(starts(case)[:-1], starts(case)[1:], strict=True):
            of_this = self.valid[:, begin:end]
            means[:, begin:end] = of_this / of_this.sum((1, 2), keepdim=True).clamp(min=1)
        everyone = torch.ones_like(self.valid) / self.valid[0].numel()
        for weights, cause in (
            (means / M, "is the mean of the micro-batches' means, and not the mean over all tokens"),
            (means, "is the sum of the micro-batches' means, and not the mean over all tokens"),
            (self.valid / M, "is divided by the number of micro-batches, and not by that of the tokens"),
            (self.valid, "is the sum over the tokens, and not their mean"),
            (everyone, "counts tokens that are not valid"),
        ):
            yield Suspect(cause, self._with(weights).numpy())

    def _reordered(self) -> Iterator[Suspect]:
        """Gradients that meet the activations of another micro-batch."""
        case = self.case
        if len(set(case.sizes)) > 1:
            return
        for shift, cause in ((-1, "reversed"), (1, "one later")):
            chunks = list(torch.split(self.weights, case.sizes[0], 1))
            order = chunks[::-1] if shift < 0 else [*chunks[1:], chunks[0]]
            weights = torch.cat(order, 1)
            if not torch.equal(weights, self.weights):
                words = f"has the masks of other micro-batches ({cause}): they go through in another order"
                yield Suspect(words, self._with(weights).numpy())

    def _gradients(self, weights: torch.Tensor) -> list[Tensors]:
        return [
            micro_batch(self.case, self.given, self.values, self.step, m, weights)[0]
            for m in range(self.case.micro_batches)
        ]

    def _accumulated(self, of_batch: list[Tensors]) -> Tensors:
        return {name: torch.stack([one[name] for one in of_batch]).sum(0) for name in of_batch[0]}

    def _result(self, of_batch: list[Tensors]) -> torch.Tensor:
        return self._seen(summed_over_copies(self.case, self._accumulated(of_batch)))

    def _seen(self, gradients: Tensors) -> torch.Tensor:
        """The gradient, or the parameter that it makes."""
        if self.case.update == "sharded":
            return updated(self.case, self.values, gradients)[self.base][0]
        return gradients[self.base]

    def _with(self, weights: torch.Tensor) -> torch.Tensor:
        if self.base != "loss":
            return self._result(self._gradients(weights))
        shares = [
            micro_batch(self.case, self.given, self.values, self.step, m, weights)[1]
            for m in range(self.case.micro_batches)
        ]
        return torch.stack(shares).sum(0).unsqueeze(-1)
