"""Faults in data parallelism: gradients that are lost or not reduced, and losses that are normalised wrongly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from sharded import buckets, loss_normalization
from sharded.buckets import Bucket
from sharded.data_parallel import DistributedDataParallel
from sharded.loss_normalization import over_ranks
from sharded.mutants import Mutant, Patch


def _early_micro_batches_not_reduced() -> list[Patch]:
    def begin(self: DistributedDataParallel) -> None:
        # Only what comes while sync is on is reduced; what was there before is added again, as the rank has it.
        if not self._syncs:
            return
        self._finished, self._set_aside = True, {}
        original(self)

    original = DistributedDataParallel._begin
    return [(DistributedDataParallel, "_begin", begin)]


def _waiting_buckets_never_reduced() -> list[Patch]:
    finish, start = DistributedDataParallel.finish, Bucket.start

    def came(self: DistributedDataParallel, index: int, parameter: torch.Tensor) -> None:
        original(self, index, parameter)
        if self._syncs:
            self._bucket_of[index].waiting.discard(index)

    def start_nothing(self: DistributedDataParallel) -> None:
        """Buckets start together, so that ranks can agree on which; where they do not, the fault is a hang."""

    def finish_complete(self: DistributedDataParallel) -> None:
        incomplete = torch.tensor([len(bucket.waiting) for bucket in self._buckets])
        for bucket, missing in zip(self._buckets, over_ranks(incomplete, self.group).tolist(), strict=True):
            bucket.waiting = set(bucket.members) if missing else set()
        finish(self)

    def start_complete(self: Bucket, group: ProcessGroup, dtype: torch.dtype, divide_by: int) -> None:
        if not self.waiting:
            start(self, group, dtype, divide_by)

    original = DistributedDataParallel._came
    return [
        (DistributedDataParallel, "_came", came),
        (DistributedDataParallel, "_start_complete", start_nothing),
        (DistributedDataParallel, "finish", finish_complete),
        (Bucket, "start", start_complete),
    ]


def _mean_of_means() -> list[Patch]:
    original = loss_normalization.divisor

    def divisor(valid: Sequence[torch.Tensor], kind: loss_normalization.Kind, group: ProcessGroup) -> torch.Tensor:
        if kind != "token_mean":
            return original(valid, kind, group)
        return torch.stack([mask.sum() for mask in valid]).sum() * group.size()

    return [(loss_normalization, "divisor", divisor)]


def _zero_over_zero() -> list[Patch]:
    original = loss_normalization.share

    def share(
        token_losses: torch.Tensor, valid: torch.Tensor, kind: loss_normalization.Kind, of_batch: torch.Tensor
    ) -> torch.Tensor:
        if kind != "token_mean":
            return original(token_losses, valid, kind, of_batch)
        # Its own mean, times its share of the tokens.
        own = torch.where(valid, token_losses, torch.zeros((), dtype=token_losses.dtype)).sum() / valid.sum()
        return own * (valid.sum() / of_batch)

    return [(loss_normalization, "share", share)]


def _only_the_last_micro_batch() -> list[Patch]:
    def begin(self: DistributedDataParallel) -> None:
        original(self)
        if not self._set_aside:
            for parameter in self._trained:
                gradient = self._gradient(parameter)
                if gradient is not None:
                    gradient.zero_()

    original = DistributedDataParallel._begin
    return [(DistributedDataParallel, "_begin", begin)]


def _reduces_in_bf16() -> list[Patch]:
    original = buckets.sent_in

    def sent_in(dtype: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
        return torch.bfloat16 if asked is torch.float32 else original(dtype, asked)

    return [(buckets, "sent_in", sent_in)]


MUTANTS = (
    Mutant(
        "F39",
        "data_parallel",
        "sync switched on only around backward: the sum of the first micro-batches stays local",
        "karpathy/build-nanogpt#30",
        _early_micro_batches_not_reduced,
    ),
    Mutant(
        "F40",
        "data_parallel",
        "a bucket that waits for an unused parameter is never reduced",
        "pytorch/pytorch#128949",
        _waiting_buckets_never_reduced,
    ),
    Mutant(
        "F41",
        "data_parallel",
        "the mean of the ranks' means instead of the mean over tokens",
        "pytorch/torchtitan#2206",
        _mean_of_means,
    ),
    Mutant(
        "F42",
        "data_parallel",
        "a rank without a valid token divides 0 by 0 and spreads NaN",
        "modelscope/mcore-bridge#104",
        _zero_over_zero,
    ),
    Mutant(
        "F43",
        "data_parallel",
        "only the last micro-batch's gradient is kept",
        "NVIDIA/Megatron-LM#7186",
        _only_the_last_micro_batch,
    ),
    Mutant(
        "F44",
        "data_parallel",
        "reduces in bf16 where fp32 was asked",
        "pytorch/pytorch#190627",
        _reduces_in_bf16,
    ),
)
