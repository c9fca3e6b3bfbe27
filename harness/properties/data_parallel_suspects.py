"""What gradients and losses would be with each of the known mistakes of data parallelism."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from harness.oracle.patterns.evidence import Suspect, Values
from reference.data_parallel import DataParallelCase, Tensors
from reference.data_parallel_gradients import local_gradients, loss_of, reduced
from reference.data_parallel_tokens import token_weights, valid_tokens


def suspects(case: DataParallelCase, given: Tensors, name: str) -> list[Suspect]:
    """The wrong values that known mistakes give for ``weight{i}[step].grad``, a bias', or ``loss[step]``."""
    base, _, rest = name.removesuffix(".grad").partition("[")
    step = int(rest.partition("]")[0])
    return list(_Suspected(case, given, base, step).all())


class _Suspected:
    def __init__(self, case: DataParallelCase, given: Tensors, base: str, step: int) -> None:
        self.case, self.given, self.base, self.step = case, given, base, step
        self.weights = token_weights(case, step)
        self.valid = valid_tokens(case, step)

    def all(self) -> Iterator[Suspect]:
        yield from self._normalised()
        if self.base == "loss":
            return
        case, n = self.case, self.case.parallel_size
        locals_ = local_gradients(case, self.given, self.step, self.weights)[self.base]
        right = reduced(case, locals_)
        average = case.reduction == "average"
        if n > 1:
            over, total = f"over {case.axis}", locals_.sum(0)
            less = f"divided by the size of {case.axis} twice" if average else f"averaged {over} where the sum is due"
            yield Suspect(f"is {n} times too large: summed {over} where the average is due", (right * n).numpy())
            yield Suspect(f"is 1/{n} of what is due: {less}", (right / n).numpy())
            yield Suspect(f"is the rank's own: it is not reduced {over}", self._per_rank(total))
            if average:
                divided = self._per_rank(total / n)
                yield Suspect(f"is the rank's own, divided by {n}: it is not reduced {over}", divided)
        yield from self._other_ranks(right, locals_)
        for m in range(case.micro_batches) if case.micro_batches > 1 else ():
            which = "the last micro-batch" if m == case.micro_batches - 1 else f"micro-batch {m}"
            alone = reduced(case, locals_[m : m + 1])
            yield Suspect(f"is that of {which} alone: the others are not accumulated", alone.numpy())
        if case.micro_batches > 1 and n > 1:
            early = locals_[:-1].sum(0)
            last = reduced(case, locals_[-1:])
            mixed = tuple(last.numpy() + early_ for early_ in self._per_rank(early))
            yield Suspect("has the reduced gradient of the last micro-batch, and the rank's own of those before", mixed)

    def _other_ranks(self, right: torch.Tensor, locals_: torch.Tensor) -> Iterator[Suspect]:
        """Sums and averages over other ranks than those of the axis. locals_: [M, R, n, *shape]."""
        case, n, world = self.case, self.case.parallel_size, self.case.mesh.size
        average = case.reduction == "average"
        everyone = right.sum(0, keepdim=True).expand_as(right)
        if world > n:
            if average:
                cause = f"is averaged over the world and not over {case.axis}"
                yield Suspect(cause, (right * n / world).numpy())
                everyone = everyone * n / world
            yield Suspect(f"is reduced over all ranks and not over {case.axis} alone", everyone.numpy())
        contribute = (locals_ != 0).flatten(3).any(-1).any(0).sum(-1).clamp(min=1)
        if average and bool((contribute < n).any()):
            share = (n / contribute).view(-1, *[1] * (right.dim() - 1))
            cause = f"is averaged over the ranks that have a gradient, and not over all of {case.axis}"
            yield Suspect(cause, (right * share).numpy())

    def _normalised(self) -> Iterator[Suspect]:
        """Means that are taken over other sets than the whole batch."""
        case, n, M = self.case, self.case.parallel_size, self.case.micro_batches
        counted = {"token_mean": self.valid.to(torch.float64), "sample_mean": self._samples()}.get(case.loss)
        if counted is None:
            return
        everyone = torch.ones_like(self.valid, dtype=torch.float64)
        of_rank = counted.sum((0, 3, 4), keepdim=True).clamp(min=1)
        of_micro_batch = counted.sum((3, 4), keepdim=True).clamp(min=1)
        filled = (counted.sum((0, 3, 4), keepdim=True) > 0).sum(2, keepdim=True).clamp(min=1)
        what = "tokens" if case.loss == "token_mean" else "samples"
        for weights, cause in (
            (counted / of_rank / n, f"is the mean of the ranks' means, and not the mean over all {what}"),
            (
                counted / of_rank / filled,
                f"is the mean of the means of ranks with {what}, and not over all {what}",
            ),
            (counted / of_micro_batch / n / M, f"is the mean of the micro-batches' means, and not over all {what}"),
            (everyone / everyone.sum((0, 2, 3, 4), keepdim=True), "counts tokens that are not valid"),
            *self._all_samples(),
        ):
            yield Suspect(cause, self._with(weights))

    def _all_samples(self) -> Iterator[tuple[torch.Tensor, str]]:
        case = self.case
        if case.loss == "sample_mean":
            number = case.micro_batches * case.parallel_size * case.samples
            yield self._samples() / number, "is divided by the number of all samples, those without a valid token too"

    def _samples(self) -> torch.Tensor:
        """Of each token, its share of its sample."""
        return self.valid / self.valid.sum(-1, keepdim=True).clamp(min=1)

    def _with(self, weights: torch.Tensor) -> Values:
        """The tensor with other weights of its tokens."""
        case, given = self.case, self.given
        if self.base != "loss":
            return reduced(case, local_gradients(case, given, self.step, weights)[self.base]).numpy()
        return loss_of(case, given, self.step, weights).numpy()

    def _per_rank(self, values: torch.Tensor) -> tuple[Values, ...]:
        """[R, n, *shape] -> for each rank, [R, *shape] with its own in every place."""
        case = self.case
        found = []
        for rank in range(case.mesh.size):
            own = values[:, case.mesh.coordinate(rank, case.axis)]
            found.append(own.numpy())
        return tuple(found)
