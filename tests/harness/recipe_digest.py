"""A digest of one tensor of every kind in every format; run as a script, it prints it."""

from __future__ import annotations

import hashlib

from reference.dtypes import FORMATS
from reference.recipe import KINDS, Recipe, fill


def digest() -> str:
    made = hashlib.sha256()
    for kind in KINDS:
        for fmt in FORMATS.values():
            made.update(fill(Recipe(kind, seed=7), "weight", (3, 50), fmt, 5).numpy().tobytes())
    return made.hexdigest()


if __name__ == "__main__":
    print(digest())
