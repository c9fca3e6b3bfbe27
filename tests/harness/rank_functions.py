"""What the tests of harness.world run on ranks: ranks import this module, as they cannot import a test's inner one."""

from __future__ import annotations

import gc
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from harness.world import Pool, RankContext, Returned, wire


def who(context: RankContext) -> tuple[int, int, int]:
    return context.rank, context.world_size, os.getpid()


def total(context: RankContext, start: float) -> torch.Tensor:
    x = torch.full((2, 3), start + context.rank)
    dist.all_reduce(x)
    return x


def echo(context: RankContext, value: Any) -> Any:
    return value


def tensors(context: RankContext) -> dict[str, Any]:
    big = torch.arange(1 << 20, dtype=torch.float32)
    return {
        "view": big[5:9].reshape(2, 2).T,
        "bfloat16": torch.tensor([1.5, float("nan"), -0.0], dtype=torch.bfloat16),
        "float8": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
        "bool": torch.tensor([[True, False]]),
        "complex": torch.tensor([1 + 2j]).conj(),
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 4, dtype=torch.int64),
        "leaf": torch.ones(2, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "array": np.arange(3),
    }


def count(context: RankContext) -> int:
    context.state["count"] = context.state.get("count", 0) + 1
    return int(context.state["count"])


def collective_on_rank_0_only(context: RankContext) -> None:
    dist.all_reduce(torch.ones(2, 6))  # all do this one
    if context.rank == 0:
        dist.all_reduce(torch.ones(3, 4, dtype=torch.float64))


def waits_in_new_group(context: RankContext) -> None:
    if context.rank == 0:
        dist.new_group([0, 1])
        dist.barrier()


def deadlock_in_backward(context: RankContext) -> None:
    x = torch.ones(2, requires_grad=True)
    _Reduce.apply(x, context.rank).sum().backward()


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rank: int) -> torch.Tensor:
        ctx.rank = rank
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        grad = grad.clone()
        if ctx.rank == 1:
            dist.all_reduce(grad)
        return grad, None


def spins_on_rank_0(context: RankContext) -> None:
    while context.rank == 0:
        pass


def works_in_bursts(context: RankContext, seconds: float) -> str:
    """Sleeps most of the time, but has a collective with the others every now and then."""
    end = time.monotonic() + seconds
    more = torch.ones(1)
    while more.item():
        time.sleep(0.05)
        more.fill_(float(time.monotonic() < end))
        dist.broadcast(more, 0)
    return "done"


def opens_groups(context: RankContext, number: int, pause: float) -> str:
    """Sleeps most of the time, like a rank whose partners get no time on a busy machine."""
    for _ in range(number):
        time.sleep(pause)
        dist.new_group([0, 1])
    return "done"


def waits_for_a_busy_child(context: RankContext, seconds: float) -> str:
    code = f"import time; end = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    return "done"


def waits_for_a_busy_thread(context: RankContext, seconds: float) -> str:
    end = time.monotonic() + seconds

    def spin() -> None:
        while time.monotonic() < end:
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    thread.join()
    return "done"


def sleeps(context: RankContext, seconds: float) -> str:
    time.sleep(seconds)
    return "done"


def raises_on_rank_1(context: RankContext, kind: str) -> None:
    if context.rank == 1:
        if kind == "exit":
            sys.exit("enough")
        if kind == "interrupt":
            raise KeyboardInterrupt
        if kind == "unprintable":
            raise _Unprintable
        raise ValueError("the shape is wrong")
    dist.all_reduce(torch.ones(5))


class _Unprintable(Exception):
    def __str__(self) -> str:
        raise TypeError("no")


def all_raise(context: RankContext) -> None:
    time.sleep(0.2 * context.rank)
    raise ValueError(f"rank {context.rank}")


def dies_on_rank_1(context: RankContext, how: str) -> None:
    dist.all_reduce(torch.ones(3))
    if context.rank == 1:
        if how == "exit":
            os._exit(7)
        os.kill(os.getpid(), getattr(signal, how))
    dist.barrier()


def forks_a_child_that_comes_back(context: RankContext, seconds: float, how: str = "return") -> str:
    if os.fork() == 0:
        time.sleep(seconds)
        if how == "raise":
            raise ValueError("in the child")
        return "the child's"
    return "the rank's"


def how_its_children_ended(context: RankContext) -> list[int]:
    codes = []
    for error in (None, SystemExit(), SystemExit(3), SystemExit("text"), ValueError("in the child")):
        child = os.fork()
        if child == 0:
            if error is None:
                return []
            raise error
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return codes


def answers_another_job(context: RankContext, number: int) -> str:
    """Says on its rank's own line what belongs to another job."""
    answer = wire.dump(Returned("another job's"))
    message = wire.frame(wire.dump(("done", (number, answer, 0.0, False))))
    for thing in gc.get_objects():
        if isinstance(thing, socket.socket) and thing.fileno() >= 0:
            thing.sendall(message)
    return "its own"


def unpicklable(context: RankContext) -> Any:
    return (lambda: 1) if context.rank == 0 else 1


class Unreadable:
    def __reduce__(self) -> Any:
        return _not_in_the_parent, ()


def _not_in_the_parent() -> None:
    raise ValueError("cannot be made here")


def unreadable(context: RankContext) -> Any:
    return Unreadable()


def pools_within(context: RankContext) -> None:
    Pool(2)


def spoils_everything(context: RankContext) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    torch.set_default_device("meta")
    os.chdir("/")
    draw(context)


def draw(context: RankContext) -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand((), device="cpu").item()


def settings(context: RankContext) -> dict[str, Any]:
    return {
        "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "device": str(torch.ones(1).device),
        "folder": str(Path.cwd()),
        "OMP_NUM_THREADS": os.environ["OMP_NUM_THREADS"],
    }


def destroys_the_group(context: RankContext) -> None:
    dist.destroy_process_group()


def prints(context: RankContext) -> None:
    print("printed by a rank")
    os.system("echo echoed by a rank")


def signal_handlers(context: RankContext) -> bool:
    os.kill(os.getpid(), signal.SIGINT)
    return signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def stuck_in_every_way(context: RankContext, folder: str) -> None:
    """Rank 0 in gloo, rank 1 in a loop that never gives the interpreter away, rank 2 with a child of its own."""
    if context.rank == 2:
        strays = starts_processes(context)
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        written = Path(folder) / "written"
        written.write_text(" ".join(map(str, [child.pid, *strays.values()])))
        written.rename(Path(folder) / "started")
        child.wait()
    if context.rank == 1:
        sys.setswitchinterval(600)
        while True:
            sum(range(10_000_000))
    dist.barrier()


def starts_processes(context: RankContext) -> dict[str, int]:
    """Processes that stay, each by a shell that says its pid; and what it takes to find them."""
    nohow = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    session = subprocess.Popen(["sh", "-c", "echo $$; exec sleep 600"], start_new_session=True, **nohow)
    family = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; wait"], start_new_session=True, **nohow)
    background = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!"], **nohow)
    daemon = subprocess.Popen(["sh", "-c", "setsid sh -c 'echo $$; exec sleep 600' &"], **nohow)
    processes = {"session": session, "family": family, "background": background, "daemon": daemon}
    return {name: int(process.stdout.readline()) for name, process in processes.items()}


def starts_processes_and_dies(context: RankContext, folder: str) -> None:
    pids = starts_processes(context)
    (Path(folder) / str(context.rank)).write_text(" ".join(map(str, pids.values())))
    dist.barrier()
    dies_on_rank_1(context, "exit")


def leaves_its_group(context: RankContext) -> None:
    subprocess.Popen(["sleep", "600"])
    os.setpgid(0, os.getpgid(os.getppid()))
    while True:
        pass


def every_collective(context: RankContext) -> list[Any]:
    rank, world = context.rank, context.world_size
    only_1 = dist.new_group([1])
    x, both = torch.ones(3), [torch.zeros(3) for _ in range(world)]
    if rank == 1:
        dist.all_reduce(x, group=only_1)
    dist.all_reduce(x)
    dist.all_gather(both, x)
    dist.reduce_scatter(torch.zeros(3), both)
    dist.broadcast(x.double(), 1)
    dist.scatter(x, both if rank == 1 else None, src=1)
    if rank == 0:
        dist.send(x, 1, tag=7)
    else:
        dist.recv(x, 0, tag=7)
    dist.barrier()
    x.requires_grad_(True)
    _Reduce.apply(x, 1).sum().backward()  # an all_reduce in the backward pass
    return list(context.traffic.records())


def gathers(context: RankContext) -> None:
    """By a function that torch is about to rename."""
    dist.all_gather_into_tensor(torch.empty(context.world_size), torch.ones(1))


def collectives_of_threads(context: RankContext) -> tuple[list[float], list[Any]]:
    """A thread by its function, one by its class, and one of a pool, one after the other."""
    got = []

    def total() -> None:
        summed = torch.ones(3)
        dist.all_reduce(summed)
        got.append(summed.sum().item())

    class Own(threading.Thread):
        def run(self) -> None:
            total()

    for thread in (threading.Thread(target=total), Own()):
        thread.start()
        thread.join()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(total).result()
    total()
    return got, list(context.traffic.records())


def distributed_tensor(context: RankContext) -> tuple[Any, list[Any]]:
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (2,))
    part = DTensor.from_local(torch.ones(1, 1), mesh, [Shard(0)])
    context.traffic.clear()
    whole = part.redistribute(mesh, [Replicate()]).to_local()
    return whole.tolist(), list(context.traffic.records())


def seconds_of_an_all_reduce(context: RankContext) -> float:
    dist.barrier()
    context.traffic.clear()
    began = time.monotonic()
    dist.all_reduce(torch.ones(3))
    return time.monotonic() - began


def tells(context: RankContext, ending: str) -> None:
    context.tell("too early to be read")
    context.tell(f"rank {context.rank} is here")
    if context.rank == 0:
        return
    match ending:
        case "hang":
            dist.recv(torch.ones(1), 0)
        case "raise":
            raise ValueError("the shape is wrong")
        case "die":
            os._exit(3)
        case "silence":
            context.tell("")
            os._exit(3)
