"""What there is: candidates, subjects and mutants."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from harness.candidates.builtin import mutants
from harness.find import registered
from harness.properties import PROPERTIES
from harness.report.console import plain


def print_listing(console: Console) -> None:
    """Prints three tables."""
    candidates = _table("candidate", "class")
    for name, target in registered().items():
        candidates.add_row(plain(name), plain(target))
    candidates.add_row("your own", "pkg.module:Class or path/to/file.py:Class")
    subjects = _table("subject", "checks", "optional features")
    for subject in PROPERTIES.values():
        subjects.add_row(subject.subject, ", ".join(subject.methods), ", ".join(subject.features))
    faults = _table("mutant", "subject", "fault", "reported in")
    for mutant in mutants():
        faults.add_row(f"builtin+{mutant.id}", mutant.subject, plain(mutant.fault), plain(mutant.thread))
    for table in (candidates, subjects, faults):
        console.print(table)
        console.print()


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
