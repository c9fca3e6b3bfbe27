"""Candidates that hand back something else than what is asked for."""

from __future__ import annotations

from typing import Any

import torch
from right import Right

from harness import Partial, Sharded, Split


class NoSharded(Right):
    def built(self, made: Sharded) -> Any:
        return made.module


class Nothing(Right):
    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        return None


class WrongShape(Right):
    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        return torch.cat([y, y], dim=-1)


class WrongDtype(Right):
    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        return y.double()


class OtherDevice(Right):
    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        return y.to("meta")


class NaN(Right):
    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        return y * float("nan")


class TooMany(Right):
    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        return y, None


class TooFew(Right):
    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        return ()


class Detached(Right):
    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        return y.detach()


class Sparse(Right):
    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        return y.to_sparse()


class LayoutThatDoesNotFit(Right):
    def built(self, made: Sharded) -> Any:
        made.outputs = {"output": Split(5, "tp")}
        return made


class GradientLayoutThatDoesNotFit(Right):
    def built(self, made: Sharded) -> Any:
        made.grads["bias"] = Split(0, "tp", sizes=(1, 2, 3))
        return made


class OnMeta(Right):
    """As a module is that was never given its memory."""

    def built(self, made: Sharded) -> Any:
        made.module.to("meta")  # type: ignore[attr-defined]
        return made


class NoParameter(Right):
    def built(self, made: Sharded) -> Any:
        made.module.bias = None  # type: ignore[attr-defined]
        return made


class NoLayout(Right):
    def built(self, made: Sharded) -> Any:
        return Sharded(made.module, forward=made.forward, weight=Split(0, "tp"))


class WrongParameterShape(Right):
    def built(self, made: Sharded) -> Any:
        return Sharded(made.module, forward=made.forward, weight=Split(1, "tp"), bias=Split(0, "tp"))


class WrongParameterDtype(Right):
    def built(self, made: Sharded) -> Any:
        made.module.bias.data = made.module.bias.data.double()  # type: ignore[attr-defined]
        return made


class GradientIsNoTensor(Right):
    def built(self, made: Sharded) -> Any:
        made.read_grad = lambda parameter: "gradient"  # type: ignore[assignment,return-value]
        return made


class GradientOfOtherDtype(Right):
    def built(self, made: Sharded) -> Any:
        made.read_grad = lambda parameter: parameter.grad.double()  # type: ignore[union-attr]
        return made


class NoGradient(Right):
    def built(self, made: Sharded) -> Any:
        made.read_grad = lambda parameter: None
        return made


class WrongGradientOnLastRank(Right):
    """Only one replica is wrong."""

    def built(self, made: Sharded) -> Any:
        if self.rank == self.mesh.size - 1:
            made.read_grad = lambda parameter: None if parameter.grad is None else parameter.grad * 2
        return made


class OtherLayoutOnRank1(Right):
    """Only the last rank says that its gradient still has to be summed."""

    def built(self, made: Sharded) -> Any:
        if self.rank == 1:
            made.grads["bias"] = Partial("tp")
        return made
