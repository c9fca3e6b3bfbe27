"""The differentiable collectives on ranks: values and gradients of one process, exactly; one call on the wire."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
from sharded_ranks import Check, Traffic, integers, piece_of, run_world, same, strided

from sharded.collectives import (
    copy_to_group,
    gather_from_group,
    gather_sequence,
    reduce_from_group,
    reduce_scatter_to_group,
    scatter_to_group,
)
from sharded.cut import cut, piece
from sharded.process_groups import ProcessGroups

SHAPES = [((4, 3), 0), ((4, 3), -1), ((2, 5, 3), 1), ((1,), 0), ((3, 1), -1), ((2, 0, 3), 1), ((7, 2), -2)]


@pytest.mark.parametrize(("length", "parts"), [(0, 3), (1, 4), (4, 4), (7, 3), (12, 5)])
def test_the_cut_is_balanced(length: int, parts: int) -> None:
    lengths = cut(length, parts)
    assert len(lengths) == parts
    assert sum(lengths) == length
    assert sorted(lengths, reverse=True) == list(lengths)
    assert lengths[0] - lengths[-1] <= 1
    assert [piece(length, parts, i) for i in range(parts)] == [(sum(lengths[:i]), n) for i, n in enumerate(lengths)]


@pytest.mark.parametrize("arguments", [(-1, 2), (3, 0)])
def test_an_impossible_cut_is_refused(arguments: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="expected a length of at least 0"):
        cut(*arguments)
    with pytest.raises(ValueError, match="no piece 2 of 2"):
        piece(3, 2, 2)


def values(group: dist.ProcessGroup, shape: tuple[int, ...], dim: int, dtype: torch.dtype) -> list[str]:
    """Forward and backward of all six on one shape, contiguous and not."""
    problems: list[str] = []
    ranks, me = dist.get_process_group_ranks(group), group.rank()
    each = [integers(f"x{r}", *shape) for r in ranks]  # a whole tensor on each rank
    whole = integers(f"x{ranks}", *shape)  # one tensor for all
    grads = [integers(f"g{r}", *shape) for r in ranks]
    whole_grad = integers(f"g{ranks}", *shape)

    def own(x: torch.Tensor) -> torch.Tensor:
        return piece_of(x, dim, group)

    total, total_grad, length = sum(each), sum(grads), shape[dim]
    table = [
        # name, call, this rank's input and output gradient, expected output and input gradient
        ("copy", lambda x: copy_to_group(x, group), whole, grads[me], whole, total_grad),
        ("reduce", lambda x: reduce_from_group(x, group), each[me], whole_grad, total, whole_grad),
        ("scatter", lambda x: scatter_to_group(x, group, dim), whole, own(whole_grad), own(whole), whole_grad),
        ("gather", lambda x: gather_from_group(x, group, dim, length), own(whole), whole_grad, whole, own(whole_grad)),
        ("sequence", lambda x: gather_sequence(x, group, dim, length), own(whole), grads[me], whole, own(total_grad)),
        (
            "reduce-scatter",
            lambda x: reduce_scatter_to_group(x, group, dim),
            each[me],
            own(whole_grad),
            own(total),
            whole_grad,
        ),
    ]
    for name, call, x, g, y, expected in table:
        for layout in (torch.Tensor.contiguous, strided):
            own_x = layout(x).to(dtype).clone().requires_grad_()
            own_g = layout(g).to(dtype).clone()
            out = call(own_x)
            out.backward(own_g)
            label = f"{name} of {shape} along {dim} in {dtype}: "
            problems += same(label + "output", out, y) + same(label + "gradient", own_x.grad, expected)
            problems += same(label + "input after", own_x, x) + same(label + "output gradient after", own_g, g)
            if out.dtype != dtype:
                problems.append(f"{label}{out.dtype} comes out")
    return problems


def even_without_length(group: dist.ProcessGroup) -> list[str]:
    whole = integers("even", 3, 2 * group.size())
    return same("gather", gather_from_group(piece_of(whole, 1, group), group), whole)


def traffic(group: dist.ProcessGroup) -> list[str]:
    """One call each way, or none."""
    n, problems = group.size(), []
    x = torch.ones(4 * n, 3, requires_grad=True)
    table = [
        (lambda: copy_to_group(x, group), [], [("allreduce", 12 * n)]),
        (lambda: reduce_from_group(x, group), [("allreduce", 12 * n)], []),
        (lambda: scatter_to_group(x, group, 0), [], [("allgather", 12)]),
        (lambda: gather_from_group(x, group, 0), [("allgather", 12 * n)], []),
        (lambda: gather_sequence(x, group, 0), [("allgather", 12 * n)], [("reduce", 12 * n * n)]),
        (lambda: reduce_scatter_to_group(x, group, 0), [("reduce", 12 * n)], [("allgather", 12)]),
    ]
    for index, (call, forward, backward) in enumerate(table):
        with Traffic() as there:
            y = call()
        with Traffic() as back:
            y.sum().backward()
        expected = (forward, backward) if n > 1 else ([], [])
        if (there.calls, back.calls) != expected:
            problems.append(f"row {index}: {there.calls} and {back.calls}, expected {expected}")
    return problems


def wrong_piece(group: dist.ProcessGroup) -> list[str]:
    """Refused on every rank, before anything is sent."""
    try:
        gather_from_group(torch.ones(2, 9), group, -1, 5)
    except ValueError as error:
        return [] if "has length 9: expected" in str(error) else [str(error)]
    return ["not refused"]


def on_ranks() -> Mapping[str, Check]:
    n = dist.get_world_size()
    groups = ProcessGroups([("tp", n)]) if n == 2 else ProcessGroups([("tp", 2), ("dp", n // 2)])
    everyone = groups.group("tp", "dp")

    def all_values(group: dist.ProcessGroup, dtype: torch.dtype) -> list[str]:
        return [problem for shape, dim in SHAPES for problem in values(group, shape, dim, dtype)]

    checks: dict[str, Check] = {}
    for name in ("tp", "dp", "world"):
        group = everyone if name == "world" else groups.group(name)
        checks[f"traffic {name}"] = lambda group=group: traffic(group)
        checks[f"even {name}"] = lambda group=group: even_without_length(group)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            checks[f"values {name} {dtype}"] = lambda group=group, dtype=dtype: all_values(group, dtype)
    checks["wrong piece"] = lambda: wrong_piece(everyone)
    checks["close"] = lambda: groups.close() or []
    return checks


@pytest.mark.parametrize("world", [2, 4])
def test_collectives_on_ranks(world: int) -> None:
    found = run_world(world, on_ranks)
    assert not any(found.values()), {name: problems for name, problems in found.items() if problems}
