"""What one process computes on the whole batch of a data-parallel case: gradients and losses, in the order and the
formats in which ranks compute them. Shapes as in `reference.data_parallel`; T = S * L tokens.
"""

from __future__ import annotations

import torch

from reference.data_parallel import DataParallelCase, Tensors, frozen
from reference.data_parallel_tokens import token_weights
from reference.precision import computed_in, rounded_to


def expected(case: DataParallelCase, given: Tensors) -> dict[str, torch.Tensor | None]:
    """Gradients and losses of one process, float64; None where there must be no gradient."""
    out: dict[str, torch.Tensor | None] = {}
    for step in range(case.steps):
        weights = token_weights(case, step)
        for name, locals_ in local_gradients(case, given, step, weights).items():
            out[f"{name}[{step}].grad"] = reduced(case, locals_)
        for name in frozen(case):
            out[f"{name}[{step}].grad"] = None
        out[f"loss[{step}]"] = loss_of(case, given, step, weights)
    return out


def local_gradients(case: DataParallelCase, given: Tensors, step: int, weights: torch.Tensor) -> Tensors:
    """What each rank's backward gives in each micro-batch, [M, R, n, *shape], by parameter. weights: of each token, as
    of `token_weights`; n times that where the wrapper averages."""
    n, M = case.parallel_size, case.micro_batches
    with computed_in(case.loss_format.name):
        scaled = weights * n if case.reduction == "average" else weights * 1
    scaled_MRnT = rounded_to(case.dtype)(scaled).flatten(3)
    x_MRnTH = torch.stack([given[f"input[{step * M + m}]"] for m in range(M)]).flatten(3, 4)
    found: Tensors = {}
    for i, layer in enumerate(case.layers):
        if layer.kind == "frozen":
            continue
        used_Mn = torch.tensor([[float(i in case.used(c, step * M + m)) for c in range(n)] for m in range(M)])
        used_MRn = used_Mn.to(torch.float64).unsqueeze(1)
        g_MRnTO = scaled_MRnT.unsqueeze(-1) * given[f"coefficient{i}"] * used_MRn[..., None, None]
        gradient = g_MRnTO.transpose(-1, -2) @ x_MRnTH
        name = "weight0" if layer.kind == "tied" else f"weight{i}"
        found[name] = found[name] + gradient if name in found else gradient
        if layer.bias:
            found[f"bias{i}"] = g_MRnTO.sum(-2)
    return found


def reduced(case: DataParallelCase, locals_: torch.Tensor) -> torch.Tensor:
    """[M, R, n, *shape] -> [R, *shape]: accumulated over micro-batches and reduced over ranks, in the case's order and
    formats."""
    kept, sent = case.kept.name, case.reduced_in.name
    divisor = case.parallel_size if case.reduction == "average" else 1
    if case.sync == "last":
        with computed_in(kept):
            total = locals_.sum(0)
        total = over_ranks(total, 1, sent, divisor)
    else:
        coarser = kept if case.kept.precision < case.reduced_in.precision else sent
        each = over_ranks(locals_, 2, sent, divisor)
        with computed_in(coarser):
            total = each.sum(0)
    return rounded_to(kept)(total)


def over_ranks(gradients: torch.Tensor, dim: int, sent: str, divisor: int) -> torch.Tensor:
    """The ranks' gradients, along ``dim``, reduced in the format ``sent``. divisor: their number for the average."""
    with computed_in(sent):
        return (rounded_to(sent)(gradients) / divisor).sum(dim)


def loss_of(case: DataParallelCase, given: Tensors, step: int, weights: torch.Tensor) -> torch.Tensor:
    """[R]"""
    n, M = case.parallel_size, case.micro_batches
    total = []
    for m in range(M):
        x_RnTH = given[f"input[{step * M + m}]"].flatten(2, 3)
        token_RnT = torch.zeros(x_RnTH.shape[:-1], dtype=torch.float64)
        for i, layer in enumerate(case.layers):
            used = torch.tensor([float(i in case.used(c, step * M + m)) for c in range(n)], dtype=torch.float64)
            if not used.any():
                continue
            y_RnTO = x_RnTH @ given["weight0" if layer.kind == "tied" else f"weight{i}"].T
            if layer.bias:
                y_RnTO = y_RnTO + given[f"bias{i}"]
            token_RnT = token_RnT + (y_RnTO @ given[f"coefficient{i}"]) * used.unsqueeze(-1)
        total.append(token_RnT)
    with computed_in(case.loss_format.name):
        return (torch.stack(total) * weights.flatten(3)).sum((0, 2, 3))
