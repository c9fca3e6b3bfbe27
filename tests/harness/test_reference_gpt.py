"""The reference of the GPT: autograd on the whole batch at once with torch's own layers, and what a case may not be."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from hypothesis import given, settings

import strategies.gpt
from reference.codec import decode, encode
from reference.gpt import GptCase
from reference.gpt_dropout import mask_shape, places
from reference.gpt_parameters import OUTPUT, owner_of, shapes, stage_of, tensors, tokens, valid_tokens
from reference.gpt_step import expected, value_of
from reference.mesh import Mesh
from reference.transformer_dropout import mask_name
from strategies.scope import Scope

FULL = Scope(max_world=8, features=frozenset(strategies.gpt.FEATURES))
PLAIN = GptCase(Mesh.of(tp=1), 5, 4, 1, 1, 2, length=3, counts=(3,))

Drop = Callable[[str, torch.Tensor], torch.Tensor]


def normed(case: GptCase, x: torch.Tensor, p: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    weight = p[f"{name}_weight"]
    if case.norm == "layer" and "q_norm" not in name and "k_norm" not in name:
        return F.layer_norm(x, weight.shape, weight, p[f"{name}_bias"])
    return F.layer_norm(x, weight.shape, weight) if case.norm == "layer" else F.rms_norm(x, weight.shape, weight, 1e-5)


def turned(x: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [B, heads, S, D] by complex numbers."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[2]).double()[:, None] * 10000.0 ** (-torch.arange(half).double() / half)
    made = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([made.real, made.imag], -1)


def random_masks(case: GptCase) -> dict[str, torch.Tensor]:
    stream = torch.Generator().manual_seed(case.ids.seed)
    return {
        mask_name(place, m): torch.rand(mask_shape(case, place, m), generator=stream) >= case.dropout
        for stage in range(case.stages)
        for place in places(case, stage)
        for m in range(case.micro_batches)
    }


def layer(case: GptCase, x: torch.Tensor, p: dict[str, torch.Tensor], drop: Drop) -> torch.Tensor:
    """[B, S, H] -> [B, S, H], by softmax over the tokens that are seen."""
    h = normed(case, x, p, "norm1")

    def heads(name: str, count: int) -> torch.Tensor:
        y = F.linear(h, p[f"{name}_weight"], p.get(f"{name}_bias")).unflatten(-1, (count, -1)).transpose(1, 2)
        if case.qk_norm and name != "v":
            y = normed(case, y, p, f"{name}_norm")
        return turned(y) if case.positions == "rotary" and name != "v" else y

    q, k, v = heads("q", case.heads), heads("k", case.kv_heads), heads("v", case.kv_heads)
    k, v = (y.repeat_interleave(case.heads // case.kv_heads, 1) for y in (k, v))
    later = torch.ones(case.length, case.length, dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(2, 3) / k.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
    mixed = (drop("probabilities", scores.softmax(-1)) @ v).transpose(1, 2).flatten(2)
    x = x + drop("o", F.linear(mixed, p["o_weight"], p.get("o_bias")))
    h = normed(case, x, p, "norm2")
    up = F.linear(h, p["up_weight"], p.get("up_bias"))
    inner = (
        F.silu(F.linear(h, p["gate_weight"], p.get("gate_bias"))) * up if case.activation == "swiglu" else F.gelu(up)
    )
    return x + drop("down", F.linear(inner, p["down_weight"], p.get("down_bias")))


def of_one_process(case: GptCase, kept: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Loss and gradients of the whole batch at once: no micro-batches, no ranks, one tied weight."""
    given_, (ids, targets), valid = tensors(case), tokens(case), valid_tokens(case)
    found: dict[str, list[torch.Tensor]] = {}
    for replica in range(case.replicas):
        leaves = {name: x.clone().requires_grad_() for name, x in given_.items()}
        drop = dropper(case, kept, replica)
        x = leaves["embedding_weight"][ids[replica].flatten(0, 1)]
        if case.positions == "learned":
            x = x + leaves["positions_weight"]
        x = drop("")("embedded", x)
        for number in range(case.layers):
            start = f"layers.{number}."
            own = {n.removeprefix(start): p for n, p in leaves.items() if n.startswith(start)}
            x = layer(case, x, own, drop(start))
        logits = normed(case, x, leaves, "norm") @ value_of(case, leaves, OUTPUT).T
        goals = torch.where(valid, targets, -100)[replica].flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), goals, reduction="sum") / (goals >= 0).sum().clamp(min=1)
        loss.backward()  # type: ignore[no-untyped-call]
        found.setdefault("loss", []).append(loss.detach().view(1))
        for name in shapes(case):
            gradient = value_of(case, leaves, name).grad
            assert gradient is not None
            found.setdefault(f"{name}.grad", []).append(gradient)
    made = {name: torch.stack(one) for name, one in found.items()}
    if case.update == "none":
        return made
    updated = {name: value_of(case, given_, name) - made[f"{name}.grad"] for name in shapes(case)}
    return {"loss": made["loss"], **updated}


def dropper(case: GptCase, kept: dict[str, torch.Tensor], replica: int) -> Callable[[str], Drop]:
    """Drops in the whole batch, sequences first."""

    def of(start: str) -> Drop:
        def drop(where: str, x: torch.Tensor) -> torch.Tensor:
            if not case.dropout:
                return x
            masks = [kept[mask_name(start + where, m)][replica] for m in range(case.micro_batches)]
            if where != "probabilities":
                masks = [one.transpose(1, 2) for one in masks]
            return x * torch.cat(masks, 1).flatten(0, 1) / (1 - case.dropout)

        return drop

    return of


@settings(max_examples=25)
@given(strategies.gpt.cases(FULL))
def test_it_is_the_whole_batch_in_one_process(case: GptCase) -> None:
    kept = random_masks(case)
    right, found = of_one_process(case, kept), expected(case, tensors(case), kept)
    assert set(right) == set(found)
    for name, want in right.items():
        torch.testing.assert_close(found[name], want, rtol=1e-9, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tied", True),
        ("norm", "rms"),
        ("activation", "swiglu"),
        ("positions", "learned"),
        ("depths", (2,)),
        ("bias", True),
    ],
)
def test_options_make_a_difference(field: str, value: Any) -> None:
    other = dataclasses.replace(PLAIN, **{field: value})
    before, after = expected(PLAIN, tensors(PLAIN)), expected(other, tensors(other))
    assert set(before) != set(after) or not torch.equal(before["loss"], after["loss"])  # type: ignore[arg-type]


def test_how_the_batch_is_cut_makes_none() -> None:
    """But for the last bits: the loss is a mean over all tokens, wherever they are."""
    cases = [
        dataclasses.replace(PLAIN, sizes=sizes, mesh=Mesh.of(pp=2), chunks=chunks, counts=(3, 1), schedule=kind)
        for sizes, chunks, kind in (((4,), 1, "gpipe"), ((1, 2, 1), 1, "1f1b"), ((2, 2), 1, "interleaved"))
    ]
    first, *others = [expected(case, tensors(case)) for case in cases]
    for other in others:
        for name, want in first.items():
            torch.testing.assert_close(other[name], want, rtol=1e-10, atol=1e-14)


def test_every_mask_makes_a_difference_and_is_needed() -> None:
    case = dataclasses.replace(PLAIN, mesh=Mesh.of(pp=2), depths=(1, 1), dropout=0.5)
    kept = random_masks(case)
    assert len(kept) == 7
    before = expected(case, tensors(case), kept)["loss"]
    for name, mask in kept.items():
        loss = expected(case, tensors(case), {**kept, name: ~mask})["loss"]
        assert not torch.equal(loss, before)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=rf"dropout 0.5 without {re.escape(name)}"):
            expected(case, tensors(case), {other: x for other, x in kept.items() if other != name})


def test_a_batch_without_a_valid_token_has_no_loss() -> None:
    found = expected(case := dataclasses.replace(PLAIN, counts=(0,)), tensors(case))
    assert all(x is not None and not x.any() for x in found.values())


def test_who_holds_what() -> None:
    case = dataclasses.replace(PLAIN, mesh=Mesh.of(pp=2), chunks=2, depths=(1, 0, 2), schedule="gpipe", tied=True)
    assert case.layers == 4
    assert [list(case.layers_on(stage)) for stage in range(4)] == [[0], [], [1, 2], [3]]
    assert [stage_of(case, f"layers.{i}.q_weight") for i in range(4)] == [0, 2, 2, 3]
    assert [owner_of(case, name) for name in ("embedding_weight", "norm_weight", "output_weight")] == [0, 1, 1]
    assert owner_of(case, "layers.1.q_weight") == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocabulary": 1, "mesh": Mesh.of(tp=2), "heads": 2, "kv_heads": 2}, "vocabulary 1 on 2 ranks"),
        ({"sizes": (1, 0)}, "sizes"),
        ({"sizes": ()}, "sizes"),
        ({"depths": (-1,)}, "depths"),
        ({"counts": (4,)}, "counts"),
        ({"schedule": "1f1b", "chunks": 2}, "1f1b has one chunk"),
        ({"schedule": "other"}, "expected one of gpipe"),
        ({"update": "sharded", "main_grad": True}, "sharded update"),
        ({"heads": 3}, "hidden 4 is not a multiple of heads 3"),
        ({"dtype": "fp8"}, "unknown dtype"),
    ],
)
def test_what_a_case_may_not_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(PLAIN, **changes)


@settings(max_examples=30)
@given(strategies.gpt.cases(FULL))
def test_a_case_survives_json(case: GptCase) -> None:
    assert decode(GptCase, encode(case)) == case
