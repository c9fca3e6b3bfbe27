"""The network that subject data_parallel trains: made by the harness, alike for every candidate, from the case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from reference.data_parallel import DataParallelCase, Tensors


class Network(nn.Module):
    """Linear layers beside each other; called with tokens [samples, length, features] and the layers to use, in their
    order, it returns the loss of each token, [samples, length], in fp32 (fp64 for fp64)."""

    def __init__(self, case: DataParallelCase, given: Tensors, differs: bool = False) -> None:
        """differs: whether this is the rank on which something is invalid."""
        super().__init__()
        self.case, dtype = case, case.format.torch_dtype
        made: list[nn.Linear] = []
        for i, layer in enumerate(case.layers):
            linear = nn.Linear(case.features, layer.out, bias=layer.bias, dtype=dtype)
            self._load(linear, given, i)
            if layer.kind == "tied":
                linear.weight = made[0].weight
            linear.requires_grad_(layer.kind != "frozen")
            made.append(linear)
        # No buffers: a wrapper may send those.
        self.coefficients = [given[f"coefficient{i}"].to(dtype) for i in range(len(case.layers))]
        self.layers = nn.ModuleList(_spoiled(made, case) if differs and case.invalid else made)
        if differs and case.invalid == "order":
            owner: Any = made[0]._parameters if len(made) == 1 else self.layers._modules
            first = next(iter(owner))
            owner[first] = owner.pop(first)

    @staticmethod
    def _load(made: nn.Linear, given: Tensors, i: int) -> None:
        with torch.no_grad():
            if f"weight{i}" in given:
                made.weight.copy_(given[f"weight{i}"])
            if made.bias is not None:
                made.bias.copy_(given[f"bias{i}"])

    def parameters_of(self, i: int) -> dict[str, torch.Tensor]:
        """``weight`` and ``bias`` of a layer, as far as it has its own."""
        layer: Any = self.layers[i]
        found = {"weight": layer.weight} if self.case.layers[i].kind != "tied" else {}
        return {**found, "bias": layer.bias} if self.case.layers[i].bias else found

    def forward(self, x: torch.Tensor, used: Sequence[int]) -> torch.Tensor:
        total = torch.zeros((), dtype=self.case.loss_format.torch_dtype)
        for i in used:
            total = total + (self.layers[i](x) @ self.coefficients[i]).to(self.case.loss_format.torch_dtype)
        return total


def _spoiled(made: list[nn.Linear], case: DataParallelCase) -> list[nn.Linear]:
    """Layers whose parameters are not those of the other ranks."""
    dtype, weight = case.format.torch_dtype, made[0].weight
    if case.invalid == "number":
        made = [*made, nn.Linear(1, 1, bias=False, dtype=dtype)]
    elif case.invalid == "shape":
        made[0].weight = nn.Parameter(torch.zeros(weight.shape[0], weight.shape[1] + 1, dtype=dtype))
    elif case.invalid == "dtype":
        other = torch.float32 if case.dtype == "fp64" else torch.float64
        made[0].weight = nn.Parameter(weight.detach().to(other))
    return made
