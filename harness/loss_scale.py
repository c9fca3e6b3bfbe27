"""How a candidate presents a loss scaler: what it is asked in every step, and what is read of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.module import require_callables

if TYPE_CHECKING:
    import torch


class LossScaler:
    """A loss scaler, and how a trainer uses it. ``scale`` and ``update`` must be given; of the rest, what is not given
    is not checked.

    scale: ``scale()`` is by what the loss of the next step is multiplied.
    update: ``update(found_inf)`` is told after each step whether this rank's own gradients have an infinity or a NaN,
        and returns whether the step is to be skipped, on all ranks alike.
    check: ``check(gradients)``: whether this rank's gradients, a list of tensors, have an infinity or a NaN; then
        ``update`` is told that. Without it the harness looks itself.
    counters: what is kept beside the scale, by the names ``good`` (good steps in a row since the scale grew or
        overflowed) and ``left`` (overflows until it backs off, of which the last one does; 0 where each does), or one.
    state: the whole state, as what torch.save can write.
    load: takes what ``state`` gave, in this scaler or in a new one.
    set_interval: changes the growth interval.
    """

    def __init__(
        self,
        scale: Callable[[], float | torch.Tensor],
        update: Callable[[bool], object],
        *,
        check: Callable[[Sequence[torch.Tensor]], object] | None = None,
        counters: Callable[[], Mapping[str, int]] | None = None,
        state: Callable[[], Any] | None = None,
        load: Callable[[Any], object] | None = None,
        set_interval: Callable[[int], object] | None = None,
    ) -> None:
        functions = {"scale": scale, "update": update, "check": check, "counters": counters}
        functions |= {"state": state, "load": load, "set_interval": set_interval}
        require_callables("LossScaler", functions)
        self.scale = scale
        self.update = update
        self.check = check
        self.counters = counters
        self.state = state
        self.load = load
        self.set_interval = set_interval
