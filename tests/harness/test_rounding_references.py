"""What can be a reference: random masks, optimizers, modules of torch, checkpoints, our own linear layer."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
import torch.utils.checkpoint
from roundings import FP32, U, X, one
from torch import Tensor

from harness.oracle.rounding import spread
from reference.dtypes import FORMATS
from reference.linear import LinearCase, expected, tensors
from reference.mesh import Mesh


def test_random_masks_are_the_same_in_all_runs() -> None:
    for compute in (
        lambda: F.dropout(X, 0.5),
        lambda: torch.native_dropout(X, 0.5, True)[0],
        lambda: X * torch.rand(5),
    ):
        s = one(compute)
        assert (s.deviation <= 4 * U * s.want.abs()).all()
        assert (s.deviation > 0).any()
        states = []
        for state in (1, 2):
            torch.manual_seed(state)
            states.append([one(compute, seed=seed).want for seed in (5, 6)])
        assert torch.equal(states[0][0], states[1][0]), "the state before does not count"
        assert not torch.equal(states[0][0], states[0][1])
    drawn = one(lambda: (X * 3).bernoulli_(0.5))
    assert (drawn.deviation == 0).all(), "numbers drawn over disturbed ones are the same in all runs"
    assert set(drawn.want.flatten().tolist()) == {0.0, 1.0}


def test_an_optimizer_can_be_a_reference() -> None:
    def compute() -> dict[str, Tensor | None]:
        p = X.clone().requires_grad_()
        optimizer = torch.optim.AdamW([p], lr=1e-2, foreach=True)
        for _ in range(2):
            optimizer.zero_grad()
            torch.autograd.backward((p * p * 3).sum())
            norm = torch.nn.utils.clip_grad_norm_([p], 1.0)
            optimizer.step()
        return {"p": p, "norm": norm, "grad": p.grad, "m": optimizer.state[p]["exp_avg"]}

    for name, s in spread(compute, FP32, runs=4).items():
        assert s is not None
        assert 0.01 * U < s.floor / float(s.want.abs().max()) < 100 * U, name


def test_a_module_of_torch_can_be_a_reference() -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, norm_first=True).double()
    conv = torch.nn.Sequential(torch.nn.Conv1d(6, 4, 3), torch.nn.BatchNorm1d(4), torch.nn.GELU()).double()

    def compute() -> dict[str, Tensor | None]:
        for p in [*layer.parameters(), *conv.parameters()]:
            p.grad = None
        x = torch.randn(3, 6, 8, dtype=torch.float64, requires_grad=True)
        y = conv(layer(x))
        torch.autograd.backward(y.square().mean())
        return {"x": x.grad, "y": y, **{name: p.grad for name, p in layer.named_parameters()}}

    state = {k: v.clone() for k, v in conv[1].state_dict().items()}
    for name, s in spread(compute, FORMATS["fp16"], runs=4).items():
        conv[1].load_state_dict(state)
        assert s is not None
        assert s.floor > 0, name
        assert s.floor < 0.2 * float(s.want.abs().max()) or name.endswith("in_proj_bias"), name


def test_checkpoints_and_inference_and_fast_paths() -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double().eval()
    x = torch.randn(3, 6, 8, dtype=torch.float64)

    def without_gradient() -> Tensor:
        with torch.no_grad():
            made: Tensor = layer(x * 3)
        return made * float(made.sum() > -1e9)

    def inference() -> Tensor:
        with torch.inference_mode():
            return (x * 3).softmax(-1)

    def recomputed() -> Tensor:
        leaf = X.clone().requires_grad_()
        y = torch.utils.checkpoint.checkpoint(lambda t: torch.tanh(t * 3) * t, leaf, use_reentrant=False)
        torch.autograd.backward(y.sum())
        assert leaf.grad is not None
        return leaf.grad

    for compute in (without_gradient, inference, recomputed):
        s = one(compute, runs=4)
        assert 0.01 * U < s.floor < 20 * U, compute.__name__
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_linear_reference_has_a_spread() -> None:
    case = LinearCase(Mesh.of(tp=2, dp=2), "column", 16, 12, ((4,), (3,)), bias=True, input_requires_grad=False)
    given = {name: torch.randn(t.shape, dtype=torch.float64) for name, t in tensors(case).items()}
    made = spread(lambda: expected(case, given), case.format)
    plain = expected(case, given)
    assert set(made) == set(plain)
    for name, value in plain.items():
        s = made[name]
        assert (value is None) == (s is None), name
        if value is not None and s is not None:
            assert torch.equal(s.want, value)
            assert (s.deviation > 0).any()
            assert s.floor < 100 * U * float(value.abs().max())
