"""Imports on the rank server, before ranks are forked from it."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence

from harness.world.context import importing_for_ranks

# Every rank needs these, and importing them there would cost each rank a second or more.
OURS = ("numpy", "torch", "torch.distributed", "harness.world.worker")


def import_ours() -> None:
    """Imports what every rank needs."""
    for module in OURS:
        importlib.import_module(module)
    _share()


def import_theirs(modules: Sequence[str]) -> None:
    """Imports the user's modules. One that fails is left to the ranks, which report how it fails."""
    for module in modules:
        if module not in sys.modules:
            with contextlib.suppress(BaseException), _silence(), importing_for_ranks():
                importlib.import_module(module)
    _share()


def _share() -> None:
    gc.collect()
    gc.freeze()  # the collector would write to every page and so unshare it


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Nothing is printed, not even by C code: a rank that imports the module again prints it."""
    kept = os.dup(1), os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        with warnings.catch_warnings():
            for fd in (1, 2):
                os.dup2(nowhere, fd)
            yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        for fd, saved in zip((1, 2), kept, strict=True):
            os.dup2(saved, fd)
            os.close(saved)
        os.close(nowhere)
