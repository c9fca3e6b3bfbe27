"""Python's own text as tokens."""

from __future__ import annotations

import pytest
import torch

import reference.text
from reference.ids import TEXT, Ids, fill_ids
from reference.text import Text, text


def drawn(name: str, seed: int = 0, shape: tuple[int, ...] = (1, 2, 3, 20)) -> torch.Tensor:
    return fill_ids(Ids(TEXT, seed), name, shape, 256, [0, 128])


def test_the_text_is_real_and_the_same_at_each_reading() -> None:
    found = text()
    assert len(found.data) > 50_000
    assert b"sequence" in found.data
    text.cache_clear()
    assert text() == found
    assert text().digest == found.digest != Text(found.data[1:], found.parts).digest
    assert found.digest in found.described()
    assert f"{len(found.data):,} bytes" in found.described()


def test_rows_are_stretches_of_it_and_targets_the_bytes_after() -> None:
    ids, targets = drawn("ids"), drawn("targets")
    assert torch.equal(ids[..., 1:], targets[..., :-1])
    rows = [bytes(row.tolist()) for row in ids.reshape(-1, ids.shape[-1])]
    assert all(row in text().data for row in rows)
    assert len(set(rows)) == len(rows)
    assert torch.equal(ids, drawn("ids"))
    assert not torch.equal(ids, drawn("ids", seed=1))


def test_a_row_may_be_nearly_the_whole_text_and_not_more() -> None:
    length = len(text().data)
    assert drawn("targets", shape=(1, length - 1)).flatten().tolist() == list(text().data[1:])
    with pytest.raises(ValueError, match="expected less than the"):
        drawn("ids", shape=(1, length))


def test_it_needs_a_token_for_each_byte() -> None:
    with pytest.raises(ValueError, match="a vocabulary of 255: expected at least 256"):
        fill_ids(Ids(TEXT), "ids", (1, 4), 255, [0])


def test_an_installation_without_the_licence_or_without_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = text()
    monkeypatch.setattr(reference.text, "_licence", lambda: iter(()))
    text.cache_clear()
    try:
        assert whole.data.endswith(text().data)
        assert text().described().startswith(f"the documentation strings of {len(text().parts)} modules")
        monkeypatch.setattr(reference.text, "_documentation", lambda name: iter(()))
        text.cache_clear()
        with pytest.raises(ValueError, match="Python's own text is missing"):
            text()
    finally:
        text.cache_clear()
