"""Candidates whose words are no text, or play with the terminal."""

from __future__ import annotations

from typing import Any

import torch
from right import Right

from harness import NotOffered, Sharded

WORDS = "lone \ud800 clear \x1b[2J nul \x00 turned \u202e return \r markup [bold]x[/bold] :warning: [/]"


class Raises(Right):
    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        raise ValueError(WORDS)


class Refuses(Right):
    def built(self, made: Sharded) -> Any:
        raise NotOffered(WORDS)


class Named(Right):
    name = WORDS


class Unusable(Right):
    def __init__(self) -> None:
        raise RuntimeError(WORDS)
