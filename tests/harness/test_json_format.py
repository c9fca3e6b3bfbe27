"""docs/json.md lists the keys that are written, all of them and no others."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from trials import BAD

from harness.case_file import Reproducer
from harness.events import Failure, Row, RunDone
from harness.properties import PROPERTIES
from harness.report.json_file import write_json
from harness.verdict import Finding, Kind, Verdict
from reference.clip import ClipParameter, ClipRecipes
from reference.codec import decode, encode
from reference.cross_entropy import CrossEntropyRecipes
from reference.data_parallel import DataParallelRecipes, Layer
from reference.embedding import EmbeddingRecipes
from reference.ids import IDS, Ids
from reference.ids import TEXT as TEXT_IDS
from reference.linear import LinearCase, LinearRecipes
from reference.loss_scale import Event, Scaling
from reference.mixed_precision import MixedPrecisionRecipes
from reference.mixed_precision_parts import Group, MixedParameter, Overflow
from reference.pipeline import Block, PipelineRecipes
from reference.recipe import KINDS, Recipe
from reference.sharded_optimizer import Parameter, ShardedOptimizerRecipes
from reference.transformer import TransformerRecipes

TEXT = (Path(__file__).parents[2] / "docs" / "json.md").read_text("utf-8")


def documented(heading: str) -> dict[str, list[str]]:
    """The rows of the table under a heading: key to the other columns."""
    found = re.search(rf"^#+ {heading}\n(.*?)(?=^#|\Z)", TEXT, re.M | re.S)
    assert found is not None, heading
    rows = re.findall(r"^\| `([^`]+)` \|(.*)\|$", found[1], re.M)
    assert rows, heading
    return {key: [column.strip() for column in rest.split("|")] for key, rest in rows}


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """What is written of a run with a failure."""
    failure = Failure(Reproducer("mine.py:Mine", "linear", BAD), Verdict((Finding("mismatch", "wrong"),)))
    row = Row("mine.py:Mine", "linear", "fault", failures=(failure,), refusals=(("why", 2),))
    write_json(tmp_path / "run.json", RunDone(1, (row,), 0.0, {"mine.py:Mine": "Mine"}))
    return json.loads((tmp_path / "run.json").read_text())


def test_the_keys_of_a_run(run: Any) -> None:
    row = run["rows"][0]
    failure = row["failures"][0]
    assert set(documented("The file of a run")) == set(run)
    assert set(documented("A row")) == set(row)
    assert set(documented("A failure")) == set(failure)
    assert set(documented("A finding")) == set(failure["findings"][0])
    assert row["refusals"] == [["why", 2]]
    assert re.findall(r"`([\w-]+)`", documented("A failure")["kind"][0]) == list(get_args(Kind))


def test_the_keys_of_a_case(run: Any, tmp_path: Path) -> None:
    made = Reproducer("mine.py:Mine", "linear", BAD, delays=7)
    saved = json.loads(made.save(tmp_path, history=["{}"]).read_text())
    assert set(documented("A case")) == set(saved)
    assert set(run["rows"][0]["failures"][0]["reproducer"]) == set(saved) - {"delays", "history", "folder"}


@pytest.mark.parametrize(
    ("heading", "kind"),
    [
        *((f"A case of {p.subject}", p.case_type) for p in PROPERTIES.values()),
        ("A layer", Layer),
        ("A block", Block),
        ("A parameter", Parameter),
        ("A scaling", Scaling),
        ("An event", Event),
        ("A parameter of clip", ClipParameter),
        ("A parameter of mixed_precision", MixedParameter),
        ("A group", Group),
        ("An overflow", Overflow),
        ("A recipe", Recipe),
        ("Ids", Ids),
    ],
)
def test_the_fields_of_a_case_and_their_defaults(heading: str, kind: Any) -> None:
    table = documented(heading)
    assert list(table) == [f.name for f in dataclasses.fields(kind)]
    for f in dataclasses.fields(kind):
        default = f.default_factory() if f.default_factory is not dataclasses.MISSING else f.default
        said = table[f.name][0]
        assert said == ("" if default is dataclasses.MISSING else f"`{json.dumps(encode(default))}`"), f.name


def test_the_names_that_recipes_have() -> None:
    for heading, kinds in (("A recipe", KINDS), ("Ids", {*IDS, TEXT_IDS})):
        (_, text) = documented(heading)["kind"]
        assert set(re.findall(r"`(\w+)`", text)) == set(kinds)
    for subject, recipes in (
        ("linear", LinearRecipes),
        ("embedding", EmbeddingRecipes),
        ("cross_entropy", CrossEntropyRecipes),
        ("transformer", TransformerRecipes),
        ("data_parallel", DataParallelRecipes),
        ("sharded_optimizer", ShardedOptimizerRecipes),
        ("mixed_precision", MixedPrecisionRecipes),
        ("pipeline", PipelineRecipes),
        ("clip", ClipRecipes),
    ):
        (_, tensors) = documented(f"A case of {subject}")["recipes"]
        assert re.findall(r"`(\w+)`", tensors) == [f.name for f in dataclasses.fields(recipes)]


def test_the_line_that_is_shown_can_be_read() -> None:
    (shown,) = re.findall(r'^    (\{"shardproof".*\})$', TEXT, re.M)
    data = json.loads(shown)
    assert Reproducer(data["candidate"], data["subject"], decode(LinearCase, data["case"])).line() == shown
