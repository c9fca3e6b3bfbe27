"""What a loss and its gradient would be with each of the known mistakes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from harness.oracle.patterns.evidence import Suspect
from harness.properties.cross_entropy_pieces import Batch, Parts, Values
from reference.cross_entropy import CrossEntropyCase, Tensors, shares
from reference.layout import Rule

_LOCAL = "smooths labels with the width of the rank's own columns, and not with the vocabulary's"
_OTHER = {"torch": "Megatron-Core's (alpha over the other classes)", "megatron": "torch's (alpha over all classes)"}


def suspects(case: CrossEntropyCase, given: Tensors, name: str, uneven: Rule) -> Iterator[Suspect]:
    """The wrong values that known mistakes give for ``loss[m]`` and ``logits[m].grad``. uneven: how the candidate cuts
    what is not divisible."""
    batch = Batch(case, given, int(name.partition("[")[2].partition("]")[0]), uneven)
    yield from _gradient(batch) if name.endswith(".grad") else _loss(batch)


def _loss(batch: Batch) -> Iterator[Suspect]:
    case, right, everyone = batch.case, batch.right, np.ones_like(batch.valid)
    if not batch.valid.all():
        if case.reduction == "mean":
            tokens = np.where(batch.valid.any(-1, keepdims=True), float(batch.valid.shape[1]), 0.0)
            yield Suspect(
                "is a mean over all tokens, the ignored ones too, and 0/0 where all are ignored",
                batch.loss(right, count=tokens),
            )
        yield Suspect("has a loss for ignored tokens: they are not masked", batch.loss(right, valid=everyone))
    if case.label_smoothing:
        other = _other_definition(case)
        if other is not None:
            aimed = Parts.of(batch, right.top, slice(0, case.vocabulary), shares(other))
            yield Suspect(
                f"has {_OTHER[case.smoothing]} label smoothing, not the one that was asked", batch.loss(aimed)
            )
    if case.padding:
        columns, top = slice(0, case.width), batch.x.max(-1)
        padded = Parts.of(batch, top, columns, shares(case))
        yield Suspect("has the padded columns under the logarithm: they are not masked", batch.loss(padded))
    if batch.n == 1:
        return
    axis, n = case.axis, batch.n
    yield Suspect(
        f"is log({axis}) too large: the sum of exponentials is added up over {axis} once more, as with logits that are "
        "gathered already",
        batch.loss(replace(right, total=n * right.total)),
    )
    own = [Parts.of(batch, right.top, columns, shares(case)) for columns in batch.pieces]
    yield Suspect(
        f"has the rank's own sum of exponentials: its all-reduce over {axis} is missing",
        batch.per_rank([batch.loss(replace(right, total=one.total)) for one in own]),
    )
    yield Suspect(
        f"has the target's logit on its own rank only: its all-reduce over {axis} is missing",
        batch.per_rank([batch.loss(replace(right, aim=one.aim)) for one in own]),
    )
    yield Suspect(
        f"has another maximum subtracted on each rank: its all-reduce over {axis} is missing", _own_maximum(batch)
    )
    yield Suspect(
        "has a logit of the rank's own added for every target that is elsewhere: they are not masked",
        batch.loss(replace(right, aim=right.aim + shares(case)[0] * _first_columns_elsewhere(batch))),
    )
    if case.label_smoothing:
        smoothed = []
        for c, one in enumerate(own):
            of_target, of_every = batch.local_shares(c)
            picked = Parts.of(batch, right.top, slice(0, case.vocabulary), (of_target, 0.0)).aim
            here = Parts.of(batch, right.top, batch.pieces[c], (0.0, of_every)).aim
            smoothed.append(batch.loss(replace(one, total=right.total, aim=picked + here)))
        yield Suspect(f"{_LOCAL}, and with the mean of the rank's own logits", batch.per_rank(smoothed))


def _gradient(batch: Batch) -> Iterator[Suspect]:
    case, right, everyone = batch.case, batch.right, np.ones_like(batch.valid)
    if not batch.valid.all():
        if case.reduction == "mean":
            tokens = np.where(batch.valid.any(-1, keepdims=True), float(batch.valid.shape[1]), 0.0)
            yield Suspect("is of a mean over all tokens, the ignored ones too", batch.gradient(count=tokens))
        yield Suspect("has the gradient of ignored tokens: they are not masked", batch.gradient(valid=everyone))
    if case.reduction == "mean":
        yield Suspect("is of the sum: not divided by the number of tokens in backward", batch.gradient(count=1.0))
    if case.label_smoothing:
        other = _other_definition(case)
        if other is not None:
            said = f"is of {_OTHER[case.smoothing]} label smoothing, not of the one that was asked"
            yield Suspect(said, batch.gradient(aim=batch.aim(shares(other))))
    if case.padding:
        top = batch.x.max(-1)
        p = np.exp(batch.x - top[..., None])
        yield Suspect(
            "has a probability in the padded columns: they are not masked",
            batch.gradient(p=p / p.sum(-1, keepdims=True)),
        )
    if batch.n == 1:
        return
    axis = case.axis
    own = [Parts.of(batch, right.top, columns, shares(case)) for columns in batch.pieces]
    yield Suspect(
        f"is of probabilities that add up to 1 on every rank: the all-reduce of their sum over {axis} is missing",
        batch.gradient(p=batch.by_columns([batch.probabilities(replace(right, total=one.total)) for one in own])),
    )
    tops = [batch.x[..., c].max(-1, initial=-np.inf) for c in batch.pieces]
    total = sum((Parts.of(batch, top, c, (0.0, 0.0)).total for top, c in zip(tops, batch.pieces, strict=True)), 0.0)
    parts = [Parts(top, np.asarray(total), right.aim) for top in tops]
    yield Suspect(
        f"is of probabilities with another maximum on each rank: its all-reduce over {axis} is missing",
        batch.gradient(p=batch.by_columns([batch.probabilities(one) for one in parts])),
    )
    unmasked = batch.hit.copy()
    for columns in batch.pieces:
        if columns.stop > columns.start:
            elsewhere = (batch.t < columns.start) | (batch.t >= columns.stop)
            unmasked[..., columns.start] += elsewhere & batch.valid
    yield Suspect(
        "is off by the output gradient in the rank's first column for targets that are elsewhere: they are not masked",
        batch.gradient(aim=batch.aim(hit=unmasked)),
    )
    if case.label_smoothing:
        local = [batch.aim(batch.local_shares(c)) for c in range(batch.n)]
        yield Suspect(f"{_LOCAL}, in backward", batch.gradient(aim=batch.by_columns(local)))


def _other_definition(case: CrossEntropyCase) -> CrossEntropyCase | None:
    if case.smoothing == "torch":
        return replace(case, smoothing="megatron") if case.vocabulary > 1 else None
    return replace(case, smoothing="torch")


def _own_maximum(batch: Batch) -> tuple[Values, ...]:
    """Each rank's losses where it subtracts the maximum of its own columns before the sums."""
    tops = [batch.x[..., columns].max(-1, initial=-np.inf) for columns in batch.pieces]
    parts = [Parts.of(batch, t, c, shares(batch.case)) for t, c in zip(tops, batch.pieces, strict=True)]
    total, aim = sum(one.total for one in parts), sum(one.aim for one in parts)
    return batch.per_rank([batch.loss(Parts(top, np.asarray(total), np.asarray(aim))) for top in tops])


def _first_columns_elsewhere(batch: Batch) -> Values:
    """The first logit below the maximum, [R, T], of every rank that does not have the target."""
    added = np.zeros(batch.t.shape)
    for columns in batch.pieces:
        if columns.stop > columns.start:
            elsewhere = (batch.t < columns.start) | (batch.t >= columns.stop)
            added += np.where(elsewhere, batch.x[..., columns.start] - batch.right.top, 0.0)
    return added
