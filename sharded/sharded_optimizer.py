"""A sharded optimizer (ZeRO-1): each rank along the data-parallel axis keeps and updates its part of the state.

Parameters of one dtype are laid end to end. Gradients are reduce-scattered, so that each owner has the reduced gradient
of its elements; it updates them; the updated parameters are all-gathered. (Rajbhandari et al., "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models", SC 2020, section 5.1.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.distributed import ProcessGroup

from sharded import wire
from sharded.alike import require_alike
from sharded.buckets import sent_in
from sharded.data_parallel import require_member
from sharded.flat_buffers import Cut
from sharded.saved_state import SavedState, require_fits
from sharded.updates import Rule

Reduction = Literal["average", "sum"]
MASTER = "master"


@dataclass
class Buffer:
    """The parameters of one dtype, and this rank's part of what is kept for them.

    parameters: by name. kept: the dtype of the state and of the update. state: by name, [part] each; with ``master``,
    the owner's own copy of the parameters in the dtype kept, where that is not theirs.
    """

    parameters: dict[str, torch.Tensor]
    cut: Cut
    kept: torch.dtype
    state: dict[str, torch.Tensor] = field(default_factory=dict)


class ShardedOptimizer:
    """Updates parameters that are alike on all ranks of a group, and keeps them alike, with the same bits.

    Call `step` on every rank after backward, with each rank's own gradients in ``grad``: it reduces them. A parameter
    without a gradient on a rank has zeros there. Gradients themselves stay as they are.

    parameters: pairs of name and parameter; those that do not require a gradient are left alone. reduction: of the
    ranks' gradients. reduce_dtype: in which they travel, by default their own. master_weights: bf16 and fp16 parameters
    are kept and updated in fp32, and rounded when they are sent.

    Raises ValueError, on every rank of the group, where parameters or options differ between its ranks, where no
    parameter trains, and for an unknown reduction; on a rank outside of the group, where it is.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.Tensor]],
        group: ProcessGroup,
        rule: Rule,
        *,
        reduction: Reduction = "average",
        reduce_dtype: torch.dtype | None = None,
        master_weights: bool = False,
    ) -> None:
        require_member(group)
        named = list(parameters)
        options = f"reduction={reduction!r}, reduce_dtype={reduce_dtype}, master_weights={master_weights}"
        require_alike(named, f"{rule}, {options}", group)
        if reduction not in ("average", "sum"):
            raise ValueError(f"reduction {reduction!r}: expected 'average' or 'sum'")
        trained = {name: p for name, p in named if p.requires_grad}
        if len(trained) < sum(p.requires_grad for _, p in named):
            raise ValueError("two parameters have one name: expected a name for each")
        if not trained:
            raise ValueError(f"none of {len(named)} parameters trains: expected one or more that require a gradient")
        self.group, self.rule = group, rule
        self._divide_by = group.size() if reduction == "average" else 1
        self._reduce_dtype = reduce_dtype
        self._steps = 0
        self._buffers = [
            self._buffer({name: p for name, p in trained.items() if p.dtype == dtype}, master_weights)
            for dtype in dict.fromkeys(p.dtype for p in trained.values())
        ]

    def _buffer(self, parameters: dict[str, torch.Tensor], master_weights: bool) -> Buffer:
        first = next(iter(parameters.values()))
        kept = torch.promote_types(first.dtype, torch.float32) if master_weights else first.dtype
        cut = Cut(tuple(p.numel() for p in parameters.values()), self.group.size())
        made = Buffer(parameters, cut, kept)
        made.state = {name: first.new_zeros(cut.part, dtype=kept, requires_grad=False) for name in self.rule.states}
        if kept != first.dtype:
            made.state[MASTER] = self._values(made).to(kept)
        return made

    @torch.no_grad()
    def step(self) -> None:
        """Reduces the gradients and updates the parameters. Every rank of the group must call it."""
        self._steps += 1
        for buffer in self._buffers:
            self._update(buffer)

    def _update(self, buffer: Buffer) -> None:
        self._apply(buffer, self._reduced(buffer))

    def _apply(self, buffer: Buffer, gradient: torch.Tensor) -> None:
        """Updates this rank's elements by their reduced gradient, [part], and has all ranks get all of them."""
        values = buffer.state[MASTER] if MASTER in buffer.state else self._values(buffer)
        state = {name: tensor for name, tensor in buffer.state.items() if name != MASTER}
        self.rule.update(values, gradient, state, self._steps)
        own = values.to(next(iter(buffer.parameters.values())).dtype)
        hand_out(buffer, wire.gathered(own, self.group, 0))

    def _reduced(self, buffer: Buffer) -> torch.Tensor:
        """The reduced gradient of this rank's elements, [part], in the dtype that is kept."""
        flat = buffer.cut.joined([self._local(p) for p in buffer.parameters.values()])
        # To the format of the wire first: there the quotient may be more exact than here.
        flat = divided(flat.to(sent_in(flat.dtype, self._reduce_dtype)), self._divide_by)
        return wire.reduce_scattered(flat, self.group, 0).to(buffer.kept)

    def _local(self, p: torch.Tensor) -> torch.Tensor:
        """This rank's own gradient of a parameter, where there is none zeros."""
        return torch.zeros_like(p) if p.grad is None else p.grad

    def _values(self, buffer: Buffer) -> torch.Tensor:
        """This rank's elements of the parameters, [part], a copy."""
        joined = buffer.cut.joined([p.detach() for p in buffer.parameters.values()])
        return buffer.cut.own(joined, self.group.rank()).clone()

    def owned(self) -> dict[str, tuple[int, int]]:
        """Of each parameter that trains, the range (start, stop) of its elements that this rank owns."""
        return {
            name: piece
            for buffer in self._buffers
            for name, piece in zip(buffer.parameters, buffer.cut.owned(self.group.rank()), strict=True)
        }

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        """Of each parameter that trains, what is kept for the elements that this rank owns: 1-d tensors by name."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for buffer in self._buffers:
            at = 0
            for name, (start, stop) in zip(buffer.parameters, buffer.cut.owned(self.group.rank()), strict=True):
                found[name] = {kind: x.narrow(0, at, stop - start).clone() for kind, x in buffer.state.items()}
                at += stop - start
        return found

    def save(self) -> SavedState:
        """The whole state, alike on every rank, for a group of any size. Every rank of the group must call it."""
        parameters: dict[str, dict[str, torch.Tensor]] = {}
        for buffer in self._buffers:
            joined = {kind: wire.gathered(part, self.group, 0) for kind, part in buffer.state.items()}
            parts = {kind: list(buffer.cut.tensors(flat)) for kind, flat in joined.items()}
            for index, (name, p) in enumerate(buffer.parameters.items()):
                parameters[name] = {kind: found[index].view(p.shape).clone() for kind, found in parts.items()}
        return {
            "rule": type(self.rule).__name__,
            "steps": self._steps,
            "owners": self.group.size(),
            "shapes": {name: tuple(p.shape) for b in self._buffers for name, p in b.parameters.items()},
            "parameters": parameters,
        }

    def require_own(self, saved: Mapping[str, Any]) -> None:
        """Raises ValueError for a state that is not of this optimizer, as `load` does."""
        due = {name: (tuple(p.shape), tuple(b.state)) for b in self._buffers for name, p in b.parameters.items()}
        require_fits(saved, type(self.rule).__name__, due)

    def load(self, saved: Mapping[str, Any]) -> None:
        """Takes over a state that was saved, at this or another size of the group. Sends nothing.

        Raises ValueError, and changes nothing, where it is not of this optimizer: of another rule, of other parameters,
        shapes or state tensors. Which, the message says.
        """
        self.require_own(saved)
        for buffer in self._buffers:
            for kind, part in buffer.state.items():
                whole = buffer.cut.joined([saved["parameters"][name][kind] for name in buffer.parameters])
                part.copy_(buffer.cut.own(whole, self.group.rank()))
        self._steps = saved["steps"]


def divided(gradient: torch.Tensor, by: int) -> torch.Tensor:
    """This rank's share of the average, where that is asked for; by: 1 for a sum."""
    return gradient / by if by > 1 else gradient


def hand_out(buffer: Buffer, flat: torch.Tensor) -> None:
    """Gives every parameter its updated elements."""
    for p, values in zip(buffer.parameters.values(), buffer.cut.tensors(flat), strict=True):
        p.copy_(values.view(p.shape))
