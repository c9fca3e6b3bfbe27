"""Subject gpt: the shipped model on real ranks against one process, its planted faults, and adapters that are wrong."""

from __future__ import annotations

import datetime
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from four_ranks import on_four_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from harness import Gpt, NotOffered, Split, cases, check
from harness.candidates.builtin import Builtin
from harness.drawn import DRAWN
from harness.gpt_draws import Dropouts
from harness.gpt_steps import run
from harness.local import WrongAdapter, WrongResult
from harness.observation import Observation
from harness.properties.base import Description
from harness.properties.gpt import GPT
from harness.verdict import Finding
from reference.gpt import GptCase
from reference.mesh import Mesh
from sharded import mutants

PLAIN = GptCase(Mesh.of(pp=2, dp=2), 7, 8, 2, 2, 4, sizes=(1, 2, 1), length=4, counts=(4, 1, 2))
TENSOR = replace(PLAIN, mesh=Mesh.of(tp=2, pp=2))
TIED = replace(PLAIN, tied=True)
CHUNKS: dict[str, Any] = {"chunks": 2, "schedule": "interleaved"}
SHARDED: dict[str, Any] = {"update": "sharded"}

#: Each on four ranks.
RIGHT = {
    "plain": PLAIN,
    "all at once": replace(TENSOR, tied=True, sequence_parallel=True, positions="learned", bias=True, qk_norm=True),
    "interleaved": replace(TIED, **CHUNKS, dtype="bf16", main_grad=True),
    "stages without layers": replace(TENSOR, depths=(1, 0), recompute="stage", norm="rms", activation="swiglu"),
    "rotary": replace(TENSOR, schedule="1f1b", positions="rotary", kv_heads=1, recompute="full"),
    "sharded": replace(TIED, **SHARDED, schedule="1f1b"),
    "copies on one rank": replace(TIED, mesh=Mesh.of(dp=4), chunks=2, hidden=12),
    "copies on one rank, sharded": replace(TIED, mesh=Mesh.of(dp=4), chunks=2, hidden=12, **SHARDED),
    "drops and computes again": replace(TENSOR, dropout=0.5, sequence_parallel=True, recompute="stage"),
    "drops, in chunks": replace(TIED, **CHUNKS, dropout=0.1, recompute="full"),
}

#: By mutant, a case that shows it.
SHOWS = {
    "F45": PLAIN,
    "F46b": replace(TIED, **SHARDED),
    "F64": PLAIN,
    "F71": replace(PLAIN, positions="learned"),
    "F72": replace(TENSOR, sequence_parallel=True),
    "F73": PLAIN,
    "F74": replace(TENSOR, sequence_parallel=True, **SHARDED),
    "F75": replace(TIED, main_grad=True),
    "F76": replace(TIED, mesh=Mesh.of(dp=4), chunks=2, depths=(0,), hidden=4, heads=1, kv_heads=1, ffn=1, counts=(4,)),
    "F92": replace(PLAIN, dropout=0.5),
    "F93": replace(PLAIN, dropout=0.5, recompute="stage"),
    "F94": replace(TENSOR, dropout=0.5, sequence_parallel=True),
}

#: By mutant, a case in which it hides.
HIDES = {
    "F45": replace(PLAIN, sizes=(4,)),
    "F46b": TIED,
    "F64": replace(PLAIN, mesh=Mesh.of(tp=2, pp=2), counts=(4,), sizes=(2, 2)),
    "F71": replace(TENSOR, positions="learned"),
    "F72": TENSOR,
    "F73": replace(PLAIN, counts=(4,)),
    "F74": replace(TENSOR, **SHARDED),
    "F75": TIED,
    "F76": PLAIN,
    "F92": replace(PLAIN, mesh=Mesh.of(dp=4), dropout=0.5),
    "F93": replace(PLAIN, dropout=0.5, recompute="full"),
    "F94": replace(TENSOR, dropout=0.5),
}


def _rank(rank: int, wanted: Sequence[tuple[GptCase, str | None]], path: str, results: Any) -> None:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=60)
    try:
        dist.init_process_group("gloo", store=dist.FileStore(path, 4), rank=rank, world_size=4, timeout=limit)
        found: Any = []
        for case, mutant in wanted:
            with mutants.applied(mutant) if mutant else nullcontext():
                candidate = Builtin()
                candidate.open(case.mesh)
                candidate.activate()
                found.append(run(case, rank, lambda: candidate.gpt(case)))  # noqa: B023 - called at once
    except BaseException:
        found = traceback.format_exc()
    results.put((rank, found))


def judged(wanted: Sequence[tuple[GptCase, str | None]]) -> list[tuple[Finding, ...]]:
    """What is found in each case, with a mutant or without, all in one world of four ranks."""
    seen = on_four_ranks(_rank, wanted)
    verdicts = []
    for i, (case, _) in enumerate(wanted):
        world: list[Observation] = [seen[rank][i] for rank in range(4)]
        verdicts.append(GPT.judge(case, Description("builtin", "builtin"), GPT.expected(case), [world]).findings)
    return verdicts


def test_it_is_one_process_and_faults_show() -> None:
    wanted: list[tuple[GptCase, str | None]] = [(case, None) for case in RIGHT.values()]
    wanted += [(case, None) for case in SHOWS.values()]
    wanted += [(case, mutant) for mutant, case in HIDES.items()]
    bad: list[tuple[GptCase, str | None]] = [(case, mutant) for mutant, case in SHOWS.items()]
    found = judged([*wanted, *bad])
    for (case, mutant), findings in zip(wanted, found, strict=False):
        assert not findings, f"{mutant} in {case}: {findings[0].message}"
    for (case, mutant), findings in zip(bad, found[len(wanted) :], strict=True):
        assert findings, f"{mutant} hides in {case}"
    causes = {mutant: findings[0].cause for (_, mutant), findings in zip(bad, found[len(wanted) :], strict=True)}
    assert "mean of the means of the ranks along dp" in str(causes["F73"])
    assert "mean of the micro-batches' means" in str(causes["F64"])


def test_every_mutant_is_here() -> None:
    own = {mutant.id for mutant in mutants.all_mutants() if mutant.subject == "gpt"}
    assert own <= set(SHOWS)
    assert set(SHOWS) == set(HIDES)


@settings(max_examples=6)
@given(data=st.data())
def test_the_gpt_is_that_of_one_process(data: st.DataObject) -> None:
    check("gpt", "builtin", data.draw(cases("gpt", "builtin", max_world=4)))


# Adapters that are wrong, on one rank and without a world.

ONE = GptCase(Mesh.of(tp=1), 5, 4, 1, 1, 2, length=2, counts=(2,), depths=(0,))


def held(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    rows = {"embedding_weight": (5, 4), "norm_weight": (4,), "norm_bias": (4,), "output_weight": (5, 4)}
    return {**{name: torch.zeros(shape, requires_grad=True) for name, shape in rows.items()}, **more}


def loss(*tokens: torch.Tensor) -> torch.Tensor:
    return torch.zeros(())


def dropping(*forwards: Any, size: int = 0, p: float = 0.1) -> Gpt:
    """Tells of these forwards, and draws one mask."""
    told: list[Callable[[Any, Any], None]] = []

    def step(*tokens: torch.Tensor) -> torch.Tensor:
        for one in forwards:
            told[0](*one)
        if size:
            torch.empty(size).bernoulli_(p)
        return torch.zeros(())

    return Gpt(step, held(), {}, before_forward=told.append)


def without(name: str) -> dict[str, torch.Tensor]:
    return {other: x for other, x in held().items() if other != name}


WRONG: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no Gpt": (lambda: None, WrongAdapter, "expected Gpt"),
    "lacks one": (lambda: Gpt(loss, without("norm_bias"), {}), WrongAdapter, "lacks norm_bias, which pp=0 holds"),
    "one too many": (lambda: Gpt(loss, held(other=torch.zeros(1)), {}), WrongAdapter, "names other on pp=0: no rank"),
    "a shape": (
        lambda: Gpt(loss, held(norm_bias=torch.zeros(3)), {}),
        WrongAdapter,
        r"norm_bias has local shape \(3,\); expected \(4,\)",
    ),
    "a layout": (lambda: Gpt(loss, held(), {"q": Split(0, "tp")}), WrongAdapter, "layouts=...\\) names 'q'"),
    "sizes": (
        lambda: Gpt(loss, held(), {"norm_bias": Split(0, "tp", (4,))}),
        WrongAdapter,
        "without sizes where it cuts the first dimension",
    ),
    "no loss": (lambda: Gpt(lambda *tokens: None, held(), {}), WrongResult, "expected a scalar tensor"),
    "a loss for each token": (lambda: Gpt(lambda *t: torch.zeros(2), held(), {}), WrongResult, "local shape"),
}

#: With dropout.
WRONGLY_DROPPED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "dropout untold": (lambda: Gpt(loss, held(), {}), NotOffered, "no before_forward"),
    "a forward untold": (
        lambda: Gpt(loss, held(), {}, before_forward=lambda hook: None),
        WrongAdapter,
        "before_forward lacks stage 0, micro-batch 0; expected a call",
    ),
    "another stage": (lambda: dropping((0, 0), (1, 0)), WrongAdapter, "before_forward has stage 1, micro-batch 0"),
    "a forward twice": (lambda: dropping((0, 0), (0, 0)), WrongAdapter, "called twice with stage 0, micro-batch 0"),
    "no numbers": (lambda: dropping(("a", 0)), WrongAdapter, r"called with \('a', 0\); expected stage"),
    "nothing dropped": (lambda: dropping((0, 0)), WrongResult, "in stage 0 drew 0 dropout masks; expected 1: embedded"),
    "a mask's shape": (lambda: dropping((0, 0), size=7), WrongResult, r"mask of shape \(7,\) for embedded; expected"),
    "a probability": (lambda: dropping((0, 0), size=8, p=0.2), WrongResult, "with probability 0.2; expected 0.1, or"),
}


@pytest.mark.parametrize("what", [*WRONG, *WRONGLY_DROPPED])
def test_an_adapter_that_is_wrong_is_told_so(what: str) -> None:
    build, kind, words = {**WRONG, **WRONGLY_DROPPED}[what]
    with pytest.raises(kind, match=words):
        run(replace(ONE, dropout=0.1 * (what in WRONGLY_DROPPED)), 0, build)


def test_a_model_is_hooked_once() -> None:
    told: list[Callable[[int, int], None]] = []

    def step(*tokens: torch.Tensor) -> torch.Tensor:
        told[0](0, 0)
        torch.empty(8).bernoulli_(0.1)
        return torch.zeros(())

    case = replace(ONE, dropout=0.1)
    dropouts = Dropouts(case, 0, Gpt(step, held(), {}, before_forward=told.append))
    for _ in range(3):
        with dropouts.seeing() as seen:
            step()
        assert set(dropouts.masks(seen)) == {(0, "embedded")}
    assert len(told) == 1


def test_a_probability_may_have_been_stored_in_bf16() -> None:
    """0.9 there is 0.8984."""
    p = float(torch.tensor(0.9, dtype=torch.bfloat16))
    assert abs(p - 0.9) > 1e-3
    seen = run(replace(ONE, dropout=0.1), 0, lambda: dropping((0, 0), size=8, p=p))
    assert seen.facts[DRAWN][0][0, "embedded"].p == p


def test_what_a_step_changes_is_seen() -> None:
    parameters = held()

    def step(*tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            parameters["norm_bias"].add_(1)
        tokens[0].add_(1)
        return torch.zeros(())

    found = run(ONE, 0, lambda: Gpt(step, parameters, {}))
    assert set(found.side_effects) == {"changed ids in place", "changed parameter norm_bias in place"}
    assert found.tensors["norm_bias.grad"] is None
