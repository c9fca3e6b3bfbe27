"""Right code that was condemned, and references that were misjudged: each of a kind with its siblings."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from harness.errors import WrongUse
from harness.observation import LocalTensor, Observation
from harness.oracle.expectation import exactly, expect
from harness.oracle.soundness import UnsoundReference
from harness.oracle.within import compare_within
from reference.dtypes import FORMATS
from reference.layout import Whole
from reference.mesh import Mesh

G = torch.Generator().manual_seed(7)
LARGE = torch.randn(64, 128, generator=G, dtype=torch.float64)
OTHER = torch.randn(64, 128, generator=G, dtype=torch.float64)
NEAR = 0.1 + LARGE * 2.0**-12


def holds(dtype: str, compute: Callable[[Tensor, Tensor], Tensor], x: Tensor = LARGE, y: Tensor = OTHER) -> bool:
    """Whether torch's own arithmetic in the dtype is within the tolerance of the same in float64."""
    fmt = FORMATS[dtype]
    x, y = (t.to(fmt.torch_dtype).to(torch.float64) if t.is_floating_point() else t for t in (x, y))
    want = expect(lambda: {"y": compute(x, y)}, fmt)["y"]
    mine = [t.to(fmt.torch_dtype) if t.is_floating_point() else t for t in (x, y)]
    got = compute(mine[0], mine[1]).to(torch.float64).numpy()
    observed = [Observation({"y": LocalTensor(np.asarray(got), "any", "cpu")})]
    return compare_within("y", want, Whole(), "any", Mesh.of(tp=1), observed).finding is None


IN_PLACE = {
    "add with a factor": lambda x, y: x.add(y, alpha=-0.1),
    "add with a factor, in place": lambda x, y: x.clone().add_(y, alpha=-0.1),
    "sub with a factor": lambda x, y: x.sub(y, alpha=0.3),
    "a number that no format holds": lambda x, y: x - 0.1,
    "from such a number": lambda x, y: 0.1 - x,
    "reversed, with a factor": lambda x, y: torch.rsub(x, y, alpha=0.7),
    "lists of tensors": lambda x, y: torch._foreach_add([x], [y], alpha=-0.1)[0],
}
CONSTANTS = {
    "clamp": lambda x, y: x.clamp(-0.1, 0.1),
    "hardtanh": lambda x, y: F.hardtanh(x, -0.3, 0.3),
    "threshold": lambda x, y: F.threshold(x, 0.0, 0.1),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, 0.1),
    "pad": lambda x, y: F.pad(x, (1, 1), value=0.1),
    "nan_to_num": lambda x, y: torch.where(y > 0, x, torch.nan).nan_to_num(0.1),
}


@pytest.mark.parametrize("name", [*IN_PLACE, *CONSTANTS])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_numbers_that_are_rounded_first(dtype: str, name: str) -> None:
    compute = {**IN_PLACE, **CONSTANTS}[name]
    assert holds(dtype, compute)
    assert holds(dtype, compute, NEAR, NEAR), "where nearly all of it cancels"


def test_bounds_that_the_format_holds_are_exact() -> None:
    for compute in (
        lambda x: x.clamp(-0.5, 0.5),
        lambda x: x.masked_fill(x > 0, -torch.inf),
        lambda x: F.pad(x, (1, 1)),
    ):
        one = expect(lambda compute=compute: {"y": compute(LARGE)}, FORMATS["bf16"])["y"]
        assert one is not None
        assert not one.tolerance.any()


ZEROS = torch.zeros(4096, dtype=torch.int64)
ONES = torch.rand(4096, generator=G, dtype=torch.float64)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, index: torch.zeros(2, dtype=x.dtype).scatter_add(0, index, x),
        lambda x, index: torch.zeros(2, dtype=x.dtype).index_put((index,), x, accumulate=True),
        lambda x, index: torch.zeros(2, dtype=x.dtype).index_add(0, index, x),
        lambda x, index: torch.zeros(2, dtype=x.dtype).scatter_reduce(0, index, x, "sum"),
    ],
)
@pytest.mark.parametrize(("dtype", "count"), [("fp32", 4096), ("bf16", 128), ("fp16", 512)])
def test_what_is_added_one_by_one_rounds_each_time(
    dtype: str, count: int, compute: Callable[[Tensor, Tensor], Tensor]
) -> None:
    assert holds(dtype, compute, ONES[:count], ZEROS[:count])


@pytest.mark.parametrize("dtype", ["fp32", "fp64"])
def test_the_norm_of_many_elements_from_shards(dtype: str) -> None:
    x = torch.randn(65536, generator=G, dtype=torch.float64).to(FORMATS[dtype].torch_dtype)
    wide = x.to(torch.float64)
    want = expect(lambda: {"n": wide.norm()}, FORMATS[dtype])["n"]
    got = torch.stack([part.norm() ** 2 for part in x.chunk(4)]).sum().sqrt()
    observed = [Observation({"n": LocalTensor(got.to(torch.float64).numpy(), "any", "cpu")})]
    assert compare_within("n", want, Whole(), "any", Mesh.of(tp=1), observed).finding is None
    off = [Observation({"n": LocalTensor((got * (1 + 2.0**-12)).to(torch.float64).numpy(), "any", "cpu")})]
    assert compare_within("n", want, Whole(), "any", Mesh.of(tp=1), off).finding is not None


@pytest.mark.parametrize(
    "made",
    [
        lambda x: torch.tensor([x.sum(), x.sum() * 2], dtype=x.dtype),
        lambda x: torch.as_tensor([x.sum(), x.sum() * 2], dtype=x.dtype),
        lambda x: x.new_tensor([[x.sum()], [x.sum() * 2]]),
    ],
)
def test_tensors_made_of_the_numbers_of_others(made: Callable[[Tensor], Tensor]) -> None:
    given = {"x": LARGE.clone()}
    one = expect(lambda: {"y": made(given["x"])}, FORMATS["fp32"], given=given)["y"]
    assert one is not None
    assert one.tolerance.all(), "they are the numbers of a sum, which rounds"


def test_a_reference_that_looks_at_what_may_overflow_is_left_open() -> None:
    x = torch.full((4,), FORMATS["fp16"].largest, dtype=torch.float64)

    def compute() -> dict[str, Tensor | None]:
        y = x * 1.5
        while not y.max() < 10:
            y = y / 2
        assert y.isfinite().all()
        return {"y": y, "whole": torch.tensor(int(y.max()))}

    found = expect(compute, FORMATS["fp16"])
    assert found["y"] is not None
    assert found["y"].ambiguous.all()


class Changing:
    """Another result from the second call on."""

    def __init__(self, compute: Callable[[Tensor], Tensor], by: float) -> None:
        self.compute, self.by, self.calls = compute, by, 0

    def __call__(self) -> dict[str, Tensor | None]:
        self.calls += 1
        return {"y": self.compute(LARGE) + (self.by if self.calls > 1 else 0)}


@pytest.mark.parametrize(
    "compute", [F.softplus, lambda x: torch.logsumexp(x, 0), lambda x: x * float((x * x).sum()), lambda x: x * 2]
)
def test_a_reference_that_changes_is_found_however_it_runs(compute: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(UnsoundReference, match="not the same twice: y differs"):
        expect(Changing(compute, 1.5), FORMATS["fp32"])
    assert expect(Changing(compute, 0.0), FORMATS["fp32"])["y"] is not None


def test_where_nothing_rounds_two_runs_agree_in_every_bit() -> None:
    big = torch.tensor([2.0**21, 1.0], dtype=torch.float64)
    calls: list[int] = []

    def counter() -> dict[str, Tensor | None]:
        calls.append(1)
        return {"y": big + torch.tensor([0.0, len(calls)], dtype=torch.float64)}

    with pytest.raises(UnsoundReference, match="not the same twice: y differs by up to 1"):
        exactly(counter)


@pytest.mark.parametrize("result", [None, (LARGE,), LARGE])
def test_what_is_no_mapping_is_said(result: object) -> None:
    with pytest.raises(UnsoundReference, match=r"the reference returns .*: expected tensors by name"):
        expect(lambda: result, FORMATS["fp32"])  # type: ignore[arg-type,return-value]


def test_sparse_tensors_are_said() -> None:
    with pytest.raises(WrongUse, match=r"layout torch\.sparse_coo: expected dense ones"):
        expect(lambda: {"y": torch.sparse.mm((LARGE * 2).to_sparse(), OTHER.T)}, FORMATS["fp32"])


def test_an_input_of_no_elements_is_not_ignored() -> None:
    given = {"x": LARGE.clone(), "none": torch.zeros(0, 3, dtype=torch.float64)}

    def compute() -> dict[str, Tensor | None]:
        return {"y": sum((row.sum() for row in given["none"]), given["x"] * 1.5)}

    assert expect(compute, FORMATS["fp32"], given=given)["y"] is not None
