"""The words that the patterns share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.oracle.patterns.evidence import Evidence


def listed(items: Iterable[object], last: str = "and") -> str:
    """``1, 2 and 3``."""
    texts = [str(item) for item in items]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} {last} {texts[-1]}"


def numbers(found: Sequence[int], most: int = 8) -> str:
    """Indices in a sentence, runs as ``3 to 7``, and not endlessly many: ``0, 2 and 5 to 9``."""
    runs: list[list[int]] = []
    for i in found:
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    texts: list[str] = []
    for run in runs:
        texts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(i) for i in run]
    return listed(texts) if len(texts) <= most else f"{', '.join(texts[:most])} and {len(texts) - most} more"


def ranks(evidence: Evidence, found: Sequence[int]) -> str:
    """``every rank``, ``rank 1`` or ``ranks 1 and 3``."""
    if len(found) == evidence.mesh.size > 1:
        return "every rank"
    return f"rank {found[0]}" if len(found) == 1 else f"ranks {numbers(found)}"


def of_ranks(evidence: Evidence, found: Sequence[int]) -> str:
    """The tensor as the subject of a sentence in the singular: ``rank 1's output[0]``."""
    if evidence.mesh.size == 1:
        return evidence.name
    who = ranks(evidence, found)
    return f"on {who}, {evidence.name}" if who.startswith("ranks") else f"{who}'s {evidence.name}"


def on_ranks(evidence: Evidence, found: Sequence[int]) -> str:
    """`` on rank 1``; nothing where all ranks are meant."""
    return "" if len(found) == evidence.mesh.size else f" on {ranks(evidence, found)}"


def called(evidence: Evidence, value: float) -> str | None:
    """What has this size: ``the size of tp or the number of micro-batches``; None if nothing does."""
    names = [name for name, size in evidence.sizes.items() if size == value]
    texts = [f"the size of {name}" if name in evidence.group_sizes else f"the number of {name}" for name in names]
    return listed(texts, "or") if texts else None
