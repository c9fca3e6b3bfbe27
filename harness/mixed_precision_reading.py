"""What is read of a mixed-precision optimizer on one rank: what it decided, and the bits of all that it keeps."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from harness.local import WrongAdapter, as_count, as_number, local_tensor, require_like
from harness.mixed_precision import MixedPrecision
from harness.observation import LocalTensor
from harness.session import phase
from reference.mixed_precision import MixedPrecisionCase
from reference.mixed_precision_steps import names

Parameters = dict[str, nn.Parameter]
Ranges = tuple[tuple[int, int], ...]
Read = dict[str, torch.Tensor]


def number(what: str, read: Callable[[], Any]) -> float:
    """Raises WrongResult for what is none."""
    with phase(what):
        found = read()
    return as_number(what, found)


class Decides(Protocol):
    """What has a loss scale, and says what it decided."""

    scale: Callable[[], float | torch.Tensor]
    counters: Callable[[], Mapping[str, int]] | None
    steps: Callable[[], int] | None


def decisions(optimizer: Decides) -> dict[str, float]:
    """The scale, and of its counters and the count of steps what the candidate offers."""
    found = {"scale": number("scale", optimizer.scale)}
    if optimizer.counters is not None:
        found |= counted(optimizer.counters)
    if optimizer.steps is not None:
        with phase("steps"):
            steps = optimizer.steps()
        found["steps"] = as_count("steps", steps)
    return found


def counted(counters: Callable[[], Mapping[str, int]]) -> dict[str, int]:
    """The counters of a loss scaler. Raises WrongAdapter for other ones, WrongResult for what is no whole number."""
    with phase("counters"):
        found: Any = counters()
    if not isinstance(found, Mapping) or set(found) - {"good", "left"}:
        raise WrongAdapter(f"counters returned {reprlib.repr(found)}; expected 'good' and 'left', or one")
    return {name: as_count(f"counters()[{name!r}]", value) for name, value in found.items()}


def owned(optimizer: MixedPrecision, name: str, parameter: nn.Parameter) -> Ranges:
    """The elements of a parameter whose master and state this rank keeps."""
    if optimizer.owned is None or not parameter.requires_grad:
        return ((0, parameter.numel()),)
    return ranges_of(name, optimizer.owned, parameter.numel())


def ranges_of(name: str, owned: Callable[[str], Any], size: int) -> Ranges:
    """What ``owned`` says of a parameter of so many elements. Raises WrongAdapter for what are no ranges of them."""
    with phase(f"owned({name!r})"):
        said = owned(name)
    try:
        found = tuple((int(start), int(stop)) for start, stop in said)
    except (TypeError, ValueError):
        found = ((1, 0),)
    if not all(0 <= start <= stop <= size for start, stop in found):
        raise WrongAdapter(
            f"owned({name!r}) returned {reprlib.repr(said)}; expected a list of ranges (start, stop) of its {size} "
            "elements here, none where the rank keeps nothing"
        )
    return found


def reading(case: MixedPrecisionCase, parameters: Parameters, optimizer: MixedPrecision) -> Read:
    """Copies of the model's parameters, the masters and the state, of the elements that this rank keeps."""
    found: Read = {}
    for name, parameter in parameters.items():
        i = int(name.removeprefix("parameter"))
        require_like(name, parameter.detach(), tuple(parameter.shape), case.format_of(i).torch_dtype)
        found[name] = parameter.detach()
        if not parameter.requires_grad:
            continue
        kept = sum(max(0, stop - start) for start, stop in owned(optimizer, name, parameter))
        for kind in _offered(case, optimizer, i):
            with phase(f"reading {kind}{i}"):
                found[f"{kind}{i}"] = _read(optimizer, name, kind)
            require_like(f"{kind}{i} of the elements kept", found[f"{kind}{i}"], (kept,), torch.float32)
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def _read(optimizer: MixedPrecision, name: str, kind: str) -> torch.Tensor:
    if kind == "master":
        assert optimizer.master is not None
        return optimizer.master(name)
    assert optimizer.state is not None
    return optimizer.state(name, kind)


def moved(before: Read, after: Read) -> list[str]:
    """What has other bits than before."""
    return [name for name, old in before.items() if not _same(old, after[name])]


def unlike(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """The names of decisions that are others."""
    return [name for name, one in before.items() if after.get(name) != one]


def named(
    case: MixedPrecisionCase, rank: int, read: Read, optimizer: MixedPrecision, step: int
) -> dict[str, LocalTensor | None]:
    """What was read, under the names of the reference; of length 0 what lies on another stage."""
    stage, found = case.mesh.coordinate(rank, "pp"), dict[str, LocalTensor | None]()
    for i in range(len(case.parameters)):
        for kind in ("parameter", *_offered(case, optimizer, i)):
            own = read.get(f"{kind}{i}")
            dtype = case.format_of(i).torch_dtype if kind == "parameter" else torch.float32
            for name, at in zip(names(case, kind, i, step), case.stages(i), strict=True):
                values = own if at == stage and own is not None else torch.empty(0, dtype=dtype)
                found[name] = local_tensor(name, values)
    return found


def _offered(case: MixedPrecisionCase, optimizer: MixedPrecision, i: int) -> tuple[str, ...]:
    """The kinds of tensors that are kept for a parameter, and that the candidate gives."""
    master = ("master",) if case.has_master(i) and optimizer.master is not None else ()
    return (*master, *case.states) if i in case.trained and optimizer.state is not None else master


def numbers(case: MixedPrecisionCase, optimizer: MixedPrecision, step: int) -> dict[str, LocalTensor | None]:
    """Norm and coefficient of a step that was not skipped, where gradients are clipped."""
    found: dict[str, LocalTensor | None] = {}
    for what, function in (("norm", optimizer.norm), ("coefficient", optimizer.coefficient)):
        if case.clip and function is not None:
            value = torch.tensor([number(what, function)], dtype=torch.float64)
            found[f"{what}[{step}]"] = local_tensor(what, value)
    return found


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit by bit, whatever they hold."""
    bits = torch.int32 if a.element_size() == 4 else torch.int16
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))
