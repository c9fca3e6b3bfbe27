"""The collectives that a linear layer needs (Megatron-LM, arXiv 1909.08053, section 3; 2205.05198, section 4.2).

T tokens, I in_features, O out_features, each as the whole layer has it.

| layer | forward | backward |
|---|---|---|
| column | gather_output: all-gather T x O | all-reduce T x I, where the input trains |
| column, sequence parallel | all-gather T x I | all-gather if the weight trains; reduce-scatter if the input does |
| row | all-reduce T x O | input not parallel: all-gather T x I, where the input trains |
| row, sequence parallel | reduce-scatter T x O | all-gather T x O, where input or weight trains |
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from reference.linear import LinearCase
from reference.traffic import Phase, Transfer, gathers, reduce_scatters, worth_sending


def needed(case: LinearCase) -> tuple[Transfer, ...]:
    """Every collective, in the order of micro-batches; those of the phases of one micro-batch in order."""
    made = [one for m in range(len(case.leading)) for one in _of_micro_batch(case, m)]
    if case.kind == "row" and case.sequence_parallel and "bias" in case.trained:
        # The gradient of the bias covers a rank's own tokens. A trainer may sum it here or later, with others.
        dtype = "float32" if case.main_grad and case.dtype != "fp64" else _dtype(case)
        made.append(Transfer("finish", 0, "all_reduce", case.axis, case.out_features, dtype, optional=True))
    return worth_sending(made, case.mesh)


def with_input_gradient(case: LinearCase, transfers: Sequence[Transfer]) -> tuple[Transfer, ...]:
    """The transfers, with those of the input's gradient although the input needs none: some layers do not look."""
    asked = needed(dataclasses.replace(case, input_requires_grad=True))
    return (*transfers, *(one for one in asked if one.phase == "backward" and one not in transfers))


def with_output_gradient(case: LinearCase, transfers: Sequence[Transfer]) -> tuple[Transfer, ...]:
    """The transfers, with those of the output's gradient that the weight needs, although it does not train."""
    asked = needed(dataclasses.replace(case, weight_requires_grad=True))
    return (*transfers, *(one for one in asked if one.phase == "backward" and one not in transfers))


def _of_micro_batch(case: LinearCase, m: int) -> Iterator[Transfer]:
    n, trained, dtype = case.parallel_size, case.trained, _dtype(case)
    first, rest = case.leading[m][0], math.prod(case.leading[m][1:])
    inside, outside = case.in_features, case.out_features

    def all_reduce(phase: Phase, elements: int) -> Transfer:
        return Transfer(phase, m, "all_reduce", case.axis, elements, dtype)

    def of_tokens(make: Callable[..., Transfer], phase: Phase, features: int, **how: bool) -> Transfer:
        """A collective that cuts or joins the first token dimension."""
        return make(phase, m, case.axis, dtype, first, rest * features, n, **how)

    if case.kind == "column":
        if case.sequence_parallel:
            yield of_tokens(gathers, "forward", inside)
            if "weight" in trained:  # unless the gathered input was kept, which costs memory
                yield of_tokens(gathers, "backward", inside, optional=True)
            if "input" in trained:
                yield of_tokens(reduce_scatters, "backward", inside)
            return
        if case.gather_output:
            yield gathers("forward", m, case.axis, dtype, outside, first * rest, n)
            if case.bias and case.skip_bias_add:
                yield gathers("forward", m, case.axis, dtype, outside, 1, n)
        if "input" in trained:
            yield all_reduce("backward", first * rest * inside)
        return
    if case.sequence_parallel:
        yield of_tokens(reduce_scatters, "forward", outside)
        if trained & {"input", "weight"}:
            yield of_tokens(gathers, "backward", outside)
        return
    yield all_reduce("forward", first * rest * outside)
    if not case.input_is_parallel and "input" in trained:
        yield gathers("backward", m, case.axis, dtype, inside, first * rest, n)


def _dtype(case: LinearCase) -> str:
    return str(case.format.torch_dtype).removeprefix("torch.")
