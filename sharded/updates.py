"""How an optimizer changes parameters: on flat tensors, in place, in their own dtype, for any part of a parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SGD:
    """Gradient descent with momentum; weight decay is added to the gradient (Sutskever et al., ICML 2013, in the form
    of torch.optim.SGD: the learning rate multiplies what is accumulated)."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    def require_valid(self) -> None:
        """Raises ValueError for options without sense."""
        _require_from_zero(lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the tensors that it keeps beside each parameter; they begin as zeros."""
        return ("momentum",) if self.momentum else ()

    def update(
        self, values: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], step: int
    ) -> None:
        """Changes values and state, all [elements]. step: the number of this step, from 1."""
        if self.weight_decay:
            gradient = gradient.add(values, alpha=self.weight_decay)
        if self.momentum:
            gradient = state["momentum"].mul_(self.momentum).add_(gradient)
        values.add_(gradient, alpha=-self.lr)


@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, ICLR 2019, algorithm 2)."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def require_valid(self) -> None:
        """Raises ValueError for options without sense."""
        _require_from_zero(lr=self.lr, eps=self.eps, weight_decay=self.weight_decay)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas are {self.betas!r}: expected numbers from 0 to below 1")

    @property
    def states(self) -> tuple[str, ...]:
        """As of `SGD.states`."""
        return "exp_avg", "exp_avg_sq"

    def update(
        self, values: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], step: int
    ) -> None:
        """As `SGD.update`."""
        (beta1, beta2), mean, square = self.betas, state["exp_avg"], state["exp_avg_sq"]
        values.mul_(1 - self.lr * self.weight_decay)
        mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        scale = square.div(1 - beta2**step).sqrt_().add_(self.eps)
        values.addcdiv_(mean, scale, value=-self.lr / (1 - beta1**step))


Rule = SGD | AdamW


def _require_from_zero(**options: object) -> None:
    for name, value in options.items():
        if not isinstance(value, float | int) or not 0 <= value < math.inf:
            raise ValueError(f"{name} is {value!r}: expected a finite number from 0")
