"""harness.world: whatever ends the parent, and however, it leaves no process and no file."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PATIENCE = 20.0  # on a machine with much else to do; measured: 0.1 s

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
pytestmark = linux_only


class Parent:
    """A process with ranks. It has its own session, which tells what belongs to it, and its own TMPDIR."""

    def __init__(self, folder: Path, code: str) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        script = folder / "script.py"
        script.write_text(code)
        # The shared memory of torch and semaphores would be here.
        self.shared = _shared_memory()
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, "TMPDIR": str(self.temporary), "PYTHONPATH": str(HERE)},
            stdout=subprocess.PIPE,
            stderr=(folder / "stderr").open("w"),
            text=True,
            start_new_session=True,
            # A shell without job control starts what it puts into the background deaf to SIGINT, children included.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        self.session = self.process.pid

    def line(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def relatives(self) -> dict[int, str]:
        """The living processes of its session, the parent itself left out."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == self.session and fields[0] != "Z" and int(entry.name) != self.session:
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        return found

    def errors(self) -> str:
        return (self.folder / "stderr").read_text()

    def assert_nothing_is_left(self) -> None:
        end = time.monotonic() + PATIENCE
        while (left := self.relatives()) and time.monotonic() < end:
            time.sleep(0.02)
        assert not left, f"processes outlive their parent: {left}"
        assert list(self.temporary.iterdir()) == [], "files outlive their parent"
        ours = [path for path in _shared_memory() - self.shared if re.match("torch_|sem|psm_", path.name)]
        assert ours == [], "shared memory outlives its parent"


def _shared_memory() -> set[Path]:
    return set(Path("/dev/shm").iterdir())


@pytest.fixture
def parents(tmp_path: Path) -> Iterator[list[Parent]]:
    started: list[Parent] = []
    yield started
    for parent in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(parent.process.pid, signal.SIGKILL)
        parent.process.wait()
        for pid in parent.relatives():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


STUCK = """
import pathlib, sys, time
import rank_functions
from harness.world import Pool, Terminated, terminate_cleanly
folder = pathlib.Path(sys.argv[0]).parent
if "cleanly" in folder.name:
    terminate_cleanly()
pool, idle = Pool(3, quiet=600, deadline=600), Pool(1)
pids = [*pool.pids, *idle.pids]
pending = pool.start(rank_functions.stuck_in_every_way, str(folder))
while not (folder / "child").exists():
    time.sleep(0.01)
time.sleep(0.3)
try:
    print("stuck", *pids, flush=True)
    pending.result()
except Terminated as ending:
    sys.exit(ending.exit_code)
"""


@pytest.mark.parametrize(
    ("ending", "to_all", "cleanly", "code"),
    [
        (signal.SIGKILL, False, False, -signal.SIGKILL),
        (signal.SIGTERM, False, False, -signal.SIGTERM),
        (signal.SIGTERM, True, True, 143),
        (signal.SIGINT, True, False, -signal.SIGINT),  # as the terminal does
    ],
)
def test_a_parent_that_is_ended(
    tmp_path: Path, parents: list[Parent], ending: signal.Signals, to_all: bool, cleanly: bool, code: int
) -> None:
    folder = tmp_path / ("cleanly" if cleanly else "hard")
    folder.mkdir()
    parent = Parent(folder, STUCK)
    parents.append(parent)
    ranks = set(map(int, parent.line()[1:]))
    assert len(ranks) == 4, parent.errors()
    child = int((folder / "child").read_text())
    assert ranks | {child} < set(parent.relatives()), "what must end is there"
    if to_all:
        os.killpg(os.getpgid(parent.process.pid), ending)
    else:
        os.kill(parent.process.pid, ending)
    assert parent.process.wait(PATIENCE) == code
    parent.assert_nothing_is_left()
    if ending != signal.SIGINT:
        assert "Traceback" not in parent.errors()
    assert parent.errors().count("KeyboardInterrupt") == (ending == signal.SIGINT), "only the parent's own"


@pytest.mark.parametrize("how", ["raise RuntimeError('no')", "import os; os._exit(1)"])
def test_a_parent_that_ends_itself(tmp_path: Path, parents: list[Parent], how: str) -> None:
    parent = Parent(tmp_path, STUCK.replace("pending.result()", how))
    parents.append(parent)
    assert parent.process.wait(60.0) == 1
    parent.assert_nothing_is_left()


def test_a_parent_that_is_killed_while_the_server_starts(tmp_path: Path, parents: list[Parent]) -> None:
    code = "import time\nfrom harness.world import Pool\npool = Pool(2)\nprint('asked', flush=True)\ntime.sleep(600)"
    parent = Parent(tmp_path, code)
    parents.append(parent)
    assert parent.line() == ["asked"], parent.errors()
    assert parent.relatives()
    parent.process.kill()
    parent.assert_nothing_is_left()


def test_a_rank_server_that_is_killed_takes_its_ranks_along(tmp_path: Path, parents: list[Parent]) -> None:
    code = STUCK.replace("pending.result()", "print(pending.result()); print(pool.run(rank_functions.who).kind)")
    parent = Parent(tmp_path, code)
    parents.append(parent)
    ranks = set(map(int, parent.line()[1:]))
    child = int((tmp_path / "child").read_text())
    (server,) = set(parent.relatives()) - ranks - {child}
    os.kill(server, signal.SIGKILL)
    assert "killed, as the rank server was" in " ".join(parent.line())
    assert parent.line() == ["ok"], "and the next job has a new one"
    os.kill(child, signal.SIGKILL)  # nobody is left who knew it
    assert parent.process.wait(PATIENCE) == 0
    parent.assert_nothing_is_left()


def test_a_script_without_a_guard_runs_once_and_two_parents_do_not_meet(tmp_path: Path, parents: list[Parent]) -> None:
    code = """
import os, pathlib, sys, time
with (pathlib.Path(sys.argv[0]).parent / "runs").open("a") as file:
    file.write("run\\n")
import rank_functions
from harness.world import Pool
def own(context): pass
pool = Pool(2)
for start in range(20):
    values = pool.run(rank_functions.total, start).values()
    assert [value.tolist() for value in values] == [[[2.0 * start + 1] * 3] * 2] * 2
try:
    pool.run(own)
except ValueError as error:
    print(error)
"""
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
        parents.append(Parent(folder, code))
    for parent in parents:
        said = " ".join(parent.line())
        assert "ranks do not run __main__ and cannot find __main__:own there" in said, parent.errors()
        assert parent.process.wait(60.0) == 0
        assert (parent.folder / "runs").read_text() == "run\n"
        parent.assert_nothing_is_left()
