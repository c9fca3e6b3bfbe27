"""The shipped mixed-precision optimizer on eight ranks (tp 2, pp 2, dp 2): each rank overflows once, and all skip; each
mutant shows; and what it refuses."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_ranks import Check, integers, run_world, same
from test_sharded_mutants import with_fault

from sharded import mutants
from sharded.clip import Held
from sharded.loss_scale import ConstantLossScaler, DynamicLossScaler
from sharded.main_parameters import ParameterGroup
from sharded.mixed_precision import MixedPrecisionOptimizer
from sharded.process_groups import ProcessGroups
from sharded.updates import SGD, AdamW, Rule

MOMENTUM = SGD(1.0, 0.5)
#: By stage: name, elements of all tp ranks, whether they are cut over tp.
MODEL = ({"w": (4, True), "b": (2, False)}, {"v": (6, True)})
SCALE = 2.0**8


class Trained:
    """This rank's part of the model, and its optimizer."""

    def __init__(self, groups: ProcessGroups, rule: Rule = MOMENTUM, **options: Any) -> None:
        self.groups = groups
        self.axes = {axis: groups.group(axis) for axis in ("tp", "pp", "dp")}
        stage = self.axes["pp"].rank()
        self.parameters, held = dict[str, torch.nn.Parameter](), dict[str, Held]()
        for name, (elements, split) in MODEL[stage].items():
            values = integers(name, elements).to(torch.bfloat16)
            values = values.tensor_split(2)[self.axes["tp"].rank()] if split else values
            self.parameters[name] = torch.nn.Parameter(values.clone())
            alike = {axis: self.axes[axis] for axis in (("dp",) if split else ("tp", "dp"))}
            held[name] = Held(self.parameters[name], alike)
        self.scaler = DynamicLossScaler(SCALE, growth_interval=2)
        self.optimizer = MixedPrecisionOptimizer(
            [ParameterGroup(rule, held)], self.scaler, self.axes["dp"], axes=self.axes, **options
        )

    def step(self, step: int, bad: int | None = None) -> bool:
        """bad: the rank with an infinity."""
        replica = self.axes["dp"].rank()
        for name, p in self.parameters.items():
            elements, split = MODEL[self.axes["pp"].rank()][name]
            own = integers(f"{name} {step} {replica}", elements) + 1
            own = own.tensor_split(2)[self.axes["tp"].rank()] if split else own
            p.grad = (own * self.scaler.scale).to(p.dtype)
        if bad == dist.get_rank():
            grad = next(iter(self.parameters.values())).grad
            assert grad is not None
            grad[0] = math.inf
        return self.optimizer.step().skipped

    def reading(self) -> dict[str, torch.Tensor]:
        found = {name: p.detach().clone() for name, p in self.parameters.items()}
        kept = {f"{kind} {name}": x for name in self.parameters for kind, x in self.optimizer.state(name).items()}
        return found | kept


def everyone(value: object) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def each_rank_overflows(
    groups: ProcessGroups, ranks: Sequence[int] = range(8), late: bool = False, **options: Any
) -> list[str]:
    """late: the rank that overflows is the last one to say so."""
    trained, problems = Trained(groups, AdamW(0.5), **options), list[str]()
    trained.step(0)
    for bad in ranks:
        if late and bad == dist.get_rank():
            has_to_say_so_late(trained.optimizer)
        before, scale = trained.reading(), trained.scaler.scale
        skips = everyone(trained.step(1 + bad, bad))
        problems += [] if skips == [True] * 8 else [f"with rank {bad}, skips are {skips}"]
        problems += [] if trained.scaler.scale == scale / 2 else [f"the scale is {trained.scaler.scale}"]
        for name, tensor in trained.reading().items():
            problems += same(name, tensor, before[name])
    problems += [] if everyone(trained.step(9)) == [False] * 8 else ["a good step is skipped"]
    return problems + ([] if trained.optimizer.steps == 2 else [f"{trained.optimizer.steps} steps are counted"])


def has_to_say_so_late(optimizer: MixedPrecisionOptimizer) -> None:
    agreed = optimizer._agreed

    def late(found: bool) -> bool:
        time.sleep(0.1)
        return agreed(found)

    optimizer._agreed = late  # type: ignore[method-assign]


def steps_problems(groups: ProcessGroups, rule: Rule = MOMENTUM, **options: Any) -> list[str]:
    """Three steps, the second skipped: against the same rule in fp32 on the mean of the gradients."""
    trained, problems = Trained(groups, rule, schedule=lambda t: (t + 1) / 4, **options), list[str]()
    masters = {name: p.detach().float() for name, p in trained.parameters.items()}
    states = {name: {kind: torch.zeros_like(x) for kind in rule.states} for name, x in masters.items()}
    made = 0
    for step, bad in enumerate((None, 0, None)):
        trained.step(step, bad)
        for name, master in masters.items() if bad is None else ():
            elements, split = MODEL[trained.axes["pp"].rank()][name]
            mean = sum(integers(f"{name} {step} {replica}", elements) + 1 for replica in (0, 1)) / 2
            mean = mean.tensor_split(2)[trained.axes["tp"].rank()] if split else mean  # type: ignore[union-attr]
            type(rule)(rule.lr * (made + 1) / 4, 0.5).update(master, mean.float(), states[name], made + 1)  # type: ignore[arg-type, union-attr]
        made += bad is None
        for name, p in trained.parameters.items():
            problems += same(f"{name} after step {step}", p.detach(), masters[name].to(p.dtype))
    return problems


def sharded_as_whole(groups: ProcessGroups) -> list[str]:
    """The same bits whether dp ranks keep all masters or their part, clipped or not; a state goes from one to the
    other."""
    problems = list[str]()
    for options in ({}, {"limit": 2.0}):
        one, other = (Trained(groups, AdamW(0.5), sharded=sharded, **options) for sharded in (False, True))
        for step in range(2):
            one.step(step)
            other.step(step)
        again = Trained(groups, AdamW(0.5), sharded=False, **options)
        for name, p in again.parameters.items():
            problems += same(f"{name} of sharded", other.parameters[name], one.parameters[name])
            p.data.copy_(other.parameters[name])
        again.optimizer.load(copy.deepcopy(other.optimizer.save()))
        for trained in (one, again):
            trained.step(2)
        for name, tensor in one.reading().items():
            problems += same(f"{name} of loaded", again.reading()[name], tensor)
    return problems


def reloaded(groups: ProcessGroups) -> list[str]:
    trained = Trained(groups, SGD(1.0, 0.5))
    trained.step(0)
    for p in trained.parameters.values():
        p.data.fill_(3.0)
    trained.optimizer.refresh()
    return [p for name in trained.parameters for p in same(name, trained.optimizer.state(name)["master"], torch.full(
        trained.parameters[name].shape, 3.0))]  # fmt: skip


def on_ranks() -> Mapping[str, Check]:
    groups = ProcessGroups([("tp", 2), ("pp", 2), ("dp", 2)], combined=())
    right: dict[str, Check] = {
        "skips": lambda: each_rank_overflows(groups),
        "skips, sharded": lambda: each_rank_overflows(groups, sharded=True),
        "skips, clipped": lambda: each_rank_overflows(groups, limit=1.0),
        "steps": lambda: steps_problems(groups),
        "steps, sharded": lambda: steps_problems(groups, sharded=True),
        "sharded": lambda: sharded_as_whole(groups),
        "reloaded": lambda: reloaded(groups),
    }
    right |= {"two skip": lambda: each_rank_overflows(groups, (1, 6), late=True)}
    shows = dict.fromkeys(("F24", "F25", "F25c", "F77", "F78"), "two skip")
    shows |= dict.fromkeys(("F26", "F30b", "F79"), "steps") | {"F30": "reloaded"}
    shows |= {"F30d": "sharded", "F30e": "sharded"}
    return right | {mutant: with_fault(mutant, right[check]) for mutant, check in shows.items()}


def test_eight_ranks_skip_together_and_each_mutant_shows() -> None:
    found = run_world(8, on_ranks)
    for name, problems in found.items():
        assert bool(problems) == name.startswith("F"), (name, problems[:5])
    assert len(found) == 8 + 11


def test_the_registry_has_them() -> None:
    of_the_subject = {mutant.id for mutant in mutants.all_mutants() if mutant.subject == "mixed_precision"}
    assert {"F24", "F25", "F26", "F30"} <= of_the_subject
    assert len(of_the_subject) == 16


def alone() -> Mapping[str, Check]:
    """One rank."""
    group = dist.group.WORLD
    assert group is not None

    def make(
        dtype: torch.dtype = torch.bfloat16,
        rule: Rule = MOMENTUM,
        scale: float = 8.0,
        size: int = 2,
        again: str = "",
        **options: Any,
    ) -> Any:
        p = torch.nn.Parameter(torch.ones(size, dtype=dtype))
        p.grad = torch.ones(size, dtype=dtype)
        more = [ParameterGroup(rule, {again: Held(p)})] if again else []
        return MixedPrecisionOptimizer(
            [ParameterGroup(rule, {"p": Held(p)}), *more],
            ConstantLossScaler(scale),
            group,
            axes={"dp": group},
            **options,
        )

    def of_p(kind: str, value: object, **options: Any) -> list[str]:
        words = f"{kind} of parameter 'p' is"
        return state(words, lambda saved: saved["groups"][0]["parameters"]["p"].update({kind: value}), **options)

    def refused(what: Callable[[], object], words: str) -> list[str]:
        try:
            what()
        except ValueError as error:
            return [] if words in str(error) else [f"{words!r} is not in {error}"]
        return [f"accepted, where {words!r} is due"]

    def state(words: str, change: Callable[[dict[str, Any]], object] = lambda saved: None, **other: Any) -> list[str]:
        """A state that does not fit is refused, and nothing of it is taken."""
        source, own = make(**other), make(sharded=other.get("sharded", False))
        source.step()
        saved = copy.deepcopy(source.save())
        change(saved)
        before = copy.deepcopy(own.state("p"))
        problems = refused(lambda: own.load(saved), words)
        problems += [f"steps are {own.steps}"] if own.steps else []
        return problems + [p for kind, x in own.state("p").items() for p in same(kind, x, before[kind])]

    return {
        "fp64": lambda: refused(lambda: make(torch.float64), "parameter 'p' is in torch.float64: expected one of"),
        "NaN": lambda: refused(lambda: make(rule=SGD(math.nan)), "lr is nan: expected a finite number from 0"),
        "negative": lambda: refused(lambda: make(rule=AdamW(-0.1)), "lr is -0.1"),
        "betas": lambda: refused(lambda: make(rule=AdamW(0.1, (2.0, 0.9))), "betas are (2.0, 0.9)"),
        "momentum negative": lambda: refused(lambda: make(rule=SGD(0.1, -1.0)), "momentum is -1.0"),
        "limit": lambda: refused(lambda: make(limit=0.0), "limit is 0.0: expected a number above 0"),
        "eps": lambda: refused(lambda: make(limit=1.0, eps=math.nan), "eps is nan: expected a finite number from 0"),
        "twice": lambda: refused(lambda: make(again="q"), "'p' and 'q' are one parameter, which would step twice"),
        "two groups": lambda: refused(lambda: make(again="p"), "parameter 'p' is in two groups"),
        "one element": lambda: of_p("momentum", torch.ones(1)),
        "no tensor": lambda: of_p("master", [1.0, 2.0]),
        "whole numbers": lambda: of_p("momentum", torch.ones(2, dtype=torch.int64)),
        "larger, sharded": lambda: of_p("momentum", torch.ones(7), sharded=True),
        "steps": lambda: state("has made -1 steps", lambda saved: saved.update(steps=-1)),
        "steps of a group": lambda: state("has made None steps", lambda saved: saved["groups"][0].update(steps=None)),
        "no groups": lambda: state("the state has groups NoneType", lambda saved: saved.update(groups=None)),
        "no group": lambda: state("no saved state, but NoneType", lambda saved: saved.update(groups=[None])),
        "nothing of p": lambda: state(
            "keeps nothing for parameter 'p'", lambda saved: saved["groups"][0]["parameters"].clear()
        ),
        "optimizer": lambda: state("the state is of AdamW, and the optimizer is SGD", rule=AdamW(0.1)),
        "momentum": lambda: state("keeps master for parameter 'p': expected master, momentum", rule=SGD(1.0)),
        "shape": lambda: state("parameter 'p' has shape (3,) in the state: expected (2,)", size=3),
        "dtype": lambda: state("keeps momentum for parameter 'p'", dtype=torch.float32),
        "scaler": lambda: state("saved with scale 4.0, and here it is 8.0", scale=4.0),
        "truncated": lambda: state("the state has no steps: it is cut short", lambda saved: saved.pop("steps")),
        "scaler cut": lambda: state("no saved state of a loss scaler", lambda saved: saved["scaler"].clear()),
        "group": lambda: state("the state is of 0 groups of parameters", lambda saved: saved["groups"].clear()),
        "group cut": lambda: state("'rule' is missing", lambda saved: saved["groups"][0].pop("rule")),
    }


def test_what_is_refused_changes_nothing() -> None:
    for name, problems in run_world(1, alone).items():
        assert not problems, (name, problems)


@pytest.mark.parametrize("cut", [0.5, 0.9])
def test_a_truncated_file_is_refused_by_what_reads_it(tmp_path: Any, cut: float) -> None:
    path = tmp_path / "state.pt"
    torch.save({"scaler": ConstantLossScaler(8.0).save(), "groups": [], "steps": 3}, path)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * cut)])
    with pytest.raises((RuntimeError, EOFError)):
        torch.load(path)
