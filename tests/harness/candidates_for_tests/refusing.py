"""Candidates that refuse cases."""

from __future__ import annotations

from typing import Any

from right import Right

from harness import Mesh, NotOffered, Sharded


class Everything(Right):
    def open(self, mesh: Mesh) -> None:
        raise NotOffered("only on Tuesdays")


class Bias(Right):
    def built(self, made: Sharded) -> Any:
        raise NotOffered("no bias here")


class BiasOnRank1(Right):
    def built(self, made: Sharded) -> Any:
        if self.rank == 1:
            raise NotOffered("no bias here")
        return made


class InForward(Right):
    def built(self, made: Sharded) -> Any:
        def forward(x: object) -> Any:
            raise NotOffered("not forwards")

        made.forward = forward
        return made
