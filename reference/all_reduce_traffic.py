"""The bytes of a reduction: what each rank sends and receives, in closed form, or the one collective of a library.

L elements in n balanced pieces; piece r has c_r of them. Partial sums take w bytes an element, finished values b (the
same unless sums are kept in fp32). Of a ring's all-reduce, c may be turned round by any number of ranks.

| algorithm | rank r sends | and receives |
|---|---|---|
| ring | w (L - c_r) + b (L - c_{r+1}) | w (L - c_{r-1}) + b (L - c_r) |
| halving_doubling | w (L - l_k) + b (l_1 + ... + l_k) | w (l_1 + ... + l_k) + b (L - l_k) |
| tree, k children | b k L, and w L where r > 0 | w k L, and b L where r > 0 |
| parameter_server | b (n - 1) L at the server, else w L | w (n - 1) L at the server, else b L |

Ring: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009, with what is
left over counted; its two terms alone are those of a reduce-scatter and of an all-gather. Halving and doubling: l_i
elements are left after i halvings, k = log2 of the ranks that take part; the ranks beyond a power of two send w L and
receive b L, and each has a partner that receives the one and sends the other.
"""

from __future__ import annotations

from reference.all_reduce import Algorithm, AllReduceCase
from reference.layout import cut
from reference.traffic import Load, Transfer, gathers, reduce_scatters, worth_sending


def needed(case: AllReduceCase) -> tuple[Transfer, ...]:
    """The collectives: one a tensor of a library, none where everything is sent point to point."""
    if case.algorithm != "library":
        return ()
    made: list[Transfer] = []
    dtype = str(case.format.torch_dtype).removeprefix("torch.")
    for length in case.lengths:
        if case.operation == "all_reduce":
            made.append(Transfer("forward", 0, "all_reduce", case.axis, length, dtype, optional=length == 0))
        elif case.operation == "all_gather":
            made.append(gathers("forward", 0, case.axis, dtype, length, 1, case.parallel_size, optional=length == 0))
        else:
            made.append(reduce_scatters("forward", 0, case.axis, dtype, length, 1, case.parallel_size))
    return worth_sending(made, case.mesh)


def alternatives(case: AllReduceCase) -> tuple[tuple[Load, ...], ...]:
    """All that is right: a ring may end its first phase with the sum of piece r + shift on rank r, for any shift, where
    nobody asks for that phase alone. The one without a shift comes first."""
    free = case.algorithm == "ring" and case.operation == "all_reduce"
    return tuple(loads(case, shift) for shift in range(case.parallel_size if free else 1))


def loads(case: AllReduceCase, shift: int = 0) -> tuple[Load, ...]:
    """What each rank along the axis sends and receives point to point, of all tensors, by its coordinate. shift: as of
    `alternatives`."""
    n = case.parallel_size
    kept, final = case.kept.torch_dtype.itemsize, case.format.torch_dtype.itemsize
    totals = [Load(0, 0)] * n
    for length in case.lengths:
        for r, (sums, finished) in enumerate(elements(case.algorithm, length, n, shift)):
            first = sums if case.operation != "all_gather" else Load(0, 0)
            second = finished if case.operation != "reduce_scatter" else Load(0, 0)
            totals[r] = totals[r] + first.times(kept) + second.times(final)
    return tuple(totals)


def elements(algorithm: Algorithm, length: int, n: int, shift: int = 0) -> list[tuple[Load, Load]]:
    """Of each rank: how many partial sums, and how many finished values, it sends and receives of one tensor."""
    if n == 1 or algorithm == "library":
        return [(Load(0, 0), Load(0, 0))] * n
    if algorithm == "ring":
        return [_ring(length, n, r, shift) for r in range(n)]
    by_rank = {"halving_doubling": _halving, "tree": _tree, "parameter_server": _server}[algorithm]
    return [by_rank(length, n, r) for r in range(n)]


def _ring(length: int, n: int, r: int, shift: int) -> tuple[Load, Load]:
    c = [cut(length, n)[(piece + shift) % n] for piece in range(n)]
    return Load(length - c[r], length - c[r - 1]), Load(length - c[(r + 1) % n], length - c[r])


def _halving(length: int, n: int, r: int) -> tuple[Load, Load]:
    halvings = n.bit_length() - 1
    beyond = n - 2**halvings
    paired = r < 2 * beyond
    if paired and r % 2:
        return Load(length, 0), Load(0, length)
    index = r // 2 if paired else r - beyond
    left, lengths = length, []
    for i in reversed(range(halvings)):
        left = (left + (1 - (index >> i & 1))) // 2  # the first half is the longer one
        lengths.append(left)
    kept = sum(lengths)
    more = length if paired else 0
    return Load(length - left, kept + more), Load(kept + more, length - left)


def _tree(length: int, n: int, r: int) -> tuple[Load, Load]:
    nearest = r & -r or n
    children = sum(1 for i in range(n.bit_length()) if 2**i < nearest and r + 2**i < n)
    above = length if r else 0
    return Load(above, children * length), Load(children * length, above)


def _server(length: int, n: int, r: int) -> tuple[Load, Load]:
    if r == 0:
        return Load(0, (n - 1) * length), Load((n - 1) * length, 0)
    return Load(length, 0), Load(0, length)
