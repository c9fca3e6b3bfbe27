"""Loss scalers and clipping that are wrong in one way each, beside the adapters of the documentation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from harness import Candidate, Clipper, LossScaler, new_group
from harness.candidates.builtin import Builtin
from sharded import clip


class MyScaler:
    """A trainer's own, with a state of two numbers."""

    def __init__(self, asked: Any) -> None:
        self.asked, self.scale, self.good = asked, asked.initial, 0

    def update(self, found_inf: bool) -> bool:
        self.good = 0 if found_inf else self.good + 1
        if found_inf:
            self.scale *= self.asked.backoff_factor
        elif self.good == self.asked.growth_interval:
            self.scale, self.good = self.scale * self.asked.growth_factor, 0
        return found_inf

    def state_dict(self) -> Any:
        return self.scale, self.good

    def load_state_dict(self, state: Any) -> None:
        self.scale, self.good = state


class Simple(Candidate):
    supports = ("loss_scale_load", "clip_plain", "clip_sharded")
    axes = ("tp", "dp")

    def open(self, mesh: Any) -> None:
        self.group = new_group(mesh, "dp") if "dp" in mesh.names else None

    def loss_scaler(self, case: Any) -> LossScaler:
        made = MyScaler(case.asked)
        return LossScaler(lambda: made.scale, made.update, state=made.state_dict, load=made.load_state_dict)

    def clip_gradients(self, case: Any, parameters: Mapping[str, nn.Parameter]) -> Clipper:
        """Over dp; for the 2-norm and cases in which all is sharded."""

        def clip() -> torch.Tensor:
            gradients = [p.grad for p in parameters.values() if p.grad is not None]
            total = sum((g * g).sum() for g in gradients)
            assert isinstance(total, torch.Tensor)
            dist.all_reduce(total, group=self.group)
            norm = total.sqrt()
            for gradient in gradients:
                gradient.mul_(min(1.0, case.limit / float(norm)))
            return norm

        return Clipper(clip)


class OverNothing(Builtin):
    """Norms that are not reduced over all axes."""

    over: tuple[str, ...] = ()

    def clip_gradients(self, case: Any, parameters: Mapping[str, nn.Parameter]) -> Clipper:
        made = super().clip_gradients(case, parameters)
        right, summed, largest = made.clip, clip.summed, clip.largest

        def some(groups: Mapping[str, Any]) -> dict[str, Any]:
            return {axis: group for axis, group in groups.items() if axis in self.over}

        def clipped() -> Any:
            with (
                mock.patch.object(clip, "summed", lambda total, groups: summed(total, some(groups))),
                mock.patch.object(clip, "largest", lambda found, groups: largest(found, some(groups))),
            ):
                return right()

        made.clip = clipped
        return made


class OverTp(OverNothing):
    """Over this one alone."""

    over = ("tp",)


class NotOverTp(OverNothing):
    """Over the others alone."""

    over = ("dp", "pp")


class NotOverDp(OverNothing):
    """Over the others alone."""

    over = ("tp", "pp")


class NotOverPp(OverNothing):
    """Over the others alone."""

    over = ("tp", "dp")


class HalfLoaded(Builtin):
    """Takes the scale before it looks at the rest."""

    def loss_scaler(self, case: Any) -> LossScaler:
        made = super().loss_scaler(case)
        right, moved = made.load, []
        assert right is not None
        scale = made.scale

        def load(state: Any) -> None:
            moved.append(1)
            assert right is not None
            right(state)

        made.load = load
        made.scale = lambda: float(scale()) + len(moved)
        return made


class ScaleTaken(Builtin):
    """Takes the scale of a state that it refuses then."""

    def loss_scaler(self, case: Any) -> LossScaler:
        made = super().loss_scaler(case)
        right, taken = made.load, list[float]()
        assert right is not None
        scale = made.scale

        def load(state: Any) -> None:
            taken[:] = [state["state"]["scale"]]
            right(state)
            taken.clear()

        made.load = load
        made.scale = lambda: taken[0] if taken else scale()
        return made


class HalfConfigured(Builtin):
    """A load that is refused has taken over something that is only seen when the state is saved."""

    def loss_scaler(self, case: Any) -> LossScaler:
        made = super().loss_scaler(case)
        right, interval = made.load, made.set_interval
        assert right is not None
        assert interval is not None

        def load(state: Any) -> None:
            interval(77)
            right(state)

        made.load = load
        return made


class HysteresisAlone(Builtin):
    """Of the configuration of a state it looks at the hysteresis."""

    def loss_scaler(self, case: Any) -> LossScaler:
        made = super().loss_scaler(case)
        right, own = made.load, made.state
        assert right is not None
        assert own is not None

        def load(state: Any) -> None:
            if "left" not in state["state"]:
                raise ValueError("cut short")
            ours = own()["configuration"]
            right({**state, "configuration": {**ours, "hysteresis": state["configuration"]["hysteresis"]}})

        made.load = load
        return made


class Aliasing(Candidate):
    """Keeps the very state that it was given, and moves it."""

    def open(self, mesh: Any) -> None:
        """Nothing is needed."""

    def loss_scaler(self, case: Any) -> LossScaler:
        kept: list[dict[str, float]] = [{"scale": 8.0, "good": 0}]

        def update(found: bool) -> bool:
            state = kept[0]
            state["good"] = 0 if found else state["good"] + 1
            if found:
                state["scale"] /= 2
            elif state["good"] == 2:
                state["scale"], state["good"] = state["scale"] * 2, 0
            return found

        def load(state: Any) -> None:
            kept[0] = state

        return LossScaler(lambda: kept[0]["scale"], update, state=lambda: kept[0], load=load)


def _checking(check: Any) -> Any:
    class Checks(Builtin):
        def loss_scaler(self, case: Any) -> LossScaler:
            made = super().loss_scaler(case)
            right = made.check
            made.check = lambda gradients: check(right, gradients)
            return made

    return Checks


def _zeroing(right: Any, gradients: Any) -> bool:
    found = right(gradients)
    for gradient in gradients:
        gradient.zero_()
    return bool(found)


Zeroing = _checking(_zeroing)
Summing = _checking(lambda right, gradients: not all(bool(g.sum().isfinite()) for g in gradients))
Fp32Alone = _checking(lambda right, gradients: right([g for g in gradients if g.dtype == torch.float32]))


def _reading(**functions: Any) -> Any:
    class Reads(Builtin):
        def loss_scaler(self, case: Any) -> LossScaler:
            made = super().loss_scaler(case)
            for name, function in functions.items():
                setattr(made, name, function)
            return made

    return Reads


class Evil:
    """Can be saved, and not read."""

    def __reduce__(self) -> Any:
        return _no, ()


def _no() -> None:
    raise RuntimeError("no")


CountsText = _reading(counters=lambda: {"good": "one"})
CountsHalves = _reading(counters=lambda: {"good": 0.5})
ScaleTooLarge = _reading(scale=lambda: 10**400)
EvilState = _reading(state=Evil)


class OneRankSkips(Builtin):
    """The first rank alone hears of nothing."""

    def loss_scaler(self, case: Any) -> LossScaler:
        made = super().loss_scaler(case)
        right = made.update
        made.update = lambda found: bool(right(found)) and dist.get_rank() != 0
        return made


class AcceptsAll(Builtin):
    def loss_scaler(self, case: Any) -> LossScaler:
        return LossScaler(lambda: 8.0, lambda found: found)

    def clip_gradients(self, case: Any, parameters: Mapping[str, nn.Parameter]) -> Clipper:
        return Clipper(lambda: 1.0)


class ReturnsNothing(Builtin):
    def loss_scaler(self, case: Any) -> Any:
        return LossScaler(lambda: "8", lambda found: None)  # type: ignore[arg-type, return-value]

    def clip_gradients(self, case: Any, parameters: Mapping[str, nn.Parameter]) -> Any:
        return None


class _Clips(Builtin):
    def clip_gradients(self, case: Any, parameters: Mapping[str, nn.Parameter]) -> Clipper:
        made = super().clip_gradients(case, parameters)
        self.change(made, parameters)
        return made

    def change(self, made: Clipper, parameters: Mapping[str, nn.Parameter]) -> None:
        raise NotImplementedError


class ChangesBeforeItRaises(_Clips):
    def change(self, made: Clipper, parameters: Mapping[str, nn.Parameter]) -> None:
        right = made.clip

        def clip() -> float | torch.Tensor:
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter.grad.mul_(2)
            return right()

        made.clip = clip


class SkipsAlone(_Clips):
    def change(self, made: Clipper, parameters: Mapping[str, nn.Parameter]) -> None:
        made.skips = lambda: dist.get_rank() == 0


class OtherBits(_Clips):
    """One rank's norm differs in its last bits."""

    def change(self, made: Clipper, parameters: Mapping[str, nn.Parameter]) -> None:
        right = made.clip
        made.clip = lambda: float(right()) * (1 + 2.0**-52 * dist.get_rank())
