"""What optimizers do in one process, in single operations: SGD with momentum, and AdamW.

Each takes values, gradient and state tensors of one shape, and t, the number of the step from 1, and returns new values
and state.
"""

from __future__ import annotations

import torch

Tensors = dict[str, torch.Tensor]


def sgd(
    values: torch.Tensor,
    gradient: torch.Tensor,
    state: Tensors,
    t: int,
    lr: float,
    momentum: float,
    weight_decay: float,
) -> tuple[torch.Tensor, Tensors]:
    """Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML 2013, as
    torch.optim.SGD has it: weight decay is added to the gradient, and lr multiplies what is accumulated."""
    if weight_decay:
        gradient = gradient + weight_decay * values
    if momentum:
        gradient = gradient + momentum * state["momentum"]
        state = {"momentum": gradient}
    return values - lr * gradient, state


def adamw(
    values: torch.Tensor,
    gradient: torch.Tensor,
    state: Tensors,
    t: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> tuple[torch.Tensor, Tensors]:
    """Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, algorithm 2."""
    beta1, beta2 = betas
    mean = beta1 * state["exp_avg"] + (1 - beta1) * gradient
    square = beta2 * state["exp_avg_sq"] + (1 - beta2) * (gradient * gradient)
    # No rounding makes a square negative; a disturbance of one that is far smaller than in the undisturbed run may.
    corrected = torch.clamp(square / (1 - beta2**t), min=0.0)
    direction = mean / (1 - beta1**t) / (torch.sqrt(corrected) + eps)
    values = values * (1 - lr * weight_decay) - lr * direction
    return values, {"exp_avg": mean, "exp_avg_sq": square}
