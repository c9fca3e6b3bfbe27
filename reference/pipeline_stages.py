"""The blocks of a pipeline case, one by one: where each lies, what it maps, and whose weight it has; and the tensors.

Shapes as in `reference.pipeline`.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, fields

import torch

from reference.lattice import LARGEST_USEFUL
from reference.pipeline import Activation, Kind, PipelineCase, Tensors
from reference.recipe import EXACT_KINDS, fill


@dataclass(frozen=True)
class Placed:
    """Block ``index`` of the network, on ``stage``. kind: a tied block whose weight cannot be shared is linear.
    entering, leaving: features. source: the block whose weight it has, its own for most, None without one."""

    index: int
    stage: int
    kind: Kind
    activation: Activation
    bias: bool
    entering: int
    leaving: int
    source: int | None

    @property
    def copy(self) -> str:
        """The name of its weight."""
        return f"weight{self.index}"


@functools.cache
def placed(case: PipelineCase) -> tuple[Placed, ...]:
    """All blocks, in the order of the network."""
    widths, found, n = case.widths, list[Placed](), 0
    stages = [s for s in range(case.stages) for _ in range(case.depth(s))]
    shared: int | None = None
    for j, stage in enumerate(stages):
        block = case.blocks[j % len(case.blocks)]
        kind, entering, leaving, source = block.kind, widths[n % len(widths)], widths[(n + 1) % len(widths)], j
        if kind in ("plain", "dropout"):
            found.append(Placed(j, stage, kind, block.activation, False, entering, entering, None))
            continue
        if kind == "tied" and (shared is None or n % len(widths)):
            kind = "linear"
        if kind == "tied" and shared is not None:
            source = shared
        elif kind == "linear" and shared is None and n % len(widths) == 0:
            shared = j
        found.append(Placed(j, stage, kind, block.activation, block.bias, entering, leaving, source))
        n += 1
    return tuple(found)


def blocks_of(case: PipelineCase, stage: int) -> tuple[Placed, ...]:
    return tuple(block for block in placed(case) if block.stage == stage)


def width_into(case: PipelineCase, stage: int) -> int:
    """The features that enter a stage."""
    return blocks_of(case, stage)[0].entering


def width_out(case: PipelineCase) -> int:
    """The features that the loss is made of."""
    return placed(case)[-1].leaving


def copies(case: PipelineCase) -> dict[int, list[Placed]]:
    """By source: the first block with that weight on each stage; of most, one block."""
    found: dict[int, list[Placed]] = {}
    for block in placed(case):
        if block.source is not None:
            mine = found.setdefault(block.source, [])
            if block.stage not in [one.stage for one in mine]:
                mine.append(block)
    return found


def tied(case: PipelineCase) -> list[Placed]:
    """The copies of the weight that several stages hold; nothing where none does."""
    return next((found for found in copies(case).values() if len(found) > 1), [])


@dataclass(frozen=True)
class Parameter:
    """A parameter as its stage holds it."""

    shape: tuple[int, ...]
    stage: int
    trains: bool


def parameters(case: PipelineCase) -> dict[str, Parameter]:
    """Every parameter of every stage, by name; a tied weight once for each stage."""
    held = {block.index: source for source, found in copies(case).items() for block in found}
    made: dict[str, Parameter] = {}
    for block in placed(case):
        trains = block.kind != "frozen"
        if block.index in held:
            made[block.copy] = Parameter((block.leaving, block.entering), block.stage, trains)
        if block.bias:
            made[f"bias{block.index}"] = Parameter((block.leaving,), block.stage, trains)
    return made


def valid_tokens(case: PipelineCase, step: int) -> torch.Tensor:
    """Which tokens count: bool [R, B, L]."""
    batch = sum(case.sizes)
    start = step * batch * case.replicas
    # Samples of one pipeline follow each other, so that few counts differ between its micro-batches.
    places = torch.arange(start, start + batch * case.replicas).view(case.replicas, batch)
    counts = torch.tensor(case.counts)[places % len(case.counts)]
    return torch.arange(case.length) < counts.unsqueeze(-1)


def divisors(case: PipelineCase) -> list[int]:
    """Everything by which a loss is divided."""
    if case.loss == "sum":
        return []
    return [int(n) for step in range(case.steps) for n in valid_tokens(case, step).sum((1, 2)).tolist()]


@functools.cache
def limits(case: PipelineCase) -> tuple[int, int] | None:
    """The largest magnitudes, of parameters and of the rest, with which nothing rounds; None where there are none."""
    # Sums of magnitudes bound every partial sum, in any order.
    from reference.pipeline_gradients import largest  # it needs the tensors of this module

    if not _could_be_exact(case):
        return None
    for parameter, other in ((2, 5), (1, 5), (1, 2), (1, 1)):
        room = largest(case, _ones(case, parameter, other))
        if all(found <= 2.0**precision for precision, found in room.items()):
            return parameter, other
    return None


def exact(case: PipelineCase) -> bool:
    """Whether nothing rounds, so that results must equal one process bit by bit: whole numbers, small enough for every
    sum, and divided by powers of two alone."""
    return limits(case) is not None


def _could_be_exact(case: PipelineCase) -> bool:
    if any(getattr(case.recipes, f.name).kind not in EXACT_KINDS for f in fields(case.recipes)):
        return False
    if case.invalid or case.drops or any(block.activation == "tanh" for block in placed(case)):
        return False
    found = divisors(case)
    if case.update == "sharded" and case.steps > 1 and any(n > 1 for n in found):
        return False  # the second step multiplies what is not whole
    return all(n == 0 or math.frexp(n)[0] == 0.5 for n in found)


def _ones(case: PipelineCase, parameter: int, other: int) -> Tensors:
    shapes = _shapes(case)
    made = {
        name: torch.full(shape, float(parameter if role == "parameter" else other))
        for name, (role, shape) in shapes.items()
    }
    return {name: value.to(torch.float64) for name, value in made.items()}


def _shapes(case: PipelineCase) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Role and shape of every tensor that is given."""
    made: dict[str, tuple[str, tuple[int, ...]]] = {}
    for source, found in copies(case).items():
        made[f"weight{source}"] = "parameter", (found[0].leaving, found[0].entering)
    for block in placed(case):
        if block.bias:
            made[f"bias{block.index}"] = "parameter", (block.leaving,)
    made["coefficient"] = "coefficient", (width_out(case),)
    batch = (case.replicas, sum(case.sizes), case.length)
    for k in range(case.steps):
        made[f"input[{k}]"] = "input", (*batch, width_into(case, 0))
        if case.ids:
            made[f"ids[{k}]"] = "ids", batch
    return made


def tensors(case: PipelineCase) -> Tensors:
    """Every global tensor of the case, float64, filled by its recipe and rounded to the case's dtype. ids are whole
    numbers from 0 to 2."""
    parameter, other = limits(case) or (LARGEST_USEFUL, LARGEST_USEFUL)
    made: Tensors = {}
    for name, (role, shape) in _shapes(case).items():
        if role == "ids":
            elements = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
            made[name] = (elements * 7 + 1).remainder(3)
        else:
            limit = parameter if role == "parameter" else other
            made[name] = fill(getattr(case.recipes, role), name, shape, case.format, limit)
    return made


def starts(case: PipelineCase) -> list[int]:
    """The first sample of each micro-batch, and the end of the last."""
    return list(itertools.accumulate(case.sizes, initial=0))
