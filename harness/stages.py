"""The stages that subject pipeline trains: made by the harness, alike for every candidate, from the case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from reference.pipeline import DROPOUT, PipelineCase, Tensors
from reference.pipeline_stages import Placed, blocks_of, parameters, tied, width_out

#: What a planted failure says.
PLANTED = "planted failure of the harness"


@dataclass
class Seen:
    """What a stage saw: ``log``, which the stages of a rank share, of 1 for a forward whose graph is kept and -1 where
    its backward begins, or it is dropped; and the ``draws`` of its dropout."""

    log: list[int] = field(default_factory=list)
    draws: list[float] = field(default_factory=list)


class InFlight:
    """A hook on what a forward made: a micro-batch is in flight until it is called, or nobody keeps it."""

    def __init__(self, log: list[int]) -> None:
        self._log, self._ended = log, False
        log.append(1)

    def __call__(self, gradient: torch.Tensor) -> None:
        self._end()

    def __del__(self) -> None:
        self._end()

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            self._log.append(-1)


class StageModule(nn.Module):
    """One stage: called with what the stage before returned, one tensor or several.

    The first stage takes x [samples, tokens, features], and ids, int64 [samples, tokens], where the case has them. What
    goes on is x, then the skip tensor, then ids, as far as there are any. The last returns the loss of each token
    [samples, tokens], in fp32 (fp64 for fp64).

    number: of the stage. tied: the copy of the weight that other stages hold too, or None; ``tied_stages``: all stages
    with one. entering: the features of x. last: whether it is the last one. takes, gives: of every tensor that crosses
    a border (nothing at the ends), its shape, with None for the samples, and its dtype.
    """

    def __init__(self, case: PipelineCase, values: Mapping[str, torch.Tensor], number: int, log: Seen) -> None:
        """values: of every parameter as its stage holds it."""
        super().__init__()
        self.number, self.seen, self._case = number, log, case
        self._blocks, dtype = blocks_of(case, number), case.format.torch_dtype
        self.weights, self.biases = nn.ParameterDict(), nn.ParameterDict()
        held = parameters(case)
        names: dict[int, str] = {}
        self._weight_of: dict[int, str] = {}
        for block in self._blocks:
            if block.source is not None:
                self._weight_of[block.index] = names.setdefault(block.source, block.copy)
        for name, parameter in held.items():
            if parameter.stage == number:
                owner = self.weights if name.startswith("weight") else self.biases
                value = values[name].to(dtype).clone(memory_format=torch.contiguous_format)
                owner[name] = nn.Parameter(value, requires_grad=parameter.trains)
        copies = tied(case)
        self.tied_stages = tuple(block.stage for block in copies)
        mine = [block.copy for block in copies if block.stage == number]
        self.tied: nn.Parameter | None = self.weights[mine[0]] if mine else None
        self.coefficient: torch.Tensor | None = None
        self.last, self.entering = number == case.stages - 1, self._blocks[0].entering
        self.takes, self.gives = self._border(number), self._border(number + 1)
        self._calls = 0

    def _border(self, number: int) -> tuple[tuple[tuple[int | None, ...], torch.dtype], ...]:
        """What enters a stage."""
        case = self._case
        if not 0 < number < case.stages:
            return ()
        dtype, length = case.format.torch_dtype, case.length
        found: list[tuple[tuple[int | None, ...], torch.dtype]] = []
        found.append(((None, length, blocks_of(case, number)[0].entering), dtype))
        if case.skip != "none":
            found.append(((None, length, blocks_of(case, 0)[0].leaving), dtype))
        if case.ids:
            found.append(((None, length), torch.int64))
        return tuple(found)

    def named(self) -> dict[str, torch.Tensor]:
        """Its parameters, by the names of the case."""
        return {**dict(self.weights.items()), **dict(self.biases.items())}

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        case, others = self._case, list(rest)
        self._fail()
        skip = others.pop(0) if self.number > 0 and case.skip != "none" else None
        ids = others.pop(0) if case.ids else None
        if others:
            raise ValueError(f"stage {self.number} was called with {len(rest) + 1} tensors")
        if self.number > 0:
            if skip is not None and (case.skip == "every" or (case.skip == "last" and self.last)):
                x = x + skip.sum(-1, keepdim=True)
            if ids is not None:
                x = x + ids.unsqueeze(-1)
        for block in self._blocks:
            x = self._block(block, x)
            if block.index == 0 and case.skip != "none":
                skip = x
        if x.is_leaf:
            x = x.clone()  # else the hook would stay with what came in
        if x.requires_grad:
            x.register_hook(InFlight(self.seen.log))  # type: ignore[no-untyped-call]
        if self.last:
            assert self.coefficient is not None
            return (x @ self.coefficient).to(case.loss_format.torch_dtype)
        x = self._spoiled(x)
        found = [one for one in (x, skip, ids) if one is not None]
        return found[0] if len(found) == 1 else tuple(found)

    def _block(self, block: Placed, x: torch.Tensor) -> torch.Tensor:
        if block.kind == "dropout":
            # Beside the masks, which are small, a number that tells draws apart.
            self.seen.draws.append(float(torch.rand((), dtype=torch.float64)))
            x = F.dropout(x, DROPOUT)
        elif block.source is not None:
            bias = self.biases[f"bias{block.index}"] if block.bias else None
            x = F.linear(x, self.weights[self._weight_of[block.index]], bias)
        if block.activation == "none":
            return x
        return torch.relu(x) if block.activation == "relu" else torch.tanh(x)

    def _fail(self) -> None:
        """In the last micro-batch of the middle stage."""
        case, call = self._case, self._calls
        self._calls += 1
        if case.invalid == "raises" and self.number == case.stages // 2 and call == case.micro_batches - 1:
            raise ArithmeticError(f"{PLANTED} in stage {self.number}")

    def _spoiled(self, x: torch.Tensor) -> torch.Tensor:
        """What crosses the border to the last rank is not what the stage there takes."""
        if self._case.invalid not in ("shape", "dtype") or not self._before_the_last_rank:
            return x
        if self._case.invalid == "shape":
            return F.pad(x, (0, 1))
        return x.to(torch.float64 if self._case.dtype != "fp64" else torch.float32)

    @property
    def _before_the_last_rank(self) -> bool:
        case = self._case
        return (
            self.number == next(s for s in range(1, case.stages) if case.coordinate_of(s) == case.parallel_size - 1) - 1
        )


def build(
    case: PipelineCase, given: Tensors, values: Mapping[str, torch.Tensor], number: int, seen: Seen
) -> StageModule:
    """A stage with its parameters. values: of this pipeline."""
    module = StageModule(case, values, number, seen)
    if module.last:
        assert given["coefficient"].shape == (width_out(case),)
        module.coefficient = given["coefficient"].to(case.format.torch_dtype)
    if case.invalid in ("shape", "dtype") and module._before_the_last_rank:
        (shape, dtype), *others = module.gives
        if case.invalid == "shape":
            assert shape[-1] is not None
            shape = (*shape[:-1], shape[-1] + 1)
        else:
            dtype = torch.float64 if case.dtype != "fp64" else torch.float32
        module.gives = ((shape, dtype), *others)
    return module
