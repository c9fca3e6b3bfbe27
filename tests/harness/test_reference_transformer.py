"""The expected values of a transformer layer against torch's own modules and autograd."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from drawing import transformer_cases
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from harness.drawn import Draws
from harness.observation import LocalTensor, Observation
from harness.oracle.expectation import expect
from harness.oracle.within import compare_within
from harness.properties.modules import one_thread
from reference.attention import visible_keys
from reference.codec import decode, encode
from reference.layout import Whole
from reference.mesh import Mesh
from reference.recipe import Recipe
from reference.transformer import DROPOUT, Tensors, TransformerCase, TransformerRecipes, expected, shapes, tensors
from reference.transformer_dropout import mask_name, mask_names, mask_shapes

PLAIN = TransformerCase(Mesh.of(tp=2), hidden=8, heads=4, kv_heads=4, ffn=6, leading=((3, 2),), bias=True)


class Layer(nn.Module):
    """The layer of a case in torch's modules and its fused attention."""

    def __init__(self, case: TransformerCase) -> None:
        super().__init__()
        self.case = case
        norm = nn.LayerNorm if case.norm == "layer" else nn.RMSNorm
        size, keys = case.head_size, case.kv_heads * case.head_size
        self.norm1, self.norm2 = norm(case.hidden, eps=1e-5), norm(case.hidden, eps=1e-5)
        if case.qk_norm:
            options = {"bias": False} if case.norm == "layer" else {}
            self.q_norm, self.k_norm = norm(size, eps=1e-5, **options), norm(size, eps=1e-5, **options)
        widths = {"q": case.hidden, "k": keys, "v": keys, "o": case.hidden, "up": case.ffn, "gate": case.ffn}
        for name, width in widths.items():
            setattr(self, name, nn.Linear(case.hidden, width, bias=case.bias))
        self.down = nn.Linear(case.ffn, case.hidden, bias=case.bias)
        self.double()

    def forward(self, x: torch.Tensor, m: int) -> torch.Tensor:
        case, (S, B, H) = self.case, x.shape

        def heads(name: str, count: int) -> torch.Tensor:
            made = getattr(self, name)(self.norm1(x)).view(S, B, count, -1)
            if case.qk_norm and name != "v":
                made = getattr(self, f"{name}_norm")(made)
            return (turned(made) if case.rotary and name != "v" else made).permute(1, 2, 0, 3)

        mixed = F.scaled_dot_product_attention(  # with dropout_p > 0 it draws one mask, [B, A, S, S]
            heads("q", case.heads),
            heads("k", case.kv_heads),
            heads("v", case.kv_heads),
            attn_mask=visible_keys(S, B, m)[:, None, None] if case.mask == "padding" else None,
            dropout_p=case.dropout,
            is_causal=case.mask == "causal",
            enable_gqa=True,
        )
        y = x + F.dropout(self.o(mixed.permute(2, 0, 1, 3).reshape(S, B, H)), case.dropout)
        h = self.norm2(y)
        inner = F.silu(self.gate(h)) * self.up(h) if case.activation == "swiglu" else F.gelu(self.up(h))
        z: torch.Tensor = y + F.dropout(self.down(inner), case.dropout)
        return z


def turned(x: torch.Tensor) -> torch.Tensor:
    """Features i and i + D / 2 are a complex number, which is turned by position / 10000^(2 i / D)."""
    first, second = x.double().chunk(2, -1)
    half, positions = first.shape[-1], torch.arange(len(x), dtype=torch.float64)
    angle = positions[:, None] / 10000 ** (2 * torch.arange(half, dtype=torch.float64) / x.shape[-1])
    made = torch.complex(first, second) * torch.polar(torch.ones_like(angle), angle)[:, None, None]
    return torch.cat([made.real, made.imag], -1).to(x.dtype)


def by_modules(
    case: TransformerCase, given: Tensors, dtype: torch.dtype = torch.float64
) -> dict[str, torch.Tensor | None]:
    """Each replica's layer, run forward and backward on each micro-batch in turn."""
    replicas = []
    for r in range(case.replicas):
        layer, out = Layer(case).to(dtype), {}
        held = {name: layer.get_parameter(re.sub("_(weight|bias)$", r".\1", name)) for name in shapes(case)}
        for name, parameter in held.items():
            parameter.data.copy_(given[name])
        for m in range(len(case.leading)):
            x = given[f"input[{m}]"][r].to(dtype, copy=True).requires_grad_(case.input_requires_grad)
            z = layer(x, m)
            if case.trains:
                torch.autograd.backward(z, given[f"output[{m}].grad"][r].to(dtype))
            out[f"output[{m}]"], out[f"input[{m}].grad"] = z.detach(), x.grad
        out |= {f"{name}.grad": parameter.grad for name, parameter in held.items()}
        replicas.append(out)
    return {
        name: None if value is None else torch.stack([replica[name] for replica in replicas])
        for name, value in replicas[0].items()
    }


@given(transformer_cases)
def test_expected_is_what_torchs_modules_compute(case: TransformerCase) -> None:
    made = tensors(case)
    assert_nearly_equal(expected(case, made), by_modules(case, made))


@given(transformer_cases, st.sampled_from(DROPOUT[1:]))
def test_with_dropout_expected_is_what_torchs_modules_compute(case: TransformerCase, p: float) -> None:
    case = dataclasses.replace(case, dropout=p, init=False)
    made, (want, masks) = tensors(case), with_masks(case)
    assert set(mask_names(case)) == set(masks)
    assert_nearly_equal(expected(case, {**made, **masks}), want)


def test_dropout_without_masks_is_refused() -> None:
    case = dataclasses.replace(PLAIN, dropout=0.5)
    with pytest.raises(
        ValueError, match=re.escape("dropout 0.5 without kept[0].probabilities, kept[0].o, kept[0].down")
    ):
        expected(case, tensors(case))


def with_masks(case: TransformerCase) -> tuple[dict[str, torch.Tensor | None], Tensors]:
    """What torch's modules compute with dropout, and the masks that they drew."""
    with torch.random.fork_rng(), Draws() as draws:
        torch.manual_seed(0)
        made = by_modules(case, tensors(case))
    drawn = iter(draws.found)
    found: dict[str, list[torch.Tensor]] = {}
    for _ in range(case.replicas):
        for m in range(len(case.leading)):
            for place, shape in mask_shapes(case, m).items():
                kept = next(drawn).kept(case.dropout, ones_are_kept=True).reshape(shape[1:])
                found.setdefault(mask_name(place, m), []).append(torch.from_numpy(kept))
    assert next(drawn, None) is None
    return made, {name: torch.stack(parts) for name, parts in found.items()}


def assert_nearly_equal(got: Mapping[str, torch.Tensor | None], want: Mapping[str, torch.Tensor | None]) -> None:
    assert set(got) == set(want)
    for name, value in got.items():
        other = want[name]
        assert (value is None) == (other is None), name
        if value is not None and other is not None:
            assert (value.dtype, value.shape) == (torch.float64, other.shape), name
            # The scale of the errors is that of the terms, which cancel in what is near zero.
            scale = max(1.0, float(other.abs().max()))
            torch.testing.assert_close(value / scale, other / scale, rtol=0, atol=3e-9, msg=name)


@given(transformer_cases)
def test_layers_that_compute_in_the_dtype_itself_are_within_tolerance(case: TransformerCase) -> None:
    """The shipped one has norms and softmax in fp32; whoever has not must not be condemned."""
    case = dataclasses.replace(case, main_grad=False)
    made = tensors(case)
    idle = [] if case.trains else [name for name in made if name.endswith(".grad")]
    with one_thread():
        want = expect(lambda: expected(case, made), case.format, given=made, idle=idle)
    got = by_modules(case, made, case.format.torch_dtype)
    for name, value in want.items():
        held = got[name]
        local = None if held is None else LocalTensor(held.to(torch.float64).numpy(), case.dtype)
        judged = compare_within(name, value, Whole(), case.dtype, Mesh.of(tp=1), [Observation({name: local})])
        assert judged.finding is None, (judged, case)


def test_the_plain_layer_is_torchs_encoder_layer() -> None:
    case = dataclasses.replace(PLAIN, mask="none")
    given = tensors(case)
    layer = nn.TransformerEncoderLayer(8, 4, 6, 0.0, F.gelu, norm_first=True, dtype=torch.float64).train()
    with torch.no_grad():
        for kind in ("weight", "bias"):
            joined = torch.cat([given[f"{name}_{kind}"] for name in ("q", "k", "v")])
            getattr(layer.self_attn, f"in_proj_{kind}").copy_(joined)
            theirs = {"self_attn.out_proj": "o", "linear1": "up", "linear2": "down", "norm1": "norm1", "norm2": "norm2"}
            for name, ours in theirs.items():
                layer.get_parameter(f"{name}.{kind}").copy_(given[f"{ours}_{kind}"])
    z = layer(given["input[0]"][0])
    z.backward(given["output[0].grad"][0])
    want = expected(case, given)
    pairs = {"output[0]": z, "norm1_weight.grad": layer.norm1.weight.grad, "up_bias.grad": layer.linear1.bias.grad}
    pairs["o_weight.grad"] = layer.self_attn.out_proj.weight.grad
    for name, got in pairs.items():
        value = want[name]
        assert value is not None
        assert got is not None
        torch.testing.assert_close(value[0], got)


@given(transformer_cases)
def test_a_case_survives_json_and_its_tensors_are_representable_and_of_order_one(case: TransformerCase) -> None:
    assert decode(TransformerCase, encode(case)) == case
    for name, tensor in tensors(case).items():
        assert torch.equal(tensor.to(case.format.torch_dtype).to(torch.float64), tensor), name
        kind = case.recipes.input.kind if name.startswith("input") else case.recipes.output_grad.kind
        if "[" not in name or kind == "normal":
            assert 0 < float(tensor.abs().max()) < 8, name
        assert tensor.numel() == 1 or not bool(((tensor == 0) | (tensor == 1)).all()), name


def test_no_sequence_of_a_padding_mask_is_hidden_altogether() -> None:
    for tokens in range(1, 9):
        visible = torch.stack([visible_keys(tokens, 3, m) for m in range(2)])
        assert visible.any(-1).all()
        assert tokens == 1 or not visible.all()
    assert visible_keys(4, 3, 0).tolist() == [[True] * 3 + [False], [True] * 2 + [False] * 2, [True] + [False] * 3]


def test_micro_batches_add_up_and_replicas_do_not() -> None:
    case = dataclasses.replace(PLAIN, mesh=Mesh.of(tp=2, dp=2), leading=((3, 2), (1, 1)))
    given = tensors(case)
    want = expected(case, given)
    assert not torch.equal(want["output[0]"][0], want["output[0]"][1])  # type: ignore[index]
    alone = []
    for m in range(2):
        one = {**given, "input[0]": given[f"input[{m}]"], "output[0].grad": given[f"output[{m}].grad"]}
        alone.append(expected(dataclasses.replace(case, leading=(case.leading[m],)), one)["q_weight.grad"])
    assert torch.equal(want["q_weight.grad"], alone[0] + alone[1])  # type: ignore[operator, arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 9}, "hidden 9 is not a multiple of heads 4"),
        ({"mesh": Mesh.of(tp=3)}, "heads 4 is not a multiple of ranks 3"),
        ({"ffn": 5}, "ffn 5 is not a multiple of ranks 2"),
        ({"kv_heads": 3}, "heads 4 is not a multiple of kv_heads 3"),
        ({"heads": 6, "hidden": 12, "kv_heads": 3}, "kv_heads 3 on 2 ranks: one must be a multiple of the other"),
        ({"sequence_parallel": True}, "tokens 3 is not a multiple of ranks 2"),
        ({"hidden": 4, "rotary": True}, "rotary turns pairs of features: a head has 1, expected an even number"),
        ({"leading": ()}, "leading (): expected (tokens, sequences) of each micro-batch"),
        ({"leading": ((2,),)}, "leading ((2,),): expected (tokens, sequences)"),
        ({"leading": ((2, 0),)}, "leading ((2, 0),): expected (tokens, sequences)"),
        ({"dropout": 0.2}, "dropout 0.2: expected one of 0.0, 0.1, 0.5"),
        ({"axis": "dp"}, "the layer's axis 'dp' is not in the mesh tp=2"),
        ({"mesh": Mesh.of(dp=2), "axis": "dp"}, "axis 'dp' is not the default group"),
        ({"ffn": 0}, "ffn 0 must be at least 1"),
        ({"norm": "batch"}, "norm is 'batch': expected one of 'layer', 'rms'"),
        ({"mask": "future"}, "mask is 'future': expected one of 'causal', 'padding', 'none'"),
        ({"dtype": "fp8"}, "unknown dtype 'fp8'"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(PLAIN, **changes)


def test_recipes_are_normal_by_default_and_seeds_change_them() -> None:
    other = dataclasses.replace(PLAIN, recipes=TransformerRecipes(vector=Recipe("normal", 1)))
    one, two = tensors(PLAIN), tensors(other)
    changed = {name for name in one if not np.array_equal(one[name], two[name])}
    assert changed == {name for name, shape in shapes(PLAIN).items() if len(shape) == 1}
