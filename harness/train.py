"""Drives a data-parallel module through the training steps of a case on one rank, alike for every candidate."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.data_parallel import DataParallel
from harness.local import Purity, WrongAdapter, WrongResult, as_local, local_tensor, require_like
from harness.network import Network
from harness.observation import LocalTensor, Observation, Sent
from harness.session import CandidateRaised, phase
from harness.world.traffic import Recorder
from reference.data_parallel import DataParallelCase, Tensors, trained
from reference.data_parallel_tokens import token_weights, valid_tokens
from reference.layout import Layout, layout_text, window, with_each
from reference.traffic import Phase

#: The facts of an observation: the gradients that are None although the parameter trains.
NONE = "none"

Build = Callable[[Network], object]


def train(
    case: DataParallelCase, given: Tensors, rank: int, build: Build, traffic: Recorder | None = None
) -> Observation:
    """Builds the network, has it wrapped, runs every step, and reads gradients and losses.

    Raises WrongAdapter, WrongResult and CandidateRaised as `harness.drive.drive` does.
    """
    return _Run(case, given, rank, traffic).all(build)


def attempt(case: DataParallelCase, given: Tensors, rank: int, build: Build) -> Observation:
    """Wraps a network that differs on the last rank, and runs one step, where that was not refused: the fact
    ``refused`` is what was raised, or None."""
    try:
        _Run(case, given, rank).all(build)
    except CandidateRaised as error:
        return Observation(facts={"refused": str(error).partition("\n")[0]})
    return Observation(facts={"refused": None})


@dataclass
class _Run:
    case: DataParallelCase
    given: Tensors
    rank: int
    traffic: Recorder | None = None
    sent: list[Sent] = field(default_factory=list)
    tensors: dict[str, LocalTensor | None] = field(default_factory=dict)
    layouts: dict[str, Layout] = field(default_factory=dict)
    none: list[str] = field(default_factory=list)

    def all(self, build: Build) -> Observation:
        case, mesh = self.case, self.case.mesh
        self.replica = mesh.coordinate(self.rank, case.replica_axes)
        self.coordinate = mesh.coordinate(self.rank, case.axis)
        last = case.invalid is not None and self.coordinate == case.parallel_size - 1
        self.network = Network(case, self.given, differs=last)
        purity = Purity()
        with phase("build"):
            built = build(self.network)
        self.wrapped = _require(built)
        self.purity = purity
        parameters = list(self._parameters())
        for name, parameter in parameters:
            purity.watch(f"parameter {name}", as_local(parameter))
        for step in range(case.steps):
            self._step(step)
        purity.release()
        effects = [*purity.report(), *self._closed()]
        sent = None if self.traffic is None else tuple(self.sent)
        return Observation(self.tensors, self.layouts, tuple(effects), sent, facts={NONE: tuple(self.none)})

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that a wrapper put in the place of the network's own."""
        for i in range(len(self.case.layers)):
            found = self.network.parameters_of(i)
            yield from ((f"{what}{i}", found[what]) for what in ("weight", "bias") if what in found)

    def _step(self, step: int) -> None:
        case, wrapped, M = self.case, self.wrapped, self.case.micro_batches
        with phase("zero_grad"):
            if wrapped.zero_grad is not None:
                wrapped.zero_grad()
            else:
                self._zero_grad()
        masks = tuple(mask[self.replica, self.coordinate] for mask in valid_tokens(case, step))
        for m in range(M):
            syncs = case.sync == "every" or m == M - 1
            k = step * M + m
            with nullcontext() if syncs else self._without_sync():
                self._micro_batch(step, m, masks)
            if syncs and wrapped.finish is not None:
                with phase(f"finish after micro-batch {m}"), self._sending("finish", k):
                    wrapped.finish()
        if wrapped.report is not None:
            with phase("report"), self._sending("forward", step * M + M - 1):
                found = wrapped.report()
            require_like("loss", found, (), case.loss_format.torch_dtype)
            self.tensors[f"loss[{step}]"] = local_tensor("loss", found)
        for name, parameter in self._parameters():
            self._read(f"{name}[{step}].grad", name, parameter)

    @contextmanager
    def _without_sync(self) -> Iterator[None]:
        with phase("no_sync"):
            context: Any = self.wrapped.no_sync()
        if not isinstance(context, AbstractContextManager):
            found = reprlib.repr(context)
            raise WrongAdapter(
                f"no_sync returned {found}; expected a context, as DistributedDataParallel.no_sync makes"
            )
        with ExitStack() as stack:
            with phase("no_sync"):
                stack.enter_context(context)
            yield

    def _micro_batch(self, step: int, m: int, masks: tuple[torch.Tensor, ...]) -> None:
        case, k = self.case, step * self.case.micro_batches + m
        x = self.given[f"input[{k}]"][self.replica, self.coordinate].to(case.format.torch_dtype)
        name = f"input[{k}]"
        self.purity.watch(name, x)
        with phase(f"forward of micro-batch {m}"), self._sending("forward", k):
            losses = self.wrapped.forward(x, case.used(self.coordinate, k))
        require_like("the output", losses, (case.samples, case.length), case.loss_format.torch_dtype)
        if self.wrapped.loss is None:
            total = (losses * self._weights(step, m)).sum()
        else:
            with phase(f"loss of micro-batch {m}"), self._sending("forward", k):
                total = self.wrapped.loss(losses, masks, m)
            require_like("the loss", total, (), case.loss_format.torch_dtype)
        if not total.requires_grad:
            raise WrongResult(f"the loss of micro-batch {m} does not require a gradient, although parameters do")
        with phase(f"backward of micro-batch {m}"), self._sending("backward", k):
            total.backward()  # type: ignore[no-untyped-call]
        self.purity.release([name])

    def _weights(self, step: int, m: int) -> torch.Tensor:
        scale = self.case.parallel_size if self.case.reduction == "average" else 1
        weights = scale * token_weights(self.case, step)[m, self.replica, self.coordinate]
        return weights.to(self.case.loss_format.torch_dtype)

    def _zero_grad(self) -> None:
        for _, parameter in self._parameters():
            parameter.grad = None
            if getattr(parameter, "main_grad", None) is not None:
                parameter.main_grad.zero_()  # type: ignore[attr-defined]

    def _read(self, what: str, name: str, parameter: torch.Tensor) -> None:
        with phase(f"reading {what}"):
            if self.wrapped.read_grad is not None:
                found = self.wrapped.read_grad(parameter)
            else:
                found = getattr(parameter, "main_grad", None) if self.case.main_grad else parameter.grad
        layout = self.layouts[what] = with_each(self.wrapped.layout, self.case.replica_axes)
        shapes = trained(self.case)
        if name in shapes:
            part = self._part(name, shapes[name], layout)
            if found is None:
                self.none.append(what)  # it stands for zeros, where all ranks have none
                found = torch.zeros(part, dtype=self.case.kept.torch_dtype)
        self.tensors[what] = None if found is None else local_tensor(what, found)

    def _part(self, name: str, shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
        """The shape of this rank's part of a gradient. Raises WrongAdapter where the layout does not fit."""
        try:
            return window((self.case.replicas, *shape), layout, self.case.mesh, self.rank).shape
        except ValueError as error:
            said = f"DataParallel(..., layout={layout_text(self.wrapped.layout)})"
            raise WrongAdapter(f"{said} does not fit {name}, correct it: {error}") from None

    def _closed(self) -> Iterator[str]:
        """What is left behind on the parameters, where the wrapper says that it is done."""
        if self.wrapped.close is None:
            return
        with phase("close"):
            self.wrapped.close()
        for name, parameter in self._parameters():
            hooks = [getattr(parameter, what, None) for what in ("_post_accumulate_grad_hooks", "_backward_hooks")]
            if any(hooks):
                yield f"left a hook on parameter {name}"

    @contextmanager
    def _sending(self, what: Phase, k: int) -> Iterator[None]:
        before = 0 if self.traffic is None else len(self.traffic.records())
        yield
        if self.traffic is not None:
            self.sent += [Sent(what, k, one) for one in self.traffic.records()[before:]]


def _require(built: object) -> DataParallel:
    if not isinstance(built, DataParallel):
        raise WrongAdapter(f"data_parallel returned {reprlib.repr(built)}; expected DataParallel(wrapped_module)")
    return built
