"""What Megatron-Core asks of a GPU, answered by the CPU: in the rank process only, and only where there is no GPU."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

if importlib.util.find_spec("megatron") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about Transformer Engine and APEX, as in megatron_core.py
        from megatron.core.tensor_parallel import random


def present_cpu_as_the_device() -> None:
    """Communication buffers are allocated on the current device."""
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]


class MadeOnTheCpu(TorchFunctionMode):
    """Tensors that are asked for on the device "cuda" are made on the CPU, those that are to be moved there stay, and
    where a tensor's type is asked for, it is that of a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.cuda.is_available():
            return func(*args, **kwargs)
        if func is torch.Tensor.cuda:
            return args[0]
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        found = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(found, str):
            return found.replace("torch.", "torch.cuda.")
        return found


class Generator:
    """The random state of the device, which is the CPU's while it is current."""

    def __init__(self, seed: int, rank: int) -> None:
        _present_the_cpu_generator()
        with torch.random.fork_rng(devices=[]):
            random.model_parallel_cuda_manual_seed(seed, tp_rank=rank)
            self.state = torch.get_rng_state()

    @contextmanager
    def current(self) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.state)
            yield
            self.state = torch.get_rng_state()


def _present_the_cpu_generator() -> None:
    """What its random streams save, set and seed is the device's generator; tensors on the CPU draw from the CPU's."""
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    logging.getLogger(random.__name__).setLevel(logging.ERROR)  # that the CPU's generator was used
