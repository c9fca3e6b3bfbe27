"""How a candidate presents a GPT on tensor-, pipeline- and data-parallel ranks: what it built, and how it steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from harness.module import require_callables
from reference.layout import Layout, placements

if TYPE_CHECKING:
    import torch

    from harness.module import PartOf


class Gpt:
    """One rank's part of a model, and how a trainer runs a whole step with it.

    step: ``step(ids, targets, valid)`` runs forward and backward of this rank's batch in all its micro-batches, and
        whatever completes the gradients. ids, targets: int64 [sequences, tokens]; valid: which tokens have a loss, bool
        of that shape. Ranks along tp and pp get the same, those along dp others. It returns the loss of the whole
        batch, over all ranks along dp, a scalar, on the ranks of the last stage, and None elsewhere.
    parameters: the tensors that this rank holds, by their names in the whole model: ``embedding_weight``,
        ``positions_weight``, ``layers.3.q_weight`` and so on as in subject transformer, ``norm_weight``, ``norm_bias``,
        ``output_weight``; or the `PartOf` a tensor that holds several. A tied output is named too, on the last stage:
        the copy, or the embedding itself where that is on the same rank.
    layouts: how each is cut over the ranks of its stage, by its full name or by what follows the last dot, the same on
        every rank, also for what this rank does not hold: ``{"q_weight": Split(0, "tp")}``. What is not named is whole.
    loaded: called when the parameters have got the values of the case.
    read_grad: ``read_grad(tensor)`` gives its gradient (default: ``main_grad`` where the case asks for it, else
        ``grad``).
    close: called at the end.
    before_forward: for cases with dropout: ``before_forward(hook)`` has ``hook(stage, m)`` called in each step from
        then on, before this rank computes the forward of micro-batch m in a stage, numbered through the whole pipeline,
        and not where it computes one again. What torch's bernoulli or dropout draw from then on are its masks, in
        order: of what is embedded, then of each layer's attention, and of what it adds to the residual after attention
        and after the mlp.
    """

    def __init__(
        self,
        step: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None],
        parameters: Mapping[str, torch.Tensor | PartOf],
        layouts: Mapping[str, Layout],
        *,
        loaded: Callable[[], None] | None = None,
        read_grad: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
        close: Callable[[], None] | None = None,
        before_forward: Callable[[Callable[[int, int], None]], object] | None = None,
    ) -> None:
        for layout in layouts.values():
            placements(layout)  # refuses what is not a layout
        if step is None:
            raise TypeError("Gpt(None, ...): expected a function, which runs a step")
        functions: dict[str, object] = {"step": step, "loaded": loaded, "read_grad": read_grad, "close": close}
        require_callables("Gpt", functions | {"before_forward": before_forward})
        self.step = step
        self.parameters = dict(parameters)
        self.layouts = dict(layouts)
        self.loaded = loaded
        self.read_grad = read_grad
        self.close = close
        self.before_forward = before_forward
