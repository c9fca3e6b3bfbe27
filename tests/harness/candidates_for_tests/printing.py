"""A candidate that prints."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from right import Right

print("noise of an import")


class Loud(Right):
    def output(self, y: torch.Tensor, x: torch.Tensor) -> Any:
        print("noise " * 1000)
        sys.stdout.write("noise without an end")
        os.write(1, b"noise of C code\n")
        return y
