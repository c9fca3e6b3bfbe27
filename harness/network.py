"""The network that subject data_parallel trains: made by the harness, alike for every candidate, from the case."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from reference.data_parallel import DataParallelCase, Tensors


class Network(nn.Module):
    """Linear layers beside each other; called with tokens [samples, length, features] and the layers to use, in their
    order, it returns the loss of each token, [samples, length], in fp32 (fp64 for fp64)."""

    def __init__(self, case: DataParallelCase, given: Tensors, differs: bool = False) -> None:
        """differs: whether this is the rank on which something is invalid."""
        super().__init__()
        invalid, dtype = case.invalid if differs else None, case.format.torch_dtype
        self.layers = nn.ModuleList()
        for i, layer in enumerate(case.layers):
            made = nn.Linear(case.features, layer.out, bias=layer.bias, dtype=dtype)
            self._load(made, given, i)
            if layer.kind == "tied":
                made.weight = self.layers[0].weight
            made.requires_grad_(layer.kind != "frozen")
            self.layers.append(made)
        # No buffers: a wrapper may send those.
        self.coefficients = [given[f"coefficient{i}"].to(dtype) for i in range(len(case.layers))]
        self.loss_dtype = case.loss_format.torch_dtype
        if invalid is not None:
            self._spoil(case, invalid)

    @staticmethod
    def _load(made: nn.Linear, given: Tensors, i: int) -> None:
        with torch.no_grad():
            if f"weight{i}" in given:
                made.weight.copy_(given[f"weight{i}"])
            if made.bias is not None:
                made.bias.copy_(given[f"bias{i}"])

    def _spoil(self, case: DataParallelCase, invalid: str) -> None:
        """Parameters that are not those of the other ranks."""
        other = torch.float32 if case.dtype == "fp64" else torch.float64
        if invalid == "number":
            self.layers.append(nn.Linear(1, 1, bias=False, dtype=case.format.torch_dtype))
        elif invalid == "shape":
            weight = self.layers[0].weight
            self.layers[0].weight = nn.Parameter(torch.zeros(weight.shape[0], weight.shape[1] + 1, dtype=weight.dtype))
        elif invalid == "dtype":
            self.layers[0].weight = nn.Parameter(self.layers[0].weight.detach().to(other))
        else:  # the same ones, registered in another order
            owner = self.layers[0]._parameters if len(self.layers) == 1 else self.layers._modules
            first = next(iter(owner))
            owner[first] = owner.pop(first)  # type: ignore[assignment]

    def forward(self, x: torch.Tensor, used: Sequence[int]) -> torch.Tensor:
        total = torch.zeros((), dtype=self.loss_dtype)
        for i in used:
            total = total + (self.layers[i](x) @ self.coefficients[i]).to(self.loss_dtype)
        return total
