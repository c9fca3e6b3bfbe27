"""Whatever a candidate does on a case, the finding says what it was and where, and the next case runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from trials import BAD, CANDIDATES, GOOD, LIVE, ON_PAPER, bench, candidate, judge, only_finding

from harness.bench import Bench, CandidateUnusable
from harness.errors import WrongUse
from harness.find import UnknownCandidate
from harness.verdict import Finding

DTYPES = "fp32, fp64, bf16, fp16"


def text(finding: Finding) -> str:
    return f"{finding.message}\n{finding.details}"


def test_a_right_candidate_holds() -> None:
    with bench("right.py:Right") as made:
        assert judge(made, BAD).holds
        assert judge(made, GOOD).holds


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("InBuild", "the candidate raised in build on every rank: KeyError: 'hidden_size'"),
        ("InForward", "the candidate raised in forward of micro-batch 0 on every rank: ValueError: forward says no"),
        ("InForwardOnRank1", "the candidate raised in forward of micro-batch 0 on rank 1: ValueError: forward says no"),
        ("InBackward", "raised in backward of micro-batch 0 on every rank: ArithmeticError: backward says no"),
        ("InBackwardOnRank1", "raised in backward of micro-batch 0 on rank 1: ArithmeticError: backward says no"),
        ("InFinish", "the candidate raised in finish on every rank: IndexError: list index out of range"),
        ("Exits", "the candidate raised in forward of micro-batch 0 on every rank: SystemExit: 0"),
        ("WithoutMessage", "on every rank: Unprintable: (its message raises RuntimeError)"),
        ("Deep", "on every rank: RecursionError: maximum recursion depth exceeded"),
    ],
)
def test_an_exception_is_the_candidates(name: str, message: str) -> None:
    finding = only_finding(f"raising.py:{name}")
    assert finding.kind == "error"
    assert message in finding.message
    trace = finding.details
    assert "/harness/session.py" not in trace, "our own frames are nobody's business"
    assert "/harness/drive.py" not in trace
    assert f"{CANDIDATES}/raising.py" in trace
    assert trace.count("says no") <= 1, "the last line of the traceback is the message, and said already"
    assert ("rank 0 waited meanwhile, last collective: all_reduce on group [0, 1]" in trace) == ("Rank1" in name)


def test_all_lines_of_a_message_are_kept() -> None:
    assert only_finding("raising.py:InForward").details.startswith("and more\nTraceback (most recent call last):\n")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("InOpen", "the candidate raised in open on every rank: RuntimeError: no groups today"),
        ("InActivate", "the candidate raised in activate on every rank: RuntimeError: cannot be current"),
    ],
)
def test_an_exception_before_the_case_is_the_candidates(name: str, message: str) -> None:
    with bench(f"raising.py:{name}") as made:
        for case in (BAD, GOOD):
            assert judge(made, case).findings[0].message == message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Nothing", "forward returned None as output[0]; expected a tensor of local shape (1, 2)"),
        ("WrongShape", "output[0] has local shape (1, 4); expected (1, 2)"),
        ("WrongDtype", "output[0] has dtype torch.float64; expected torch.float32"),
        ("OtherDevice", "output[0] is on device meta; expected cpu"),
        ("TooMany", "forward returned 2 values (Tensor, NoneType); expected 1: output[0]"),
        ("TooFew", "forward returned 0 values; expected 1: output[0]"),
        ("Sparse", "output[0] is a tensor of layout torch.sparse_coo; expected a dense one (torch.strided)"),
        ("Detached", "the output of micro-batch 0 does not require a gradient, although an input or parameter does"),
        ("GradientIsNoTensor", "weight.grad is 'gradient'; expected a tensor"),
    ],
)
def test_what_is_handed_back_must_be_what_was_asked_for(name: str, message: str) -> None:
    finding = only_finding(f"returning.py:{name}")
    assert finding.kind == "mismatch"
    assert finding.message.startswith("wrong result on every rank: ")
    assert message in finding.message
    assert finding.details == ""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoSharded", "build returned Linear(in_fea...=2, bias=True); expected Sharded(module, weight=Split(0, 'tp'))"),
        ("NoLayout", "no layout is given for parameter 'bias': say how it is cut, for example Sharded(..., bias=Split"),
        (
            "WrongParameterShape",
            "parameter weight has local shape (2, 2); expected (4, 1), as layout Split(1, 'tp') cuts the global shape "
            "(4, 2): correct the layout, Sharded(..., weight=...), or the module's size",
        ),
        (
            "WrongParameterDtype",
            "parameter bias has dtype torch.float64; expected torch.float32: build the module with case.format.torch_d",
        ),
        (
            "OnMeta",
            "parameter weight is on device meta; expected cpu: build it so, or pass another with Sharded(..., p",
        ),
        (
            "LayoutThatDoesNotFit",
            "the layout Split(5, 'tp') of output[0] does not fit, correct it in Sharded(...): Spl",
        ),
        ("GradientLayoutThatDoesNotFit", "of bias.grad does not fit, correct it in Sharded(...): Split(0, 'tp', sizes"),
        ("GradientLayoutThatDoesNotFit", "the sizes must be 2 lengths that add up to 4"),
    ],
)
def test_an_adapter_that_does_not_fit_says_nothing_of_the_layer(name: str, message: str) -> None:
    finding = only_finding(f"returning.py:{name}")
    assert finding.kind == "error"
    assert finding.message.startswith("the adapter does not fit on every rank: ")
    assert message in finding.message
    assert finding.details == ""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("GradientOfOtherDtype", "weight.grad has dtype float64; expected float32 on rank 0 (tp=0)"),
        ("NoGradient", "weight.grad is missing on rank 0 (tp=0)"),
    ],
)
def test_a_gradient_must_have_the_right_form(name: str, message: str) -> None:
    finding = only_finding(f"returning.py:{name}")
    assert (finding.kind, finding.message) == ("mismatch", message)


def test_a_missing_parameter_names_what_there_is() -> None:
    finding = only_finding("returning.py:NoParameter")
    assert finding.kind == "error"
    assert "has no parameter 'bias' (it has: weight); pass it with Sharded(..., parameters=" in finding.message


def test_nan_is_a_wrong_number() -> None:
    finding = only_finding("returning.py:NaN")
    assert finding.kind == "mismatch"
    assert finding.tensor == "output[0]"
    assert finding.got != finding.got
    assert finding.want == finding.want


def test_one_wrong_replica_is_found_with_its_place() -> None:
    finding = only_finding("returning.py:WrongGradientOnLastRank")
    assert finding.message == "weight.grad differs from one process on rank 1: 4 of 8 elements"
    assert (finding.rank, finding.place) == (1, "rank 1 (tp=1)")
    assert (finding.index, finding.local_index) == ((0, 2, 0), (0, 0))
    assert finding.got == 2 * (finding.want or 0)


def test_ranks_must_name_the_same_layout() -> None:
    finding = only_finding("returning.py:OtherLayoutOnRank1")
    assert finding.kind == "disagree"
    assert finding.message.startswith("the layout of bias.grad is Partial('tp') on rank 1 and Split(0, ")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("OutputGradient", "changed the gradient of output[0] in place"),
        ("DefaultDtype", "left the default dtype at torch.float64"),
        ("Random", "drew from the default random generator and did not restore it"),
        ("GradMode", "left gradients switched off"),
    ],
)
def test_a_side_effect_is_named_and_does_not_reach_the_next_case(name: str, message: str) -> None:
    finding = only_finding(f"changing.py:{name}")
    assert (finding.kind, finding.message) == ("side-effect", f"the candidate {message}")


def test_a_changed_input_is_named_beside_what_became_wrong_by_it() -> None:
    with bench("changing.py:InputOnRank1") as made:
        findings = judge(made, BAD).findings
    assert findings[0].message == "weight.grad differs from one process on rank 1: 4 of 8 elements"
    assert (findings[-1].kind, findings[-1].message) == ("side-effect", "the candidate changed input[0] in place")
    assert findings[-1].place == "rank 1 (tp=1)"


def test_a_default_group_that_is_gone_is_there_again_in_the_next_case() -> None:
    with bench("changing.py:DefaultGroup") as made:
        assert judge(made, BAD).holds
        assert judge(made, GOOD).holds


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Exit", "every rank died: exited with code 3 without returning"),
        ("KilledOnRank1", "rank 1 died: killed by SIGSEGV"),
    ],
)
def test_a_death_is_a_crash(name: str, message: str) -> None:
    finding = only_finding(f"dying.py:{name}")
    assert (finding.kind, finding.message) == ("crash", message)
    assert re.match(r"rank \d died, last collective: (none|all_reduce)", finding.details)


def test_a_blocked_rank_shows_where_it_waits() -> None:
    finding = only_finding("blocking.py:ExtraCollectiveOnRank0")
    assert finding.kind == "hang"
    assert re.fullmatch(r"rank 0 did not finish: given up after \d+\.\d s; rank 1 did", finding.message)
    first, *frames = finding.details.splitlines()
    assert first.startswith("rank 0, last collective: all_reduce on group [0, 1], float32, 3 elements, 1st collective")
    assert any("blocking.py" in frame and "in output" in frame for frame in frames)
    assert "right.py" in frames[-1], "our own frames at the end say nothing"


def test_ranks_that_sleep_are_all_shown() -> None:
    finding = only_finding("blocking.py:Sleeps")
    assert finding.message.startswith("no rank finished: given up after ")
    assert finding.details.count("last collective: none") == finding.details.count("in output") == 2


def test_ranks_that_are_busy_for_ever_end_at_the_deadline() -> None:
    with bench("blocking.py:Spins", deadline=3.0) as made:
        assert judge(made, BAD).kind == "hang"
        assert judge(made, GOOD).holds


@pytest.mark.parametrize(("name", "why"), [("Bias", "no bias here"), ("InForward", "not forwards")])
def test_a_refused_case_is_neither_passed_nor_failed(name: str, why: str) -> None:
    with bench(f"refusing.py:{name}") as made:
        verdict = judge(made, BAD)
        assert (verdict.rejected, verdict.holds, verdict.findings) == (why, False, ())
        assert judge(made, GOOD).holds


def test_a_case_must_be_refused_by_all() -> None:
    finding = only_finding("refusing.py:BiasOnRank1")
    assert finding.kind == "error"
    assert finding.message == (
        "the candidate refused the case on rank 1 only, and must refuse it on every rank or none: no bias here"
    )


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("Ranks", "mismatch", "wrong result on every rank: group of tp returned [0, 1]; expected a ProcessGroup"),
        ("OnRank0Only", "disagree", "rank 1 (tp=1) has no tp group; rank 0 (tp=0) has one"),
        ("Words", "mismatch", "group_ranks of tp returned [['zero', 'one']]; expected ranks, [groups, group size]"),
        ("NotNumbers", "mismatch", "group_ranks of tp returned [[0, nan]]; expected ranks"),
        ("Ragged", "error", "the candidate raised in group_ranks of tp on rank 0: ValueError: "),
        ("RaisesOnPaper", "error", "the candidate raised in group_ranks of tp on rank 0: LookupError: no such axes"),
    ],
)
def test_groups_must_be_groups(name: str, kind: str, message: str) -> None:
    live = name in ("Ranks", "OnRank0Only")
    finding = only_finding(f"groups.py:{name}", LIVE if live else ON_PAPER)
    assert finding.kind == kind
    assert message in finding.message


@pytest.mark.parametrize(("name", "case"), [("NoGroup", LIVE), ("NoGroupRanks", ON_PAPER)])
def test_groups_of_which_there_is_none_are_not_passed(name: str, case: object) -> None:
    with bench(f"groups.py:{name}") as made:
        assert "returned None for every axis" in str(judge(made, case).rejected)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        (
            "raising_on_import.py:Mine",
            "error",
            "raised in import on rank 0: ModuleNotFoundError: No module named 'no_s",
        ),
        ("raising.py:InConstruction", "error", "the candidate raised in construction on rank 0: RuntimeError: no lice"),
        ("dying_on_import.py:Mine", "crash", "rank 0 died: exited with code 7 without returning"),
    ],
)
def test_a_candidate_that_cannot_be_described_is_a_finding(name: str, kind: str, message: str) -> None:
    with pytest.raises(CandidateUnusable, match=re.escape(message)) as caught:
        Bench(candidate(name))
    (finding,) = caught.value.findings
    assert finding.kind == kind
    assert message in finding.message
    assert "/harness/find.py" not in finding.details


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("UnknownFeature", "supports names 'teleportation'; expected some of all_reduce_any_axis, "),
        ("UnknownDtype", f"dtypes is ('fp32', 'fp8'); expected some of {DTYPES}"),
        ("UnknownAxis", "axes is ('tp', 'fsdp'); expected some of tp, cp, ep, dp, pp"),
        ("NoAxis", "axes is (); expected some of tp, cp, ep, dp, pp"),
        ("OtherAxes", "axes is ('dp', 'pp'); expected 'tp' too, over which the cases of column_linear lie"),
        ("OneString", "dtypes is the string 'fp32'; expected several, for example ('fp32',)"),
        ("NoStrings", "supports is None; expected several strings, for example (), or ('one', 'two')"),
        ("UnknownCut", "uneven is 'left'; expected 'balanced' or 'chunk'"),
        ("NoTokens", "token_dims is (0,); expected whole numbers from 1 to 4, for example (2,)"),
        ("OneNumber", "token_dims is 2; expected whole numbers from 1 to 4, for example (2,)"),
        ("NoMesh", "largest_mesh is 0; expected a whole number of at least 1"),
        ("NoNumber", "meshes_at_once is 'one'; expected a whole number of at least 1"),
    ],
)
def test_declarations_that_cannot_be_used_are_wrong_use(name: str, message: str) -> None:
    named = candidate(f"declaring.py:{name}")
    with pytest.raises(WrongUse) as caught:
        Bench(named)
    assert str(caught.value).startswith(f"candidate {named!r} declares what cannot be used: {message}")


def test_what_a_declaration_raises_is_the_candidates() -> None:
    with pytest.raises(CandidateUnusable, match="the candidate raised in its declarations on rank 0: KeyError: 'axes'"):
        Bench(candidate("declaring.py:Raises"))


def test_broken_syntax_shows_the_line(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import torch\n\ndef broken(:\n")
    with pytest.raises(CandidateUnusable, match="the candidate raised in import on rank 0: SyntaxError: ") as caught:
        Bench(f"{file}:Mine")
    assert f'File "{file}", line 3\n    def broken(:\n' in caught.value.findings[0].details


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("declaring.py:Nope", "declaring.py has no 'Nope'; candidates in it: "),
        ("declaring.py:NoCandidate", "NoCandidate'>; expected a subclass of harness.Candidate"),
        ("right.py:Right+v2", "Right has no variants, but was asked for +v2: leave it out"),
    ],
)
def test_no_such_candidate_is_wrong_use(name: str, message: str) -> None:
    with pytest.raises(UnknownCandidate, match=re.escape(message)) as caught:
        Bench(candidate(name))
    assert name in str(caught.value), "the value is named as it was given"


def test_an_unknown_mutant_is_wrong_use() -> None:
    with pytest.raises(UnknownCandidate, match=r"candidate 'builtin\+F99': .*F99"):
        Bench("builtin+F99")


def test_a_library_that_is_not_installed_is_wrong_use() -> None:
    message = r"it requires no-such-distribution, which is not installed here: pip install no-such-distribution"
    with pytest.raises(UnknownCandidate, match=message):
        Bench(candidate("declaring.py:Missing"))
