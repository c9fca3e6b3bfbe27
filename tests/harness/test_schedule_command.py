"""`shardproof schedule`: what is shown, at every width, and how it ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from rich.console import Console
from trials import candidate

from harness.cli import main
from harness.report.schedule_picture import CannotDraw, Panel, draw, require_drawing
from harness.report.schedule_text import print_schedule
from reference.schedule import Lists, ScheduleCase, lists
from reference.schedule_rules import Checked, check
from sharded.pipeline_schedules import schedule


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("harness.world.terminate_cleanly", lambda: None)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["schedule", *arguments])


def options(kind: str, stages: int, micro_batches: int, *more: str) -> list[str]:
    return ["--kind", kind, "--stages", str(stages), "--micro-batches", str(micro_batches), *more]


def found(case: ScheduleCase) -> tuple[Lists, Checked]:
    made = lists(case, schedule(case.kind, case.stages, case.chunks, case.micro_batches))  # type: ignore[arg-type]
    return made, check(case, made)


def shown(case: ScheduleCase, width: int) -> list[str]:
    """The lines that are printed in a terminal of that width, without colours."""
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        print_schedule(console, case, *found(case))
    return capture.get().splitlines()


def test_a_schedule_is_shown_beside_its_formulas(folder: Path) -> None:
    done = command(*options("1f1b", 2, 3), "--plot", "out.png")
    assert done.exit_code == 0, done.output
    assert [line.rstrip() for line in done.output.splitlines()] == [
        "1f1b: 2 ranks, 3 micro-batches, of builtin",
        "rank 0 F0 F1 .  .  B0 == F2 B1 == .  B2 ==",
        "rank 1 .  F0 B0 == F1 B1 == F2 B2 == .  .",
        "F forward, B backward of a micro-batch, =: goes on, .: idle",
        "rank  most in flight  formula  busy  idle",
        "   0               2        2     9     3",
        "   1               1        1     9     3",
        "idle share 1/4 (25.0 %), formula 1/4 (25.0 %)",
        "12 units of time, formula 12; forward 1, backward 2",
        "where sends wait for their receives: it comes to its end too",
        "all rules hold",
        "drawn: out.png",
    ]
    assert (folder / "out.png").stat().st_size > 1000


def test_chunks_are_told_apart_and_a_narrow_terminal_gets_a_character_a_unit() -> None:
    case = ScheduleCase("interleaved", 2, 4, 2)
    wide, narrow = shown(case, 200), shown(case, 40)
    assert wide[0].startswith("rank 0 F0a F1a F0b F1b F2a .   B0b === F3a B1b === F2b B0a ===")
    assert wide[2].endswith("a, b: chunks")
    assert narrow[0] == "rank 0 FFFFF.B=FB=FB=FB=.B=.B=B=B="
    assert any(line.startswith("one character a unit of time: with micro-batches it would take") for line in narrow)
    assert not any("cut after" in line for line in narrow)


@pytest.mark.parametrize("width", [1, 8, 20, 57, 100])
def test_what_does_not_fit_is_cut_and_said_to_be(width: int) -> None:
    case = ScheduleCase("1f1b", 12, 40)
    lines = shown(case, width)
    rows = [line for line in lines if line.startswith("rank ") and "most" not in line][:12]
    assert all(len(row) <= max(width, len("rank 11 F")) for row in rows)
    assert f"cut after {max(1, width - 8)} of {3 * 51} units of time: the terminal is too narrow" in " ".join(lines)


def test_of_many_ranks_the_first_are_shown() -> None:
    lines = shown(ScheduleCase("gpipe", 70, 1), 300)
    assert "and 6 more ranks" in lines


def test_a_broken_rule_is_a_fault() -> None:
    done = command(*options("1f1b", 3, 1), "--candidate", "builtin+F50")
    assert done.exit_code == 1, done.output
    assert "rank 0, position 4: recv_backward of micro-batch 1, but there is 1 micro-batch" in done.output
    assert "cause: the warm-up takes as many micro-batches as stages follow" in done.output
    slow = command(
        *options("1f1b", 3, 2), "--candidate", candidate("scheduling.py:AllForwardsFirst"), "--plot", "a.svg"
    )
    assert slow.exit_code == 1
    assert "rank 0 F0 F1 " in slow.output, "what runs to its end is shown all the same"
    assert "2 activations are in flight" in slow.output
    assert "drawn: a.svg" in slow.output


def test_what_a_candidate_does_not_have_is_nothing_to_show() -> None:
    done = command(*options("zbv", 2, 4, "--chunks", "2"))
    assert done.exit_code == 3
    assert "nothing to show: the candidate refuses the case: it has no zbv schedule" in done.output
    done = command(*options("1f1b", 2, 4), "--candidate", candidate("right.py:Right"))
    assert done.exit_code == 3
    assert "nothing to show: the candidate refuses the case: it has no schedule" in done.output


def test_an_unusable_candidate_is_told() -> None:
    done = command(*options("1f1b", 2, 4), "--candidate", candidate("raising_on_import.py:Mine"))
    assert done.exit_code == 1, done.output
    assert "error: " in done.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (options("1f1b", 2, 0), "micro_batches is 0: expected a whole number of at least 1"),
        (options("1f1b", -3, 2), "stages is -3: expected a whole number of at least 1"),
        (options("1f1b", 2, 2, "--chunks", "2"), "1f1b has one chunk a rank, not 2: take interleaved, or gpipe"),
        (options("zbv", 2, 2), "zbv has two chunks a rank, not 1"),
        (options("pipe", 2, 2), "unknown schedule 'pipe': expected one of gpipe, 1f1b, interleaved"),
        (options("gpipe", 10**6, 10**6), "GiB of memory (stages 1000000, chunks 1, micro_batches 1000000)"),
        (options("gpipe", 2, 2, "--plot", "a.mp3"), "--plot a.mp3: expected a file of a known kind: "),
        (options("gpipe", 2, 2, "--plot", "no/a.png"), "--plot no/a.png: there is no folder"),
        (options("gpipe", 2, 2, "--candidate", "nobody"), "unknown candidate 'nobody'"),
        (options("gpipe", 2, 2, "--deadline", "0"), "deadline"),
    ],
)
def test_wrong_use_has_exit_code_2_and_names_the_value(arguments: list[str], says: str) -> None:
    done = command(*arguments)
    assert done.exit_code == 2, done.output
    assert says in done.output


def test_without_matplotlib_a_picture_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    done = command(*options("gpipe", 2, 2, "--plot", "a.png"))
    assert done.exit_code == 2
    assert "--plot needs matplotlib, which is not installed here: pip install matplotlib" in done.output


def test_pictures_of_several_schedules_are_the_same_every_time(folder: Path) -> None:
    panels = []
    for kind, v in (("gpipe", 1), ("interleaved", 2)):
        made, checked = found(ScheduleCase(kind, 2, 2, v))  # type: ignore[arg-type]
        assert checked.run is not None
        panels.append(Panel(kind, made, checked.run, 1 / v))
    for name in ("a.svg", "b.svg"):
        require_drawing(folder / name)
        draw(folder / name, panels)
    first = (folder / "a.svg").read_text()
    assert first == (folder / "b.svg").read_text()
    assert all(text in first for text in ("gpipe", "interleaved", "units of time", "backward, chunk 1"))
    (folder / "c.svg").mkdir()
    with pytest.raises(CannotDraw, match="cannot write --plot"):
        draw(folder / "c.svg", panels)
