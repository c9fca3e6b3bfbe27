"""What a transformer layer with dropout must give, once it is known which masks it drew."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from harness.drawn import DRAWN, Drawn
from harness.exercise import Result
from harness.oracle.diagnose import Diagnosis
from harness.properties.base import World
from harness.properties.modules import Values, explanation, one_thread, wanted
from harness.properties.tensors import Form, judge_tensors
from harness.verdict import Finding, Verdict
from reference.layout import Each, Layout, Split, window
from reference.transformer import Tensors, TransformerCase, expected, tensors
from reference.transformer_dropout import mask_name, mask_shapes


def mask_results(case: TransformerCase, m: int) -> dict[str, Result]:
    """The shape and layout of each mask of micro-batch ``m``, by its place."""
    each, tokens = Each(case.replica_axes), Split(0, case.axis)
    added: Layout = (each, tokens) if case.sequence_parallel else (each,)
    cuts: dict[str, Layout] = {"probabilities": (each, Split(1, case.axis)), "o": added, "down": added}
    return {place: Result(shape, cuts[place]) for place, shape in mask_shapes(case, m).items()} if case.dropout else {}


def judge_values(case: TransformerCase, forms: Mapping[str, Form], observed: World) -> Verdict:
    """Every result against one process with the masks that the ranks drew. Empty where they did not show them."""
    if not all(seen.facts.get(DRAWN) for seen in observed):
        return Verdict()
    differing = next(_replicas_differ(case, observed), None)
    if differing is not None:
        return Verdict((differing,))
    verdicts = []
    for ones_are_kept in (True, False) if case.dropout == 0.5 else (True,):
        given = {**tensors(case), **_masks(case, observed, ones_are_kept)}
        verdict = _judge(case, given, forms, observed)
        if verdict.findings:  # tolerances are estimated: a second look with more disturbed runs
            verdict = _judge(case, given, forms, observed, careful=True)
        if not verdict.findings:
            return verdict
        verdicts.append(verdict)
    return min(verdicts, key=lambda one: len(one.findings))


def _judge(
    case: TransformerCase, given: Tensors, forms: Mapping[str, Form], observed: World, careful: bool = False
) -> Verdict:
    def why(name: str, values: Values, tolerance: Values | None) -> Diagnosis | None:
        with one_thread():
            others = {**given, **expected(case, given)}
            explain = explanation(forms, case.mesh, observed, others, len(case.leading))
            return explain(name, values, tolerance)

    known = {name: one for name, one in given.items() if one.dtype != torch.bool}
    idle = [] if case.trains else [name for name in known if name.endswith(".grad")]
    want = wanted(False, case.format, lambda: expected(case, given), known, idle, careful)
    verdict = judge_tensors(want, forms, case.mesh, observed, why)
    told = [replace(one, message=f"{one.message}, with the masks that forward drew") for one in verdict.findings]
    return replace(verdict, findings=tuple(told))


def _masks(case: TransformerCase, observed: World, ones_are_kept: bool) -> Tensors:
    """The global masks, put together from those of the ranks."""
    found: Tensors = {}
    for m, place, result in _places(case):
        whole = torch.ones(result.shape, dtype=torch.bool)
        for rank, seen in enumerate(observed):
            kept = _drawn(seen.facts, m, place).kept(case.dropout, ones_are_kept)
            window(result.shape, result.layout, case.mesh, rank).take(whole).copy_(torch.from_numpy(kept))
        found[mask_name(place, m)] = whole
    return found


def _replicas_differ(case: TransformerCase, observed: World) -> Iterator[Finding]:
    """Masks of what all ranks of the layer hold are the same on all of them."""
    if case.sequence_parallel:
        return
    mesh = case.mesh
    for m, place, _ in _places(case):
        for group in mesh.groups(case.axis) if place != "probabilities" else ():
            first, *others = (int(rank) for rank in group)
            drawn = _drawn(observed[first].facts, m, place).ones
            for rank in others:
                if not (_drawn(observed[rank].facts, m, place).ones == drawn).all():
                    pair = f"{mesh.describe(first)} and {mesh.describe(rank)}"
                    message = (
                        f"the dropout mask of {place} in micro-batch {m} differs between {pair}: replicas drift apart"
                    )
                    yield Finding("disagree", message, rank, mesh.describe(rank))


def _places(case: TransformerCase) -> Iterator[tuple[int, str, Result]]:
    for m in range(len(case.leading)):
        for place, result in mask_results(case, m).items():
            yield m, place, result


def _drawn(facts: Mapping[str, Mapping[tuple[int, str], Drawn]], m: int, place: str) -> Drawn:
    return facts[DRAWN][m, place]
