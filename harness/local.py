"""A rank's own tensors: reading them as data, checking their form, and watching that nothing else changes."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor

from harness.observation import LocalTensor
from harness.oracle.compare import same_bits


class WrongResult(Exception):
    """What the candidate handed back is not what was asked for: shape, dtype, device, number or kind."""


class WrongAdapter(Exception):
    """How a candidate describes what it built does not fit: names, layouts, the form of parameters. No statement about
    what its layer computes."""


def as_local(tensor: torch.Tensor) -> torch.Tensor:
    """The rank's own part of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_tensor(what: str, tensor: torch.Tensor) -> LocalTensor:
    """The tensor as data: float64 values, independent of the tensor's memory. Raises WrongResult where it has none."""
    require_values(what, tensor)
    own = as_local(tensor.detach())
    values = own.to(device="cpu", dtype=torch.float64, copy=True).numpy()
    return LocalTensor(values, str(own.dtype).removeprefix("torch."), str(own.device))


def permuted(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with the last dimension outermost in memory: not contiguous where it and another are above 1.

    Flattened over all but the last dimension it is the transpose of a contiguous matrix, for which torch's own matrix
    product returns gradients that are not contiguous either.
    """
    outermost = tensor.movedim(-1, 0).clone(memory_format=torch.contiguous_format)
    return outermost.movedim(0, -1)


def require_values(what: str, tensor: object) -> None:
    """Raises WrongResult unless it is a dense tensor on the CPU."""
    if not isinstance(tensor, torch.Tensor):
        raise WrongResult(f"{what} is {reprlib.repr(tensor)}; expected a tensor")
    if tensor.layout != torch.strided:
        raise WrongResult(f"{what} is a tensor of layout {tensor.layout}; expected a dense one (torch.strided)")
    if tensor.device.type != "cpu":
        raise WrongResult(f"{what} is on device {tensor.device}; expected cpu")


def require_like(what: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raises WrongResult unless it is a dense tensor on the CPU with this shape and dtype."""
    require_values(what, tensor)
    if tuple(tensor.shape) != shape:
        raise WrongResult(f"{what} has local shape {tuple(tensor.shape)}; expected {shape}")
    if tensor.dtype != dtype:
        raise WrongResult(f"{what} has dtype {tensor.dtype}; expected {dtype}")


def as_number(what: str, found: object) -> float:
    """A number that a candidate returned. Raises WrongResult for what is none."""
    if isinstance(found, float | int) or (isinstance(found, torch.Tensor) and found.numel() == 1):
        try:
            return float(found)
        except (ArithmeticError, NotImplementedError, RuntimeError, TypeError, ValueError):
            pass  # complex, on meta, or too large
    raise WrongResult(f"{what} returned {reprlib.repr(found)}; expected a number, or a tensor of one element")


def as_count(what: str, found: object) -> int:
    """Likewise a whole number."""
    number = as_number(what, found)
    if not number.is_integer():
        raise WrongResult(f"{what} returned {reprlib.repr(found)}; expected a whole number")
    return int(number)


class Purity:
    """Watches what a candidate must leave alone: parameters, inputs and outputs, the random state unless it ``draws``,
    torch's defaults."""

    def __init__(self, *, draws: bool = False) -> None:
        self._draws = draws
        self._watched: dict[str, tuple[Callable[[], torch.Tensor], torch.Tensor]] = {}
        self._random = torch.get_rng_state()
        self._dtype = torch.get_default_dtype()
        self._device = torch.get_default_device()
        self._problems: list[str] = []

    def watch(
        self, name: str, tensor: torch.Tensor, part: Callable[[torch.Tensor], torch.Tensor] = lambda whole: whole
    ) -> None:
        """From now on the tensor, or part of it, must keep its bits, until it is released."""
        self._watched[name] = lambda: part(tensor.detach()), part(tensor.detach()).clone()

    def release(self, names: Iterable[str] | None = None) -> None:
        """Compares what was watched, all or by name, with its copy, bit for bit, and lets go of it."""
        for name in list(self._watched if names is None else names):
            now, copy = self._watched.pop(name)
            if not _same_bits(now(), copy):
                self._problems.append(f"changed {name} in place")

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Inside, random numbers may be drawn, and a random state be loaded."""
        self._see_random()
        yield
        self._random = torch.get_rng_state()

    def _see_random(self) -> None:
        if not self._draws and not torch.equal(self._random, torch.get_rng_state()):
            self._problems.append("drew from the default random generator and did not restore it")

    def report(self) -> Iterator[str]:
        """One sentence for each thing that was changed."""
        self._see_random()
        yield from dict.fromkeys(self._problems)
        if torch.get_default_dtype() != self._dtype:
            yield f"left the default dtype at {torch.get_default_dtype()}"
        if torch.get_default_device() != self._device:
            yield f"left the default device at {torch.get_default_device()}"
        if not torch.is_grad_enabled():
            yield "left gradients switched off"


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return same_bits(a.to(torch.float64).numpy(), b.to(torch.float64).numpy())
