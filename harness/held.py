"""A parameter as the built module holds it: a tensor of its own, or a part of one that several parameters share."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from harness.local import WrongAdapter, WrongResult, as_local, require_values
from harness.module import PartOf


@dataclass(frozen=True)
class Held:
    """The tensor, and which of its elements are the parameter: their positions in the rank's flattened tensor, in the
    parameter's local shape; None where it is the whole tensor."""

    tensor: torch.Tensor
    positions: torch.Tensor | None = None

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """The parameter's elements of a tensor that is like the rank's own: of its values, or of its gradient."""
        return whole if self.positions is None else whole.reshape(-1)[self.positions]

    def local(self) -> torch.Tensor:
        """The rank's own values."""
        return self.of(as_local(self.tensor.detach()))

    def fill(self, values: torch.Tensor) -> None:
        """Sets the rank's own values, and leaves the tensor's other elements alone."""
        with torch.no_grad():
            local = as_local(self.tensor)
            if self.positions is None:
                local.copy_(values)
                return
            whole = local.reshape(-1).clone()  # which need not be contiguous
            whole[self.positions] = values.to(whole.dtype)
            local.copy_(whole.view(local.shape))

    def gradient(self, what: str, found: torch.Tensor) -> torch.Tensor:
        """The parameter's part of the gradient that was found. Raises WrongResult where it is not like the tensor."""
        if self.positions is None:
            return found
        require_values(what, found)
        own, shape = as_local(found.detach()), tuple(as_local(self.tensor).shape)
        if tuple(own.shape) != shape:
            raise WrongResult(f"{what} is part of a gradient of local shape {tuple(own.shape)}; expected {shape}")
        return self.of(own)


def held(name: str, parameter: torch.Tensor | PartOf) -> Held:
    """How a parameter is held. Raises WrongAdapter where a part does not say which elements it is made of."""
    if not isinstance(parameter, PartOf):
        return Held(parameter)
    what = f"parameter {name}"
    try:
        require_values(f"the tensor that {what} is part of", parameter.tensor)
    except WrongResult as error:
        raise WrongAdapter(str(error)) from None
    local = as_local(parameter.tensor)
    numbers = torch.arange(local.numel()).view(local.shape)
    try:
        taken = parameter.take(numbers.clone())
    except Exception as error:
        raise WrongAdapter(f"PartOf of {what}: take raised {error!r} for a shape of {tuple(local.shape)}") from error
    problem = _problem(taken, local.numel())
    if problem is None and not torch.equal(parameter.take(_renumbered(numbers)), _renumbered(taken)):
        problem = "calculates"
    if problem is not None:
        raise WrongAdapter(
            f"PartOf of {what}, of a tensor of local shape {tuple(local.shape)}: take {problem}; "
            "expected it to cut, view, permute or index, and nothing else"
        )
    return Held(parameter.tensor, taken)


def _renumbered(numbers: torch.Tensor) -> torch.Tensor:
    """Other numbers of the elements: what picks them picks these at the same places."""
    return 3 * numbers + 7


def _problem(taken: object, size: int) -> str | None:
    if not isinstance(taken, torch.Tensor):
        return f"returned {type(taken).__name__}, and no tensor"
    if taken.dtype != torch.int64 or (taken.numel() and not 0 <= int(taken.min()) <= int(taken.max()) < size):
        return "calculates"
    return "takes an element twice" if len(set(taken.flatten().tolist())) < taken.numel() else None


def require_apart(parameters: Mapping[str, Held], trains: Mapping[str, bool]) -> None:
    """Raises WrongAdapter where two parameters are made of the same elements, or of one tensor and do not train
    together."""
    for (a, one), (b, two) in itertools.combinations(parameters.items(), 2):
        if one.tensor is not two.tensor:
            continue
        # Of two whole tensors each is all of the other.
        both = None if one.positions is None or two.positions is None else torch.isin(one.positions, two.positions)
        if both is None or bool(both.any()):
            raise WrongAdapter(f"parameters {a} and {b} are made of the same elements of one tensor: correct PartOf")
        if trains[a] != trains[b]:
            raise WrongAdapter(
                f"parameters {a} and {b} are parts of one tensor, of which the case trains only one: "
                "raise NotOffered for such a case"
            )
