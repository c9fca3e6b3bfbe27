"""What one process computes in a GPT case: the loss of the whole batch, and every gradient of it.

The pieces are those of `reference.transformer_layer`; gradients are autograd's. Each micro-batch of each data-parallel
rank has gradients of its own, which are then added up as ranks add them: over micro-batches, over the two copies of a
tied weight, over data-parallel ranks. Shapes as in `reference.gpt`; U units, the micro-batches of one size of all
ranks, T = S * b tokens of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from reference.gpt import GptCase
from reference.gpt_dropout import EMBEDDED, Masks, dropping
from reference.gpt_parameters import EMBEDDING, OUTPUT, POSITIONS, layer_name, shapes, tokens, valid_tokens
from reference.precision import computed_in, gradient_rounded_to, rounded_to
from reference.transformer import shapes as layer_shapes
from reference.transformer_layer import Change, attend, feed, linear, norm

Tensors = dict[str, torch.Tensor]


def expected(case: GptCase, given: Tensors, kept: Masks = MappingProxyType({})) -> dict[str, torch.Tensor | None]:
    """The loss, and every gradient, or with a sharded update every parameter after it; float64. kept: the masks of
    `reference.gpt_dropout`, where the case has dropout."""
    parts, shares = units(case, given, divisors(case), kept)
    totals = reduced(case, parts)
    out: dict[str, torch.Tensor | None] = {"loss": loss_of(case, shares)}
    for name, total in totals.items():
        if case.update == "none":
            out[f"{name}.grad"] = total
        else:
            with computed_in(case.dtype):
                out[name] = value_of(case, given, name) - total
    return out


def value_of(case: GptCase, given: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """A parameter's values."""
    return given[EMBEDDING if name == OUTPUT and case.tied else name]


def divisors(case: GptCase) -> torch.Tensor:
    """By what the loss of each token is divided in the loss of the batch: [N, D, B, S], the valid tokens of all ranks
    and micro-batches; infinity for a token that is not valid."""
    valid = valid_tokens(case)
    count = valid.sum((1, 2, 3), keepdim=True).clamp(min=1).to(torch.float64)
    return torch.where(valid, count, torch.inf)


def units(
    case: GptCase, given: Tensors, by: torch.Tensor, kept: Masks = MappingProxyType({})
) -> tuple[Tensors, torch.Tensor]:
    """The gradient that each micro-batch of each rank gives every parameter, [N, D, M, *shape], in the order of the
    case; and its share of the loss, [N, D, M]. by: as `divisors`. kept: as of `expected`."""
    parts: dict[str, list[torch.Tensor]] = {name: [] for name in shapes(case)}
    shares: list[torch.Tensor] = []
    order: list[int] = []
    for size in dict.fromkeys(case.sizes):
        numbers = [m for m, one in enumerate(case.sizes) if one == size]
        order += numbers
        found, share = _of_size(case, given, numbers, by, kept)
        shares.append(share)
        for name, gradient in found.items():
            parts[name].append(gradient)
    back = torch.tensor([order.index(m) for m in range(case.micro_batches)])
    gradients = {name: torch.cat(found, 2).index_select(2, back) for name, found in parts.items()}
    return gradients, torch.cat(shares, 2).index_select(2, back)


def loss_of(case: GptCase, shares: torch.Tensor) -> torch.Tensor:
    """The loss of the batch, [N, 1], from the shares of `units`."""
    with computed_in(case.loss_format.name):
        return shares.sum((1, 2)).unsqueeze(-1)


def reduced(case: GptCase, parts: Tensors) -> Tensors:
    """The gradients of the whole batch, [N, *shape], from those of `units`, all or some."""
    of_rank = of_ranks(case, parts)
    with computed_in(case.gradient_format.name):
        return {name: total.sum(1) for name, total in of_rank.items()}


def of_ranks(case: GptCase, parts: Tensors) -> Tensors:
    """The gradients of the batch of each data-parallel rank, [N, D, *shape], from those of `units`, all or some."""
    with computed_in(case.gradient_format.name):
        of_rank = {name: part.sum(2) for name, part in parts.items()}
        if case.tied and EMBEDDING in of_rank:
            both = of_rank[EMBEDDING] + of_rank[OUTPUT]
            of_rank |= {EMBEDDING: both, OUTPUT: both}
        return of_rank


def _of_size(
    case: GptCase, given: Tensors, numbers: list[int], by: torch.Tensor, kept: Masks
) -> tuple[Tensors, torch.Tensor]:
    """All micro-batches of one size: gradients [N, D, m, *shape] and shares of the loss [N, D, m]."""
    dims = case.replicas, case.data_parallel_size, len(numbers)
    ids, targets = (_picked(case, x, numbers) for x in tokens(case))
    divisor_UST = _picked(case, by, numbers)
    leaves = _leaves(case, given, dims[0] * dims[1] * dims[2])
    with torch.enable_grad():
        losses = token_losses(case, leaves, ids, targets, dropping(case, kept, numbers))
        with computed_in(case.loss_format.name):
            counted = torch.where(divisor_UST.isfinite(), losses, 0.0)
            share_U = (counted / divisor_UST.nan_to_num(posinf=1.0)).flatten(1).sum(-1)
        gradients = torch.autograd.grad(share_U.sum(), list(leaves.values()))
    wanted = shapes(case)
    found = {name: g.reshape(*dims, *wanted[name]) for name, g in zip(leaves, gradients, strict=True)}
    return found, share_U.detach().view(dims)


def _picked(case: GptCase, x: torch.Tensor, numbers: list[int]) -> torch.Tensor:
    """[N, D, B, S] -> [U, S, b], micro-batches of one size."""
    starts = [sum(case.sizes[:m]) for m in range(case.micro_batches)]
    rows = [x[:, :, starts[m] : starts[m] + case.sizes[m]] for m in numbers]
    return torch.stack(rows, 2).flatten(0, 2).transpose(1, 2)


def _leaves(case: GptCase, given: Tensors, units: int) -> Tensors:
    """Every parameter once for each unit, vectors with dimensions for the tokens: see `reference.transformer_layer`."""
    made: Tensors = {}
    for name, shape in shapes(case).items():
        heads = name.endswith(("q_norm_weight", "k_norm_weight"))
        dims = shape if len(shape) == 2 else (1,) * (3 if heads else 2) + shape
        made[name] = value_of(case, given, name).view(dims).expand(units, *dims).clone().requires_grad_()
    return made


def token_losses(
    case: GptCase, p: Tensors, ids: torch.Tensor, targets: torch.Tensor, drop: Callable[[str], Change]
) -> torch.Tensor:
    """ids, targets [U, S, b] -> the loss of every token, [U, S, b]. drop: see `reference.gpt_dropout.dropping`."""
    U, S, b = ids.shape
    rows = (torch.arange(U).view(-1, 1, 1) * case.vocabulary + ids).flatten()
    x = p[EMBEDDING].flatten(0, 1).index_select(0, rows).view(*ids.shape, case.hidden)
    if case.positions == "learned":
        x = x + p[POSITIONS][:, :S].unsqueeze(2)
    x = drop("")(EMBEDDED, x)
    layer = case.layer(b)
    names = layer_shapes(layer)
    for number in range(case.layers):
        own = {name: p[layer_name(number, name)] for name in names}
        change = drop(layer_name(number, ""))
        x = feed(layer, own, attend(layer, own, x, 0, change), change)
    logits = linear(p, "output", norm(layer, p, "norm", x))
    # The loss is in its own format: what goes back is rounded.
    return cross_entropy(case, gradient_rounded_to(case.dtype)(logits), targets)


def cross_entropy(case: GptCase, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """-log softmax(logits)[target], [U, S, b, V], [U, S, b] -> [U, S, b]."""
    with computed_in(case.loss_format.name):
        top = logits.detach().amax(-1, keepdim=True)
        below = logits - top
        log_total = below.exp().sum(-1, keepdim=True).log()
        lse = (log_total + top).detach()
        # 0: but where it is disturbed, x - lse may round as x - max - log(total) does not. Both are usual.
        log_total = log_total + (rounded_to(case.loss_format.name)(lse) - lse)
        return (log_total - below.gather(-1, targets.unsqueeze(-1))).squeeze(-1)
