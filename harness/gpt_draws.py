"""Which dropout masks the stages of a rank draw in each forward of a step."""

from __future__ import annotations

import math
import reprlib
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from harness.candidate import NotOffered
from harness.drawn import Drawn, Draws, drawn_of
from harness.gpt import Gpt
from harness.local import WrongAdapter, WrongResult
from harness.session import phase
from reference.gpt import GptCase
from reference.gpt_dropout import mask_layout, mask_shape, places
from reference.layout import window

#: How far a probability below 1 is moved where it is stored in bf16: its unit roundoff.
_STORED = 2.0**-9

#: By micro-batch and place.
Masks = dict[tuple[int, str], Drawn]


class Dropouts:
    """Sees what the stages of one rank drop."""

    def __init__(self, case: GptCase, rank: int, gpt: Gpt) -> None:
        """Raises NotOffered for a model that does not tell of its forwards, in a case with dropout."""
        self._case, self._rank, self._gpt = case, rank, gpt
        self._forwards: _Forwards | None = None
        if case.dropout and gpt.before_forward is None:
            raise NotOffered("the model has no before_forward")

    def seeing(self) -> AbstractContextManager[_Forwards | None]:
        """Around a step."""
        if not self._case.dropout or self._gpt.before_forward is None:
            return nullcontext()
        hooked, self._forwards = self._forwards is not None, _Forwards(self._case)
        if not hooked:
            with phase("before_forward"):
                self._gpt.before_forward(self._begin)
        return self._forwards

    def _begin(self, stage: Any, micro_batch: Any) -> None:
        if self._forwards is not None:
            self._forwards.begin(stage, micro_batch)

    def masks(self, seen: _Forwards | None) -> Masks:
        """What each forward of the step drew. Raises WrongResult where that are not the masks that were due, and
        WrongAdapter where it was not told of every forward."""
        if seen is None:
            return {}
        if seen.wrong:
            raise WrongAdapter(seen.wrong)
        case, found = self._case, Masks()
        stages = case.stages_on(case.mesh.coordinate(self._rank, "pp"))
        due = {(stage, m) for stage in stages for m in range(case.micro_batches)}
        told = set(seen.drawn)
        if told != due:
            one = min(told ^ due)
            missing = "lacks" if one in due else "has"
            raise WrongAdapter(
                f"before_forward {missing} stage {one[0]}, micro-batch {one[1]}; expected a call for each micro-batch "
                f"of the stages {', '.join(map(str, stages))}"
            )
        for (stage, m), drawn in seen.drawn.items():
            found |= {(m, place): mask for place, mask in self._paired(stage, m, drawn)}
        return found

    def _paired(self, stage: int, m: int, drawn: list[Drawn]) -> list[tuple[str, Drawn]]:
        case, where = self._case, f"the forward of micro-batch {m} in stage {stage}"
        due = places(case, stage)
        if len(drawn) != len(due):
            named = ", ".join(due) or "none"
            raise WrongResult(f"{where} drew {len(drawn)} dropout masks; expected {len(due)}: {named}")
        pairs = []
        for place, one in zip(due, drawn, strict=True):
            shape = window(mask_shape(case, place, m), mask_layout(case, place), case.mesh, self._rank).shape
            if one.ones.size != math.prod(shape):
                raise WrongResult(f"{where} drew a mask of shape {one.ones.shape} for {place}; expected {shape}")
            if min(abs(one.p - case.dropout), abs(one.p - (1 - case.dropout))) > _STORED:
                raise WrongResult(
                    f"{where} drew the mask of {place} with probability {one.p:g}; expected {case.dropout:g}, or "
                    f"{1 - case.dropout:g} for what is kept"
                )
            pairs.append((place, Drawn(one.ones.reshape(shape), one.p)))
        return pairs


class _Forwards(Draws):  # type: ignore[no-untyped-call]
    """What was drawn, by (stage, micro-batch), from the begin of a forward to that of the next. What is computed again
    in a backward draws nothing new."""

    def __init__(self, case: GptCase) -> None:
        super().__init__()
        self._case = case
        self.drawn: dict[tuple[int, int], list[Drawn]] = {}
        self._now: tuple[int, list[Drawn]] | None = None
        self.wrong = ""

    def begin(self, stage: Any, micro_batch: Any) -> None:
        """Keeps in ``wrong`` what is wrong with the call: an error here would be one of the candidate's step."""
        if type(stage) is not int or type(micro_batch) is not int:
            said = reprlib.repr((stage, micro_batch))
            self.wrong = f"before_forward's function was called with {said}; expected stage and micro-batch"
            return
        if (stage, micro_batch) in self.drawn:
            self.wrong = (
                f"before_forward's function was called twice with stage {stage}, micro-batch {micro_batch}; expected "
                "one call, and none where a forward is computed again"
            )
        self._now = stage, self.drawn.setdefault((stage, micro_batch), [])

    def _keep(self, ones: torch.Tensor, p: float) -> None:
        if self._now is None or torch._C._current_autograd_node() is not None:
            return
        stage, drawn = self._now
        # The whole stage may be computed again outside of autograd, after its forward.
        if self._case.recompute != "stage" or len(drawn) < len(places(self._case, stage)):
            drawn.append(drawn_of(ones, p))
