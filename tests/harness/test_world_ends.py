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
from hearing import hear_interrupts

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
            env={**os.environ, "TMPDIR": str(self.temporary), "PYTHONPATH": f"{HERE}:{HERE.parents[1]}"},
            stdout=subprocess.PIPE,
            stderr=(folder / "stderr").open("w"),
            text=True,
            start_new_session=True,
            preexec_fn=hear_interrupts,
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
                fields = _stat(int(entry.name))
                if int(fields[3]) == self.session and fields[0] != "Z" and int(entry.name) != self.session:
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        return found

    def started(self) -> set[int]:
        """What its ranks have started and said, in whatever session."""
        file = self.folder / "started"
        return set(map(int, file.read_text().split())) if file.exists() else set()

    def errors(self) -> str:
        return (self.folder / "stderr").read_text()

    def assert_nothing_is_left(self) -> None:
        end = time.monotonic() + PATIENCE
        while (left := {*self.relatives(), *filter(_lives, self.started())}) and time.monotonic() < end:
            time.sleep(0.02)
        assert not left, f"processes outlive their parent: {left}"
        assert list(self.temporary.iterdir()) == [], "files outlive their parent"
        while (left_over := self._shared_left()) and time.monotonic() < end:
            time.sleep(0.02)
        assert left_over == [], "shared memory outlives its parent"

    def _shared_left(self) -> list[Path]:
        """What somebody else's living process holds, another test's for one, is not ours: ours are all gone. Another's
        semaphore may be there for a moment before it is held, or before its name goes."""
        there = [p for p in _shared_memory() - self.shared if re.match("torch_|sem|psm_", p.name)]
        held = _held_by_the_living()
        return [p for p in there if str(p) not in held and p.exists()]


def _held_by_the_living() -> set[str]:
    """The shared memory that any process has in its address space."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            found |= {line.split()[-1] for line in maps.read_text().splitlines() if "/dev/shm/" in line}
    return found


def _lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return _stat(pid)[0] != "Z"  # one that nobody waits for is a matter of the machine's init
    return False


def _parent_of(pid: int) -> int:
    return int(_stat(pid)[1])


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


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
        for pid in {*parent.relatives(), *filter(_lives, parent.started())}:
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
while not (folder / "started").exists():
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
        (signal.SIGKILL, True, False, -signal.SIGKILL),
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
    assert ranks < set(parent.relatives()), "what must end is there"
    assert len(parent.started()) == 5
    assert all(map(_lives, parent.started()))
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


HANGS = """
import pathlib, sys, time
folder = pathlib.Path(sys.argv[0]).parent
from harness.world import Pool
pool = Pool(1, preload=["hangs_on_import"])
while not (folder / "started").exists():
    time.sleep(0.01)
print("hangs", flush=True)
if folder.name == "killed":
    time.sleep(600)
"""
HANGS_ON_IMPORT = """
import pathlib, subprocess, time
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
written = pathlib.Path(__file__).with_name("written")
written.write_text(str(child.pid))
written.rename(written.with_name("started"))
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["killed", "returns"])
def test_a_parent_that_ends_while_the_server_hangs(tmp_path: Path, parents: list[Parent], how: str) -> None:
    folder = tmp_path / how
    folder.mkdir()
    (folder / "hangs_on_import.py").write_text(HANGS_ON_IMPORT)
    parent = Parent(folder, HANGS)
    parents.append(parent)
    assert parent.line() == ["hangs"], parent.errors()
    if how == "killed":
        parent.process.kill()
    parent.process.wait(PATIENCE)
    parent.assert_nothing_is_left()


def test_a_parent_that_is_killed_while_the_server_starts(tmp_path: Path, parents: list[Parent]) -> None:
    code = "import time\nfrom harness.world import Pool\npool = Pool(2)\nprint('asked', flush=True)\ntime.sleep(600)"
    parent = Parent(tmp_path, code)
    parents.append(parent)
    assert parent.line() == ["asked"], parent.errors()
    assert parent.relatives()
    parent.process.kill()
    parent.assert_nothing_is_left()


@pytest.mark.parametrize("who", ["server", "guardian"])
def test_a_rank_server_that_is_killed_takes_its_ranks_along(tmp_path: Path, parents: list[Parent], who: str) -> None:
    code = STUCK.replace("pending.result()", "print(pending.result()); print(pool.run(rank_functions.who).kind)")
    parent = Parent(tmp_path, code)
    parents.append(parent)
    server = _parent_of(int(parent.line()[1]))
    guardian = _parent_of(server)
    assert _parent_of(guardian) == parent.process.pid
    before = parent.started()
    os.kill(server if who == "server" else guardian, signal.SIGKILL)
    assert "killed, as the rank server was" in " ".join(parent.line())
    assert parent.line() == ["ok"], "and the next job has a new one"
    assert not any(map(_lives, before))
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
