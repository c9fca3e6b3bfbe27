"""The whole adapters of docs/plugging-in.md, as they stand there, around code that is right: they hold."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from harness import verify

DOCUMENT = Path(__file__).parents[1] / "docs" / "plugging-in.md"

#: What the documentation leaves to the reader.
CODE = """
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F

from harness import Candidate, Clipper, LossScaler, MixedPrecision, NotOffered, Trainer, new_group


class MyScaler:
    def __init__(self, scale, growth, interval, backoff, hysteresis=1, moves=True):
        self.scale, self.good, self.left = scale, 0, hysteresis
        self.growth, self.interval, self.backoff = growth, interval, backoff
        self.hysteresis, self.moves = hysteresis, moves

    def update(self, found):
        if not self.moves:
            return found
        self.good = 0 if found else self.good + 1
        if found:
            self.left = max(0, self.left - 1)
            self.scale *= 1 if self.left else self.backoff
        elif self.good >= self.interval:
            self.scale, self.good, self.left = self.scale * self.growth, 0, self.hysteresis
        return found

    def state_dict(self):
        return {name: getattr(self, name) for name in ("scale", "good", "left")}

    def load_state_dict(self, state):
        vars(self).update(state)


def my_clip(parameters, sharded, limit, p, group):
    own = torch.zeros(2, dtype=torch.float64)
    for parameter, cut in zip(parameters, sharded):
        if parameter.grad is not None and parameter.grad.numel():
            x = parameter.grad.double().abs()
            own[int(cut)] = torch.maximum(own[int(cut)], x.max()) if p == math.inf else own[int(cut)] + (x**p).sum()
    if group is not None:  # not by an all-reduce: gloo's largest of a number and NaN is either
        parts = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(parts, own, group=group)
        cut = torch.stack(parts)[:, 1]
        own[1] = cut.max() if p == math.inf else cut.sum()
    norm = float(own.max() if p == math.inf else own.sum() ** (1 / p))
    if norm > limit:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.copy_(parameter.grad.double() * (limit / norm))
    return norm


class MyOptimizer:
    def __init__(self, parameters, scaler, data, everyone, lr, momentum, decay):
        self.parameters, self.scaler, self.data, self.everyone = parameters, scaler, data, everyone
        self.copy_model_to_masters()
        self.optimizer = torch.optim.SGD(self.masters, lr, momentum, weight_decay=decay)

    def copy_model_to_masters(self):
        values = [p.detach().float().clone() for p in self.parameters]
        if not hasattr(self, "masters"):
            self.masters = values
        for master, value in zip(self.masters, values):
            master.copy_(value)

    def master_of(self, parameter):
        return next(m for p, m in zip(self.parameters, self.masters) if p is parameter).flatten()

    def step(self):
        found = torch.zeros(())
        for parameter, master in zip(self.parameters, self.masters):
            master.grad = torch.zeros_like(master) if parameter.grad is None else parameter.grad.float()
            if self.data is not None:
                dist.all_reduce(master.grad, group=self.data)
                master.grad /= self.data.size()
            master.grad /= self.scaler.scale
            found = torch.maximum(found, (~master.grad.isfinite()).any().float())
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.everyone)
        if not self.scaler.update(bool(found)):
            self.optimizer.step()
            with torch.no_grad():
                for parameter, master in zip(self.parameters, self.masters):
                    parameter.copy_(master)
        return bool(found)


class Layer(torch.nn.Module):
    def __init__(self, hidden, heads, ffn):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(hidden), torch.nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.o = (torch.nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.up, self.down = torch.nn.Linear(hidden, ffn, bias=False), torch.nn.Linear(ffn, hidden, bias=False)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (one(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class MyGpt(torch.nn.Module):
    def __init__(self, vocabulary, hidden, heads, ffn, layers, length):
        super().__init__()
        self.embedding, self.positions = torch.nn.Embedding(vocabulary, hidden), torch.nn.Embedding(length, hidden)
        self.layers = torch.nn.ModuleList(Layer(hidden, heads, ffn) for _ in range(layers))
        self.norm, self.output = torch.nn.LayerNorm(hidden), torch.nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, ids):
        x = self.embedding(ids) + self.positions.weight
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


class MyTrainer:
    def __init__(self, model, optimizer, scaler, sizes, limit, data):
        self.model, self.optimizer, self.scaler = model, optimizer, scaler
        self.sizes, self.limit, self.data = list(sizes), limit, data
        self.hooks, self.skipped, self.norm = [], False, 0.0

    def summed(self, tensor):
        if self.data is not None:
            dist.all_reduce(tensor, group=self.data)
        return tensor

    def step(self, ids, targets, valid):
        self.optimizer.zero_grad(set_to_none=False)
        count = self.summed(valid.sum()).clamp(min=1)
        total = torch.zeros(())
        for own, wanted, counted in zip(*(x.split(self.sizes) for x in (ids, targets, valid))):
            losses = F.cross_entropy(self.model(own).flatten(0, 1), wanted.flatten(), reduction="none")
            loss = (losses * counted.flatten()).sum() / count
            (loss * self.scaler.scale).backward()
            total += loss.detach()
        for hook in self.hooks:
            hook()
        gradients = [p.grad for p in self.model.parameters()]
        for gradient in gradients:
            self.summed(gradient).div_(self.scaler.scale)
        found = not all(gradient.isfinite().all() for gradient in gradients)
        if self.limit and not found:
            self.norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.limit))
        self.skipped = bool(self.scaler.update(found))
        if not self.skipped:
            self.optimizer.step()
        return self.summed(total)

    def momentum_of(self, parameter):
        kept = self.optimizer.state[parameter].get("momentum_buffer")
        return (torch.zeros_like(parameter) if kept is None else kept).flatten()

    def state_dict(self):
        return {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "scaler")}

    def load_state_dict(self, state):
        for name, one in state.items():
            getattr(self, name).load_state_dict(one)


"""


def adapter_of(heading: str) -> str:
    """The first block of code under it."""
    _, _, section = DOCUMENT.read_text(encoding="utf-8").partition(f"\n## {heading}\n")
    lines = section.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("    class Mine(Candidate):"))
    end = next(i for i in range(start, len(lines)) if lines[i] and not lines[i].startswith("    "))
    return textwrap.dedent("\n".join(lines[start:end]))


@pytest.mark.parametrize(
    ("heading", "subject"),
    [
        ("LossScaler", "loss_scale"),
        ("Clipper", "clip"),
        ("MixedPrecision", "mixed_precision"),
        ("Trainer", "train_step"),
    ],
)
def test_the_adapter_of_the_documentation_holds(heading: str, subject: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODE + adapter_of(heading))
    done = verify(f"{tmp_path / 'mine.py'}:Mine", subjects=[subject], examples=25, seed=1, max_world=2, save=None)
    (row,) = done.rows
    messages = [finding.message for failure in row.failures for finding in failure.verdict.findings]
    assert row.result == "held", (row.stopped, row.refusals, messages)
