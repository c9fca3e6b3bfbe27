"""Faults in pipelines: schedules that wait for what never comes or keep too much, messages that are read or overwritten
too early, and ranks that are not told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup, Work

from sharded import pipeline, pipeline_border, pipeline_schedules
from sharded.mutants import Mutant, Patch
from sharded.pipeline import Pipeline
from sharded.pipeline_border import Border, Label

_unfinished: list[Work | None] = []  # a message whose handle is gone is never delivered, which would be another fault


def _waits_for_the_last_handle_only() -> list[Patch]:
    def wait_for(works: Sequence[Work | None]) -> None:
        _unfinished.extend(works[:-1])
        for work in works[-1:]:
            if work is not None:
                work.wait()

    return [(pipeline_border, "wait_for", wait_for)]


def _ahead_of_micro_batches() -> list[Patch]:
    def forwards_ahead(stages: int, rank: int, micro_batches: int) -> int:
        return stages - rank

    return [(pipeline_schedules, "forwards_ahead", forwards_ahead)]


def _one_more_in_flight() -> list[Patch]:
    def forwards_ahead(stages: int, rank: int, micro_batches: int) -> int:
        return min(micro_batches, stages - rank + 1)

    return [(pipeline_schedules, "forwards_ahead", forwards_ahead)]


def _padded_micro_batch() -> list[Patch]:
    original = pipeline._Run.__init__

    def init(self: pipeline._Run, of: Pipeline, inputs: Sequence[Any], targets: Sequence[Any]) -> None:
        longest = max(len(target) for target in targets)
        padded = [[_padded(x, longest) for x in tensors] for tensors in inputs]
        original(self, of, padded, [_padded(target, longest) for target in targets])

    return [(pipeline._Run, "__init__", init)]


def _padded(x: torch.Tensor, length: int) -> torch.Tensor:
    """Its last sample again and again."""
    return torch.cat([x, x[-1:].expand(length - len(x), *x.shape[1:])])


_buffers: dict[Any, torch.Tensor] = {}


def _send_buffer_used_again() -> list[Patch]:
    original = Border.send

    def send(self: Border, peer: int, label: Label, tensors: Sequence[torch.Tensor] | None) -> None:
        copies = None if tensors is None else [_in_buffer(i, x) for i, x in enumerate(tensors)]
        original(self, peer, label, copies)

    return [(Border, "send", send)]


def _in_buffer(i: int, x: torch.Tensor) -> torch.Tensor:
    buffer = _buffers.setdefault((i, x.shape, x.dtype), torch.empty_like(x))
    return buffer.copy_(x.detach()).detach().requires_grad_(x.requires_grad)


def _raises_alone() -> list[Patch]:
    def raise_together(self: pipeline._Run) -> None:
        if self.failure is not None and self.failure.said is not None:
            raise pipeline.StageFailed(self.failure.said)

    return [(pipeline._Run, "_raise_together", raise_together)]


def _own_number_of_stages() -> list[Patch]:
    def require_chunks(chunks: int, group: ProcessGroup) -> None:
        """Every rank believes that the others have as many stages as it has."""

    return [(pipeline, "require_chunks", require_chunks)]


MUTANTS = (
    Mutant(
        "F49",
        "pipeline",
        "waits for the last of several send and receive handles only",
        "pytorch/pytorch#152938",
        _waits_for_the_last_handle_only,
    ),
    Mutant(
        "F50",
        "pipeline",
        "warm-up count without min(.., m): hangs for m < p",
        "pytorch/torchtitan#775",
        _ahead_of_micro_batches,
    ),
    Mutant("F60", "pipeline", "one activation more in flight than 1F1B needs", "own", _one_more_in_flight),
    Mutant("F63", "pipeline", "a smaller micro-batch is padded, and the padding counts", "own", _padded_micro_batch),
    Mutant("F66", "pipeline", "a send buffer is filled again before it is sent", "own", _send_buffer_used_again),
    Mutant("F69", "pipeline", "a stage that raises ends its own rank alone", "own", _raises_alone),
    Mutant("F70", "pipeline", "ranks with different numbers of stages are not refused", "own", _own_number_of_stages),
)
