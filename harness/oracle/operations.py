"""Which operations round, and how: the rule of each, and `register` for those that torch does not bring along.

An operation that is in no table, carries no telling tag and has no decomposition raises `UnknownOperation`: an
operation silently taken for exact would make tolerances too small.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._decomp import decomposition_table

from harness.errors import WrongUse
from harness.oracle.decompositions import DECOMPOSITIONS, SCALED_SUMS, rounds_a_number
from harness.oracle.fused import FUSED
from harness.oracle.sizes import CHOICES, EXACT, Choice, Size, constants
from harness.oracle.tables import (
    EXACT_WHEN_SMALL,
    LIBRARY_ROUNDINGS,
    MOVEMENT,
    ONE_ROUNDING,
    PRODUCTS,
    SHARES_MEMORY,
    SUMS,
    VALUELESS,
    WRITES_ITSELF,
    Args,
    Kind,
    Kwargs,
)


class UnknownOperation(WrongUse):
    """An operation of which nobody said how it rounds."""

    def __init__(self, name: str, reason: str = "nobody said how it rounds") -> None:
        super().__init__(
            f"the reference uses {name}, and {reason}: express it in elementary operations, or say what it is: "
            f'harness.oracle.operations.register("{name}", Kind.ELEMENTWISE), or CONTRACTION, REDUCTION, MOVEMENT, '
            f'or register("{name}", decomposition=function)'
        )
        self.name = name


@dataclass(frozen=True)
class Rule:
    """What the rounding model does with one overload of an operation.

    ``base``: the name without namespace and the underscore of an in-place form. ``size``: of the error, unless
    ``choose`` says it from the arguments. ``underflows``: whether a result below the format's normal range loses bits:
    a product does, a sum is exact there. ``fused``: the operation with its inner roundings, see `harness.oracle.fused`.
    ``decomposition``: the operation as a sequence of others, where ``when`` says so of its arguments. ``writes``:
    positions and names of the arguments that are written to. ``view``: the results share memory with an argument.
    ``random``: draws numbers. ``reads``: hands numbers to Python, or has results whose shape depends on numbers.
    ``valueless``: looks at nothing but the shape of its arguments. ``known``: False where results other than integers
    and booleans are an error.
    """

    name: str
    base: str
    size: Size = EXACT
    choose: Choice | None = None
    underflows: bool = True
    fused: Callable[..., Any] | None = None
    decomposition: Callable[..., Any] | None = None
    when: Callable[[Args, Kwargs], bool] = lambda args, kwargs: True
    writes: tuple[int | str, ...] = ()
    view: bool = False
    random: bool = False
    reads: bool = False
    valueless: bool = False
    pointwise: bool = False
    known: bool = True


def register(
    operation: Any,
    kind: Kind | None = None,
    *,
    decomposition: Callable[..., Any] | None = None,
    roundings: float = 1.0,
) -> None:
    """Says how an operation rounds: ``register("mylib::gate", Kind.ELEMENTWISE)``.

    operation: its qualified name, or the operation itself; all overloads and the in-place form are meant, and what was
    said before does not count any more.
    kind: for CONTRACTION and REDUCTION the operation is also run on the absolute values of its floating-point
    arguments, so it must be a sum of products of them. decomposition: a function of the same arguments that computes
    the same results from operations that are known. roundings: the error of one result in unit roundoffs.
    Raises WrongUse unless exactly one of kind and decomposition is given, or for roundings below 0.
    """
    name = _qualified(operation)
    if (kind is None) == (decomposition is None):
        raise WrongUse(f"register({name!r}): expected either a kind or a decomposition")
    if not roundings >= 0:
        raise WrongUse(f"register({name!r}): roundings {roundings} must not be negative")
    _registered[name] = Size(kind, roundings) if kind is not None else decomposition
    _rules.clear()


def rule_of(func: Any) -> Rule:
    """The rule of an overload, as a dispatch mode receives it. Cached."""
    rule = _rules.get(func)
    if rule is None:
        rule = _rules[func] = _make(func)
    return rule


_registered: dict[str, Any] = {}
_rules: dict[Any, Rule] = {}


def _qualified(operation: Any) -> str:
    """``namespace::name`` without overload and the underscore of the in-place form."""
    name = operation if isinstance(operation, str) else getattr(operation, "_qualified_op_name", None)
    name = str(name or operation._schema.name).partition(".")[0]
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def _make(func: Any) -> Rule:
    schema = getattr(func, "_schema", None)
    if schema is None:
        return Rule(str(func), str(func), known=False)
    qualified, tags = _qualified(str(schema.name)), set(func.tags)
    space, _, base = qualified.partition("::")
    writes = tuple(
        argument.name if argument.kwarg_only else i
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
    shares = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    facts: dict[str, Any] = {
        "name": str(schema.name),
        "base": base,
        "writes": writes,
        "view": shares or torch.Tag.inplace_view in tags or base in SHARES_MEMORY,
        "random": torch.Tag.nondeterministic_seeded in tags,
        "reads": bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & tags),
        "valueless": base in VALUELESS or base.endswith("_like") or base.startswith("new_"),
        "pointwise": torch.Tag.pointwise in tags,
    }
    if qualified in _registered:
        said = _registered[qualified]
        return Rule(size=said, **facts) if isinstance(said, Size) else _rewritten(said, facts)
    rule = _known(func, base, facts) if space == "aten" else None
    if rule is not None:
        return rule
    nothing = not writes and not any("Tensor" in str(r.type) for r in schema.returns)
    return Rule(known=nothing, **facts)


def _known(func: Any, base: str, facts: dict[str, Any]) -> Rule | None:
    """The rule of one of torch's own operations: tables first, then decompositions, then tags."""
    choose = CHOICES.get(base, constants if base in MOVEMENT and not facts["view"] else None)
    facts = {**facts, "choose": choose, "underflows": base not in EXACT_WHEN_SMALL}
    if base in MOVEMENT or facts["view"]:
        return Rule(**facts)
    if base in SCALED_SUMS:
        return _rewritten(SCALED_SUMS[base], {**facts, "size": Size(Kind.ELEMENTWISE), "when": rounds_a_number})
    for names, kind in ((SUMS, Kind.REDUCTION), (PRODUCTS, Kind.CONTRACTION), (ONE_ROUNDING, Kind.ELEMENTWISE)):
        if base in names:
            return Rule(size=Size(kind), **facts)
    if base in FUSED:
        functional = getattr(torch.ops.aten, base)
        return _rewritten(functional, facts) if facts["writes"] else Rule(fused=FUSED[base], **facts)
    if base in DECOMPOSITIONS:
        return _rewritten(DECOMPOSITIONS[base], facts)
    if base.startswith("_foreach_"):
        return Rule(decomposition=_through_composite(func), **facts)
    table = None if facts["random"] else _from_torch(func, facts)
    if table is not None:
        return _rewritten(table, facts)
    if facts["pointwise"]:
        return Rule(size=Size(Kind.ELEMENTWISE, LIBRARY_ROUNDINGS), **facts)
    if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        return Rule(decomposition=func.decompose, **facts)
    copies = torch.Tag.view_copy in func.tags or base.endswith(("_copy", "_like"))
    factory = base.startswith("new_") or not any("Tensor" in str(a.type) for a in func._schema.arguments)
    return Rule(**facts) if copies or factory or facts["random"] or facts["reads"] else None


def _from_torch(func: Any, facts: dict[str, Any]) -> Callable[..., Any] | None:
    """A decomposition from torch's table, if it leads to torch's operations: those of torch._refs lead to prims."""
    overloads = [func]
    if facts["writes"]:
        packet: Any = getattr(torch.ops.aten, facts["base"], func.overloadpacket)
        overloads = [getattr(packet, name) for name in packet.overloads()]
    for overload in overloads:
        function = decomposition_table.get(overload)
        if function is not None and inspect.unwrap(function).__module__ == "torch._decomp.decompositions":
            return function
    return None


def _rewritten(function: Callable[..., Any], facts: dict[str, Any]) -> Rule:
    """The rule of an operation that is computed by a function of new tensors, also for in-place and out forms."""
    writes = facts["writes"]
    if not writes or facts["base"] in WRITES_ITSELF:
        return Rule(decomposition=function, **facts)
    outputs = [name for name in writes if isinstance(name, str)]

    def written(*args: Any, **kwargs: Any) -> Any:
        targets = [kwargs.pop(name) for name in outputs] or [args[i] for i in writes]
        made = function(*args, **kwargs)
        for target, value in zip(targets, made if isinstance(made, tuple) else (made,), strict=True):
            if outputs and target.shape != value.shape:
                target.resize_(value.shape)
            target.copy_(value)
        return targets[0] if len(targets) == 1 else tuple(targets)

    return Rule(decomposition=written, **facts)


def _through_composite(func: Any) -> Callable[..., Any]:
    """The kernel of a list operation that calls the operation on each member, seen by whoever is listening."""
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    if not func.has_kernel_for_dispatch_key(key):
        raise UnknownOperation(str(func), "it has no kernel that works on one tensor after another")

    def members(*args: Any, **kwargs: Any) -> Any:
        return func._op_dk(key, *args, **kwargs)

    return members
