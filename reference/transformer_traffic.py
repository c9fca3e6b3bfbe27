"""The collectives that a transformer layer needs (Megatron-LM, arXiv 1909.08053, section 3; 2205.05198, section 4.2).

T tokens, H hidden: two all-reduces T x H forward, after attention and after the mlp, and two backward, before them.
Under sequence parallelism each is a reduce-scatter, and an all-gather at the other end; backward may gather the inputs
of both halves again for the weights' gradients. Full recomputation repeats the collectives of forward in backward,
as far as they cannot be spared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from reference.traffic import Phase, Transfer, gathers, reduce_scatters, worth_sending
from reference.transformer import TransformerCase, shapes

#: One for gradients of a rank's own tokens, one for those of a rank's own heads, and one more of each dtype.
_MOST_AT_THE_END = 4


def needed(case: TransformerCase) -> tuple[Transfer, ...]:
    """Every collective, micro-batch by micro-batch."""
    made: list[Transfer] = []
    for m in range(len(case.leading)):
        forward = list(_halves(case, m, "forward"))
        made += forward
        if not case.trains:
            continue
        made += _halves(case, m, "backward")
        if case.sequence_parallel:
            made += [_gather(case, m, "backward", optional=True)] * 2
        if case.recompute == "full":
            made += [replace(one, phase="backward", optional=True) for one in forward]
    if case.trains:
        # What is summed at the end, and with what else, is up to the trainer.
        most = sum(math.prod(shape) for shape in shapes(case).values()) * case.parallel_size
        dtype = "float32" if case.main_grad and case.dtype != "fp64" else _dtype(case)
        last = Transfer("finish", 0, "all_reduce", case.axis, most, dtype, optional=True, least=0)
        made += [last] * _MOST_AT_THE_END
    return worth_sending(made, case.mesh)


def _halves(case: TransformerCase, m: int, phase: Phase) -> Iterator[Transfer]:
    """Attention and mlp."""
    tokens, sequences = case.leading[m]
    for _ in range(2):
        if case.sequence_parallel:
            yield _gather(case, m, phase)
            rest = sequences * case.hidden
            yield reduce_scatters(phase, m, case.axis, _dtype(case), tokens, rest, case.parallel_size)
        else:
            yield Transfer(phase, m, "all_reduce", case.axis, tokens * sequences * case.hidden, _dtype(case))


def _gather(case: TransformerCase, m: int, phase: Phase, optional: bool = False) -> Transfer:
    tokens, sequences = case.leading[m]
    rest = sequences * case.hidden
    return gathers(phase, m, case.axis, _dtype(case), tokens, rest, case.parallel_size, optional)


def _dtype(case: TransformerCase) -> str:
    return str(case.format.torch_dtype).removeprefix("torch.")
