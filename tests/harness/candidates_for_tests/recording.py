"""A candidate that writes down every case, for comparing runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from right import Right

from reference.linear import LinearCase


class Recording(Right):
    def column_linear(self, case: LinearCase) -> Any:
        if self.rank == 0:
            with Path(os.environ["RECORDED_CASES"]).open("a") as file:
                file.write(f"{case}\n")
        return super().column_linear(case)
