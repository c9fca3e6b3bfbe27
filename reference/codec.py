"""Cases to JSON and back, losslessly: the JSON of a case is its reproducer."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeVar

from reference.mesh import Mesh

T = TypeVar("T")


class MalformedCase(ValueError):
    """Data that is not a case; the message names the field, what was found and what was expected."""


def encode(value: Any) -> Any:
    """A frozen dataclass of numbers, strings, tuples and dataclasses as JSON data.

    A mesh becomes "tp=2,dp=3". Fields at their default are left out: what remains is what matters.
    """
    if isinstance(value, Mesh):
        return ",".join(f"{name}={size}" for name, size in value.axes)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value) if not _at_default(value, f)}
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    return value


def decode(kind: type[T], data: Any) -> T:
    """The inverse of `encode`. Raises MalformedCase for anything that ``encode`` cannot have written."""
    return typing.cast(T, _decode(kind, data, kind.__name__))


def _at_default(owner: Any, f: dataclasses.Field[Any]) -> bool:
    if f.default_factory is not dataclasses.MISSING:
        return bool(getattr(owner, f.name) == f.default_factory())
    return f.default is not dataclasses.MISSING and bool(getattr(owner, f.name) == f.default)


def _decode(kind: Any, data: Any, where: str) -> Any:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if kind is Mesh:
        return _construct(Mesh.parse, (_expect(str, data, where),), where)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_dataclass(kind, data, where)
    if origin is tuple:
        items = _expect(list, data, where)
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(_decode(args[0], item, f"{where}[{i}]") for i, item in enumerate(items))
        if len(items) != len(args):
            raise MalformedCase(f"{where}: expected {len(args)} items, found {len(items)}")
        return tuple(_decode(a, item, f"{where}[{i}]") for i, (a, item) in enumerate(zip(args, items, strict=True)))
    if origin is typing.Literal:
        if data not in args or any(isinstance(data, bool) != isinstance(a, bool) for a in args if a == data):
            raise MalformedCase(f"{where}: expected one of {', '.join(map(repr, args))}, found {data!r}")
        return data
    if origin in (types.UnionType, typing.Union):
        if data is None and type(None) in args:
            return None
        (only,) = [a for a in args if a is not type(None)]
        return _decode(only, data, where)
    return _expect(kind, data, where)


def _decode_dataclass(kind: type, data: Any, where: str) -> Any:
    found = _expect(dict, data, where)
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    unknown = sorted(set(found) - set(fields), key=repr)
    missing = sorted(
        name
        for name, f in fields.items()
        if name not in found and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    )
    if unknown or missing:
        parts = [f"unknown field {name!r}" for name in unknown] + [f"missing field {name!r}" for name in missing]
        raise MalformedCase(f"{where}: {', '.join(parts)}; the fields are {', '.join(fields)}")
    values = {name: _decode(hints[name], item, f"{where}.{name}") for name, item in found.items()}
    return _construct(lambda: kind(**values), (), where)


def _construct(make: Any, args: tuple[Any, ...], where: str) -> Any:
    try:
        return make(*args)
    except MalformedCase:
        raise
    except (ValueError, TypeError) as error:
        raise MalformedCase(f"{where}: {error}") from error


def _expect(kind: type, data: Any, where: str) -> Any:
    right = isinstance(data, kind) and not (isinstance(data, bool) and kind is not bool)
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if not right:
        raise MalformedCase(f"{where}: expected {kind.__name__}, found {data!r}")
    return data
