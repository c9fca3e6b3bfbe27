"""A rank: takes jobs from its link, runs each in the same clean state, and says what came of it."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import random
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from harness.world import functions, wire
from harness.world.context import RankContext, enter_rank, is_rank
from harness.world.delays import Delays
from harness.world.files import Slots, path_of
from harness.world.outcome import Raised, Returned
from harness.world.traffic import Collective, Recorder, follow_threads, ordinal

SEED = 0x5EED
# The parent decides when a job has taken too long; a timeout of gloo's would turn a hang into an exception.
_NEVER = timedelta(days=1)


def work(fds: list[int], rank: int, world_size: int, path: list[str], folder: str, store: str | None) -> NoReturn:
    """The life of a rank. fds: its link, its file for stacks, the slots and the store; store: or its path."""
    link = socket.socket(fileno=fds[0])
    enter_rank(rank)
    sys.path[:] = path
    with contextlib.suppress(OSError):
        os.chdir(folder)
    if not sys.warnoptions:  # nobody has asked for them
        # Each rank of each pool would say again that a collective is going to be renamed.
        warnings.filterwarnings("ignore", r"`torch\.distributed\.", FutureWarning)
    faulthandler.register(signal.SIGUSR1, file=fds[1], all_threads=True)
    slots = Slots(fds[2], world_size)
    delays = Delays()

    def begins(what: Collective, number: int) -> None:
        if is_rank():
            slots.write(rank, _line(what, number))
            time.sleep(delays.before(rank, number))

    recorder = Recorder(begins)
    follow_threads(recorder)
    try:
        torch.set_num_threads(1)
        where = store or path_of(fds[3])
        dist.init_process_group("gloo", init_method=f"file://{where}", rank=rank, world_size=world_size, timeout=_NEVER)
        base = _Base()
        _meet(slots, rank, world_size)
    except BaseException as error:
        _answer(link, "failed", _raised(error))
        os._exit(1)
    context = RankContext(rank, world_size, recorder, lambda text: slots.tell(rank, text))
    _answer(link, "ready", None)
    while True:
        try:
            job = wire.load(wire.receive(link))
        except (EOFError, ConnectionError):
            os._exit(0)  # the parent wants no more of us
        base.restore()
        slots.clear(rank)
        slots.tell(rank, "")
        recorder.clear()
        delays = Delays(job["delays"])
        sys.path[:] = job["path"]
        began = time.monotonic()
        answer = _run(job["function"], job["args"], context)
        seconds = time.monotonic() - began
        _flush()
        slots.clear(rank)  # a death between jobs is no matter of this one
        _answer(link, "done", (job["number"], answer, seconds, base.spoiled()))


def _meet(slots: Slots, rank: int, world_size: int) -> None:
    """Waits for all ranks to have the group: a job that dies on the first one would break the others' connections,
    and look like ranks that cannot start. Not by a collective, which a death breaks just the same."""
    slots.write(rank, "ready")
    while not all(slots.count(other) for other in range(world_size)):
        time.sleep(0.0005)


def _run(function: bytes, args: bytes, context: RankContext) -> bytes:
    """The job's ending, as a pickle."""
    try:
        with context.traffic:
            call: Callable[..., Any] = functions.unpack(function)
            value = call(context, *wire.load(args))
    except BaseException as error:  # SystemExit and KeyboardInterrupt are no way out of a rank either
        if not is_rank():
            _end_child(error)
        return wire.dump(_raised(error))
    try:
        return wire.dump(Returned(value))
    except BaseException as error:
        why = f"the result of {functions.describe(call)}, a {type(value).__name__}, cannot be pickled: {error}"
        return wire.dump(_raised(error, why))


def _raised(error: BaseException, message: str | None = None) -> Raised:
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    try:
        text = str(error) if message is None else message
    except Exception as second:
        text = f"(its message raises {type(second).__name__})"
    # The frames of this file are the same for every error and say nothing.
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    try:
        lines = "".join(traceback.format_exception(kind, error, trace)).rstrip()
    except Exception as second:
        lines = f"(its traceback raises {type(second).__name__})"
    return Raised(name, text, lines)


def _line(what: Collective, number: int) -> str:
    return f"{what.describe()}, {ordinal(number)} collective of this rank"


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _end_child(error: BaseException) -> NoReturn:
    """Ends a child that the job forked and in which it raised, as a program of its own would end."""
    code: object = 1
    if isinstance(error, SystemExit):
        code = error.code or 0
    else:
        sys.excepthook(type(error), error, error.__traceback__)
    _flush()
    os._exit(code if isinstance(code, int) else 1)


def _answer(link: socket.socket, what: str, value: object) -> None:
    if not is_rank():
        # A child that the job forked came back out of it. The rank itself answers, and alone takes the next job.
        os._exit(0)
    try:
        link.sendall(wire.frame(wire.dump((what, value))))
    except ConnectionError:
        os._exit(0)


class _Base:
    """The state that every job starts from."""

    def __init__(self) -> None:
        self._dtype = torch.get_default_dtype()
        self._deterministic = _deterministic()
        self._cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
        self._group = dist.group.WORLD
        self._folder = Path.cwd()

    def restore(self) -> None:
        """Undoes what a job may have set, and seeds every generator with the same number on every rank."""
        random.seed(SEED)
        np.random.seed(SEED)
        torch.manual_seed(SEED)
        torch.set_default_dtype(self._dtype)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.autograd.set_detect_anomaly(False)
        if _deterministic() != self._deterministic:  # the setter imports PyTorch's compiler, 1 to 3 s
            enabled, only_warn = self._deterministic
            torch.use_deterministic_algorithms(enabled, warn_only=only_warn)
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = self._cudnn
        if torch.get_num_threads() != 1:
            torch.set_num_threads(1)
        with contextlib.suppress(OSError):
            os.chdir(self._folder)

    def spoiled(self) -> bool:
        """True where a job has taken away what the next one needs: the default group."""
        return not dist.is_initialized() or dist.group.WORLD is not self._group


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
