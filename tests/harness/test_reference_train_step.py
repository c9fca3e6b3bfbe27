"""The reference of training steps: against torch.optim, what is planned, and who trains alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from harness.oracle.expectation import expect
from reference.dtypes import FORMATS
from reference.gpt import GptCase
from reference.gpt_parameters import OUTPUT, tensors, tokens, valid_tokens
from reference.gpt_step import expected as of_step
from reference.gpt_step import units
from reference.largest import Largest
from reference.loss_scale import Scaling
from reference.mesh import Mesh
from reference.mixed_precision_parts import Overflow
from reference.optimizers import adamw
from reference.precision import computed_in
from reference.train_step import TrainStepCase
from reference.train_step_expected import Changed, Undecided, expected, largest_of, plan

MODEL = GptCase(Mesh.of(dp=2, pp=2), 5, 4, 1, 1, 2, sizes=(1, 2), length=3, counts=(3, 1, 2), tied=True)
CASE = TrainStepCase(MODEL, steps=3)
ADAM: dict[str, Any] = {"optimizer": "adamw", "lr": 2.0**-5, "weight_decay": 0.125}


def by_torch(case: TrainStepCase) -> dict[str, torch.Tensor]:
    """The same steps with torch's optimizers and clipping, gradients from the reference of the subject gpt."""
    parameters = {name: torch.nn.Parameter(x.clone()) for name, x in tensors(case.model).items()}
    options: dict[str, Any] = {"lr": case.lr, "weight_decay": case.weight_decay}
    if case.optimizer == "adamw":
        made: Any = torch.optim.AdamW(parameters.values(), betas=case.betas, eps=case.adam_eps, **options)
    else:
        made = torch.optim.SGD(parameters.values(), momentum=case.momentum, **options)
    out: dict[str, torch.Tensor] = {}
    for step in range(case.steps):
        found = of_step(case.batch(step), {name: p.detach() for name, p in parameters.items()})
        for name, p in parameters.items():
            gradient = found[f"{name}.grad"]
            assert gradient is not None
            p.grad = gradient[0].clone()
        loss = found["loss"]
        assert loss is not None
        out[f"loss[{step}]"] = loss[0]
        if case.clip:
            out[f"norm[{step}]"] = torch.nn.utils.clip_grad_norm_(parameters.values(), case.clip).view(1)
        for group in made.param_groups:
            group["lr"] = case.lr * case.factor(step)
        made.step()
    out |= {name: p.detach() for name, p in parameters.items()}
    for name, p in parameters.items():
        out |= {f"{name}.{kind}": made.state[p][kind] for kind in case.states if kind != "momentum"}
        if case.momentum:
            out[f"{name}.momentum"] = made.state[p]["momentum_buffer"]
    return out


@pytest.mark.parametrize(
    "case",
    [
        CASE,
        replace(CASE, momentum=0.75, warmup=2, clip=0.5),
        replace(CASE, **ADAM, clip=0.5, scaling=Scaling(initial=8.0)),
    ],
)
def test_it_is_torch_on_one_process(case: TrainStepCase) -> None:
    found, want = expected(case, tensors(case.model), plan(case)), by_torch(case)
    for name, right in want.items():
        got = found[name]
        assert got is not None
        torch.testing.assert_close(got, right, rtol=1e-4 if name.startswith("norm") else 1e-5, atol=1e-7, msg=name)
    named = {name for name in found if not name.startswith(("coefficient", "norm", OUTPUT))}
    assert named == {name for name in want if not name.startswith("norm")}


def test_a_tied_output_is_the_embedding() -> None:
    found = expected(replace(CASE, **ADAM), tensors(MODEL), plan(CASE))
    for ending in ("", ".exp_avg", ".exp_avg_sq"):
        one, other = found["embedding_weight" + ending], found["output_weight" + ending]
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


def test_the_scale_changes_nothing_but_what_is_planned() -> None:
    scaled = replace(CASE, scaling=Scaling(initial=2.0**8, growth_interval=2), clip=1.0)
    given = tensors(MODEL)
    one = expected(scaled, given, plan(scaled))
    other = expected(replace(CASE, clip=1.0), given, plan(CASE))
    assert all(torch.allclose(x, other[name], rtol=1e-12) for name, x in one.items() if x is not None)  # type: ignore[arg-type]
    assert [step.scale for step in plan(scaled)] == [256.0, 256.0, 512.0]


def test_ranks_that_are_alone_are_one_process() -> None:
    base, given = replace(CASE, **ADAM, load=1, clip=1.0), tensors(MODEL)
    want = expected(base, given, plan(base))
    for resume in ("apart", "together"):
        case = replace(base, resume=resume)
        found = expected(case, given, plan(case))
        assert all(torch.allclose(x, found[name], rtol=1e-12) for name, x in want.items() if x is not None)  # type: ignore[arg-type]
        assert [case.is_alone(step) for step in range(3)] == [resume == "together", *[resume == "apart"] * 2]
    seen = replace(base, resume="apart").seen_by(1)
    assert seen.mesh == Mesh.of(cp=2, pp=2)
    assert seen.model.sizes == (1, 2, 1, 2)


def test_batches_differ() -> None:
    one, other = CASE.batch(0), CASE.batch(1)
    assert not torch.equal(tokens(one)[0], tokens(other)[0])
    assert not torch.equal(valid_tokens(one), valid_tokens(other))
    assert one == MODEL


def test_an_overflow_skips_the_step_and_nothing_moves() -> None:
    put = replace(CASE, overflows=(Overflow(0, axes=("pp",), at=1),), warmup=4, scaling=Scaling(initial=16.0))
    plans = plan(put)
    assert [(one.skipped, one.t, one.scale) for one in plans] == [(True, 0, 16.0), (False, 0, 8.0), (False, 1, 8.0)]
    found = expected(replace(put, steps=1), tensors(MODEL), plans[:1])
    assert all(torch.equal(x, found[name]) for name, x in tensors(MODEL).items())  # type: ignore[arg-type]


def test_who_gets_an_overflow() -> None:
    case = replace(CASE, steps=2, overflows=(Overflow(0, "nan", ("dp",), 1, 2, 7),))
    hit = [list(case.hits(rank, 0)) for rank in range(4)]
    assert [bool(one) for one in hit] == [case.mesh.coordinate(rank, "dp") == 1 for rank in range(4)]
    assert all(element == 7 and value == "nan" for one in hit for _, element, value in one)
    assert not any(list(case.hits(rank, 1)) for rank in range(4))
    apart = replace(case, load=1, resume="together")
    assert all(list(apart.hits(rank, 0)) for rank in range(4))


@pytest.mark.parametrize(("scale", "skips"), [(2.0**8, False), (2.0**16, None), (2.0**32, True)])
def test_whether_fp16_overflows_is_decided_with_a_margin(scale: float, skips: bool | None) -> None:
    case = replace(CASE, model=replace(MODEL, dtype="fp16"), steps=1, scaling=Scaling("constant", scale))
    if skips is None:
        with pytest.raises(Undecided, match="rounding decides whether it overflows"):
            plan(case)
        return
    assert plan(case)[0].skipped is skips


def test_the_largest_numbers_of_a_backward() -> None:
    x = torch.tensor([[3.0, -3.0]], dtype=torch.float64, requires_grad=True)
    y = torch.tensor([[100.0], [100.0]], dtype=torch.float64, requires_grad=True)
    forward = torch.full((2,), 1e6, dtype=torch.float64)
    with Largest() as largest:
        (forward * 2).sum()
        (x.exp() @ y).sum().backward()
    assert largest.backward == pytest.approx(100 * float(torch.tensor(3.0).exp()), rel=1e-6)
    assert largest.stored == 0
    with Largest() as largest:  # in another order, or in parts, the sum is not zero
        (torch.ones(1, 2, dtype=torch.float64) @ (y * torch.tensor([[1.0], [-1.0]])) * x.sum()).sum().backward()
    assert largest.backward >= 200


def test_memory_that_nothing_was_written_to_is_not_looked_at() -> None:
    class Empty(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            for made in (torch.empty(2), grad.new_empty(2), torch.empty_like(grad)):
                assert made.isnan().all()
            return grad

    x = torch.ones(1, dtype=torch.float64, requires_grad=True)
    torch.use_deterministic_algorithms(True)  # which fills such memory with NaN
    try:
        with Largest() as largest:
            Empty.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    finally:
        torch.use_deterministic_algorithms(False)
    assert largest.backward == 1


def test_what_is_added_up_afterwards_counts_too() -> None:
    """Micro-batches of a rank, of one size or of several, and both uses of a tied table."""
    reached = []
    for changes in ({"sizes": (1,)}, {"sizes": (1, 1, 1)}, {"sizes": (1, 2, 1)}):
        model = replace(MODEL, dtype="fp16", mesh=Mesh.of(dp=1), tied=True, **changes)
        case = replace(CASE, model=model, steps=1, load=0, resume="same", overflows=())
        with largest_of(case) as largest:
            units(model, tensors(model), torch.ones(1, 1, sum(model.sizes), model.length, dtype=torch.float64))
        assert largest.reached(True) >= largest.reached(False)
        assert largest.reached(True) >= largest.looked_up + largest.multiplied
        reached.append(largest.reached(False))
    assert 1.1 * reached[0] < reached[1] <= reached[2]


@pytest.mark.parametrize(
    ("change", "moves"),
    [
        ({"scaled": 1}, "norm[0]"), ({"times": 0.5}, "norm[0]"), ({"tied_twice": True}, "norm[0]"),
        ({"added": True}, "norm[1]"), ({"anew": 1}, "norm_weight"),
    ],
)  # fmt: skip
def test_a_mistake_changes_what_follows(change: dict[str, Any], moves: str) -> None:
    case = replace(CASE, momentum=0.75, clip=1.0, scaling=Scaling("constant", 8.0))
    right, wrong = (expected(case, tensors(MODEL), plan(case), one) for one in (Changed(), Changed(**change)))
    assert not torch.allclose(right[moves], wrong[moves])  # type: ignore[arg-type]
    assert torch.equal(right["loss[0]"], wrong["loss[0]"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": replace(MODEL, dtype="fp64")}, "a model in fp64"),
        ({"model": replace(MODEL, update="sharded")}, "update 'sharded'"),
        ({"optimizer": "lamb"}, "optimizer is 'lamb'"),
        ({"lr": 0.0}, "a learning rate above 0"),
        ({"clip": -1.0}, "clip and clip_eps from 0"),
        ({"adam_eps": 0.0}, "adam_eps is 0.0"),
        ({"momentum": 1.0}, "momentum 1.0"),
        ({"load": 3}, "load 3 of 3 steps"),
        ({"resume": "apart"}, "resume 'apart' with load 0"),
        ({"resume": "later"}, "resume is 'later'"),
        ({"scaling": Scaling("constant", 3.0)}, "expected powers of two"),
        ({"scaling": Scaling(initial=2.0)}, "no scale below 1 after 3 steps"),
        ({"overflows": (Overflow(3),)}, "one of 3 steps"),
        ({"overflows": (Overflow(axes=("tp",)),)}, "expected axes of the mesh"),
    ],
)
def test_a_case_that_is_none_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CASE, **changes)


def test_a_second_moment_stays_above_zero_in_disturbed_runs() -> None:
    """Where a gradient is hardly more than its own rounding, that of one run may be a thousandth of the undisturbed."""
    a = torch.linspace(1, 2, 50_000, dtype=torch.float64)

    def compute() -> dict[str, torch.Tensor | None]:
        gradient = a * (1 + 2.0**-12) - a
        zeros = {kind: torch.zeros_like(a) for kind in ("exp_avg", "exp_avg_sq")}
        with computed_in("fp32"):
            values, _ = adamw(a, gradient, zeros, 1, 0.125, (0.9, 0.999), 1e-5, 0.0)
        return {"values": values}

    found = expect(compute, FORMATS["fp16"])["values"]
    assert found is not None
    assert not found.ambiguous.any(), "no run has NaN"
