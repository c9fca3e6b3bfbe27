"""The reference of the pipeline against autograd on the whole batch, its exactness, and what a case may not be."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings

import strategies.pipeline
from harness.stages import Seen, build
from reference.codec import decode, encode
from reference.mesh import Mesh
from reference.pipeline import Block, PipelineCase, PipelineRecipes
from reference.pipeline_gradients import at_start, expected, token_weights
from reference.pipeline_stages import blocks_of, copies, exact, parameters, placed, starts, tensors, tied, valid_tokens
from reference.pipeline_traffic import due, most_in_flight, tied_elements
from reference.recipe import Recipe
from strategies.scope import Scope

FULL = Scope(max_world=8, features=frozenset(strategies.pipeline.FEATURES))
CASES = strategies.pipeline.cases(FULL).filter(lambda case: case.invalid is None and not case.drops)
PP = Mesh.of(pp=2)


def of_one_process(case: PipelineCase) -> dict[str, torch.Tensor | None]:
    """Gradients, parameters and losses by autograd through the stages that candidates get, of the whole batch at once,
    in float64."""
    wide, given_ = dataclasses.replace(case, dtype="fp64"), tensors(case)
    found: dict[str, torch.Tensor | None] = {}
    values = at_start(case, given_)
    total: dict[str, torch.Tensor] = {}
    for step in range(case.steps):
        losses, gradients = [], []
        for replica in range(case.replicas):
            own = {name: value[replica] for name, value in values.items()}
            stages = [build(wide, given_, own, number, Seen()) for number in range(case.stages)]
            flow: Any = (given_[f"input[{step}]"][replica],)
            flow += (given_[f"ids[{step}]"][replica].long(),) if case.ids else ()
            for stage in stages:
                flow = stage(*flow)
                flow = flow if isinstance(flow, tuple) else (flow,)
            loss = (flow[0] * token_weights(case, step)[replica]).sum()
            loss.backward()
            losses.append(loss.detach())
            named = {name: p for stage in stages for name, p in stage.named().items()}
            gradients.append({name: named[name].grad for name, p in parameters(case).items() if p.trains})
        found[f"loss[{step}]"] = torch.stack(losses).unsqueeze(-1)
        of_step = {name: torch.stack([one[name] for one in gradients]) for name in gradients[0]}
        names = [block.copy for block in tied(case)]
        together = sum(of_step[name] for name in names)
        of_step |= dict.fromkeys(names, together)
        if case.update == "sharded":
            values = {name: v - of_step[name].sum(0) if name in of_step else v for name, v in values.items()}
            found |= {f"{name}[{step}]": value[0] for name, value in values.items()}
            continue
        total = {name: total[name] + g for name, g in of_step.items()} if case.accumulate and total else of_step
        for name, p in parameters(case).items():
            found[f"{name}[{step}].grad"] = total[name] if p.trains else None
    return found


@settings(max_examples=40)
@given(CASES)
def test_gradients_and_losses_are_autograds_on_the_whole_batch(case: PipelineCase) -> None:
    """In float64 the sums are the same but for their order: 2^-40 of the largest number is far more than that, and far
    less than a term that is missing."""
    want, got = of_one_process(case), expected(case, tensors(case))
    assert set(got) == set(want)
    largest = max(float(value.abs().max()) for value in want.values() if value is not None)
    for name, value in want.items():
        ours = got[name]
        if value is None or ours is None:
            assert value is ours, name
        elif exact(case):
            assert torch.equal(ours, value), name
        else:
            assert bool(((ours - value).abs() <= 2.0**-40 * max(1, largest)).all()), name


@settings(max_examples=40)
@given(CASES)
def test_what_is_exact_fits_every_format_on_the_way(case: PipelineCase) -> None:
    if exact(case):
        for name, value in expected(case, tensors(case)).items():
            if value is not None:
                fmt = case.loss_format if name.startswith("loss") else case.format
                assert torch.equal(value.to(fmt.torch_dtype).to(torch.float64), value), name


@given(strategies.pipeline.cases(FULL))
def test_a_case_survives_its_json(case: PipelineCase) -> None:
    assert decode(PipelineCase, encode(case)) == case


def test_rounding_and_odd_divisors_are_not_exact() -> None:
    plain = PipelineCase(PP, widths=(2,), sizes=(1, 1), length=2, counts=(2,))
    assert exact(plain)
    for changes in (
        {"recipes": PipelineRecipes(input=Recipe("normal"))},
        {"loss": "token_mean", "sizes": (1, 1, 1)},
        {"blocks": (Block(activation="tanh"),)},
        {"blocks": (Block(), Block("dropout"))},
        {"dtype": "bf16", "widths": (4,), "depths": (3,)},
    ):
        assert not exact(dataclasses.replace(plain, **changes)), changes
    assert exact(dataclasses.replace(plain, loss="token_mean")), "four tokens"
    assert exact(dataclasses.replace(plain, blocks=(Block(activation="relu"),)))


def test_blocks_depths_and_widths_are_read_round_and_round() -> None:
    blocks = (Block(bias=True), Block("plain", "relu"), Block("tied"), Block("frozen"))
    case = PipelineCase(PP, chunks=2, blocks=blocks, depths=(1, 2), widths=(2, 3))
    assert [(b.index, b.stage, b.kind, b.entering, b.leaving, b.source) for b in placed(case)] == [
        (0, 0, "linear", 2, 3, 0),
        (1, 1, "plain", 3, 3, None),
        (2, 1, "linear", 3, 2, 2),  # not as large as the first
        (3, 2, "frozen", 2, 3, 3),
        (4, 3, "linear", 3, 2, 4),
        (5, 3, "plain", 2, 2, None),
    ]
    assert [name for name, p in parameters(case).items() if not p.trains] == ["weight3"]
    assert tied(case) == []


def test_a_tied_weight_has_one_copy_on_each_stage_that_uses_it() -> None:
    case = PipelineCase(PP, chunks=2, blocks=(Block(), Block("tied"), Block("tied"), Block()), depths=(1, 2, 1))
    assert [block.stage for block in placed(case)] == [0, 1, 1, 2, 3]
    assert [block.copy for block in tied(case)] == ["weight0", "weight1"]
    assert list(parameters(case)) == ["weight0", "weight1", "weight3", "weight4"]
    assert len(copies(case)[0]) == 2
    assert tied_elements(case) == ({0, 1}, 2)
    one_rank = dataclasses.replace(case, mesh=Mesh.of(pp=1))
    assert tied_elements(one_rank) == ({0}, 2)


def test_where_stages_lie() -> None:
    loop = PipelineCase(PP, schedule="interleaved", chunks=3)
    assert [loop.stages_on(c) for c in range(2)] == [(0, 2, 4), (1, 3, 5)]
    down_and_up = PipelineCase(Mesh.of(pp=3), schedule="zbv", chunks=2)
    assert [down_and_up.stages_on(c) for c in range(3)] == [(0, 5), (1, 4), (2, 3)]


def test_which_tokens_count() -> None:
    case = PipelineCase(Mesh.of(pp=1, dp=2), sizes=(1, 2), length=3, counts=(3, 0))
    assert valid_tokens(case, 0).sum(-1).tolist() == [[3, 0, 3], [0, 3, 0]]
    assert starts(case) == [0, 1, 3]
    mean = token_weights(dataclasses.replace(case, loss="token_mean"), 0)
    assert mean.sum((1, 2)).tolist() == [pytest.approx(1)] * 2
    assert not token_weights(dataclasses.replace(case, loss="token_mean", counts=(0,)), 0).any()


def test_what_crosses_the_borders() -> None:
    case = PipelineCase(PP, widths=(2, 3), sizes=(1, 2), length=2, counts=(2,), skip="last", ids=True)
    assert width_of(case) == [2, 3]
    tokens = 3 * 2
    assert due(case) == {
        (0, 1, "float32"): tokens * (3 + 3),
        (1, 0, "float32"): tokens * (3 + 3),
        (0, 1, "int64"): tokens,
    }
    assert due(dataclasses.replace(case, mesh=Mesh.of(pp=1), chunks=4, schedule="gpipe")) == {}
    v = PipelineCase(PP, schedule="zbv", chunks=2)
    assert due(v) == {(0, 1, "float32"): 2, (1, 0, "float32"): 2}, "stages 1 and 2 are on one rank"


def width_of(case: PipelineCase) -> list[int]:
    return [blocks_of(case, stage)[0].entering for stage in range(case.stages)]


def test_how_much_is_in_flight() -> None:
    case = PipelineCase(Mesh.of(pp=4), schedule="1f1b", sizes=(1,) * 6)
    assert [most_in_flight(case, c) for c in range(4)] == [4, 3, 2, 1]
    assert most_in_flight(dataclasses.replace(case, sizes=(1,) * 2), 0) == 2
    assert most_in_flight(dataclasses.replace(case, schedule="gpipe", chunks=2), 0) == 12
    assert most_in_flight(dataclasses.replace(case, schedule="interleaved_zero_bubble", chunks=2), 0) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"axis": "tp"}, "the axis 'tp' is not in the mesh"),
        ({"schedule": "2f2b"}, "schedule is '2f2b': expected one of gpipe"),
        ({"steps": 0}, "steps is 0: expected at least 1"),
        ({"depths": ()}, "depths"),
        ({"widths": (0,)}, "widths"),
        ({"sizes": ()}, "sizes"),
        ({"sizes": (1, 0)}, "sizes"),
        ({"counts": (2,)}, "counts .* expected one or more from 0 to the length 1"),
        ({"blocks": (Block("frozen"),)}, "the first block must be linear"),
        ({"schedule": "1f1b", "chunks": 2}, "1f1b has one chunk a rank, not 2"),
        ({"schedule": "zbv"}, "zbv has two chunks a rank, not 1"),
        ({"update": "sharded"}, "a sharded update needs one other axis"),
        ({"invalid": "no_micro_batches"}, "expected none where there is no micro-batch"),
        ({"invalid": "small_batch"}, "expected a 0 where the batch is too small"),
        ({"mesh": Mesh.of(pp=1), "invalid": "shape"}, "one rank has no border"),
    ],
)
def test_what_is_no_case_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PipelineCase(PP), **changes)


@pytest.mark.parametrize("changes", [{"kind": "other"}, {"activation": "gelu"}])
def test_what_is_no_block_is_refused(changes: Any) -> None:
    with pytest.raises(ValueError, match="expected one of"):
        Block(**changes)
