"""The collectives that a sharded optimizer needs: in each step, for each dtype, gradients to the owners of their
elements, and updated parameters back to all."""

from __future__ import annotations

from reference.sharded_optimizer import ShardedOptimizerCase
from reference.traffic import Transfer, gathers, reduce_scatters, worth_sending


def needed(case: ShardedOptimizerCase) -> tuple[Transfer, ...]:
    """One reduce-scatter and one all-gather of all elements of each dtype, padded to the number of owners. The step
    stands in the place of the micro-batch."""
    made: list[Transfer] = []
    for step in range(case.steps):
        axis = case.axis_at(step)
        n = case.mesh.axis_size(axis)
        for fp32, total in elements(case).items():
            i = next(i for i in case.trained if _is_fp32(case, i) == fp32)
            sent, own = (_name(f.torch_dtype) for f in (case.sent(i), case.format_of(i)))
            made.append(reduce_scatters("finish", step, axis, sent, total, 1, n))
            made.append(gathers("finish", step, axis, own, total, 1, n))
    return tuple(one for one in worth_sending(made, case.mesh))


def elements(case: ShardedOptimizerCase) -> dict[bool, int]:
    """The trained elements of each dtype, by whether it is fp32, in the order of the parameters."""
    found: dict[bool, int] = {}
    for i in case.trained:
        found[_is_fp32(case, i)] = found.get(_is_fp32(case, i), 0) + case.parameters[i].elements
    return found


def _is_fp32(case: ShardedOptimizerCase, i: int) -> bool:
    return case.format_of(i).name == "fp32"


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
