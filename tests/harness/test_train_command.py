"""`shardproof train`: what is told of right and of wrong trainings, and how the command ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from test_json_format import documented
from test_world_ends import Parent

from harness.bench import Bench
from harness.cli import main
from harness.report.training_picture import draw_training
from harness.training import training
from harness.training.beside import Beside
from harness.training.curves import Look, Number, Step, Trained, exit_code
from harness.training.judging import tolerance_of
from harness.training.recipe import Sizes, case_of
from harness.training.same_state import look
from harness.training.training import train
from harness.verdict import Finding
from reference.largest import Largest
from reference.loss_scale import Scaling
from reference.mesh import Mesh

SIZES = Sizes(steps=3, layers=1, hidden=8, heads=2, length=8, batch=4, micro_batches=1)
SMALL = ("--layers", "1", "--hidden", "8", "--heads", "2", "--length", "8", "--batch", "4", "--micro-batches", "1")
CANDIDATES = """
from harness.candidates.builtin import Builtin


class Wrong(Builtin):
    '''From its second step on: a loss that is a little too large.'''

    def train_step(self, case):
        trainer, step = super().train_step(case), [0]
        right = trainer.step

        def wrong(*batch):
            loss, step[0] = right(*batch), step[0] + 1
            return self.returned(loss, step[0])

        trainer.step = wrong
        return trainer

    def returned(self, loss, number):
        return loss if number < 2 or loss is None else loss * (1 + 1e-4)


class Raises(Wrong):
    def returned(self, loss, number):
        if number == 2:
            raise RuntimeError("out of ideas")
        return loss


class Plain(Builtin):
    '''Has one way to build a model, and shows nothing that it keeps.'''

    supports = (
        "gpt_gpipe", "gpt_untied", "gpt_rotary", "gpt_rms_norm", "gpt_swiglu", "train_step_adamw", "train_step_warmup",
        "train_step_weight_decay", "train_step_clip_eps",
    )

    def train_step(self, case):
        trainer = super().train_step(case)
        trainer.master = trainer.state = None
        return trainer
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("harness.world.terminate_cleanly", lambda: None)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CANDIDATES)
    return tmp_path


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["train", *arguments])


def test_a_right_training_is_told_drawn_and_written(folder: Path) -> None:
    files = ("--plot", "out.png", "--json", "out.json")
    done = command("--mesh", "dp=2", "--steps", "3", "--dtype", "fp32,fp16", *SMALL, *files)
    assert done.exit_code == 0, done.output
    first, second, told, heads, *rows, legend, drawn = done.output.splitlines()
    assert first.startswith("fp32: 1 of 3 steps, loss ")
    assert re.fullmatch(r"fp16: 1 of 3 steps, loss \d\.\d{4}, scale 1.67772e\+07", second)
    assert told.startswith("text: ")
    assert heads.split()[:8] == ["dtype", "steps", "loss,", "one", "process", "loss,", "2", "ranks"]
    assert [(row.split()[0], row.split()[-1]) for row in rows] == [("fp32", "held"), ("fp16", "held")]
    assert legend.startswith("off: the largest difference over its computed tolerance")
    assert drawn == "drawn: out.png"
    assert (folder / "out.png").read_bytes().startswith(b"\x89PNG")
    data = json.loads((folder / "out.json").read_text())
    assert set(documented("The file of a training")) == set(data)
    first, second = data["runs"]
    assert set(documented("A training")) == set(first)
    assert set(documented("A step")) == set(first["steps"][0])
    assert set(documented("A number")) == set(first["steps"][0]["loss"])
    assert [step["skipped"] for step in first["steps"]] == [False] * 3
    assert [step["skipped"] for step in second["steps"]] == [True] * 3, "the scale begins too large"
    assert [step["scale"] for step in second["steps"]] == [2.0**24, 2.0**23, 2.0**22]
    assert [look["step"] for look in first["looks"]] == [0]
    assert first["looks"][0]["share"] < 1


def test_a_wrong_loss_is_told_with_its_step(folder: Path) -> None:
    done = command("mine.py:Wrong", "--mesh", "tp=2", "--steps", "3", "--dtype", "fp32", *SMALL, "--json", "out.json")
    assert done.exit_code == 1, done.output
    assert "loss[1] differs from one process" in done.output
    assert "fault: mismatch at step 1" in done.output
    assert "replay: shardproof replay" in done.output
    (run,) = json.loads((folder / "out.json").read_text())["runs"]
    assert (run["held"], run["wrong_at"], run["findings"][0]["tensor"]) == (False, 1, "loss[1]")
    assert [step["loss"]["share"] > 1 for step in run["steps"]] == [False, True, True]


@pytest.mark.parametrize(
    ("candidate", "dtype", "said"),
    [
        # Its loss is not multiplied by the scale: nothing overflows, and the first step is not skipped.
        ("builtin+F83", "fp16", "the decision to skip the step is False on every rank in step 0"),
        # Gradients pile up: AdamW and clipping hide their size, and not their direction.
        ("builtin+F86", "fp32", "fault: mismatch at step 1"),
    ],
)
def test_a_planted_fault_is_told_although_the_loss_falls(candidate: str, dtype: str, said: str) -> None:
    done = command(candidate, "--mesh", "dp=2", "--steps", "2", "--dtype", dtype, *SMALL)
    assert done.exit_code == 1, done.output
    assert said in done.output


def test_what_raises_is_told_after_the_steps_before_it() -> None:
    done = command("mine.py:Raises", "--mesh", "dp=2", "--steps", "2", "--dtype", "fp32", *SMALL)
    assert done.exit_code == 1, done.output
    assert "error: mine.py:Raises" in done.output
    assert "the candidate raised in step 1 on every rank: RuntimeError: out of ideas" in done.output
    assert "fault: error" in done.output


def test_a_candidate_gets_the_model_that_it_supports() -> None:
    done = command("mine.py:Plain", "--mesh", "dp=2", "--steps", "1", "--dtype", "bf16,fp16", *SMALL)
    assert done.exit_code == 3, done.output
    first, second = (line.rstrip() for line in done.output.splitlines()[-3:-1])
    assert first.split()[0] == "bf16"
    assert "not seen" in first
    assert first.endswith("held")
    assert "nothing ran: the training needs what the candidate does not support: train_step_dynamic" in second


def test_a_candidate_without_a_trainer() -> None:
    done = command("torch", "--mesh", "dp=2", "--steps", "1", "--plot", "out.png")
    assert done.exit_code == 3, done.output
    assert "nothing ran: it has no train_step" in done.output
    assert "nothing is drawn" in done.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--plot", "out.xyz"], "--plot out.xyz: expected a file of a known kind"),
        (["--plot", "none/out.png"], "there is no folder"),
        (["--json", "none/out.json"], "there is no folder"),
        (["--steps", "0"], "--steps is 0: expected at least 1"),
        (["--dtype", "fp16,fp8"], "--dtype fp8: expected some of fp32, bf16, fp16"),
        (["--dtype", ","], "--dtype names none"),
        (["--mesh", "tp"], "cannot read 'tp' as an axis"),
        (["--mesh", "cp=2"], "expected sizes of tp, pp, dp only, not of cp"),
        (["--mesh", "tp=3"], "--mesh tp=3 with these sizes"),
        (["--mesh", "dp=3"], "--batch 8 on dp=3 in 2 micro-batches: expected a multiple of 3, and at least 6"),
        (["--mesh", "dp=2", "--micro-batches", "5"], "expected a multiple of 2, and at least 10"),
        (["--mesh", "dp=1000", "--batch", "2000"], "more than this machine allows"),
        (["--length", "100000000"], "expected less than the"),
        (["--lr", "0"], "is not in the range x>0"),
        (["--deadline", "0"], "deadline is 0.0"),
        (["nobody"], "nobody"),
    ],
)
def test_what_cannot_be_is_refused_before_any_work(arguments: list[str], said: str, folder: Path) -> None:
    done = command(*arguments)
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.split()), done.output
    assert [path.name for path in folder.iterdir()] == ["mine.py"]


def case(dtype: str = "fp32", **changes: Any) -> Any:
    return replace(case_of(Mesh.parse("dp=2"), dtype, SIZES, 0), **changes)


def test_a_step_from_the_same_state_shows_what_the_losses_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """One element of one moment, on one rank after one step."""
    seen: list[tuple[Any, ...]] = []

    def remembered(*arguments: Any) -> Any:
        seen.append(arguments)
        return look(*arguments)

    monkeypatch.setattr(training, "look", remembered)
    with Bench("builtin") as bench:
        done = train(bench, case(steps=1))
    assert done.held
    ((_, step, planned, before, after),) = seen
    tensors = dict(after[1].tensors)
    found = tensors["layers.0.q_weight.exp_avg"]
    assert found is not None
    values = np.array(found.values)
    values[0] += 1e-3 * np.abs(values).max()
    tensors["layers.0.q_weight.exp_avg"] = replace(found, values=values)
    share, findings = look(case(steps=1), step, planned, before, [after[0], replace(after[1], tensors=tensors)])
    assert share.share > 1
    assert findings[0].tensor == "layers.0.q_weight.exp_avg"


@pytest.mark.parametrize(
    ("scale", "followed", "skipped"),
    [(2.0**24, False, True), (2.0**8, True, False)],
)
def test_one_process_decides_for_itself(scale: float, followed: bool, skipped: bool) -> None:
    found = Beside(case("fp16", scaling=Scaling(initial=scale, minimum=1.0))).step(0, followed)
    assert (found.planned.skipped, found.decided) == (skipped, True)


def test_where_rounding_decides_one_process_does_as_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the sum of magnitudes is too large for fp16, and no gradient is."""
    monkeypatch.setattr(Largest, "backward", property(lambda self: 1e5, lambda self, value: None), raising=False)
    made = case("fp16", scaling=Scaling(initial=2.0**8, minimum=1.0))
    followed = [Beside(made).step(0, said) for said in (True, False, None)]
    assert [(one.planned.skipped, one.decided) for one in followed] == [(True, False), (False, False), (False, False)]
    assert set(followed[0].values) == {"loss[0]"}


def test_the_ranks_decide_as_one_process_whatever_the_scale() -> None:
    """Around the border gradients that a tied weight adds up decide, each of which is within fp16."""
    made, decided = case("fp16", steps=1), set()
    model = replace(made.model, sizes=(1, 1))
    with Bench("builtin") as bench:
        for power in range(15, 19):
            scaling = Scaling(initial=2.0**power, minimum=1.0)
            done = train(bench, replace(made, model=model, scaling=scaling))
            assert done.held, (power, done.findings)
            decided |= {(one.decided, one.skipped) for one in done.steps}
    assert decided >= {(True, True), (True, False)}


def test_what_micro_batches_add_up_is_counted() -> None:
    """Four units of two ranks; each has a gradient of 3, from terms of 5 in magnitude."""
    weights = torch.ones(4, 1, 2, dtype=torch.float64, requires_grad=True)
    inputs = torch.tensor([4.0, -1.0], dtype=torch.float64).expand(4, 2, 2)
    for largest, most in ((Largest(), 5.0), (Largest(4, 2), 10.0)):
        with largest:
            torch.autograd.grad(torch.bmm(weights, inputs).sum(), weights)
        assert (largest.backward, largest.multiplied, largest.looked_up) == (most, most, 0.0)


def test_small_updates_of_a_warm_up_are_no_difference() -> None:
    """They are rounded away in fp16, all against the gradient: a disturbance by chance would not explain that."""
    made = case("fp16", scaling=Scaling("constant", 2.0**8), steps=4, lr=2.0**-12)
    with Bench("builtin") as bench:
        done = train(bench, made)
    assert done.held
    assert max(one.loss.share for one in done.steps) < 0.25


def number(difference: float, tolerance: float = 1e-3) -> Number:
    return Number(5.0 + difference, 5.0, tolerance, difference / tolerance)


def test_a_picture_of_what_cannot_be_drawn_to_scale(folder: Path) -> None:
    """No difference, no tolerance, and numbers that are none."""
    numbers = [number(0.0), number(1e-4), number(1.0), Number(np.nan, 5.0, np.inf, np.inf)]
    steps = [Step(i, one, None, 2.0**i, i == 1, 2.0**i, i == 1, i != 2) for i, one in enumerate(numbers)]
    made = Trained("mine", "fp16", case("fp16"), steps, [Look(0, 0.5)], [Finding("mismatch", "wrong")], 2)
    draw_training(folder / "out.svg", [made, replace(made, findings=(), wrong_at=None)], "2 ranks, dp=2")
    svg = (folder / "out.svg").read_text()
    for said in ("wrong from step 2 on", "beyond its tolerance", "made, rounding decided", "one process", "fp16"):
        assert said in svg
    assert exit_code([made]) == 1


def test_the_tolerance_of_a_number_is_what_both_statistics_allow() -> None:
    due = Beside(case()).step(0, None).values["loss[0]"]
    rms = float(np.sqrt(np.mean(np.square(due.residuals))))
    assert tolerance_of(due) == pytest.approx(16 * min(rms, float(due.tolerance[0])))
    assert tolerance_of(replace(due, ambiguous=np.array([True]))) == np.inf


def test_ranks_that_change_what_is_not_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = training.side_effects
    monkeypatch.setattr(
        training, "side_effects",
        lambda case, seen: judged(case, [replace(seen[0], side_effects=("moved the furniture",)), *seen[1:]]),
    )  # fmt: skip
    with Bench("builtin") as bench:
        done = train(bench, case(steps=1))
    assert [(one.kind, one.message) for one in done.findings] == [("side-effect", "the candidate moved the furniture")]


@pytest.fixture
def parents(tmp_path: Path) -> Iterator[list[Parent]]:
    started: list[Parent] = []
    yield started
    for parent in started:
        with contextlib.suppress(ProcessLookupError):
            os.kill(parent.process.pid, signal.SIGKILL)
        parent.process.wait()


LONG = """
import sys
from harness.cli import main
sys.argv = "shardproof train --mesh dp=2 --steps 100000 --layers 1 --hidden 8 --length 8 --json out.json".split()
main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_training_that_is_ended_leaves_nothing(folder: Path, parents: list[Parent]) -> None:
    parent = Parent(folder, LONG)
    parents.append(parent)
    assert parent.line()[:4] == ["fp16:", "1", "of", "100000"], parent.errors()
    os.killpg(os.getpgid(parent.process.pid), signal.SIGINT)  # as the terminal does
    assert parent.process.wait(20) == 130, parent.errors()
    parent.assert_nothing_is_left()
    assert "Traceback" not in parent.errors()
    assert not (folder / "out.json").exists()
