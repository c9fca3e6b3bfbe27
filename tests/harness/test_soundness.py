"""What is wrong with a reference is a clear error of kind ``harness``, never a verdict on a candidate."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from harness import verify
from harness.bench import Bench
from harness.errors import WrongUse
from harness.observation import LocalTensor, Observation
from harness.oracle.expectation import exactly, expect
from harness.oracle.soundness import UnsoundReference
from harness.properties import PROPERTIES, property_of
from harness.properties.tensors import Form, judge_tensors
from harness.verification import exit_code
from reference.dtypes import FORMATS
from reference.layout import Whole
from reference.linear import LinearCase
from reference.mesh import Mesh

Given = dict[str, Tensor]
Reference = Callable[[Given], dict[str, Tensor | None]]
BOTH = pytest.mark.parametrize("rounds", [False, True], ids=["exact", "rounds"])


def fresh() -> Given:
    g = torch.Generator().manual_seed(0)
    shapes = {"x": (4, 3), "w": (5, 3), "b": (5,)}
    return {name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}


def run(reference: Reference, rounds: bool, given: Given | None = None, **options: object) -> dict[str, object]:
    given = fresh() if given is None else given
    if rounds:
        return {**expect(lambda: reference(given), FORMATS["fp32"], given=given, **options)}  # type: ignore[arg-type]
    return {**exactly(lambda: reference(given), given=given, **options)}  # type: ignore[arg-type]


def right(given: Given) -> dict[str, Tensor | None]:
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
    y = leaves["x"] @ leaves["w"].T + leaves["b"]
    y.sum().backward()  # type: ignore[no-untyped-call]
    return {"y": y, "none": None, **{f"{name}.grad": leaf.grad for name, leaf in leaves.items()}}


@BOTH
def test_a_sound_reference_passes_and_leaves_what_it_is_given(rounds: bool) -> None:
    given, before = fresh(), fresh()
    made = run(right, rounds, given)
    assert list(made) == ["y", "none", "x.grad", "w.grad", "b.grad"]
    assert made["none"] is None
    assert all(torch.equal(given[name], before[name]) for name in given)


def without_bias(given: Given) -> dict[str, Tensor | None]:
    return {"y": given["x"] @ given["w"].T}


def copies_the_bias_for_nothing(given: Given) -> dict[str, Tensor | None]:
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in given.items()}
    bias = leaves["b"].reshape(1, -1) * 2
    assert bias.shape == (1, 5)
    return {"y": leaves["x"] @ leaves["w"].T}


@BOTH
@pytest.mark.parametrize("reference", [without_bias, copies_the_bias_for_nothing])
def test_an_input_that_is_ignored_is_named(reference: Reference, rounds: bool) -> None:
    with pytest.raises(UnsoundReference, match="ignores its input b: nothing of it reaches any of y"):
        run(reference, rounds)
    assert run(reference, rounds, idle=["b"])["y"] is not None, "unless it is said to be idle"


def in_place(given: Given) -> dict[str, Tensor | None]:
    y = given["x"] @ given["w"].T
    y += given["b"]
    return {"y": y}


def into_a_buffer(given: Given) -> dict[str, Tensor | None]:
    y = torch.empty(4, 5, dtype=torch.float64)
    torch.addmm(given["b"], given["x"], given["w"].T, out=y)
    return {"y": y}


def as_python_numbers(given: Given) -> dict[str, Tensor | None]:
    y = given["x"] @ given["w"].T
    return {"y": torch.stack([y[:, k] + float(given["b"][k]) for k in range(5)], 1)}


def by_numpy(given: Given) -> dict[str, Tensor | None]:
    return {"y": given["x"] @ given["w"].T + torch.from_numpy(given["b"].numpy().copy())}


def by_list_operations(given: Given) -> dict[str, Tensor | None]:
    one, two = torch._foreach_add([given["x"] @ given["w"].T, given["b"]], 1.0)
    torch._foreach_add_([one], [two.expand(4, 5).contiguous()])
    return {"y": one}


def as_it_is(given: Given) -> dict[str, Tensor | None]:
    return {"y": given["x"] @ given["w"].T, "b": given["b"].expand(2, 5)}


def by_a_branch(given: Given) -> dict[str, Tensor | None]:
    y = given["x"] @ given["w"].T
    return {"y": y if bool((given["b"] > 0).any()) else -y}


@BOTH
@pytest.mark.parametrize(
    "reference",
    [in_place, into_a_buffer, as_python_numbers, by_numpy, by_list_operations, as_it_is, by_a_branch],
)
def test_however_an_input_is_used_it_counts(reference: Reference, rounds: bool) -> None:
    assert run(reference, rounds)["y"] is not None


@BOTH
def test_an_input_of_zeros_is_used_all_the_same(rounds: bool) -> None:
    given = {name: torch.zeros_like(tensor) for name, tensor in fresh().items()}
    assert run(right, rounds, given)["y"] is not None


def adds_in_place(given: Given) -> dict[str, Tensor | None]:
    return {"y": given["x"].add_(1) @ given["w"].T + given["b"]}


def writes_with_numpy(given: Given) -> dict[str, Tensor | None]:
    made = right(given)
    given["w"].numpy()[0, 0] = 7
    return made


def sorts_a_view(given: Given) -> dict[str, Tensor | None]:
    made = right(given)
    given["x"][0].zero_()
    return made


@BOTH
@pytest.mark.parametrize(("reference", "name"), [(adds_in_place, "x"), (writes_with_numpy, "w"), (sorts_a_view, "x")])
def test_an_input_that_is_changed_is_named(reference: Reference, name: str, rounds: bool) -> None:
    with pytest.raises(UnsoundReference, match=f"changes its input {name} in place|not the same twice"):
        run(reference, rounds)


@BOTH
def test_an_input_that_is_changed_back_and_forth_is_found_by_the_values(rounds: bool) -> None:
    state = {"sign": 1.0}

    def reference(given: Given) -> dict[str, Tensor | None]:
        state["sign"] = -state["sign"]
        return {"y": (given["x"] @ given["w"].T + given["b"]) * state["sign"]}

    with pytest.raises(UnsoundReference, match="not the same twice: y differs by up to"):
        run(reference, rounds)


@BOTH
def test_nan_out_of_finite_inputs_is_an_error(rounds: bool) -> None:
    def reference(given: Given) -> dict[str, Tensor | None]:
        made = right(given)
        assert made["y"] is not None
        return {**made, "y": torch.where(made["y"] > 0, made["y"], math.nan)}

    with pytest.raises(UnsoundReference, match=r"returns NaN in \d+ of 20 elements of y, and all its inputs"):
        run(reference, rounds)
    assert run(reference, rounds, may_be_nan=["y"])["y"] is not None
    given = fresh()
    given["b"][0] = math.inf
    assert run(reference, rounds, given)["y"] is not None, "infinities may become NaN"


@BOTH
def test_what_the_reference_keeps_is_not_what_it_returns(rounds: bool) -> None:
    """One that returns the same buffer each time, and writes to it later, changes nothing that was handed out."""
    buffer = torch.empty(4, 5, dtype=torch.float64)

    def reference(given: Given) -> dict[str, Tensor | None]:
        return {"y": torch.addmm(given["b"], given["x"], given["w"].T, out=buffer)}

    made = run(reference, rounds)["y"]
    values = made.numpy() if isinstance(made, Tensor) else made.want  # type: ignore[attr-defined]
    before = values.copy()
    buffer.zero_()
    assert np.array_equal(values, before)


def test_expected_values_in_the_memory_of_the_result_are_an_error() -> None:
    want = torch.arange(6.0, dtype=torch.float64)
    forms, mesh = {"y": Form(Whole(), "float64")}, Mesh.of(tp=1)

    def judged(values: np.ndarray) -> bool:
        seen = [Observation({"y": LocalTensor(values, "float64")})]
        return judge_tensors({"y": want}, forms, mesh, seen, lambda *args: None).holds

    assert judged(want.numpy().copy())
    for shared in (want.numpy(), want.numpy()[::1]):
        with pytest.raises(UnsoundReference, match="expected values of y share memory with what the candidate"):
            judged(shared)


CASE = LinearCase(Mesh.of(tp=1), "column", 2, 2)


def _nan(case: LinearCase, given: Given) -> dict[str, Tensor | None]:
    return {"output[0]": given["input[0]"] @ given["weight"].T * given["output[0].grad"] * math.nan}


def _ignoring(case: LinearCase, given: Given) -> dict[str, Tensor | None]:
    return {"output[0]": given["input[0]"] @ given["weight"].T}


def _changing(case: LinearCase, given: Given) -> dict[str, Tensor | None]:
    return {"output[0]": given["input[0]"] @ given["weight"].zero_().T * given["output[0].grad"]}


@pytest.mark.parametrize(
    ("reference", "says"), [(_nan, "returns NaN"), (_ignoring, "ignores its input"), (_changing, "changes its input")]
)
def test_the_verdict_is_of_kind_harness(
    reference: Callable[..., object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("harness.properties.linear.expected", reference)
    with Bench("builtin") as bench:
        verdict = bench.once(property_of("linear"), CASE).verdict
    assert verdict.kind == "harness"
    assert says in verdict.findings[0].message
    assert not verdict.findings[0].details, "the message says it; a traceback through our code does not help"


def test_a_run_with_such_a_reference_ends_with_exit_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = dataclasses.replace(property_of("linear"), expected=lambda case: exactly(dict, given=fresh()))
    monkeypatch.setitem(PROPERTIES, "linear", broken)
    done = verify("builtin", subjects=["linear"], examples=2, max_world=1, seed=0, save=None)
    assert [failure.kind for failure in done.rows[0].failures] == ["harness"]
    assert exit_code(done.rows) == 2


def test_a_format_and_idle_names_that_are_none_are_refused() -> None:
    x = torch.ones(2, dtype=torch.float64)
    with pytest.raises(WrongUse, match="fmt is 'bf16': expected a format such as"):
        expect(lambda: {"y": 2 * x}, "bf16")  # type: ignore[arg-type]
    for judge in (lambda: expect(lambda: {"y": 2 * x}, FORMATS["bf16"], given={"x": x}, idle=["z"]),
                  lambda: exactly(lambda: {"y": 2 * x}, given={"x": x}, idle=["z"])):  # fmt: skip
        with pytest.raises(WrongUse, match="idle names 'z': expected some of what is given: x"):
            judge()
