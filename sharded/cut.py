"""How a dimension is cut over the ranks of a group: balanced, the longer pieces first.

Every part of the package that cuts or joins a tensor asks here, so shards of any two tensors of one length fit.
"""

from __future__ import annotations


def cut(length: int, parts: int) -> tuple[int, ...]:
    """The lengths of ``parts`` pieces: the first ``length % parts`` are one longer; pieces may be empty.

    Raises ValueError for a negative length or fewer than one part.
    """
    if length < 0 or parts < 1:
        raise ValueError(
            f"cannot cut a length of {length} into {parts} parts: expected a length of at least 0 and 1 or more parts"
        )
    base, longer = divmod(length, parts)
    return (base + 1,) * longer + (base,) * (parts - longer)


def piece(length: int, parts: int, index: int) -> tuple[int, int]:
    """(offset, length) of one piece.

    Raises ValueError where there is no piece of that index.
    """
    lengths = cut(length, parts)
    if not 0 <= index < parts:
        raise ValueError(f"there is no piece {index} of {parts}: expected 0 to {parts - 1}")
    return sum(lengths[:index]), lengths[index]
