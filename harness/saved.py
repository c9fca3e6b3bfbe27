"""A candidate's saved state: as it comes back from a file, cut short, and against another one."""

from __future__ import annotations

import io
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from harness.candidate import NotOffered
from harness.local import Purity, WrongAdapter
from harness.observation import Observation
from harness.session import phase

#: Facts of an observation: the file of a state that new processes are to load, and the parameters as they were then.
STATE, PARAMETERS = "state", "parameters"
#: What who saved had after one step more, for those who make it with its state; and the names of what these have then
#: with other bits.
GONE_ON, APART = "gone on", "apart"


def through_a_file(save: Callable[[], object]) -> Any:
    """A state, as it comes back from a file."""
    return read(written(save))


def written(save: Callable[[], object]) -> bytes:
    """A file of a state. Raises WrongAdapter where there is none."""
    file = io.BytesIO()
    with phase("save"):
        state = save()
        torch.save(state, file)
    if state is None:
        raise WrongAdapter("save returned None; expected the state, as what torch.save can write")
    return file.getvalue()


def read(file: bytes) -> Any:
    """The state in a file, another object each time."""
    with phase("reading the state that it saved"):
        return torch.load(io.BytesIO(file), weights_only=False)


def again_as(parameters: Mapping[str, torch.Tensor]) -> dict[str, nn.Parameter]:
    """New parameters of the same values."""
    return {name: nn.Parameter(p.detach().clone(), p.requires_grad) for name, p in parameters.items()}


def together(before: Observation | None, purity: Purity) -> tuple[str, ...]:
    """The side effects of both parts of a run."""
    return tuple(dict.fromkeys((*(() if before is None else before.side_effects), *purity.report())))


def cut_short(state: Any) -> Any:
    """A saved state without its last entry."""
    if not isinstance(state, Mapping) or not state:
        raise NotOffered(f"its state is {reprlib.repr(state)}: of what is no dict, nothing can be left out")
    kept, last = dict(state), list(state)[-1]
    if isinstance(kept[last], Mapping) and kept[last]:
        return {**kept, last: cut_short(kept[last])}
    del kept[last]
    return kept


def alike(one: Any, other: Any) -> bool:
    """Whether two states have the same values."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return set(one) == set(other) and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float | int | str) and isinstance(other, float | int | str):
        return one == other or (one != one and other != other)
    return type(one) is type(other)  # objects come back from a file as others
