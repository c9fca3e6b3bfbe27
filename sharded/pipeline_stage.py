"""One stage of a pipeline on its rank: forward and backward of single micro-batches, and what is kept between them.

With recomputation a stage keeps its inputs alone (GPipe, arXiv 1811.06965, section 2.3). Its forward runs again just
before its backward, with the random numbers of the first time; afterwards the streams are where they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sharded.pipeline_border import require_sendable
from sharded.random import RandomTracker, default_generator

#: What becomes of the outputs: themselves, or the micro-batch's share of the loss.
Finish = Callable[[Any], Any]


@dataclass
class Kept:
    """A micro-batch between its forward and its backward. inputs: leaves. outputs: with their graph, or None where they
    are computed again from the random states. bytes: of what is stored for it."""

    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...] | None
    finish: Finish
    states: list[Any]
    bytes: int


class Stage:
    """A module that computes one stage.

    number: of the stage. recompute: keep the inputs alone. trackers: random streams that the module draws from beside
    the default generators. measure: count the bytes that are stored.
    """

    def __init__(
        self,
        module: nn.Module,
        number: int,
        *,
        recompute: bool = False,
        trackers: Sequence[RandomTracker] = (),
        measure: bool = False,
    ) -> None:
        self.module, self.number = module, number
        self._recompute, self._trackers, self._measure = recompute, trackers, measure
        self._kept: dict[int, Kept] = {}
        self.again = 0  # bytes of the last recomputation

    def forward(
        self, micro_batch: int, inputs: Sequence[torch.Tensor], finish: Finish = lambda outputs: outputs
    ) -> tuple[torch.Tensor, ...]:
        """Runs the module on the inputs, leaves, and keeps what backward needs. The outputs are detached; they require
        a gradient where theirs is wanted.

        finish: made of the outputs, in the graph. Raises what the module raises, and TypeError where an output is no
        dense tensor.
        """
        states = self._random_states() if self._recompute else []
        outputs, stored = self._run(tuple(inputs), finish)
        kept = None if self._recompute else outputs
        self._kept[micro_batch] = Kept(
            tuple(inputs), kept, finish, states, bytes_of(inputs) if self._recompute else stored
        )
        return tuple(x.detach().requires_grad_(x.requires_grad) for x in outputs)

    def backward(self, micro_batch: int, gradients: Sequence[torch.Tensor] | None) -> list[torch.Tensor]:
        """Adds to the parameters' gradients, and returns those of the inputs that require one, in their order. Those of
        the first stage's inputs stay with them.

        gradients: of the outputs that require one, in their order; None for a loss, a scalar.
        """
        kept = self._kept.pop(micro_batch)
        outputs = kept.outputs
        if outputs is None:
            with self._random_states_at(kept.states):
                outputs, self.again = self._run(kept.inputs, kept.finish)
        roots = [x for x in outputs if x.requires_grad]
        if roots:
            torch.autograd.backward(roots, gradients)
        wanted = [x for x in kept.inputs if x.requires_grad and self.number > 0]
        found = [torch.zeros_like(x) if x.grad is None else x.grad for x in wanted]
        for x in wanted:
            x.grad = None
        return found

    def drop(self) -> None:
        """Forgets all micro-batches."""
        self._kept = {}

    @property
    def in_flight(self) -> int:
        """The micro-batches between their forward and their backward."""
        return len(self._kept)

    @property
    def stored(self) -> int:
        """The bytes that are stored for them; 0 where it is not measured."""
        return sum(kept.bytes for kept in self._kept.values()) if self._measure else 0

    def _run(self, inputs: tuple[torch.Tensor, ...], finish: Finish) -> tuple[tuple[torch.Tensor, ...], int]:
        with stored_bytes(self.module, inputs) if self._measure else _nothing() as stored:
            found = finish(self.module(*inputs))
        outputs = found if isinstance(found, tuple | list) else (found,)
        require_sendable(outputs)
        return tuple(outputs), stored[0]

    def _random_states(self) -> list[Any]:
        return [*(g.get_state() for g in self._generators()), *(tracker.state() for tracker in self._trackers)]

    def _load(self, states: list[Any]) -> None:
        generators = self._generators()
        for generator, state in zip(generators, states, strict=False):
            generator.set_state(state)
        for tracker, state in zip(self._trackers, states[len(generators) :], strict=True):
            tracker.load(state)

    @contextmanager
    def _random_states_at(self, states: list[Any]) -> Iterator[None]:
        now = self._random_states()
        self._load(states)
        try:
            yield
        finally:
            self._load(now)

    def _generators(self) -> list[torch.Generator]:
        devices = {x.device for x in (*self.module.parameters(), *self.module.buffers())} | {torch.device("cpu")}
        return [default_generator(device) for device in sorted(devices, key=str) if device.type != "meta"]


@contextmanager
def stored_bytes(module: nn.Module, inputs: Sequence[torch.Tensor]) -> Iterator[list[int]]:
    """Counts, in the list that it gives, the bytes that autograd saves inside, and those of the inputs. Memory that
    several tensors share is counted once, and that of the module's parameters and buffers not at all."""
    total = [0]
    seen = {_memory(x) for x in (*module.parameters(), *module.buffers())}

    def add(x: torch.Tensor) -> None:
        if x.layout == torch.strided and _memory(x) not in seen:
            seen.add(_memory(x))
            held.append(x)  # its memory is not used again while others are counted
            total[0] += x.untyped_storage().nbytes()

    def pack(x: torch.Tensor) -> torch.Tensor:
        add(x)
        return x.detach()

    held: list[torch.Tensor] = []
    for x in inputs:
        add(x)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield total


@contextmanager
def _nothing() -> Iterator[list[int]]:
    yield [0]


def _memory(x: torch.Tensor) -> tuple[str, int]:
    return str(x.device), x.untyped_storage().data_ptr()


def bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    """Those of their memory, each once."""
    return sum({_memory(x): x.untyped_storage().nbytes() for x in tensors}.values())
