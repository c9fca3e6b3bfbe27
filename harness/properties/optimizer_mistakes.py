"""The updates of optimizers with a known mistake in their formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from reference.sharded_optimizer import ShardedOptimizerCase, Tensors

#: Values, gradient, state, and the number of the step from 1, to new values and state.
Update = Callable[[ShardedOptimizerCase, torch.Tensor, torch.Tensor, Tensors, int], tuple[torch.Tensor, Tensors]]


def after(
    case: ShardedOptimizerCase, values: torch.Tensor, gradients: list[torch.Tensor], update: Update
) -> torch.Tensor:
    """The values after the last of the steps."""
    state: Tensors = {}
    for t, gradient in enumerate(gradients, start=1):
        values, state = update(case, values, gradient, state, t)
    return values


def mistakes(case: ShardedOptimizerCase) -> Iterator[tuple[str, Update]]:
    """Causes, as the rest of a sentence that starts with the parameter's name, and the updates that have them."""
    table = _ADAMW if case.optimizer == "adamw" else _SGD
    for cause, (update, applies) in table.items():
        if applies(case):
            yield cause, update


def _adamw(
    case: ShardedOptimizerCase,
    values: torch.Tensor,
    gradient: torch.Tensor,
    state: Tensors,
    t: int,
    *,
    corrected: tuple[int, int] = (1, 1),
    ahead: int = 0,
    coupled: bool = False,
    eps_inside: bool = False,
) -> tuple[torch.Tensor, Tensors]:
    """corrected: whether each moment is corrected for its start at zero. ahead: how far the count of steps is off.
    coupled: weight decay is added to the gradient. eps_inside: eps stands under the root."""
    (beta1, beta2), decay = case.betas, case.weight_decay
    gradient = gradient + decay * values if coupled else gradient
    mean = beta1 * state.get("exp_avg", torch.zeros_like(values)) + (1 - beta1) * gradient
    square = beta2 * state.get("exp_avg_sq", torch.zeros_like(values)) + (1 - beta2) * gradient * gradient
    first = mean / (1 - beta1 ** (t + ahead)) if corrected[0] else mean
    second = square / (1 - beta2 ** (t + ahead)) if corrected[1] else square
    root = torch.sqrt(second + case.eps) if eps_inside else torch.sqrt(second) + case.eps
    kept = values if coupled else values * (1 - case.lr * decay)
    return kept - case.lr * first / root, {"exp_avg": mean, "exp_avg_sq": square}


def _sgd(
    case: ShardedOptimizerCase,
    values: torch.Tensor,
    gradient: torch.Tensor,
    state: Tensors,
    t: int,
    *,
    decoupled: bool = False,
    nesterov: bool = False,
    dampened: bool = False,
) -> tuple[torch.Tensor, Tensors]:
    """decoupled: weight decay does not pass through the momentum. nesterov: the step looks ahead. dampened: gradients
    enter the momentum with a weight of 1 - momentum."""
    decay, momentum = case.weight_decay, case.momentum
    kept = values * (1 - case.lr * decay) if decoupled else values
    gradient = gradient if decoupled else gradient + decay * values
    share = 1 - momentum if dampened else 1.0
    moved = momentum * state.get("momentum", torch.zeros_like(values)) + share * gradient
    step = gradient + momentum * moved if nesterov else moved
    return kept - case.lr * step, {"momentum": moved}


def _with(update: Callable[..., tuple[torch.Tensor, Tensors]], **options: object) -> Update:
    def made(
        case: ShardedOptimizerCase, values: torch.Tensor, gradient: torch.Tensor, state: Tensors, t: int
    ) -> tuple[torch.Tensor, Tensors]:
        return update(case, values, gradient, state, t, **options)

    return made


def _always(case: ShardedOptimizerCase) -> bool:
    return True


def _decays(case: ShardedOptimizerCase) -> bool:
    return case.weight_decay > 0


def _moves(case: ShardedOptimizerCase) -> bool:
    return case.momentum > 0


_Table = Mapping[str, tuple[Update, Callable[[ShardedOptimizerCase], bool]]]

_ADAMW: _Table = {
    "is as if weight decay were added to the gradient, as in Adam and not in AdamW": (
        _with(_adamw, coupled=True),
        _decays,
    ),
    "is as if the moments were not corrected for their start at zero": (_with(_adamw, corrected=(0, 0)), _always),
    "is as if the second moment were not corrected for its start at zero": (_with(_adamw, corrected=(1, 0)), _always),
    "is as if the first moment were not corrected for its start at zero": (_with(_adamw, corrected=(0, 1)), _always),
    "is as if the count of steps were one ahead where the moments are corrected": (_with(_adamw, ahead=1), _always),
    "is as if eps were added under the root": (_with(_adamw, eps_inside=True), _always),
}

_SGD: _Table = {
    "is as if weight decay did not pass through the momentum": (
        _with(_sgd, decoupled=True),
        lambda case: _decays(case) and _moves(case),
    ),
    "is as with Nesterov's momentum": (_with(_sgd, nesterov=True), _moves),
    "is as if gradients were dampened by the momentum": (_with(_sgd, dampened=True), _moves),
    "is as without momentum": (
        lambda case, values, gradient, state, t: (
            values - case.lr * (gradient + case.weight_decay * values),
            {},
        ),
        _moves,
    ),
}
