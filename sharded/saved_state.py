"""The state of an optimizer as it is saved, and whether it fits the one that loads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

#: rule: the optimizer's name. steps: how many were made. owners: the size of the group that saved it. shapes: of the
#: parameters, by name. parameters: by name, the state tensors of each by name, of its shape; plain SGD has none.
SavedState: TypeAlias = dict[str, Any]


def require_fits(
    saved: Mapping[str, Any], rule: str, due: Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]]
) -> None:
    """due: for each parameter its shape, and the names of its state tensors. Raises ValueError, naming the first thing
    that differs."""
    if not isinstance(saved, Mapping):
        raise ValueError(f"this is no saved state, but {type(saved).__name__}: pass what save() returned")
    missing = [key for key in ("rule", "steps", "shapes", "parameters") if key not in saved]
    if missing:
        raise ValueError(f"this is no saved state, {missing[0]!r} is missing: pass what save() returned")
    if saved["rule"] != rule:
        raise ValueError(f"the state is of {saved['rule']}, and the optimizer is {rule}: build the one that was saved")
    found = saved["shapes"]
    for name in due:
        if name not in found:
            raise ValueError(f"the state has no parameter {name!r}, which trains: it has {', '.join(found) or 'none'}")
    for name in found:
        if name not in due:
            raise ValueError(
                f"the state has a parameter {name!r}, which does not train here: expected {', '.join(due)}"
            )
    steps = saved["steps"]
    if not isinstance(steps, int) or steps < 0:
        raise ValueError(f"the state has made {steps!r} steps: expected a whole number from 0")
    for name, (shape, kinds) in due.items():
        if tuple(found[name]) != shape:
            raise ValueError(f"parameter {name!r} has shape {tuple(found[name])} in the state: expected {shape}")
        if not isinstance(saved["parameters"].get(name), Mapping):
            raise ValueError(
                f"the state keeps nothing for parameter {name!r}: it is cut short; pass what save() returned"
            )
        kept = saved["parameters"][name]
        if set(kept) != set(kinds):
            has, expected = (", ".join(sorted(names)) or "nothing" for names in (kept, kinds))
            raise ValueError(
                f"the state keeps {has} for parameter {name!r}: expected {expected}; build the optimizer with the "
                "options that it was saved with"
            )
        for kind, tensor in kept.items():
            said = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
            if said != shape or not tensor.is_floating_point():
                what = f"of {tensor.dtype}, {said}" if isinstance(tensor, torch.Tensor) else said
                raise ValueError(
                    f"{kind} of parameter {name!r} is {what} in the state: expected a tensor of floats of shape {shape}"
                )
