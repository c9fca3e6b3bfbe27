"""Calling an autograd Function, typed."""

from __future__ import annotations

import torch


def apply(function: type[torch.autograd.Function], *arguments: object) -> torch.Tensor:
    """The one tensor that the function returns."""
    result: torch.Tensor = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


def apply_all(function: type[torch.autograd.Function], *arguments: object) -> tuple[torch.Tensor, ...]:
    """The tensors that the function returns."""
    results: tuple[torch.Tensor, ...] = function.apply(*arguments)  # type: ignore[no-untyped-call]
    return results
