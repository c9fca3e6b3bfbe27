"""How far a training is: a bar with loss and scale on a terminal, and lines of text elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from harness.report.console import print_line
from harness.report.streams import CannotPrint
from harness.training.curves import Step

_SECONDS = 30.0


class TrainingProgress:
    """Is told of every step. The bar goes to stderr and only to a terminal; where ``console`` is none, a line goes
    there after the first step of each training, and every 30 s.

    ``unwritten``: why a line could not be written. The training goes on.
    """

    def __init__(
        self, console: Console, dtypes: Sequence[str], steps: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.unwritten: CannotPrint | None = None
        self._console, self._steps, self._clock, self._told = console, steps, clock, clock()
        bar = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[said]}", markup=False),
            TimeElapsedColumn(),
            console=bar,
            transient=True,
            disable=not bar.is_terminal,
        )
        self._tasks = {dtype: self._progress.add_task(dtype, total=steps, said="", start=False) for dtype in dtypes}

    def __enter__(self) -> TrainingProgress:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def __call__(self, dtype: str, step: Step) -> None:
        said = f"loss {step.loss.ranks:.4f}" + (f", scale {step.scale:g}" if dtype == "fp16" else "")
        if not step.step:
            self._progress.start_task(self._tasks[dtype])
        self._progress.update(self._tasks[dtype], completed=step.step + 1, said=said)
        due = not step.step or self._clock() - self._told >= _SECONDS
        if due and not self._console.file.isatty():
            self._told = self._clock()
            try:
                print_line(self._console, f"{dtype}: {step.step + 1} of {self._steps} steps, {said}")
            except CannotPrint as error:
                self.unwritten = error
