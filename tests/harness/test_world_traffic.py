"""harness.world.traffic: which collectives ran."""

from __future__ import annotations

import dataclasses

import pytest
import rank_functions as on_rank
import torch

from harness.world import Pool
from harness.world.files import SLOT_BYTES, Slots
from harness.world.traffic import Collective, Recorder, ordinal


def test_every_collective_is_recorded_in_order() -> None:
    with Pool(2) as pool:
        first, second = pool.run(on_rank.every_collective).values()
    expected = [
        Collective("all_reduce", (0, 1), "float32", 3, 12),
        Collective("all_gather", (0, 1), "float32", 3, 12),
        Collective("reduce_scatter", (0, 1), "float32", 6, 24),
        Collective("broadcast", (0, 1), "float64", 3, 24, peer=1),
        Collective("scatter", (0, 1), "float32", 3, 12, peer=1),
        Collective("send", (0, 1), "float32", 3, 12, peer=1, tag=7),
        Collective("barrier", (0, 1), None, 0, 0),
        Collective("all_reduce", (0, 1), "float32", 3, 12),  # in the backward pass
    ]
    assert first == expected
    expected[4] = Collective("scatter", (0, 1), "float32", 6, 24, peer=1)
    expected[5] = Collective("recv", (0, 1), "float32", 3, 12, peer=0, tag=7)
    assert second == [Collective("all_reduce", (1,), "float32", 3, 12), *expected]


def test_what_threads_of_a_job_begin_is_recorded() -> None:
    with Pool(2) as pool:
        for got, records in pool.run(on_rank.collectives_of_threads).values():
            assert got == [6.0] * 4
            one = Collective("all_reduce", (0, 1), "float32", 3, 12)
            assert records == [dataclasses.replace(one, aside=True)] * 3 + [one]


def test_what_a_tensor_with_its_own_dispatch_does_inside_is_recorded() -> None:
    with Pool(2) as pool:
        for got, records in pool.run(on_rank.distributed_tensor).values():
            assert got == [[1.0], [1.0]]
            assert records == [Collective("all_gather_into_tensor", (0, 1), "float32", 1, 4)]


def test_a_step_of_training_goes_on_as_ever() -> None:
    def step() -> list[torch.Tensor]:
        torch.manual_seed(0)
        layer = torch.nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(layer.parameters())
        layer(torch.ones(4, 3)).sum().backward()
        optimizer.step()
        return [p.detach().clone() for p in layer.parameters()]

    expected = step()
    with Recorder():
        got = step()
    assert all(map(torch.equal, got, expected))


def test_operators_that_do_not_communicate_are_not_recorded() -> None:
    with Recorder() as recorder:
        x = torch.ones(3, requires_grad=True)
        (x @ x).backward()
    assert recorder.records() == ()
    assert torch.equal(x.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("number", "text"), [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (12, "12th"), (21, "21st")]
)
def test_ordinals(number: int, text: str) -> None:
    assert ordinal(number) == text


def test_slots_hold_one_text_a_rank() -> None:
    slots = Slots(Slots.create(2), 2)
    assert slots.read(1) is None
    slots.write(1, "é" * SLOT_BYTES)
    slots.write(0, "zero")
    assert (slots.read(0), slots.count(0)) == ("zero", 1)
    assert set(slots.read(1) or "") <= {"é", "\ufffd"}
    slots.write(1, "short")
    assert (slots.read(1), slots.count(1)) == ("short", 2)
    slots.clear(1)
    assert (slots.read(1), slots.count(1)) == (None, 2)
    slots.tell(0, "what its job tells")
    assert (slots.told(0), slots.told(1), slots.read(1)) == ("what its job tells", None, None)
    assert slots.count(0) == 1, "telling is no progress"
    slots.tell(0, "")
    assert (slots.told(0), slots.read(0)) == (None, "zero")
    slots.close()
