"""The findings of docs/findings.md still stand. A test that fails here means a fixed library: remove the note, and the
refusal in the candidate."""

from __future__ import annotations

import math
import re
from pathlib import Path

import library_findings
import pytest
import torch

from harness.bench import Bench
from harness.case_file import Reproducer, read
from harness.properties import property_of
from harness.world import Outcome, Pool, Raised, RankContext
from reference.cross_entropy import CrossEntropyCase
from reference.gpt import GptCase
from reference.mesh import Mesh
from reference.pipeline import PipelineCase
from reference.train_step import TrainStepCase

NOTE = Path(__file__).parent.parent / "docs" / "findings.md"
REPRODUCERS = [read(line) for line in re.findall(r"^shardproof replay '(.*)'$", NOTE.read_text("utf-8"), re.MULTILINE)]


def on_rank(context: RankContext, name: str, *args: object) -> object:
    return getattr(library_findings, name)(*args)


def outcome(ranks: int, name: str, *args: object) -> Outcome:
    with Pool(ranks) as pool:
        return pool.run(on_rank, name, *args)


@pytest.mark.parametrize(
    ("ranks", "partial", "bias", "dtype", "error"),
    [
        (3, 0.0, 193.0, torch.bfloat16, 1.0),
        (3, -31.0, 31.0, torch.float64, 3.6e-15),
        (2, 200.0, 1.0, torch.bfloat16, -1.0),
    ],
)
def test_torch_rounds_the_bias_of_a_row_layer(
    ranks: int, partial: float, bias: float, dtype: torch.dtype, error: float
) -> None:
    """In fp64 the error depends on the order in which the ranks' parts are summed: only its size is known."""
    for result, exact in outcome(ranks, "row_bias", partial, bias, dtype).values():
        assert exact == partial + bias
        assert result != exact
        assert result - exact == error or (dtype == torch.float64 and abs(result - exact) <= 2 * error)


@pytest.mark.parametrize("name", ["one_feature_column", "one_feature_row"])
def test_torch_cannot_run_a_layer_of_one_feature_on_one_rank(name: str) -> None:
    (ending,) = outcome(1, name).ranks
    assert isinstance(ending, Raised), ending
    assert "would remove or reshape sharded dimension" in ending.message


def test_gloo_reduces_what_lies_between_the_elements_of_a_view() -> None:
    """The sums are 10 and 14, and the elements between should stay."""
    first, second = outcome(2, "view_with_gaps").values()
    assert first == ([10.0, 2.0], [10.0, 12.0, 2.0, 3.0])
    assert second == ([10.0, 12.0], [10.0, 12.0, 12.0, 13.0])


def test_torch_lists_the_forwards_of_the_last_rank_from_one() -> None:
    ((*listed, _),) = outcome(1, "listed_1f1b").values()  # the last one reduces gradients
    assert listed == [f"3{what}" for k in range(8) for what in (f"F{k + 1}", f"B{k}")]


def test_torch_gives_no_loss_for_a_target_out_of_range() -> None:
    for losses in outcome(2, "parallel_loss", 4, 0, 4, -1, 7).values():
        assert losses == [pytest.approx(math.log(4)), 0, 0, 0]
    with pytest.raises(IndexError, match="Target 4 is out of bounds"):  # one process
        torch.nn.functional.cross_entropy(torch.zeros(1, 4), torch.tensor([4]))


def test_torch_cannot_run_its_parallel_loss_on_a_rank_without_columns() -> None:
    *_, last = outcome(3, "parallel_loss", 2, 0).ranks
    assert isinstance(last, Raised), last
    assert "out of bounds for dimension" in last.message


def test_megatron_changes_fp32_logits() -> None:
    pytest.importorskip("megatron.core")
    assert outcome(2, "logits_changed").values() == [[0.25, 0.25]] * 2


def test_megatron_smooths_labels_with_a_ranks_own_columns() -> None:
    """-log p is 8.7 for the first two classes and 0.7 for the others: the right loss is 0.9 x 0.7 + 0.1 x (two times
    8.7 and 0.7) / 3."""
    pytest.importorskip("megatron.core")
    small = math.log(2 + 2 * math.exp(-8))
    right = 0.9 * small + 0.1 * (2 * (small + 8) + small) / 3
    first, second = outcome(2, "smoothed_labels").values()
    assert abs(first - right) > 0.4
    assert abs(second - right) > 0.4
    assert first - second == pytest.approx(0.2 * 8)


def test_megatron_smooths_labels_to_infinity() -> None:
    pytest.importorskip("megatron.core")
    assert outcome(1, "smoothed_underflow").values() == [math.inf]  # 0.1 x 200 = 20 by definition


def test_megatron_drops_the_bias_gradient_beside_a_frozen_weight() -> None:
    pytest.importorskip("megatron.core")
    assert outcome(2, "frozen_weight").values() == [None, None]


def test_megatron_returns_one_ranks_bias_with_the_gathered_output() -> None:
    pytest.importorskip("megatron.core")
    assert outcome(2, "gathered_bias", 2).values() == [[0.0, 0.0], [1.0, 1.0]]  # one process: [0, 1]
    for ending in outcome(2, "gathered_bias", 4).ranks:
        assert isinstance(ending, Raised), ending
        assert "must match the size" in ending.message


def test_megatron_takes_keys_of_another_group() -> None:
    """Right were query 1 on ranks 0 and 1, the first of their groups, and 2 on the others; and 3 and 4 everywhere."""
    pytest.importorskip("megatron.core")
    assert outcome(4, "other_groups_keys").values() == [[1, 1, 2], [2, 1, 2], [3, 3, 4], [4, 3, 4]]


@pytest.mark.parametrize(("needs_gradient", "trained"), [(False, [False, True]), (True, [True, True])])
def test_megatron_trains_no_recomputed_layer_whose_input_needs_no_gradient(
    needs_gradient: bool, trained: list[bool]
) -> None:
    pytest.importorskip("megatron.core")
    assert outcome(1, "frozen_input", needs_gradient).values() == [trained]


@pytest.mark.parametrize("found", REPRODUCERS, ids=lambda r: f"{r.candidate}-{r.subject}-{r.case.mesh}")
def test_the_case_of_a_note_fails_when_it_runs_and_is_refused_or_mended_otherwise(found: Reproducer) -> None:
    if found.candidate.startswith("megatron"):
        pytest.importorskip("megatron.core")
    name, subject = found.candidate.removesuffix("+strict"), property_of(found.subject)
    assert name != found.candidate
    with Bench(found.candidate) as strict:
        assert strict.check(subject, found.case).verdict.findings
    with Bench(name) as usual:
        verdict = usual.check(subject, found.case).verdict
    assert not verdict.findings
    assert (verdict.rejected or "").startswith("known fault: ") or found.case in MENDED


#: Of fp32 logits, the adapter hands over a copy; it says what shapes cross a border; it overlaps messages; its mesh has
#: dp before tp.
MENDED = [
    CrossEntropyCase(Mesh.of(tp=1), 2, ((1, 1),)),
    PipelineCase(Mesh.of(pp=2), widths=(2,), sizes=(1, 1), skip="every"),
    PipelineCase(Mesh.of(pp=2), schedule="interleaved", chunks=2, sizes=(1, 1, 1, 1)),
    TrainStepCase(GptCase(Mesh((("dp", 2), ("tp", 2))), 2, 4, 2, 2, 2, depths=(0,), length=2, counts=(2,))),
]


def test_the_note_shows_the_code_that_is_run() -> None:
    source, note = Path(library_findings.__file__).read_text("utf-8"), NOTE.read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", note, re.DOTALL)
    assert blocks
    for block in blocks:
        assert block.strip() in source
    assert len(REPRODUCERS) == 28


@pytest.mark.parametrize(("transposed", "given", "kept"), [(True, [1.0], [1.0]), (False, [2.0], [2.0])])
def test_megatron_reduces_a_copy_or_the_tensor_itself(transposed: bool, given: list[float], kept: list[float]) -> None:
    """Two ranks: the sum is 2, and what was handed in should stay 1."""
    assert outcome(2, "copied_gradient", transposed).values() == [(given, kept)] * 2


def test_megatron_mixes_the_gradients_of_ranks_in_other_orders() -> None:
    """10 + 2 and 1 + 20, where 1 + 2 and 10 + 20 are due."""
    pytest.importorskip("megatron.core")
    assert outcome(2, "overlapped_in_other_orders").values() == [[21.0, 12.0], [12.0, 21.0]]


def test_torch_cannot_detach_the_output_of_a_linear_layer_in_its_zero_bubble() -> None:
    (ending,) = outcome(1, "zero_bubble_of_linear_layers").ranks
    assert isinstance(ending, Raised), ending
    assert "Can't detach views in-place" in ending.traceback


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "ScheduleInterleavedZeroBubble"])
def test_torch_does_not_move_an_expanded_gradient_across_a_border(schedule: str) -> None:
    raised = [ending for ending in outcome(2, "expanded_gradient", schedule).ranks if isinstance(ending, Raised)]
    assert any("input tensor has to be contiguous" in ending.message for ending in raised), raised


@pytest.mark.parametrize("overlap", [False, True])
def test_megatron_mixes_what_two_ranks_send_each_other(overlap: bool) -> None:
    """2100 divided by the factors 2 and 5 of rank 0, 3 and 7 of rank 1."""
    pytest.importorskip("megatron.core")
    found = outcome(2, "interleaved_on_two_ranks", overlap).values()
    assert (found == [[1050.0, 420.0], [700.0, 300.0]]) == overlap, found


@pytest.mark.parametrize(("good", "interval", "scale"), [(1, 1, 8.0), (3, 2, 8.0), (1, 2, 64.0), (0, 1, 512.0)])
def test_torch_grows_no_more_where_the_interval_is_passed(good: int, interval: int, scale: float) -> None:
    """Six more good steps: with an interval of 2 after one good step it grows at once, and after 2 steps each."""
    assert outcome(1, "scale_after_another_interval", good, interval).values() == [scale]


def test_torch_loses_a_nan_in_the_inf_norm() -> None:
    """It is the second rank's, and error_if_nonfinite is set."""
    assert outcome(2, "sharded_inf_norm", [2.0], ["nan"]).values() == [2.0, 2.0]


def test_torch_cannot_take_the_inf_norm_of_an_empty_shard() -> None:
    *_, last = outcome(2, "sharded_inf_norm", [2.0], []).ranks
    assert isinstance(last, Raised), last
    assert "cannot compute the infinity norm on an empty tensor" in last.message


@pytest.mark.parametrize(("first", "scales"), [("cut", [4.0, 4.0]), ("replicated", [8.0, 4.0])])
def test_torch_agrees_about_an_overflow_as_the_first_gradient_is_cut(first: str, scales: list[float]) -> None:
    assert outcome(2, "scale_of_cut_gradients", first).values() == scales


def test_torch_cannot_reduce_over_tp_and_then_dp_at_once() -> None:
    # A root, squared for the second axis, in fp32: within its last bit.
    assert outcome(4, "norm_on_mesh", "dp", "tp").values() == pytest.approx([4.0] * 4, rel=2.0**-23, abs=0)
    for ending in outcome(4, "norm_on_mesh", "tp", "dp").ranks:
        assert isinstance(ending, Raised), ending
        assert "Mesh dim indices should be in ascending order" in ending.message


def test_megatron_loses_a_nan_in_the_inf_norm() -> None:
    """Also on one rank, by the order of the gradients."""
    pytest.importorskip("megatron.core")
    assert outcome(1, "megatron_norm", "inf", [[2.0], ["nan"]]).values() == [2.0]
    assert outcome(2, "megatron_norm", "inf", [[2.0]], [["nan"]]).values() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("norm_type", "second", "said"),
    [
        ("inf", [], "max() arg is an empty sequence"),
        ("inf", [[]], "max(): Expected reduction dim"),
        ("1", [], "Expected parameter `tensor` of type torch.Tensor"),
    ],
)
def test_megatron_has_no_norm_of_a_rank_without_gradients(norm_type: str, second: list[list[float]], said: str) -> None:
    pytest.importorskip("megatron.core")
    *_, last = outcome(2, "megatron_norm", norm_type, [[2.0]], second).ranks
    assert isinstance(last, Raised), last
    assert said in last.message
    assert outcome(2, "megatron_norm", "2", [[2.0]], []).values() == [2.0, 2.0]
