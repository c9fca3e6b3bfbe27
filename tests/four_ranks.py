"""A small world for tests that run many cases in one go: four gloo ranks, and what each of them has to say."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

RANKS = 4
_SECONDS = 180


def on_four_ranks(target: Callable[[int, Any, str, Any], None], wanted: Any) -> list[Any]:
    """What each rank puts into its queue, as (rank, found). target: a module-level function of the rank, ``wanted``,
    the path of a store for the group, and the queue; it finds a text where something was raised."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    results: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=target, args=(rank, wanted, str(Path(folder, "store")), results), daemon=True)
            for rank in range(RANKS)
        ]
        for process in ranks:
            process.start()
        try:
            seen: dict[int, Any] = dict(results.get(timeout=_SECONDS) for _ in ranks)
        finally:
            for process in ranks:
                process.join(timeout=5)
                process.kill()
    for found in seen.values():
        assert not isinstance(found, str), found
    return [seen[rank] for rank in range(RANKS)]
