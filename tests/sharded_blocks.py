"""What the tests of the transformer layer share: one process in plain torch, and a case on ranks against it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from sharded_ranks import Traffic

from sharded import attention_core, random, transformer
from sharded.transformer import TransformerLayer, finish_gradients

HIDDEN_KEYS = {4: [3, 2], 8: [7]}  # by length: the first key that is padding, by sequence


def normal(name: str, *shape: int) -> torch.Tensor:
    """Normal numbers in float64 that belong to the name."""
    stream = torch.Generator().manual_seed(sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**31)
    return torch.randn(shape, generator=stream, dtype=torch.float64)


@dataclass(frozen=True)
class Block:
    """One transformer layer, driven forward and backward on a few micro-batches of (positions, sequences)."""

    hidden: int = 16
    heads: int = 4
    kv_heads: int = 4
    ffn: int = 12
    batches: tuple[tuple[int, int], ...] = ((4, 2), (8, 1))
    mask: str = "causal"
    dtype: torch.dtype = torch.float64
    frozen_input: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def width(self) -> int:
        return self.hidden // self.heads

    def option(self, name: str, default: Any = False) -> Any:
        return self.options.get(name, default)

    def build(self, group: dist.ProcessGroup, **more: Any) -> TransformerLayer:
        options = {**self.options, "dtype": self.dtype, "group": group, **more}
        return TransformerLayer(self.hidden, self.heads, self.ffn, kv_heads=self.kv_heads, **options)

    def mask_of(self, positions: int, sequences: int) -> Any:
        if self.mask != "padding":
            return None if self.mask == "none" else self.mask
        first = torch.tensor(HIDDEN_KEYS[positions][:sequences])
        return torch.arange(positions) < first[:, None]


def names_of(layer: TransformerLayer) -> dict[str, torch.nn.Parameter]:
    """Parameters by short names: norm1_weight, q_weight, gate_bias ..."""
    found = {}
    for name, parameter in layer.named_parameters():
        *_, part, kind = name.split(".")
        found[f"{part}_{kind}"] = parameter
    return found


def cuts(case: Block, name: str, ranks: int) -> tuple[int | None, int]:
    """(dimension that is cut or None, how many ranks share a piece)."""
    part, kind = name.rsplit("_", 1)
    if part in ("q", "gate", "up"):
        return 0, 1
    if part in ("k", "v"):
        return 0, max(1, ranks // case.kv_heads)
    return (1, 1) if part in ("o", "down") and kind == "weight" else (None, 1)


def own(case: Block, name: str, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's piece of a parameter or its gradient."""
    dim, copies = cuts(case, name, group.size())
    return whole if dim is None else whole.chunk(group.size() // copies, dim)[group.rank() // copies]


def whole_shape(case: Block, name: str, piece: torch.Tensor, group: dist.ProcessGroup) -> tuple[int, ...]:
    dim, copies = cuts(case, name, group.size())
    return tuple(length * (group.size() // copies if i == dim else 1) for i, length in enumerate(piece.shape))


def plain_norm(case: Block, x: torch.Tensor, p: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    if case.option("norm", "layer") == "layer":
        x = x - x.mean(-1, keepdim=True)
    normed = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * p[f"{name}_weight"]
    return normed + p[f"{name}_bias"] if f"{name}_bias" in p else normed


def plain_rotary(x: torch.Tensor) -> torch.Tensor:
    """x [S, B, A, D]: pairs as complex numbers."""
    half = x.shape[-1] // 2
    speeds = torch.tensor([10000.0 ** (-i / half) for i in range(half)], dtype=x.dtype)
    angles = torch.arange(x.shape[0], dtype=x.dtype)[:, None] * speeds
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)[:, None, None]
    return torch.cat([turned.real, turned.imag], -1)


def plain_layer(case: Block, x: torch.Tensor, p: dict[str, torch.Tensor], drops: list[torch.Tensor]) -> torch.Tensor:
    """The layer on one process, head by head: x [S, B, H]; drops: what dropout multiplies with, in turn."""

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ p[f"{name}_weight"].T
        return y + p[f"{name}_bias"] if f"{name}_bias" in p else y

    S, B, _ = x.shape
    h = plain_norm(case, x, p, "norm1")
    q, k, v = (linear(h, name).view(S, B, -1, case.width) for name in "qkv")
    if case.option("qk_norm"):
        q, k = plain_norm(case, q, p, "q_norm"), plain_norm(case, k, p, "k_norm")
    if case.option("rotary"):
        q, k = plain_rotary(q), plain_rotary(k)
    mask = case.mask_of(S, B)
    outputs = []
    for a in range(case.heads):
        kv = a * case.kv_heads // case.heads
        scores = torch.einsum("sbd,tbd->bst", q[:, :, a], k[:, :, kv]) / math.sqrt(case.width)
        if case.mask == "causal":
            scores = scores + torch.full((S, S), -math.inf, dtype=x.dtype).triu(1)
        if case.mask == "padding":
            scores = torch.where(mask[:, None], scores, torch.full_like(scores, -math.inf))
        outputs.append(torch.einsum("bst,tbd->sbd", scores.softmax(-1) * drops[0][:, a], v[:, :, kv]))
    y = x + linear(torch.cat(outputs, -1), "o") * drops[1]
    h = plain_norm(case, y, p, "norm2")
    u = linear(h, "up")
    if case.option("activation", "gelu") == "gelu":
        u = u * (1 + torch.erf(u / math.sqrt(2))) / 2
    else:
        gate = linear(h, "gate")
        u = gate * torch.sigmoid(gate) * u
    return y + linear(u, "down") * drops[2]


@contextmanager
def recorded_dropout() -> Iterator[list[torch.Tensor]]:
    """What dropout multiplies with inside, in the order of the calls: 0 or 1 / (1 - p), all 1 where p is 0."""
    factors: list[torch.Tensor] = []

    def dropout(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
        factors.append(random.dropout(torch.ones_like(x.detach()), *arguments))
        return x * factors[-1]

    places = (attention_core, transformer)
    for place in places:
        place.dropout = dropout
    try:
        yield factors
    finally:
        for place in places:
            place.dropout = random.dropout


def raises(call: Callable[[], object], message: str) -> bool:
    try:
        call()
    except ValueError as error:
        return message in str(error)
    return False


def gathered(value: Any, group: dist.ProcessGroup) -> list[Any]:
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def whole_drops(case: Block, factors: list[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    """The factors of all heads [B, A, S, S], and of the two halves' outputs [S, B, H]."""
    heads, *halves = zip(*gathered(factors, group), strict=True)
    whole = [torch.cat(half) if case.option("sequence_parallel") else half[group.rank()] for half in halves]
    return [torch.cat(heads, dim=1).double(), *(half.double() for half in whole)]


def near(name: str, found: torch.Tensor | None, expected: torch.Tensor | None, rtol: float = 1e-9) -> list[str]:
    """What differs by more than rtol of the largest expected element.

    A key bias moves all scores of a query alike, so that its gradient is zero but for rounding: hence a least largest.
    """
    if found is None or expected is None:
        return [] if found is expected else [f"{name} is {found}, expected {expected}"]
    if found.shape != expected.shape:
        return [f"{name} has shape {tuple(found.shape)}, expected {tuple(expected.shape)}"]
    worst = (found.detach().double() - expected.detach().double()).abs().max().item()
    largest = expected.detach().abs().max().item()
    return (
        []
        if worst <= rtol * max(largest, 1e-3)
        else [f"{name} is off by {worst:.3g} where the largest is {largest:.3g}"]
    )


def block_problems(case: Block, group: dist.ProcessGroup, rtol: float = 1e-9) -> list[str]:
    """What differs from one process: outputs, input gradients, gradients of all parameters; inputs that changed."""
    data = f"replica {dist.get_process_group_ranks(group)}"
    n, sp = group.size(), case.option("sequence_parallel")
    layer = case.build(group)
    held = names_of(layer)
    whole = {}
    with torch.no_grad():
        for name, parameter in held.items():
            value = normal(name, *whole_shape(case, name, parameter, group))
            value = 1 + 0.3 * value if "norm" in name and "weight" in name else 0.5 * value
            whole[name] = value.to(case.dtype).double().requires_grad_()
            parameter.copy_(own(case, name, whole[name], group))
    problems: list[str] = []
    for m, (S, B) in enumerate(case.batches):
        x, g = normal(f"{data} x{m}", S, B, case.hidden), normal(f"{data} g{m}", S, B, case.hidden)
        x = x.to(case.dtype).double().requires_grad_(not case.frozen_input)
        g = g.to(case.dtype).double()

        def cut(t: torch.Tensor) -> torch.Tensor:
            return t.chunk(n, 0)[group.rank()] if sp else t

        own_x = cut(x.detach()).to(case.dtype).clone().requires_grad_(not case.frozen_input)
        with recorded_dropout() as factors:
            out = layer(own_x, mask=case.mask_of(S, B), sequence_length=S if m else None)
            y = plain_layer(case, x, whole, whole_drops(case, factors, group))
            y.backward(g)
            forward = len(factors)
            out.backward(cut(g).to(case.dtype))
        again = {"full": factors, "selective": factors[:1]}.get(case.option("recompute"), [])[:forward]
        if not all(itertools.starmap(torch.equal, zip(again, factors[forward:], strict=True))):
            problems.append(f"dropout {m} is not the same in recomputation")
        problems += near(f"output {m}", out, cut(y), rtol)
        problems += near(f"input gradient {m}", own_x.grad, None if x.grad is None else cut(x.grad), rtol)
        problems += near(f"input {m} after", own_x, cut(x), 0)
    finish_gradients(layer)
    for name, parameter in held.items():
        expected = own(case, name, whole[name].grad, group)
        if case.option("main_grad"):
            problems += near(f"{name}.grad", parameter.grad, None) + near(name, parameter.main_grad, expected, rtol)
        else:
            problems += near(f"{name}.grad", parameter.grad, expected, rtol)
    return problems


def block_traffic(case: Block, group: dist.ProcessGroup) -> list[tuple[str, int]]:
    """The collectives of one forward, one backward and the completion of the gradients."""
    layer = case.build(group)
    S, B = case.batches[0]
    x = torch.ones(S // (group.size() if case.option("sequence_parallel") else 1), B, case.hidden, dtype=case.dtype)
    x.requires_grad_(not case.frozen_input)
    with Traffic() as traffic:
        y = layer(x, mask=case.mask_of(S, B))
        traffic.calls.append(("backward", 0))
        y.backward(torch.ones_like(y))
        traffic.calls.append(("finish", 0))
        finish_gradients(layer)
    return traffic.calls


def mask_problems(case: Block, group: dist.ProcessGroup) -> list[str]:
    """Dropout masks are equal on all ranks where activations are, and differ where they are cut; both are drawn from
    the layer's own streams. Within a rank no two are alike."""
    before = torch.get_rng_state()
    layer = case.build(group, seed=1)
    sp = case.option("sequence_parallel")
    x = normal("x", 8 // (group.size() if sp else 1), 2, case.hidden).requires_grad_()
    with recorded_dropout() as factors:
        layer(x).sum().backward()
    problems = [] if torch.equal(before, torch.get_rng_state()) else ["the default generator moved"]
    attention, *halves = factors[:3]
    p, q = case.option("attention_dropout", 0.0), case.option("hidden_dropout", 0.0)
    for name, mask, dropped, cut in (("attention", attention, p, True), *(("half", half, q, sp) for half in halves)):
        if bool((mask == 0).any()) != (dropped > 0) or not (mask > 0).any():
            problems.append(f"{name}: p is {dropped} and {(mask == 0).sum()} of {mask.numel()} are dropped")
        alike = [bool(torch.equal(mask, other)) for other in gathered(mask, group)]
        alike.pop(group.rank())
        if dropped and any(equal == cut for equal in alike):
            problems.append(f"{name}: masks of other ranks are alike: {alike}")
    if q and torch.equal(*halves):
        problems.append("the halves have the same mask")
    return problems
