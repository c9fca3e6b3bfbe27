"""Mutants: the shipped code with one fault that was reported in public, for tests that must find it.

A module of this package, one a subject, lists its faults in ``MUTANTS``. None of them is imported and no patch code
runs until a mutant is asked for.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

#: (object, attribute, replacement); a replaced static method is given as staticmethod(function).
Patch: TypeAlias = tuple[Any, str, Any]


@dataclass(frozen=True)
class Mutant:
    """One fault.

    id: as in "F04". subject: the part of the package that shows it. fault: one line. thread: where it was reported,
    owner/repository#number, or "own". patches: makes the replacements that put the fault in.
    """

    id: str
    subject: str
    fault: str
    thread: str
    patches: Callable[[], list[Patch]]


class UnknownMutant(KeyError):
    """No mutant has this id."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would print the message's repr


def all_mutants() -> tuple[Mutant, ...]:
    """Every mutant, by id."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__, f"{__name__}."))
    found = [mutant for name in names for mutant in importlib.import_module(name).MUTANTS]
    return tuple(sorted(found, key=lambda mutant: mutant.id))


def get(mutant_id: str) -> Mutant:
    """The mutant of this id. Raises UnknownMutant, a KeyError that names those there are."""
    known = {mutant.id: mutant for mutant in all_mutants()}
    if mutant_id not in known:
        raise UnknownMutant(f"there is no mutant {mutant_id!r}: expected one of {', '.join(known)}")
    return known[mutant_id]


_in_force: set[str] = set()


def apply(mutant_id: str) -> None:
    """Puts a fault into this process for good: for a rank that serves nothing else. Does nothing the second time."""
    if mutant_id in _in_force:
        return
    _in_force.add(mutant_id)
    for target, name, replacement in get(mutant_id).patches():
        setattr(target, name, replacement)


@contextmanager
def applied(mutant_id: str) -> Iterator[Mutant]:
    """The fault is in the code inside the block only."""
    mutant = get(mutant_id)
    patches = mutant.patches()
    # From __dict__, as getattr would unwrap a static method.
    before = [(target, name, vars(target)[name]) for target, name, _ in patches]
    try:
        for target, name, replacement in patches:
            setattr(target, name, replacement)
        yield mutant
    finally:
        for target, name, original in reversed(before):
            setattr(target, name, original)
