"""Drives a mixed-precision optimizer through the steps of a case on one rank, alike for every candidate."""

from __future__ import annotations

import io
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

from harness.candidate import NotOffered
from harness.local import Purity, WrongAdapter, WrongResult, local_tensor, require_like
from harness.mixed_precision import MixedPrecision
from harness.observation import LocalTensor, Observation
from harness.properties.refusal import REFUSED
from harness.scaling import cut_short
from harness.session import CandidateRaised, phase
from reference.mixed_precision import OF_STATE, MixedPrecisionCase
from reference.mixed_precision_steps import Tensors, handed, names

#: The facts of an observation: for each step what was decided, by name; for each step and parameter, the ranges that
#: the rank keeps; for each step what has other bits than before it; and what a refused load has changed.
SEEN, OWNED, MOVED, CHANGED = "seen", "owned", "moved", "changed"

Parameters = dict[str, nn.Parameter]
Build = Callable[[MixedPrecisionCase, Parameters], object]
Read = dict[str, torch.Tensor]
Ranges = tuple[tuple[int, int], ...]


def run(case: MixedPrecisionCase, given: Tensors, rank: int, build: Build) -> Observation:
    """Builds the optimizer, makes every step, and reads decisions, parameters, masters and state.

    Raises WrongAdapter, WrongResult and CandidateRaised as `harness.drive.drive` does.
    """
    return _Run(case, given, rank, build).all()


def attempt(case: MixedPrecisionCase, given: Tensors, rank: int, build: Build) -> Observation:
    """Hands over what must be refused: the fact ``refused`` is what was raised, or None."""
    one = _Run(case, given, rank, build)
    if case.invalid not in OF_STATE:
        try:
            one.built(case, one.parameters(case, wrong_dtype=case.invalid == "dtype"))
        except CandidateRaised as error:
            return Observation(facts={REFUSED: str(error).partition("\n")[0]})
        return Observation(facts={REFUSED: None})
    state = one.foreign_state()
    parameters = one.parameters(case)
    optimizer = one.built(case, parameters)
    before = one.reading(parameters, optimizer)
    try:
        with phase("load"):
            one.loader(optimizer)(state)
    except CandidateRaised as error:
        changed = moved(before, one.reading(parameters, optimizer))
        return Observation(facts={REFUSED: str(error).partition("\n")[0], CHANGED: changed})
    return Observation(facts={REFUSED: None})


@dataclass
class _Run:
    case: MixedPrecisionCase
    given: Tensors
    rank: int
    build: Build
    tensors: dict[str, LocalTensor | None] = field(default_factory=dict)
    seen: list[dict[str, Any]] = field(default_factory=list)
    owned: dict[int, dict[str, Ranges]] = field(default_factory=dict)
    moved_in: list[list[str]] = field(default_factory=list)

    def all(self) -> Observation:
        case, purity = self.case, Purity()
        parameters = self.parameters(case)
        optimizer = self.built(case, parameters)
        for step in range(case.steps):
            if case.load and step == case.load:
                parameters, optimizer = self._resumed(parameters, optimizer)
            if case.reload and step == case.reload:
                self._reload(parameters, optimizer)
            scale = number("scale", optimizer.scale)
            self._set_gradients(case, parameters, step, scale)
            before = self.reading(parameters, optimizer)
            with phase(f"step {step}"):
                skipped: Any = optimizer.step()
            if not isinstance(skipped, bool):
                said = reprlib.repr(skipped)
                raise WrongResult(f"step returned {said}; expected whether the step was skipped, a bool")
            self.seen.append({"by": scale, "skipped": skipped, **decisions(optimizer)})
            self.moved_in.append(moved(before, self.reading(parameters, optimizer)))
            self._keep(parameters, optimizer, step, skipped)
        facts = {SEEN: self.seen, OWNED: self.owned, MOVED: self.moved_in}
        return Observation(self.tensors, side_effects=tuple(purity.report()), facts=facts)

    def parameters(self, case: MixedPrecisionCase, wrong_dtype: bool = False) -> Parameters:
        """Those that this rank holds. wrong_dtype: in one that is none of a mixed-precision optimizer."""
        made: Parameters = {}
        for i, one in enumerate(case.parameters):
            if case.holds(i, self.rank):
                whole = self.given.get(f"parameter{i}")
                if whole is None or whole.numel() != one.size:
                    whole = torch.zeros(one.size, dtype=torch.float64)
                dtype = torch.float64 if wrong_dtype else case.format_of(i).torch_dtype
                values = whole[case.window(i, self.rank)].to(dtype, copy=True)
                made[f"parameter{i}"] = nn.Parameter(values, requires_grad=one.kind != "frozen")
        return made

    def built(self, case: MixedPrecisionCase, parameters: Parameters) -> MixedPrecision:
        with phase("build"):
            made = self.build(case, parameters)
        if not isinstance(made, MixedPrecision):
            raise WrongAdapter(f"mixed_precision returned {reprlib.repr(made)}; expected MixedPrecision(step, scale)")
        return made

    def loader(self, optimizer: MixedPrecision) -> Callable[[Any], object]:
        if optimizer.load is None:
            raise NotOffered("the mixed-precision optimizer has no load")
        return optimizer.load

    def foreign_state(self) -> Any:
        """A state of another configuration, after a step, or one from which the last entry is missing."""
        case = self.case if self.case.invalid == "state_truncated" else self.case.other
        case = replace(case, invalid=None)
        parameters = self.parameters(case)
        optimizer = self.built(case, parameters)
        for parameter in parameters.values():
            if parameter.requires_grad and case.main_grad:
                parameter.main_grad = torch.zeros(parameter.shape)  # type: ignore[attr-defined]
            elif parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        with phase("step 0"):
            optimizer.step()
        state = self._saved(optimizer)
        return cut_short(state) if self.case.invalid == "state_truncated" else state

    def _saved(self, optimizer: MixedPrecision) -> Any:
        """The state, as it comes back from a file."""
        if optimizer.save is None:
            raise NotOffered("the mixed-precision optimizer has no save")
        return through_a_file(optimizer.save)

    def _resumed(self, parameters: Parameters, optimizer: MixedPrecision) -> tuple[Parameters, MixedPrecision]:
        """A new optimizer with the state of the old one, for new parameters of the same values."""
        state = self._saved(optimizer)
        again = {name: nn.Parameter(p.detach().clone(), p.requires_grad) for name, p in parameters.items()}
        made = self.built(self.case, again)
        with phase("load"):
            self.loader(made)(state)
        return again, made

    def _reload(self, parameters: Parameters, optimizer: MixedPrecision) -> None:
        if optimizer.reload is None:
            raise NotOffered("the mixed-precision optimizer has no reload")
        for name, parameter in parameters.items():
            i = int(name.removeprefix("parameter"))
            with torch.no_grad():
                parameter.copy_(self.given[f"reloaded{i}"][self.case.window(i, self.rank)])
        with phase("reload"):
            optimizer.reload()

    def _set_gradients(self, case: MixedPrecisionCase, parameters: Parameters, step: int, scale: float) -> None:
        coordinate = case.mesh.coordinate(self.rank, "dp")
        for name, parameter in parameters.items():
            i = int(name.removeprefix("parameter"))
            if case.parameters[i].kind == "frozen":
                continue
            has = case.has_gradient(i, coordinate, step)
            gradient = handed(case, self.given, i, step, self.rank, scale) if has else None
            if case.main_grad:
                parameter.main_grad = gradient  # type: ignore[attr-defined]
            else:
                parameter.grad = gradient

    def reading(self, parameters: Parameters, optimizer: MixedPrecision) -> Read:
        """Copies of the model's parameters, the masters and the state, of the elements that this rank keeps."""
        found: Read = {}
        for name, parameter in parameters.items():
            i = int(name.removeprefix("parameter"))
            own = self._owned(optimizer, i, parameter)
            kept = sum(max(0, stop - start) for start, stop in own)
            found[name] = parameter.detach()
            require_like(name, found[name], tuple(parameter.shape), self.case.format_of(i).torch_dtype)
            if self.case.parameters[i].kind == "frozen":
                continue
            if optimizer.master is not None and self.case.has_master(i):
                found[f"master{i}"] = self._kept(f"master{i}", kept, lambda n=name: optimizer.master(n))  # type: ignore[misc]
            for kind in self.case.states if optimizer.state is not None else ():
                read = lambda n=name, k=kind: optimizer.state(n, k)  # type: ignore[misc]  # noqa: E731
                found[f"{kind}{i}"] = self._kept(f"{kind}{i}", kept, read)
        return {name: tensor.clone() for name, tensor in found.items()}

    def _kept(self, what: str, elements: int, read: Callable[[], torch.Tensor]) -> torch.Tensor:
        with phase(f"reading {what}"):
            found = read()
        require_like(f"{what} of the elements kept", found, (elements,), torch.float32)
        return found.detach()

    def _owned(self, optimizer: MixedPrecision, i: int, parameter: nn.Parameter) -> Ranges:
        name = f"parameter{i}"
        if optimizer.owned is None or self.case.parameters[i].kind == "frozen":
            return ((0, parameter.numel()),)
        with phase(f"owned({name!r})"):
            said: Any = optimizer.owned(name)
        try:
            return tuple((int(start), int(stop)) for start, stop in said)
        except (TypeError, ValueError):
            raise WrongAdapter(
                f"owned({name!r}) returned {reprlib.repr(said)}; expected a list of ranges (start, stop) of elements"
            ) from None

    def _keep(self, parameters: Parameters, optimizer: MixedPrecision, step: int, skipped: bool) -> None:
        """Everything after a step, under the names of the reference; of length 0 what is of another stage."""
        case, read = self.case, self.reading(parameters, optimizer)
        self.owned[step] = {name: self._owned(optimizer, int(name[9:]), p) for name, p in parameters.items()}
        stage = case.mesh.coordinate(self.rank, "pp")
        for i in range(len(case.parameters)):
            for kind in ("parameter", *(("master",) if case.has_master(i) else ()), *case.states):
                own = read.get(f"{kind}{i}")
                offered = {"parameter": True, "master": optimizer.master is not None}
                if not offered.get(kind, optimizer.state is not None) or (
                    kind != "parameter" and case.parameters[i].kind == "frozen"
                ):
                    continue
                dtype = case.format_of(i).torch_dtype if kind == "parameter" else torch.float32
                for name, at in zip(names(case, kind, i, step), case.stages(i), strict=True):
                    values = own if at == stage and own is not None else torch.empty(0, dtype=dtype)
                    self.tensors[name] = local_tensor(name, values)
        if case.clip and not skipped:
            for what, function in (("norm", optimizer.norm), ("coefficient", optimizer.coefficient)):
                if function is not None:
                    found = torch.tensor([number(what, function)], dtype=torch.float64)
                    self.tensors[f"{what}[{step}]"] = local_tensor(what, found)


class Decides(Protocol):
    """What has a loss scale, and says what it decided."""

    scale: Callable[[], float | torch.Tensor]
    counters: Callable[[], Mapping[str, int]] | None
    steps: Callable[[], int] | None


def decisions(optimizer: Decides) -> dict[str, float]:
    """The scale, and the counts that it offers."""
    found = {"scale": number("scale", optimizer.scale)}
    if optimizer.counters is not None:
        with phase("counters"):
            counters: Any = optimizer.counters()
        if not isinstance(counters, Mapping) or set(counters) - {"good", "left"}:
            raise WrongAdapter(f"counters returned {reprlib.repr(counters)}; expected 'good' and 'left', or one")
        found |= {name: int(value) for name, value in counters.items()}
    if optimizer.steps is not None:
        found["steps"] = int(number("steps", optimizer.steps))
    return found


def number(what: str, read: Callable[[], Any]) -> float:
    """What a function returns, a number or a tensor of one element."""
    with phase(what):
        found = read()
    if not isinstance(found, float | int) and not (isinstance(found, torch.Tensor) and found.numel() == 1):
        raise WrongResult(f"{what} returned {reprlib.repr(found)}; expected a number, or a tensor of one element")
    return float(found)


def through_a_file(save: Callable[[], object]) -> Any:
    """A state, as it comes back from a file."""
    file = io.BytesIO()
    with phase("save"):
        torch.save(save(), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def moved(before: Read, after: Read) -> list[str]:
    """What has other bits than before."""
    return [name for name, old in before.items() if not _same(old, after[name])]


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit by bit, whatever they hold."""
    bits = torch.int32 if a.element_size() == 4 else torch.int16
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))
