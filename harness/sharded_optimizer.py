"""How a candidate presents a sharded optimizer: what it made of the parameters that it was given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.module import require_callables

if TYPE_CHECKING:
    import torch


class ShardedOptimizer:
    """An optimizer, and how a trainer uses it. Only ``step`` must be given; what else is not given is not checked.

    step: called on every rank with the rank's own gradients in ``grad``. It reduces them and updates the parameters in
        place, so that all ranks have all of them.
    owned: ``owned(name)`` gives the ranges (start, stop) of a parameter's flat elements whose state this rank keeps.
    state: ``state(name, kind)`` gives a state tensor of a parameter, ``momentum``, ``exp_avg`` or ``exp_avg_sq``, of
        the elements owned, in the order of the ranges. Needs ``owned``.
    save: the whole state, or this rank's part, as what torch.save can write.
    load: takes what this rank's ``save`` gave, in a new optimizer; at another size only a whole state can fit.
    """

    def __init__(
        self,
        step: Callable[[], object],
        *,
        owned: Callable[[str], Sequence[tuple[int, int]]] | None = None,
        state: Callable[[str, str], torch.Tensor] | None = None,
        save: Callable[[], Mapping[str, Any]] | None = None,
        load: Callable[[Any], object] | None = None,
    ) -> None:
        if state is not None and owned is None:
            raise TypeError("ShardedOptimizer(..., state=) without owned=: say of which elements the state is")
        require_callables(
            "ShardedOptimizer", {"step": step, "owned": owned, "state": state, "save": save, "load": load}
        )
        self.step = step
        self.owned = owned
        self.state = state
        self.save = save
        self.load = load
