"""The disturbed copies of a tensor follow whatever happens to its memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from roundings import FP32, X, one
from torch import Tensor

from harness.oracle import shadows
from harness.oracle.shadows import Shadows
from reference.dtypes import FORMATS

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.T,
    "column": lambda x: x[:, 1:2],
    "every other": lambda x: x[1::2, ::2],
    "expanded": lambda x: x[:, :1].expand(6, 4),
    "overlapping": lambda x: x.as_strided((4, 3), (2, 1), 5),
    "permuted": lambda x: x.view(2, 3, 5).permute(2, 0, 1)[1],
}
STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "copy": lambda x: x.clone(),
    "contiguous": lambda x: x.contiguous(),
    "channels last": lambda x: (x[None, :, None] * x[None, :, :, None]).to(memory_format=torch.channels_last),
    "clone channels last": lambda x: x[None, None].clone(memory_format=torch.channels_last),
    "reshape": lambda x: x.reshape(-1)[1:] * 2,
    "sort": lambda x: x.sort(0).values,
    "roll": lambda x: x.roll(1, 0),
    "cat": lambda x: torch.cat([x, X[: len(x), :1]], 1),
    "stack": lambda x: torch.stack([x, x], -1),
    "pad": lambda x: F.pad(x, (1, 0)),
    "index": lambda x: x[[0, -1]],
    "gather": lambda x: x.gather(0, torch.zeros(x.shape, dtype=torch.int64)),
    "scatter": lambda x: torch.zeros(x.shape).double().scatter_add(0, torch.zeros(x.shape, dtype=torch.int64), x),
    "sum": lambda x: x.sum(0),
    "sum of all": lambda x: x.sum(),
    "sum, kept": lambda x: x.sum((0, -1), keepdim=True),
    "mean": lambda x: x.mean(-1),
    "largest": lambda x: x.amax(1, keepdim=True),
    "number": lambda x: x.sum().sum(),
    "matmul": lambda x: x @ x.T,
    "vector": lambda x: x @ x[0],
    "batched": lambda x: x[None].expand(2, -1, -1) @ X[: x.shape[1], :2],
    "from the left": lambda x: X[:2, : len(x)] @ x if len(x) < 6 else x,
    "addmm": lambda x: torch.addmm(x[:, :1], x, x.T, beta=-0.5, alpha=3),
    "addmm, plain": lambda x: torch.addmm(x[:, 0], x, x.T),
    "softmax": lambda x: x.softmax(0),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:], x[0], x[-1]),
    "broadcast": lambda x: x[:, None] * x[None, :, :1] + x[0, 0],
    "fill with a number": lambda x: x.masked_fill(x > 1, x[0, 0]),
    "where": lambda x: torch.where(x > 1, x[0, 0], x[:, :1]),
    "clamp": lambda x: x.clamp(x[0, 0], x[0]),
    "out": lambda x: torch.mul(x, x, out=torch.empty(0).double()),
    "out, of a sum": lambda x: torch.cumsum(x, 0, out=torch.empty(x.shape).double()),
    "out, over disturbed": lambda x: torch.sort(x, 0, out=(x * 5, torch.empty(0).long()))[0],
    "in place": lambda x: x.clone().mul_(x[0]).add_(x),
    "part in place": lambda x: _doubled(x),
    "fill": lambda x: x.clone().fill_(0.5) + x,
    "conv": lambda x: F.conv1d(x[None], x[:, None, :1], groups=len(x)),
    "var_mean": lambda x: torch.stack(torch.var_mean(x, 0)),
    "split": lambda x: torch.cat(x.split(1)[::-1]),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True, eps=0.5),
    "dropout": lambda x: F.dropout(x, 0.5),
    "compare": lambda x: (x > x.mean()).double(),
}


def _doubled(x: Tensor) -> Tensor:
    base = x.clone()
    base[1:] *= 3
    base[:, 0].copy_(x[:, -1])
    return base


@pytest.mark.parametrize("step", STEPS)
def test_copies_follow_whatever_happens_to_the_memory(step: str) -> None:
    """With fp64's own roundoff all copies stay next to the undisturbed values, and every result is reached."""
    for layout, view in LAYOUTS.items():
        s = one(lambda view=view: STEPS[step](view(X * 3 + 2)), fmt=FORMATS["fp64"], runs=3)  # type: ignore[misc]
        assert (s.deviation <= 1e-12 * s.want.abs().max().clamp(min=1)).all(), layout
        coarse = one(lambda view=view: STEPS[step](view(X * 3 + 2)), fmt=FORMATS["bf16"], runs=3)  # type: ignore[misc]
        reached = (coarse.deviation > 0) | (coarse.want == 0)
        assert reached.all() or step in ("dropout", "compare", "pad", "scatter", "cat"), layout
        assert not coarse.ambiguous.any()


def test_shadows_of_dead_storages_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute() -> Tensor:
        x = X
        for _ in range(200):
            x = x * 0.99 + 0.25
        return x

    want = one(compute)
    held = []
    for limit in (1 << 28, 1 << 14):
        monkeypatch.setattr(shadows, "_SWEEP", limit)
        assert torch.equal(one(compute).residuals, want.residuals)
        with Shadows(FP32, 0, 8) as mode:
            compute()
        held.append(len(mode._flat))
    assert held[0] == 400
    assert held[1] < 20


def test_a_computation_goes_on_after_it_was_interrupted() -> None:
    """Copies stay with what is still there; what was made outside has those that it is given."""

    def computed(pieces: bool) -> Tensor:
        mode = Shadows(FP32, 0, 4)
        with mode:
            x = X * X
        if pieces:
            mode.forget()
            assert not mode.near_overflow()
        with mode:
            y = x + X
        found = mode.of(y)
        assert found is not None
        return found

    assert torch.equal(computed(True), computed(False))


def test_copies_from_outside() -> None:
    mode, made = Shadows(FP32, 0, 4), X.round()
    assert mode.of(made) is None
    given = torch.stack([made, made + 1, made, made])
    mode.keep(made, given)
    with mode:
        twice = made[1:] + made[1:]
    found = mode.of(twice)
    assert found is not None
    torch.testing.assert_close(found, 2 * given[:, 1:], rtol=1e-6, atol=1e-6)
