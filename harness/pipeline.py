"""How a candidate presents a pipeline: what it made of the stages that it was given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from harness.module import require_callables

if TYPE_CHECKING:
    import torch


class Pipeline:
    """The stages of one rank, and how a trainer runs a batch through them. Only ``step`` must be given.

    step: ``step(inputs, valid)`` runs forward and backward of one batch, and leaves gradients in the parameters.
        inputs: the tensors of the whole batch, samples first; valid: which tokens count, bool [samples, tokens]. Every
        rank gets them; the first stage needs the inputs, and the loss the masks. It returns the loss of the batch, a
        scalar, on the rank of the last stage, and None elsewhere.
    zero_grad: called before each step, unless gradients accumulate; by default they become None.
    read_grad: ``read_grad(parameter)`` gives its gradient (default: ``grad``).
    close: called at the end.
    """

    def __init__(
        self,
        step: Callable[[Sequence[torch.Tensor], torch.Tensor], torch.Tensor | None],
        *,
        zero_grad: Callable[[], None] | None = None,
        read_grad: Callable[[torch.Tensor], torch.Tensor | None] | None = None,
        close: Callable[[], None] | None = None,
    ) -> None:
        if step is None:
            raise TypeError("Pipeline(None): expected a function, which runs a step")
        functions = {"step": step, "zero_grad": zero_grad, "read_grad": read_grad, "close": close}
        require_callables("Pipeline", functions)
        self.step = step
        self.zero_grad = zero_grad
        self.read_grad = read_grad
        self.close = close
