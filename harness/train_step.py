"""How a candidate presents a trainer: a GPT on tensor-, pipeline- and data-parallel ranks, and how it learns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from harness.gpt import Gpt
from harness.module import require_callables
from reference.layout import Layout

if TYPE_CHECKING:
    import torch

    from harness.module import PartOf


class Trainer(Gpt):
    """One rank's part of a model, and how a whole training step is made with it. ``step``, ``parameters``, ``layouts``,
    ``scale`` and ``skipped`` must be given; what else is not given is not checked.

    step: as of `Gpt`: forward and backward of this rank's batch, of the loss times the scale, and the optimizer's step.
        It returns the loss of the whole batch, without the scale and before the step, on the ranks of the last stage.
    parameters, layouts, read_grad, before_forward: as of `Gpt`. close: called at the end, and before another trainer is
        built that loads what this one saved. loaded: called when the parameters have got the values of the case, so
        that masters must be made of them.
    scale: ``scale()`` is by what the loss of the next step is multiplied.
    skipped: after a step, whether it was skipped, a bool.
    counters, steps, norm, coefficient, save, load: as of `harness.mixed_precision.MixedPrecision`; the state has the
        weights too, and where random streams are.
    master, state, owned: likewise, by the names in ``parameters``; the elements are those of this rank's own part of
        the parameter, flat.
    after_backward: ``after_backward(hook)`` has the hook called in each step from then on, without arguments, when this
        rank's backwards are done, and its gradients not yet reduced over dp: it may change them.
    """

    def __init__(
        self,
        step: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None],
        parameters: Mapping[str, torch.Tensor | PartOf],
        layouts: Mapping[str, Layout],
        scale: Callable[[], float | torch.Tensor],
        skipped: Callable[[], bool],
        *,
        loaded: Callable[[], None] | None = None,
        read_grad: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
        close: Callable[[], None] | None = None,
        counters: Callable[[], Mapping[str, int]] | None = None,
        steps: Callable[[], int] | None = None,
        norm: Callable[[], float | torch.Tensor] | None = None,
        coefficient: Callable[[], float | torch.Tensor] | None = None,
        master: Callable[[str], torch.Tensor] | None = None,
        state: Callable[[str, str], torch.Tensor] | None = None,
        owned: Callable[[str], Sequence[tuple[int, int]]] | None = None,
        save: Callable[[], Mapping[str, Any]] | None = None,
        load: Callable[[Any], object] | None = None,
        after_backward: Callable[[Callable[[], None]], object] | None = None,
        before_forward: Callable[[Callable[[int, int], None]], object] | None = None,
    ) -> None:
        options: dict[str, Any] = {"loaded": loaded, "read_grad": read_grad, "close": close}
        super().__init__(step, parameters, layouts, **options, before_forward=before_forward)
        if scale is None or skipped is None:
            raise TypeError("Trainer(..., scale, skipped): expected functions, not None")
        functions: dict[str, object] = {"scale": scale, "skipped": skipped, "counters": counters, "steps": steps}
        functions |= {"norm": norm, "coefficient": coefficient, "master": master, "state": state, "owned": owned}
        require_callables("Trainer", functions | {"save": save, "load": load, "after_backward": after_backward})
        self.scale = scale
        self.skipped = skipped
        self.counters = counters
        self.steps = steps
        self.norm = norm
        self.coefficient = coefficient
        self.master = master
        self.state = state
        self.owned = owned
        self.save = save
        self.load = load
        self.after_backward = after_backward
