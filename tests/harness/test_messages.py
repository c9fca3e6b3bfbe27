"""The verdict on messages: each that is sent is received, and every rank moves just what is due."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from harness.observation import Observation, Sent
from harness.properties.messages import judge_messages, without_messages
from harness.properties.traffic import judge_traffic
from harness.world.traffic import Collective
from reference.mesh import Mesh
from reference.traffic import Load

TP = Mesh.of(tp=2)
DUE = (Load(12, 8), Load(8, 12))


def message(operation: str, peer: int, elements: int, tag: int = 0, dtype: str = "float32") -> Collective:
    return Collective(operation, (0, 1), dtype, elements, 4 * elements, peer, tag)


def judged(*ranks: Sequence[Collective], mesh: Mesh = TP, due: Sequence[Load] = DUE) -> list[str]:
    observed = [Observation(sent=tuple(Sent("forward", 0, one) for one in some)) for some in ranks]
    findings = list(judge_messages(mesh, "tp", (due,), observed))
    assert all(finding.kind == "traffic" for finding in findings)
    return [finding.message for finding in findings]


FIRST = [message("recv", 1, 2), message("send", 1, 1), message("send", 1, 2)]
SECOND = [message("recv", 0, 1), message("send", 0, 2), message("recv", 0, 2)]


def test_any_of_several_ways_is_right() -> None:
    observed = [Observation(sent=tuple(Sent("forward", 0, one) for one in some)) for some in (FIRST, SECOND)]
    other = (Load(8, 12), Load(12, 8))
    assert list(judge_messages(TP, "tp", (other, DUE), observed)) == []
    (finding,) = judge_messages(TP, "tp", (other, other), observed)
    assert "where 8 and 12 are due" in finding.message


def test_what_is_due_holds() -> None:
    assert judged(FIRST, SECOND) == []
    assert judged([], [], due=[Load(0, 0)] * 2) == []


def test_other_bytes_than_due_are_said() -> None:
    (said,) = judged(FIRST, SECOND, due=[Load(12, 8), Load(8, 16)])
    assert said == "rank 1 (tp=1) sends 8 bytes point to point and receives 12, where 8 and 16 are due"
    (said,) = judged([], [])
    assert said.startswith("rank 0 (tp=0) sends 0 bytes")


def test_a_message_that_is_not_received_as_it_was_sent_is_said() -> None:
    (said,) = judged(FIRST, SECOND[:2], due=[Load(12, 8), Load(8, 4)])
    assert said == "rank 0 sends 1 float32, 2 float32 to rank 1, which expects 1 float32"
    other = [*SECOND[:2], message("recv", 0, 2, dtype="int32")]
    assert judged(FIRST, other)[0].endswith("which expects 1 float32, 2 int32")


def test_order_counts_within_a_tag_only() -> None:
    turned = [SECOND[2], SECOND[1], SECOND[0]]
    assert judged(FIRST, turned) == ["rank 0 sends 1 float32, 2 float32 to rank 1, which expects 2 float32, 1 float32"]
    tagged = [dataclasses.replace(one, tag=one.elements) for one in FIRST]
    assert judged(tagged, [dataclasses.replace(one, tag=one.elements) for one in turned]) == []


def test_a_rank_of_another_group_has_no_part() -> None:
    mesh = Mesh.of(tp=2, dp=2)
    stray = dataclasses.replace(message("send", 2, 1), group=(0, 2))
    found = judged([stray], [], [], [], mesh=mesh, due=[Load(4, 0), Load(0, 0)])
    assert found[0].startswith("a message to or from a rank that has no part in it: send (peer 2)")


def test_messages_are_no_collectives_but_where_none_is_due() -> None:
    observed = [Observation(sent=tuple(Sent("forward", 0, one) for one in some)) for some in (FIRST, SECOND)]
    assert list(judge_traffic(TP, (), without_messages(observed))) == []
    assert list(judge_traffic(TP, (), observed)) != []
    collective = Sent("forward", 0, Collective("all_reduce", (0, 1), "float32", 3, 12))
    more = [dataclasses.replace(one, sent=(*(one.sent or ()), collective)) for one in observed]
    assert [len(one.sent or ()) for one in without_messages(more)] == [1, 1]
    assert without_messages([Observation()]) == [Observation()]
    assert list(judge_messages(TP, "tp", (DUE,), [Observation()] * 2)) == [], "nothing was recorded"
