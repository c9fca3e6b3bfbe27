"""Whether what an adapter built fits the subject: its names, its layouts, its parameters.

What does not fit is the adapter's mistake, told apart from a layer that computes something wrong.
"""

from __future__ import annotations

import reprlib

import torch

from harness.exercise import Names
from harness.held import Held
from harness.local import WrongAdapter, WrongResult, local_tensor, require_values
from harness.module import Sharded
from harness.observation import LocalTensor
from reference.layout import Layout, layout_text


def require_sharded(built: object) -> Sharded:
    """What was built. Raises WrongAdapter where it is no Sharded."""
    if not isinstance(built, Sharded):
        raise WrongAdapter(f"build returned {reprlib.repr(built)}; expected Sharded(module, weight=Split(0, 'tp'))")
    return built


def require_known(names: Names, sharded: Sharded) -> None:
    """Raises WrongAdapter for a name that the subject does not have: a misspelt layout must not be left out."""
    for name, layout in sharded.layouts.items():
        if name not in names.parameters:
            has = f"expected {', '.join(names.parameters)}" if names.parameters else "the subject has none; expected"
            raise WrongAdapter(
                f"Sharded(..., {name}={layout_text(layout)}) is the layout of no parameter: {has}, "
                "or an argument: forward, parameters, grads, inputs, outputs, read_grad, finish"
            )
    for argument, given, known in (
        ("parameters", sharded.parameters, names.parameters),
        ("grads", sharded.grads, names.parameters + names.inputs),
        ("inputs", sharded.inputs, names.inputs),
        ("outputs", sharded.outputs, names.outputs),
    ):
        for name in given:
            if name not in known:
                some = f"expected some of {', '.join(known)}" if known else "the subject has none, leave it out"
                raise WrongAdapter(f"Sharded(..., {argument}=...) names {name!r}: {some}")


def layout_of(name: str, sharded: Sharded) -> Layout:
    """The layout of a parameter. Raises WrongAdapter where none is given."""
    if name not in sharded.layouts:
        raise WrongAdapter(
            f"no layout is given for parameter {name!r}: say how it is cut, for example "
            f"Sharded(..., {name}=Split(0, 'tp')), or Sharded(..., {name}=Whole()) where every rank holds all of it"
        )
    return sharded.layouts[name]


def initial(name: str, parameter: Held) -> LocalTensor:
    """A parameter as it was built. Raises WrongAdapter where it has no values that can be read and set."""
    try:
        require_values(f"parameter {name}", parameter.tensor)
        return local_tensor(f"parameter {name}", parameter.local())
    except WrongResult as error:
        raise WrongAdapter(f"{error}: build it so, or pass another with Sharded(..., parameters=...)") from None


def require_parameter(
    name: str, local: torch.Tensor, layout: Layout, shape: tuple[int, ...], part: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Raises WrongAdapter unless the rank's parameter is the part of the global shape that its layout says, in this
    dtype."""
    if tuple(local.shape) != part:
        raise WrongAdapter(
            f"parameter {name} has local shape {tuple(local.shape)}; expected {part}, as layout {layout_text(layout)} "
            f"cuts the global shape {shape}: correct the layout, Sharded(..., {name}=...), or the module's size"
        )
    if local.dtype != dtype:
        raise WrongAdapter(
            f"parameter {name} has dtype {local.dtype}; expected {dtype}: build the module with case.format.torch_dtype"
        )
