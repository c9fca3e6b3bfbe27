"""The dropout masks that a module draws in forward, seen where torch draws them, whoever calls it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from harness.local import WrongResult

#: The fact of an observation: what was drawn, by (micro-batch, place); of a GPT that by step.
DRAWN = "drawn masks"


@dataclass(frozen=True)
class Drawn:
    """Zeros and ones, ones with probability ``p``. Which of them stand for what is kept, p tells unless it is 1/2."""

    ones: NDArray[Any]
    p: float

    def kept(self, dropout: float, ones_are_kept: bool) -> NDArray[Any]:
        """What is kept where ``dropout`` drops; ones_are_kept: how to read p = 1/2."""
        kept = ones_are_kept if dropout == 0.5 else abs(self.p - dropout) > abs(self.p - (1 - dropout))
        return self.ones if kept else ~self.ones


class Draws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which every tensor of random zeros and ones is kept, in its order. It changes nothing."""

    supports_higher_order_operators = True  # PyTorch refuses them under a mode that does not say so

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Drawn] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        name, given = func.overloadpacket.__name__, dict(kwargs or {})
        if name in ("bernoulli", "bernoulli_"):
            # bernoulli(x) has the probabilities in x; else p is 1/2 where it is not given.
            default = args[0] if func is torch.ops.aten.bernoulli.default else 0.5
            p = given.get("p", args[1] if len(args) > 1 else default)
            self._keep(made, float(torch.as_tensor(p).double().mean()))
        elif name == "native_dropout":
            self._keep(made[1], 1 - args[1])
        return made

    def _keep(self, ones: torch.Tensor, p: float) -> None:
        self.found.append(drawn_of(ones, p))


def drawn_of(ones: torch.Tensor, p: float) -> Drawn:
    """A copy of what was drawn."""
    return Drawn((ones.detach() != 0).cpu().numpy().copy(), p)


def masks_of(m: int, drawn: Sequence[Drawn], shapes: Mapping[str, tuple[int, ...]]) -> dict[tuple[int, str], Drawn]:
    """The masks of a micro-batch's forward by (micro-batch, place), each in this rank's shape of its place. Raises
    WrongResult where another number of masks, or one of another size, was drawn."""
    if len(drawn) != len(shapes):
        raise WrongResult(
            f"forward of micro-batch {m} drew {len(drawn)} dropout masks; expected {len(shapes)}: {', '.join(shapes)}"
        )
    for (place, shape), one in zip(shapes.items(), drawn, strict=True):
        if one.ones.size != math.prod(shape):
            raise WrongResult(
                f"the dropout mask of {place} in micro-batch {m} has shape {one.ones.shape}; expected {shape}"
            )
    return {(m, place): Drawn(one.ones.reshape(shapes[place]), one.p) for place, one in zip(shapes, drawn, strict=True)}
