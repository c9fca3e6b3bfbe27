"""What every dispatch mode of the rounding model does with an operation before it disturbs the result."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from harness.oracle.dataflow import Dataflow, tensors_in, written
from harness.oracle.noise import Noise, accumulated, amplitude
from harness.oracle.operations import Rule, UnknownOperation, rule_of
from harness.oracle.sizes import Size, in_turn, shared, terms
from harness.oracle.tables import Args, Kind, Kwargs
from reference.dtypes import Format
from reference.precision import current


class Disturbance(NamedTuple):
    """Of one result: the largest of each element, in what shape to draw, and the one that all elements have in common,
    relative to them."""

    own: torch.Tensor
    shape: tuple[int, ...]
    common: float


class Operation(NamedTuple):
    """One operation as it is about to run: what it does, how large its error is, in which format, and the tensors among
    its positional and its named arguments."""

    func: Any
    rule: Rule
    size: Size
    format: Format
    args: Args
    kwargs: Kwargs
    inputs: list[torch.Tensor]
    named: list[torch.Tensor]

    @property
    def exact(self) -> bool:
        return self.size.kind is Kind.MOVEMENT and self.rule.fused is None

    def run(self) -> Any:
        return self.func(*self.args, **self.kwargs)

    def scales(self) -> list[torch.Tensor] | None:
        """What errors are relative to, for each result; None for its own magnitude. To be asked before it runs."""
        kind = self.size.kind
        if kind is Kind.ELEMENTWISE or kind is Kind.MOVEMENT:
            return None
        scales = _absolute_results(self)
        # The weights of a mean may be negative after all: avg_pool2d takes any divisor.
        return [s.abs_() for s in scales] if kind is Kind.REDUCTION else scales

    def disturbances(
        self, results: Sequence[torch.Tensor], scales: Sequence[torch.Tensor] | None
    ) -> list[Disturbance | None]:
        """Of each result, or None where there is nothing to disturb."""
        found: list[Disturbance | None] = []
        inputs = [] if self.rule.valueless else self.inputs
        for i, result in enumerate(results):
            if result.is_complex():
                raise UnknownOperation(self.rule.name, "the rounding model has no complex numbers")
            if not result.is_floating_point() or not result.numel():
                found.append(None)
                continue
            if scales is None:
                scale = result.abs()
            else:
                count = terms(self.rule.base, self.args, result)
                scale = accumulated(scales[i], result, count, self.format, in_turn(self.rule.base))
            own = amplitude(scale, self.format, self.size.own, self.rule.underflows)
            shape = shared(self.rule.base, self.size.kind, inputs, result)
            found.append(Disturbance(own, shape, self.size.common))
        return found


class Disturbing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Resolves operations into elementary and fused ones, and asks `disturbed` for the result of each.

    fmt: the format in which the implementation under test computes. seed: decides all random numbers. flow: is told of
    every operation. ``rewrote``: True once an operation was computed from others.
    Raises UnknownOperation where the computation uses an operation of which nobody said how it rounds.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is ever compiled, and being guarded against it costs more than an operation."""
        return False

    def __init__(self, fmt: Format, seed: int, flow: Dataflow | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.format = fmt
        self.flow = flow
        self.noise = Noise(seed)
        self.rewrote = False
        self._formats: dict[int, Format] = {}

    @abstractmethod
    def disturbed(self, operation: Operation) -> Any:
        """Runs the operation and returns its result."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        rule, kw, block = rule_of(func), kwargs or {}, current()
        if rule.view and block is None:
            return func(*args, **kw)
        if rule.decomposition is not None and rule.when(args, kw):
            self.rewrote = True
            with self:
                result = rule.decomposition(*args, **kw)
            if result is NotImplemented:
                raise UnknownOperation(rule.name, "torch does not decompose this use of it")
            return result
        fmt, size = self.format, rule.size
        if block is not None or self._formats:
            fmt = self._format_of_operation()
        if rule.choose is not None:
            size = rule.choose(args, kw, fmt)
        if block is not None and block.stores and size.kind is Kind.MOVEMENT and not rule.view:
            size = Size(Kind.ELEMENTWISE)
        inputs = tensors_in(args)
        named = tensors_in(tuple(kw.values())) if kw else []
        result = self.disturbed(Operation(func, rule, size, fmt, args, kw, inputs, named))
        if not rule.known:
            _refuse_numbers(rule.name, [result, written(rule, args, kw)])
        if self.flow is not None and not rule.view and not rule.valueless:
            self.flow.follow(inputs + named, tensors_in([result, *written(rule, args, kw)] if rule.writes else result))
            if rule.reads:
                self.flow.leave(inputs + named)
        return result

    def _format_of_operation(self) -> Format:
        """That of the block the operation is in, or of the block of the operation whose backward runs."""
        block, node = current(), _node()
        if node is None:
            if block is None:
                return self.format
            # Autograd numbers an operation before it runs it; where it records none, the last number is an older one.
            number = torch._C._autograd._get_sequence_nr() - 1
            if number >= block.since:
                self._formats.setdefault(number, block.format)
            return block.format
        if block is not None and block.in_backward:
            return block.format
        return self._formats.get(node._sequence_nr(), self.format if block is None else block.format)


def _node() -> Any:
    """The function whose backward runs, or None in the forward pass."""
    return torch._C._current_autograd_node()


def _absolute_results(operation: Operation) -> list[torch.Tensor]:
    """The results of an operation on the absolute values of its arguments: its terms, added without cancelling.

    The arguments themselves are left alone, also by an in-place or out form.
    """
    args, kwargs = operation.args, operation.kwargs
    targets = tensors_in(written(operation.rule, args, kwargs))
    if not all(t.is_floating_point() for t in targets):
        return targets
    kw = {k: abs(v) if k in ("alpha", "beta") else _absolute(v) for k, v in kwargs.items()}
    return tensors_in(operation.func(*[_absolute(a) for a in args], **kw))


def _absolute(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.abs() if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return [_absolute(member) for member in value]
    return value


def _refuse_numbers(name: str, result: Any) -> None:
    """Raises UnknownOperation if a result holds anything but integers and booleans."""
    for tensor in tensors_in(result):
        if tensor.is_floating_point() or tensor.is_complex():
            raise UnknownOperation(name)
