"""One pool a world size."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType

from harness.world.pool import Pool


class Pools:
    """Pools of equal settings, each made when its world size is first asked for; a context manager.

    deadline, quiet, preload: as for Pool.
    """

    def __init__(self, *, deadline: float = 30.0, quiet: float = 2.0, preload: Sequence[str] = ()) -> None:
        self._deadline = deadline
        self._quiet = quiet
        self._preload = tuple(preload)
        self._pools: dict[int, Pool] = {}
        self._closed = False

    def __enter__(self) -> Pools:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def get(self, world_size: int) -> Pool:
        """The pool of this world size. Raises RuntimeError once closed."""
        if self._closed:
            raise RuntimeError("these pools are closed")
        if world_size not in self._pools:
            self._pools[world_size] = Pool(
                world_size, deadline=self._deadline, quiet=self._quiet, preload=self._preload
            )
        return self._pools[world_size]

    def restart_all(self) -> None:
        """Every pool gets fresh processes."""
        for pool in self._pools.values():
            pool.restart()

    def close(self) -> None:
        """Closes every pool. Does nothing the second time."""
        self._closed = True
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
