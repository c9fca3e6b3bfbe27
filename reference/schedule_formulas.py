"""What is known of a schedule before it is looked at: activations in flight, and how long ranks are idle.

**Idle share.** Let f and b be the units of a forward and of a backward, the same on every stage. The rank of the last
stage cannot begin before a micro-batch has passed the p - 1 ranks before it, and after its last backward the gradient
has p - 1 ranks to go; between these it works vm (f + b) units. So no schedule takes less than (vm + p - 1)(f + b). And
the last stage alone has m (f + b) units to do, vp - 1 stages after the first forward and before the last backward:
no less than (m + vp - 1)(f + b). GPipe, 1F1B and interleaved 1F1B take the larger of both:

    ((v - 1) max(m, p) + m + p - 1)(f + b)

of which a rank works vm (f + b). For m >= p the idle share is (p - 1) / (vm + p - 1): with v = 1 as in GPipe
(arXiv 1811.06965, section 2.3) and 1F1B; with v chunks 1/v of the pipeline's fill and drain time (arXiv 2104.04473,
section 2.2, which gives it as a share of the ideal time: (p - 1) / (vm)).

Zero-bubble schedules (arXiv 2401.10241) split the backward, so that the gradient of the weights may wait; they must not
take longer than that.

**In flight** are the activations of the chunks between their forward and their backward. GPipe: all, vm. 1F1B: until
the gradient of the first micro-batch is back, a rank takes p - rank forwards, if there are so many: min(m, p - rank).
Interleaved 1F1B (2104.04473, section 2.2, and Megatron-LM's warm-up, which it does not print): micro-batches pass a
rank in groups of g >= p, chunk by chunk. The last rank reaches its last chunk after (v - 1) g forwards, and that
chunk's first forward is followed by the first backward. A rank that lies k before the last one starts k forwards
earlier, and waits for the gradient k backwards longer, each beside a forward: 2k more. So Megatron's warm-up count is
(v - 1) g + 2 (p - 1 - rank), and one forward more is in flight before the first backward. g is p where p divides m.
Else groups hold at least p (a smaller one would make a rank wait for its first micro-batch to come round), and the
largest of the fewest has ceil(m / floor(m / p)); fewer micro-batches than ranks are one group of m.
ZB-V holds as much as 1F1B does on its first rank, p whole stages, or 2p of its half ones (2401.10241, section 6); an
activation is held until the gradient of the weights is computed. The others have no formula here.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from reference.schedule import ScheduleCase

#: The kinds that take exactly as long as the formula says; others take no longer.
EXACT = ("gpipe", "1f1b", "interleaved")


def span(case: ScheduleCase, forward: int, backward: int) -> int:
    """Units from the first forward to the last backward of a schedule that does not split its backwards."""
    p, v, m = case.stages, case.chunks, case.micro_batches
    return ((v - 1) * max(m, p) + m + p - 1) * (forward + backward)


def idle_share(case: ScheduleCase) -> Fraction:
    """The share of that time in which a rank is idle, for any units of forward and backward."""
    return 1 - Fraction(2 * case.chunks * case.micro_batches, span(case, 1, 1))


def place_of(case: ScheduleCase, stages: Sequence[int]) -> int | None:
    """The place in the pipeline of a rank with these stages, wherever its number is; None where they do not follow each
    other once round."""
    first = min(stages)
    return first if sorted(stages) == list(range(first, case.stages * case.chunks, case.stages)) else None


def most_in_flight(case: ScheduleCase, rank: int | None) -> int | None:
    """How many chunks' activations a rank may hold at once; None for a kind that has no formula. rank: its place in the
    pipeline, see `place_of`."""
    p, v, m = case.stages, case.chunks, case.micro_batches
    match case.kind:
        case "gpipe":
            return v * m
        case "1f1b" if rank is not None:
            return min(m, p - rank)
        case "interleaved" if rank is not None:
            groups = max(1, m // p)
            largest = -(-m // groups)
            return min(v * m, (v - 1) * largest + 2 * (p - 1 - rank) + 1)
        case "zbv":
            return min(v * m, 2 * p)
        case _:
            return None
