"""What the tests of `sharded` run on ranks: a small world of gloo ranks, and checks that return what is wrong.

A check never raises on a difference: it returns a list of sentences, so that all ranks reach the next check together.
"""

from __future__ import annotations

import datetime
import multiprocessing
import queue
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from sharded.cut import cut
from sharded.linear import ColumnParallelLinear, RowParallelLinear
from sharded.main_grad import attach
from sharded.sequence_parallel import finish_sequence_parallel_gradients

Check = Callable[[], list[str]]
_DEADLINE = 90


def run_world(world: int, checks: Callable[[], Mapping[str, Check]]) -> dict[str, list[str]]:
    """Runs the checks that ``checks`` (a module-level function, called on each rank) lists, on ``world`` ranks in one
    go. Returns what is wrong, by check: sentences that begin with the rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (world, str(Path(folder, "store")), checks, results)
        ranks = [context.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(world)]
        for process in ranks:
            process.start()
        found: dict[str, list[str]] = {}
        try:
            for _ in ranks:
                rank, problems = results.get(timeout=_DEADLINE)
                for name, sentences in problems.items():
                    found.setdefault(name, []).extend(f"rank {rank}: {sentence}" for sentence in sentences)
        except queue.Empty:
            raise TimeoutError(f"the ranks did not answer within {_DEADLINE} s") from None
        finally:
            for process in ranks:
                process.join(timeout=5)
                process.kill()
    assert "crash" not in found, "\n".join(found["crash"])
    return found


def _rank(rank: int, world: int, path: str, checks: Callable[[], Mapping[str, Check]], results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(path, world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=datetime.timedelta(seconds=_DEADLINE // 2)
    )
    found: dict[str, list[str]] = {}
    try:
        for name, check in checks().items():
            found[name] = check()
    except BaseException:
        found["crash"] = [traceback.format_exc()]
    results.put((rank, found))
    dist.destroy_process_group()


class Traffic(TorchDispatchMode):
    """The collectives that run inside, as (name, elements that this rank gives)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.name().split("::")[1].partition(".")[0].strip("_")
            # The tensor that is sent comes second, except for what is reduced in place.
            sent = args[0][0] if name.startswith(("allreduce", "broadcast")) else args[1]
            self.calls.append((name.partition("_")[0], sent.numel()))
        return func(*args, **(kwargs or {}))


def integers(name: str, *shape: int) -> torch.Tensor:
    """Small whole numbers in float64: sums and products of them are exact in every dtype and every order."""
    stream = torch.Generator().manual_seed(sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**31)
    return torch.randint(-2, 3, shape, generator=stream).double()


def piece_of(x: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    return x.split(cut(x.shape[dim], group.size()), dim)[group.rank()]


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values in memory that runs the other way round, as a transpose leaves them."""
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def same(name: str, found: torch.Tensor | None, expected: torch.Tensor | None) -> list[str]:
    """What differs, bit by bit after conversion to float64; nothing where both are None."""
    if found is None or expected is None:
        return [] if found is expected else [f"{name} is {found}, expected {expected}"]
    if found.shape != expected.shape:
        return [f"{name} has shape {tuple(found.shape)}, expected {tuple(expected.shape)}"]
    if not torch.equal(found.detach().double(), expected.detach().double()):
        return [f"{name} is {found.tolist()}, expected {expected.tolist()}"]
    return []


@dataclass(frozen=True)
class Linear:
    """One linear layer driven forward and backward. ``group``: where the layer lives; ``explicit``: it is told so."""

    kind: str
    inputs: int
    outputs: int
    leading: tuple[tuple[int, ...], ...] = ((3,),)
    dtype: torch.dtype = torch.float64
    transposed: bool = False
    explicit: bool = True
    frozen: tuple[str, ...] = ()
    weight_at_call: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def option(self, name: str) -> Any:
        return self.options.get(name, name in ("bias", "input_is_parallel"))

    def build(self, group: dist.ProcessGroup, **more: Any) -> ColumnParallelLinear | RowParallelLinear:
        layer = ColumnParallelLinear if self.kind == "column" else RowParallelLinear
        options = {**self.options, "dtype": self.dtype, **({"group": group} if self.explicit else {}), **more}
        return layer(self.inputs, self.outputs, **options)


def linear_problems(case: Linear, group: dist.ProcessGroup) -> list[str]:
    """What differs from one process in float64: outputs, gradients of input, weight and bias; inputs that changed."""
    # Groups side by side have other data, so that a collective in the wrong group shows.
    data = f"replica {dist.get_process_group_ranks(group)}"
    weight, bias = integers("w", case.outputs, case.inputs), integers("b", case.outputs)
    column, sp, main = case.kind == "column", case.option("sequence_parallel"), case.option("main_grad")
    layer = case.build(group, build_weight=not case.weight_at_call)
    own_weight = piece_of(weight, 0 if column else 1, group).to(case.dtype)
    if case.weight_at_call:
        held = torch.nn.Parameter(own_weight.clone())
        if main:
            attach(held)
    else:
        assert layer.weight is not None
        held = layer.weight
    parameters = {"weight": held, **({"bias": layer.bias} if layer.bias is not None else {})}
    with torch.no_grad():
        held.copy_(own_weight)
        if layer.bias is not None:
            layer.bias.copy_(piece_of(bias, 0, group) if column else bias)
    whole = {"weight": weight.clone(), "bias": bias.clone()}
    for name in parameters:
        parameters[name].requires_grad_(name not in case.frozen)
        whole[name].requires_grad_(name not in case.frozen)
    problems: list[str] = []

    def entering(x: torch.Tensor) -> torch.Tensor:
        if column:
            return piece_of(x, 0, group) if sp else x
        return piece_of(x, -1, group) if case.option("input_is_parallel") else x

    def leaving(y: torch.Tensor) -> torch.Tensor:
        if column:
            return y if case.option("gather_output") else piece_of(y, -1, group)
        return piece_of(y, 0, group) if sp else y

    for m, lead in enumerate(case.leading):
        x, g = integers(f"{data} x{m}", *lead, case.inputs), integers(f"{data} g{m}", *lead, case.outputs)
        x.requires_grad_("input" not in case.frozen)
        y = torch.nn.functional.linear(x, whole["weight"], whole["bias"] if case.option("bias") else None)
        if y.requires_grad:
            y.backward(g)
        shape = strided if case.transposed else torch.Tensor.contiguous
        own_x = shape(entering(x.detach())).to(case.dtype).clone().requires_grad_(x.requires_grad)
        own_g = shape(leaving(g)).to(case.dtype).clone()
        before = own_x.detach().clone(), own_g.clone()
        arguments = (own_x, held) if case.weight_at_call else (own_x,)
        length = {"sequence_length": lead[0]} if column and sp and lead[0] % group.size() else {}
        out = layer(*arguments, **length)
        if case.option("skip_bias_add"):
            out = out[0] if out[1] is None else out[0] + out[1]
        problems += same(f"output {m}", out, leaving(y))
        if out.dtype != case.dtype:
            problems.append(f"output {m} is {out.dtype}, expected {case.dtype}")
        if y.requires_grad:
            out.backward(own_g)
        problems += same(f"input gradient {m}", own_x.grad, None if x.grad is None else entering(x.grad))
        problems += same(f"input {m} after", own_x, before[0]) + same(f"output gradient {m} after", own_g, before[1])
    finish_sequence_parallel_gradients(parameters.values(), group)
    for name, parameter in parameters.items():
        grad = whole[name].grad
        cut_dim = {"weight": 0 if column else 1, "bias": 0 if column else None}[name]
        expected = grad if grad is None or cut_dim is None else piece_of(grad, cut_dim, group)
        if main:
            problems += same(f"{name}.grad", parameter.grad, None)
            buffer = parameter.main_grad
            if buffer.dtype != torch.promote_types(case.dtype, torch.float32):
                problems.append(f"{name}.main_grad is {buffer.dtype}")
            problems += same(f"{name}.main_grad", buffer, torch.zeros_like(buffer) if expected is None else expected)
        else:
            problems += same(f"{name}.grad", parameter.grad, expected)
    return problems


def traffic_of(case: Linear, group: dist.ProcessGroup) -> list[tuple[str, int]]:
    """The collectives of one forward and backward, alike on all ranks."""
    n, lead = group.size(), case.leading[0]
    sp, column = case.option("sequence_parallel"), case.kind == "column"
    layer = case.build(group)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(name not in case.frozen)
    own_features = case.inputs if column or not case.option("input_is_parallel") else case.inputs // n
    own_lead = (lead[0] // n, *lead[1:]) if column and sp else lead
    x = torch.ones(*own_lead, own_features, dtype=case.dtype, requires_grad="input" not in case.frozen)
    with Traffic() as traffic:
        y = layer(x)
        y = y[0] if isinstance(y, tuple) else y
        traffic.calls.append(("backward", 0))
        y.sum().backward()
    return traffic.calls


@contextmanager
def closing(groups: Any) -> Iterator[Any]:
    """The mesh, closed at the end."""
    try:
        yield groups
    finally:
        groups.close()
