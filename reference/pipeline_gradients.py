"""What one process computes in a pipeline case: gradients, losses and updated parameters, in the order and the formats
in which stages compute them. Shapes as in `reference.pipeline`; T = S * L tokens of a micro-batch.

The whole batch is computed in micro-batches whose gradients are added up. In float64 that is the gradient of the whole
batch at once, to the last bits; how much it rounds is that of the micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from reference.pipeline import PipelineCase, Tensors
from reference.pipeline_stages import blocks_of, copies, parameters, starts, tied, valid_tokens
from reference.precision import computed_in, gradient_rounded_to, rounded_to

#: Sees an activation, or the gradient of one.
See = Callable[[torch.Tensor], None]


def expected(case: PipelineCase, given: Tensors) -> dict[str, torch.Tensor | None]:
    """Float64; None where there must be no gradient."""
    out: dict[str, torch.Tensor | None] = {}
    values = at_start(case, given)
    kept: Tensors = {}
    for step in range(case.steps):
        gradients, loss = one_step(case, given, values, step)
        out[f"loss[{step}]"] = loss
        if case.update == "sharded":
            values = updated(case, values, gradients)
            out |= {f"{name}[{step}]": values[name][0] for name in parameters(case)}
            continue
        with computed_in(case.dtype):
            kept = {name: kept[name] + g for name, g in gradients.items()} if case.accumulate and kept else gradients
        for name, parameter in parameters(case).items():
            out[f"{name}[{step}].grad"] = rounded_to(case.dtype)(kept[name]) if parameter.trains else None
    return out


def at_start(case: PipelineCase, given: Tensors) -> Tensors:
    """Every parameter as its stage holds it, once for each pipeline: [R, *shape]."""
    source = {block.copy: f"weight{source}" for source, found in copies(case).items() for block in found}
    return {name: given[source.get(name, name)].expand(case.replicas, *p.shape) for name, p in parameters(case).items()}


def updated(case: PipelineCase, values: Tensors, gradients: Tensors) -> Tensors:
    """The parameters after a step with the gradients of all pipelines, [R, *shape], R times the same."""
    made = {}
    with computed_in(case.dtype):
        for name, value in values.items():
            made[name] = (value - gradients[name].sum(0)) if name in gradients else value
    return made


def one_step(case: PipelineCase, given: Tensors, values: Tensors, step: int) -> tuple[Tensors, torch.Tensor]:
    """The gradients of every parameter that trains, [R, *shape], those of tied ones summed over the stages; and the
    loss, [R, 1]."""
    shares, of_batch = [], []
    for m in range(case.micro_batches):
        found, share = micro_batch(case, given, values, step, m)
        of_batch.append(found)
        shares.append(share)
    with computed_in(case.loss_format.name):
        loss = torch.stack(shares).sum(0).unsqueeze(-1)
    with computed_in(case.dtype):
        gradients = {name: torch.stack([found[name] for found in of_batch]).sum(0) for name in of_batch[0]}
    return summed_over_copies(case, gradients), loss


def summed_over_copies(case: PipelineCase, gradients: Tensors) -> Tensors:
    """Tied parameters get the sum over all stages that hold one."""
    names = [block.copy for block in tied(case)]
    if not names or names[0] not in gradients:
        return gradients
    with computed_in(case.dtype):
        total = torch.stack([gradients[name] for name in names]).sum(0)
    return {**gradients, **dict.fromkeys(names, total)}


def micro_batch(
    case: PipelineCase,
    given: Tensors,
    values: Tensors,
    step: int,
    m: int,
    weights: torch.Tensor | None = None,
    see: See | None = None,
) -> tuple[Tensors, torch.Tensor]:
    """The gradient that a micro-batch gives each copy of a parameter, [R, *shape], and its part of the loss, [R].
    weights: of the tokens, where not `token_weights`. see: is shown every activation and its gradient."""
    begin, end = starts(case)[m : m + 2]
    trained = {name: p for name, p in parameters(case).items() if p.trains}
    leaves = {name: values[name].detach().clone().requires_grad_(name in trained) for name in values}
    with torch.enable_grad():
        x = given[f"input[{step}]"][:, begin:end].flatten(1, 2)
        ids = given[f"ids[{step}]"][:, begin:end].flatten(1, 2) if case.ids else None
        token_RT = token_losses(case, leaves, x, ids, given["coefficient"], see)
        weights_RT = (token_weights(case, step) if weights is None else weights)[:, begin:end].flatten(1, 2)
        with computed_in(case.loss_format.name):
            share = (token_RT * weights_RT).sum(-1)
        found = torch.autograd.grad(share.sum(), [leaves[name] for name in trained])
    return dict(zip(trained, found, strict=True)), share.detach()


def token_losses(
    case: PipelineCase,
    leaves: Tensors,
    x: torch.Tensor,
    ids: torch.Tensor | None,
    coefficient: torch.Tensor,
    see: See | None,
) -> torch.Tensor:
    """x: [R, T, H] -> [R, T]."""
    skip: torch.Tensor | None = None
    weight_of: dict[tuple[int, int], str] = {}
    for stage in range(case.stages):
        if stage > 0:
            last = stage == case.stages - 1
            if skip is not None and (case.skip == "every" or (case.skip == "last" and last)):
                x = _seen(see, x + skip.sum(-1, keepdim=True))
            if ids is not None:
                x = x + ids.unsqueeze(-1)
        for block in blocks_of(case, stage):
            if block.source is not None:
                name = weight_of.setdefault((stage, block.source), block.copy)
                x = x @ leaves[name].transpose(-1, -2)
                if block.bias:
                    x = x + leaves[f"bias{block.index}"].unsqueeze(-2)
            x = _activated(block.activation, x)
            x = _seen(see, x)
            if block.index == 0 and case.skip != "none":
                skip = x
    # The loss of a token is in the loss' format: its gradient is rounded on the way back.
    return gradient_rounded_to(case.dtype)(_seen(see, (x * coefficient).sum(-1)))


def _activated(name: str, x: torch.Tensor) -> torch.Tensor:
    if name == "relu":
        return torch.relu(x)
    return torch.tanh(x) if name == "tanh" else x


def _seen(see: See | None, x: torch.Tensor) -> torch.Tensor:
    if see is not None:
        see(x.detach())
        if x.requires_grad:
            x.register_hook(lambda grad: see(grad.detach()))  # type: ignore[no-untyped-call]
    return x


def token_weights(case: PipelineCase, step: int) -> torch.Tensor:
    """By what the loss of each token is multiplied in the loss of the batch: [R, B, L]."""
    valid = valid_tokens(case, step).to(torch.float64)
    if case.loss == "sum":
        return valid
    with computed_in(case.loss_format.name):
        return valid / valid.sum((1, 2), keepdim=True).clamp(min=1)


def largest(case: PipelineCase, magnitudes: Tensors) -> dict[int, float]:
    """By precision, the largest number that can appear where no value is larger than these magnitudes, in units of the
    smallest weight of a token."""
    found = {case.format.precision: 0.0, case.loss_format.precision: 0.0}

    def see(x: torch.Tensor) -> None:
        found[case.format.precision] = max(found[case.format.precision], float(x.abs().max()))

    values, total = at_start(case, magnitudes), dict[str, torch.Tensor]()
    most = max([1, *(n for step in range(case.steps) for n in valid_tokens(case, step).sum((1, 2)).tolist())])
    units = most if case.loss == "token_mean" else 1
    for step in range(case.steps):
        valid = valid_tokens(case, step).to(torch.float64)
        shares, of_step = torch.zeros(case.replicas, dtype=torch.float64), dict[str, torch.Tensor]()
        for m in range(case.micro_batches):
            gradients, share = micro_batch(case, magnitudes, values, step, m, valid, see)
            shares = shares + share
            of_step = {name: of_step.get(name, torch.zeros(())) + g for name, g in gradients.items()}
        of_step = summed_over_copies(case, of_step)
        found[case.loss_format.precision] = max(found[case.loss_format.precision], float(shares.max()))
        total = {name: total.get(name, torch.zeros(())) + g for name, g in of_step.items()}
        for gradient in (total if case.accumulate else of_step).values():
            see(gradient)
        if case.update == "sharded":
            values = {name: units * v + of_step[name].sum(0) if name in of_step else v for name, v in values.items()}
            for value in values.values():
                see(value)
    return found
