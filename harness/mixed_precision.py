"""How a candidate presents a mixed-precision optimizer: what it made of the parameters that this rank holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.module import require_callables

if TYPE_CHECKING:
    import torch


class MixedPrecision:
    """A mixed-precision optimizer, and how a trainer uses it. ``step`` and ``scale`` must be given; what else is not
    given is not checked.

    step: called on every rank with the rank's own scaled gradients, in ``grad`` or, where the case says so, in
        ``main_grad``. It reduces them over dp, updates masters and model, and returns whether it was skipped, a bool.
    scale: ``scale()`` is by what the loss of the next step is multiplied.
    counters: what the scaler keeps beside it, as of `harness.loss_scale.LossScaler`.
    steps: ``steps()``: how many steps were made, without those that were skipped.
    norm, coefficient: after a step that was not skipped: the norm of the gradients before clipping, without the scale,
        and by what they were multiplied; numbers, or scalar tensors.
    master: ``master(name)``: the fp32 master of a parameter, flat, of the elements that are kept on this rank; asked
        where the model's parameter is not in fp32.
    state: ``state(name, kind)``: likewise a state tensor, ``momentum``, ``exp_avg`` or ``exp_avg_sq``.
    owned: ``owned(name)``: the ranges (start, stop) of this rank's elements of a parameter whose master and state it
        keeps, where these are cut over dp (default: all).
    reload: called on every rank after the model's weights were replaced by themselves.
    save: the whole state, or this rank's part, as what torch.save can write.
    load: takes what this rank's ``save`` gave, in a new optimizer of parameters of the same values.
    """

    def __init__(
        self,
        step: Callable[[], bool],
        scale: Callable[[], float | torch.Tensor],
        *,
        counters: Callable[[], Mapping[str, int]] | None = None,
        steps: Callable[[], int] | None = None,
        norm: Callable[[], float | torch.Tensor] | None = None,
        coefficient: Callable[[], float | torch.Tensor] | None = None,
        master: Callable[[str], torch.Tensor] | None = None,
        state: Callable[[str, str], torch.Tensor] | None = None,
        owned: Callable[[str], Sequence[tuple[int, int]]] | None = None,
        reload: Callable[[], object] | None = None,
        save: Callable[[], Mapping[str, Any]] | None = None,
        load: Callable[[Any], object] | None = None,
    ) -> None:
        functions: dict[str, object] = {"step": step, "scale": scale, "counters": counters, "steps": steps}
        functions |= {"norm": norm, "coefficient": coefficient, "master": master, "state": state, "owned": owned}
        require_callables("MixedPrecision", functions | {"reload": reload, "save": save, "load": load})
        self.step = step
        self.scale = scale
        self.counters = counters
        self.steps = steps
        self.norm = norm
        self.coefficient = coefficient
        self.master = master
        self.state = state
        self.owned = owned
        self.reload = reload
        self.save = save
        self.load = load
