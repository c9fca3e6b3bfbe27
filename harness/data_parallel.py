"""How a candidate presents data parallelism: what it made of the module that it was given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from harness.module import require_callables
from reference.layout import Layout, Whole, placements

if TYPE_CHECKING:
    import torch


class DataParallel:
    """A wrapped module, and how a trainer uses it. Only ``forward`` must be given: ``DataParallel(MyDDP(module))``.

    forward: called with the arguments of the module, once for each micro-batch, before its backward.
    no_sync: makes the context in which forward and backward of a micro-batch reduce nothing.
    finish: called after each backward outside of it.
    loss: ``loss(token_losses, valid, m)`` gives what backward is called on, a scalar: this rank's part of the loss of
        the batch in micro-batch m, times the number of ranks where gradients are averaged. token_losses: [samples,
        tokens], with their graph; valid: the masks of all micro-batches of the rank, bool [samples, tokens] each. By
        default the harness computes it, and how the candidate normalises is not checked.
    report: called after the last micro-batch of a step: the loss of the whole batch, a scalar. Not checked by default.
    zero_grad: called before each step; by default gradients become None, and main gradients zero.
    read_grad: ``read_grad(parameter)`` gives its gradient (default: ``main_grad`` where the case asks for it, else
        ``grad``).
    layout: how each gradient lies over the ranks, where they do not have all of it: ``Split(0, "dp", rule="chunk")``.
    close: called at the end; it must leave no hook on a parameter.
    """

    def __init__(
        self,
        forward: Callable[..., torch.Tensor],
        *,
        no_sync: Callable[[], AbstractContextManager[Any]] = nullcontext,
        finish: Callable[[], None] | None = None,
        loss: Callable[[torch.Tensor, Sequence[torch.Tensor], int], torch.Tensor] | None = None,
        report: Callable[[], torch.Tensor] | None = None,
        zero_grad: Callable[[], None] | None = None,
        read_grad: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
        layout: Layout = Whole(),  # noqa: B008
        close: Callable[[], None] | None = None,
    ) -> None:
        placements(layout)  # refuses what is not a layout
        functions = {"forward": forward, "no_sync": no_sync, "finish": finish, "loss": loss, "report": report}
        require_callables("DataParallel", {**functions, "zero_grad": zero_grad, "read_grad": read_grad, "close": close})
        self.forward = forward
        self.no_sync = no_sync
        self.finish = finish
        self.loss = loss
        self.report = report
        self.zero_grad = zero_grad
        self.read_grad = read_grad
        self.layout = layout
        self.close = close
