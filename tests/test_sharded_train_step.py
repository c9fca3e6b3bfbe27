"""The shipped trainer on two tensor-parallel ranks: what counts in its norm, what is left of a step, what it refuses
to load; and that it takes no model that reduces by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from sharded_ranks import Check, run_world

from sharded.gpt_parallel import ParallelGPT
from sharded.loss_scale import ConstantLossScaler, DynamicLossScaler
from sharded.partial_gradients import is_cut
from sharded.process_groups import ProcessGroups
from sharded.train_step import Trainer
from sharded.updates import SGD, AdamW

_groups: list[ProcessGroups] = []


def built(tied: bool = True, reduces: bool = False, hidden: int = 8, **options: Any) -> ParallelGPT:
    """Two query heads share one of keys and values, which both ranks hold."""
    groups = {axis: _groups[0].group(name) for axis, name in (("tensor", "tp"), ("pipeline", "pp"), ("data", "dp"))}
    stages = [[0], [1]] if tied else [[0]]
    if tied:
        options["schedule"] = "interleaved"
    return ParallelGPT(
        7, hidden, 2, 4, stages, tied=tied, reduces=reduces, kv_heads=1, qk_norm=True, **groups, **options
    )


def batch(step: int) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(step)
    ids, targets = (torch.randint(7, (2, 3), generator=generator) for _ in range(2))
    return [ids], [(targets, torch.ones(2, 3, dtype=torch.bool))]


def the_norm_counts_every_parameter_once() -> list[str]:
    model = built()
    trainer = Trainer(model, SGD(0.0), ConstantLossScaler(4.0), limit=1e9)
    _, stepped = trainer.step(*batch(0))
    squares = 0.0
    for name, parameter in trainer.parameters.items():
        if name == "output.weight":  # the other copy
            continue
        assert parameter.grad is not None
        own = (parameter.grad.double() / 4).square().sum()
        if is_cut(parameter):
            total = own.clone()
            torch.distributed.all_reduce(total, group=model.tensor)
            own = total / (2 if ".k." in name or ".v." in name else 1)
        squares += float(own)
    wrong = not math.isclose(stepped.norm or 0.0, math.sqrt(squares), rel_tol=1e-6)
    return [f"the norm is {stepped.norm}, and of every parameter once {math.sqrt(squares)}"] if wrong else []


def a_step_begins_without_gradients() -> list[str]:
    found = []
    for main_grad in (False, True):
        model = built(main_grad=main_grad)
        trainer = Trainer(model, SGD(0.0), ConstantLossScaler(1.0))
        seen = []
        for _ in range(2):
            trainer.step(*batch(0))
            p = trainer.parameters["norm.weight"]
            seen.append((p.main_grad if main_grad else p.grad).clone())
        if not torch.equal(*seen):
            found.append(f"with main_grad={main_grad} the same batch gives other gradients the second time")
    return found


def the_loss_is_not_scaled() -> list[str]:
    losses = []
    for scale in (1.0, 2.0**16):
        loss, _ = Trainer(built(), SGD(0.0), ConstantLossScaler(scale)).step(*batch(0))
        losses.append(loss)
    return [] if losses[0] == losses[1] else [f"losses with and without a scale are {losses}"]


def a_state_goes_on_with_the_same_bits() -> list[str]:
    def make() -> Trainer:
        model = built(dtype=torch.bfloat16)
        return Trainer(model, AdamW(0.125), DynamicLossScaler(256.0, growth_interval=2), limit=0.5)

    one, found = make(), []
    one.step(*batch(0))
    other = make()
    with torch.no_grad():
        for p in other.parameters.values():
            p.zero_()
    other.load(one.save())
    for step in (1, 2):
        results = [trainer.step(*batch(step)) for trainer in (one, other)]
        if results[0] != results[1]:
            found.append(f"step {step}: {results}")
    found += [name for name, p in one.parameters.items() if not torch.equal(p, other.parameters[name])]
    return found


def foreign_states_are_refused() -> list[str]:
    trainer = Trainer(built(), SGD(0.5, 0.5), ConstantLossScaler(1.0))
    trainer.step(*batch(0))
    good = trainer.save()
    before = {name: p.detach().clone() for name, p in trainer.parameters.items()}
    fewer = {name: p for name, p in good["parameters"].items() if name != "norm.bias"}
    wide = Trainer(built(hidden=16), SGD(0.5, 0.5), ConstantLossScaler(1.0)).save()
    adam = Trainer(built(), AdamW(0.5), ConstantLossScaler(1.0)).save()
    scaled = Trainer(built(), SGD(0.5, 0.5), ConstantLossScaler(2.0)).save()
    wanted: dict[str, tuple[Mapping[str, Any], str]] = {
        "cut short": ({"parameters": good["parameters"]}, "the state has no random, optimizer"),
        "other stages": (
            {**good, "random": {3: {}}},
            "of the stages [3], and here are the stages [0, 1]",
        ),
        "fewer parameters": ({**good, "parameters": fewer}, "parameter 'norm.bias' is missing in the state"),
        "another width": (wide, ", 16), torch.float32) in the state"),
        "another optimizer": (adam, "AdamW"),
        "another scale": (scaled, "scale 2.0"),
    }
    found = []
    for what, (state, words) in wanted.items():
        try:
            trainer.load(state)
            found.append(f"{what}: nothing was raised")
        except ValueError as error:
            if words not in str(error):
                found.append(f"{what}: {error}")
    return found + [name for name, p in trainer.parameters.items() if not torch.equal(p, before[name])]


def a_model_that_reduces_is_refused() -> list[str]:
    try:
        Trainer(built(reduces=True), SGD(0.5), ConstantLossScaler(1.0))
    except ValueError as error:
        return [] if "build it with reduces=False" in str(error) else [str(error)]
    return ["nothing was raised"]


def an_output_that_is_the_embedding_is_one_parameter() -> list[str]:
    groups = {axis: _groups[0].group(name) for axis, name in (("tensor", "tp"), ("pipeline", "pp"), ("data", "dp"))}
    model = ParallelGPT(7, 8, 2, 4, [[0]], tied=True, reduces=False, **groups)
    trainer = Trainer(model, SGD(0.5), ConstantLossScaler(1.0))
    named = model.named_parameters()
    assert named["output.weight"] is named["embedding.weight"]
    return [] if "output.weight" not in trainer.parameters else ["it is there twice"]


CHECKS: dict[str, Callable[[], list[str]]] = {
    one.__name__: one
    for one in (
        the_norm_counts_every_parameter_once,
        a_step_begins_without_gradients,
        the_loss_is_not_scaled,
        a_state_goes_on_with_the_same_bits,
        foreign_states_are_refused,
        a_model_that_reduces_is_refused,
        an_output_that_is_the_embedding_is_one_parameter,
    )
}


def checks() -> dict[str, Check]:
    _groups[:] = [ProcessGroups((("tp", 2),), combined=())]
    return dict(CHECKS)


def test_a_trainer_on_two_ranks() -> None:
    found = run_world(2, checks)
    assert set(found) == set(CHECKS)
    assert {name: problems for name, problems in found.items() if problems} == {}
