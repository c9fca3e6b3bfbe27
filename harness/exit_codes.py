"""How the command ends: every end has its exit code, whatever becomes of its output."""

from __future__ import annotations

import contextlib
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

import click

from harness.errors import WrongUse
from harness.printable import printable_lines
from harness.report.streams import CannotPrint, give_up, prepare_streams, printing
from harness.world import Terminated, WorldError, ended

EXIT_CODES = (
    "Exit codes: 0 all that was asked ran and holds; 1 a fault in a candidate; "
    "2 wrong use or our own fault; 3 nothing ran."
)


class Command(click.Command):
    """A command whose help may fail to be printed, too."""

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        with printing():  # of --help
            return super().make_context(*arguments, **options)


class Group(click.Group):
    """A command whose every end has its exit code, whatever becomes of its output."""

    command_class = Command

    def main(self, *arguments: Any, **options: Any) -> Any:
        prepare_streams()
        try:
            return super().main(*arguments, **options)
        except OSError:  # an error message that could not be written either
            give_up(sys.stderr)
            sys.exit(2)

    def make_context(self, *arguments: Any, **options: Any) -> click.Context:
        with _exit_codes(), printing():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: click.Context) -> Any:
        with _exit_codes():
            return super().invoke(ctx)


@contextlib.contextmanager
def _exit_codes() -> Iterator[None]:
    """Our refusals and our own faults end with 2, Ctrl-C with 130, a SIGTERM with 143."""
    try:
        yield
    except Terminated as error:
        ended()
        raise click.exceptions.Exit(error.exit_code) from error
    except KeyboardInterrupt as error:
        ended()
        raise click.exceptions.Exit(130) from error
    except WrongUse as error:
        raise click.UsageError(printable_lines(str(error))) from error
    except (click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except CannotPrint as error:
        end(128 + signal.SIGPIPE if error.unread else 2, error)
    except Exception as error:
        own = f"this is a fault of shardproof's own.\n{traceback.format_exc().rstrip()}"
        say_error(str(error) if isinstance(error, WorldError) else own)
        raise click.exceptions.Exit(2) from error


def end(code: int, unwritten: CannotPrint | None = None, *, lost: bool = False) -> NoReturn:
    """Ends with the verdict's code, also where nobody read the output: whoever closed a pipe has seen enough.

    unwritten: what became of the output. lost: a file could not be written. Where something is lost, 0 becomes 2.
    """
    if unwritten is not None:
        give_up(sys.stdout)
        if not unwritten.unread:
            lost = True
            say_error(str(unwritten))
    sys.exit(code or (2 if lost else 0))


def say_error(text: str) -> None:
    click.echo(f"Error: {printable_lines(text)}", err=True)
