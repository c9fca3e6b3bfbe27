"""The shipped pipeline schedules, without the harness: small ones written out, what is refused, and the mutant."""

from __future__ import annotations

from typing import Any

import pytest

from sharded import mutants
from sharded.pipeline_schedules import Action, gpipe, interleaved, one_f_one_b, schedule

SHORT = {
    "forward": "F",
    "backward": "B",
    "recv_forward": "rf",
    "send_forward": "sf",
    "recv_backward": "rb",
    "send_backward": "sb",
}


def written(actions: tuple[Action, ...], chunks: int = 1) -> str:
    return " ".join(f"{SHORT[a.kind]}{a.micro_batch}{'ab'[a.chunk] if chunks > 1 else ''}" for a in actions)


def computed(actions: tuple[Action, ...], chunks: int = 1) -> str:
    return written(tuple(a for a in actions if a.kind in ("forward", "backward")), chunks)


def test_gpipe_takes_all_forwards_then_all_backwards() -> None:
    first, last = gpipe(2, 2)
    assert written(first) == "F0 sf0 F1 sf1 rb0 B0 rb1 B1"
    assert written(last) == "rf0 F0 rf1 F1 B0 sb0 B1 sb1"


def test_1f1b_takes_backwards_as_soon_as_they_come() -> None:
    first, middle, last = one_f_one_b(3, 4)
    assert computed(first) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert computed(middle) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert written(last) == "rf0 F0 B0 sb0 rf1 F1 B1 sb1 rf2 F2 B2 sb2 rf3 F3 B3 sb3"


def test_1f1b_with_fewer_micro_batches_than_stages() -> None:
    assert [computed(rank) for rank in one_f_one_b(4, 1)] == ["F0 B0"] * 4


def test_interleaved_takes_a_group_through_all_chunks_before_the_next() -> None:
    first, last = interleaved(2, 2, 4)
    assert computed(first, 2) == "F0a F1a F0b F1b F2a B0b F3a B1b F2b B0a F3b B1a B2b B3b B2a B3a"
    assert computed(last, 2) == "F0a F1a F0b B0b F1b B1b F2a B0a F3a B1a F2b B2b F3b B3b B2a B3a"


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 5), (4, 6), (4, 7), (4, 9), (3, 2)])
def test_interleaved_groups_are_even_and_no_smaller_than_they_must_be(stages: int, micro_batches: int) -> None:
    """A group ends where the last chunk's forwards end and the first chunk's begin again."""
    order = [a for a in interleaved(stages, 2, micro_batches)[0] if a.kind == "forward"]
    starts = [k for k, a in enumerate(order) if a.chunk == 0 and (k == 0 or order[k - 1].chunk == 1)]
    sizes = [(end - start) // 2 for start, end in zip(starts, [*starts[1:], len(order)], strict=True)]
    assert sum(sizes) == micro_batches
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= min(stages, micro_batches)
    assert sizes == sorted(sizes, reverse=True)


def test_two_ranks_with_chunks_receive_in_the_order_in_which_the_other_sends() -> None:
    """Activations and gradients share the messages from one rank to the other: one is received before it is needed."""
    first, last = interleaved(2, 2, 4)
    sent = [("forward" if a.kind == "send_forward" else "backward") for a in first if a.kind.startswith("send")]
    received = [a.kind.removeprefix("recv_") for a in last if a.kind.startswith("recv")]
    assert sent == received
    assert "forward" in sent[sent.index("backward") :], "the directions alternate"


def test_stages_of_one_rank_exchange_no_messages() -> None:
    for made in (gpipe(1, 3, 2), interleaved(1, 3, 2), one_f_one_b(1, 2)):
        assert all(a.kind in ("forward", "backward") for a in made[0])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("1f1b", 4, 1, 0), "micro_batches is 0: expected a whole number of at least 1"),
        (("gpipe", 0, 1, 4), "stages is 0"),
        (("interleaved", 2, -1, 4), "chunks is -1"),
        (("1f1b", True, 1, 4), "stages is True"),
        (("1f1b", 2, 1, 2.0), "micro_batches is 2.0"),
        (("1f1b", 4, 2, 4), "1f1b has one chunk a rank, not 2: take interleaved"),
        (("2f2b", 4, 1, 4), "unknown schedule '2f2b': expected one of gpipe, 1f1b, interleaved"),
    ],
)
def test_what_cannot_be_is_refused(arguments: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        schedule(*arguments)


def test_f50_waits_for_micro_batches_that_never_come() -> None:
    right, enough = one_f_one_b(3, 1), one_f_one_b(3, 3)
    with mutants.applied("F50"):
        wrong = one_f_one_b(3, 1)
        assert one_f_one_b(3, 3) == enough, "hidden where there are as many micro-batches as stages"
        assert interleaved(3, 1, 1) == interleaved(3, 1, 1)
    assert one_f_one_b(3, 1) == right
    assert written(wrong[0]) == "F0 sf0 rb0 B0 rb1 B1 rb2 B2"
    assert wrong[2] == right[2], "nobody sends what the others wait for"
