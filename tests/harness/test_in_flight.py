"""Several micro-batches in flight, forwards without gradients, totals over micro-batches, and what stays as it was."""

from __future__ import annotations

import dataclasses

import pytest
from trials import BAD, GOOD, bench, judge

from harness.verdict import Verdict
from reference.linear import LinearCase

TWO_BATCHES = dataclasses.replace(BAD, leading=((2,), (3,)))


def verdicts(name: str, *cases: LinearCase) -> list[Verdict]:
    with bench(name) as made:
        found = [judge(made, case) for case in cases]
        assert judge(made, GOOD).holds
    return found


def with_backward(*orders: str) -> list[LinearCase]:
    return [dataclasses.replace(TWO_BATCHES, backward=order) for order in orders]  # type: ignore[arg-type]


ORDERS = with_backward("immediate", "delayed", "reversed", "never")


@pytest.mark.parametrize("name", ["right.py:Right", "holding.py:InputOnModule"])
def test_a_layer_that_keeps_what_it_needs_holds_in_every_order(name: str) -> None:
    assert [found.holds for found in verdicts(name, *ORDERS)] == [True] * 4


def test_an_input_that_the_next_forward_overwrites() -> None:
    at_once, delayed, reversed_, never = verdicts("holding.py:InputOnModuleShared", *ORDERS)
    assert at_once.holds
    assert never.holds
    # The forward of micro-batch 1 came last: with its backward first, only that of micro-batch 0 is wrong.
    for found in (delayed, reversed_):
        assert found.kind in ("mismatch", "error"), found


def test_an_output_that_the_next_forward_overwrites() -> None:
    same = [dataclasses.replace(case, leading=((2,), (2,))) for case in ORDERS]
    at_once, delayed, reversed_, never = verdicts("holding.py:OutputBuffer", *same)
    assert at_once.holds, "after its backward an output may be overwritten"
    for found in (delayed, reversed_, never):
        assert [(f.kind, f.message) for f in found.findings] == [
            ("side-effect", "the candidate changed output[0] in place")
        ]


def test_a_parameter_changed_after_the_last_backward() -> None:
    (found,) = verdicts("holding.py:ParameterInFinish", TWO_BATCHES)
    assert [f.message for f in found.findings] == ["the candidate changed parameter weight in place"]


def test_a_forward_that_is_wrong_without_gradients() -> None:
    at_once, never = verdicts("holding.py:WithoutGradients", *with_backward("immediate", "never"))
    assert at_once.holds
    assert {f.tensor for f in never.findings} == {"output[0]", "output[1]"}


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
def test_main_gradients_are_summed_in_fp32(dtype: str) -> None:
    case = dataclasses.replace(TWO_BATCHES, dtype=dtype, main_grad=True)
    orders = [dataclasses.replace(case, backward="delayed"), dataclasses.replace(case, backward="reversed")]
    assert all(found.holds for found in verdicts("holding.py:MainGradient", case, *orders))


def test_main_gradients_summed_in_low_precision() -> None:
    """In one micro-batch there is no total, and nothing wrong with it."""
    case = dataclasses.replace(TWO_BATCHES, dtype="bf16", main_grad=True)
    found, alone = verdicts("holding.py:MainGradientInBf16", case, dataclasses.replace(case, leading=((2,),)))
    assert {f.tensor for f in found.findings} == {"weight.grad", "bias.grad"}
    assert alone.holds
