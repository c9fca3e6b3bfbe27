"""What the subjects that drive a module have in common: what is expected, in which form, and why it is not there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from harness.observation import Observation
from harness.oracle.diagnose import Diagnosis, diagnose, evidence_of
from harness.oracle.expectation import CAREFUL, RUNS, exactly, expect
from harness.oracle.patterns.evidence import Suspect
from harness.properties.tensors import Form, Want
from reference.dtypes import Format
from reference.layout import Layout
from reference.mesh import Mesh

Values = NDArray[np.float64]


def wanted(
    exact: bool,
    fmt: Format,
    compute: Callable[[], Mapping[str, torch.Tensor | None]],
    given: Mapping[str, torch.Tensor],
    idle: Collection[str] = (),
    careful: bool = False,
) -> dict[str, Want]:
    """Values where nothing rounds, else values and how far rounding moves them. Arguments as of `expect`. careful: with
    more disturbed runs, of which none was seen before."""
    with one_thread():
        if exact:
            return {**exactly(compute, given=given, idle=idle)}
        runs, seed = (CAREFUL, 1) if careful else (RUNS, 0)
        return {**expect(compute, fmt, given=given, idle=idle, squares=_is_square, runs=runs, seed=seed)}


def _is_square(name: str) -> bool:
    """As ``exp_avg_sq0[1]`` and ``output_weight.exp_avg_sq`` are."""
    return "exp_avg_sq" in name


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes on this thread alone. Tensors are small here, and while ranks have the cores, threads that wait
    for each other cost several times what they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def forms_of(
    names: Collection[str], cuts: Mapping[str, Layout], fmt: Format, in_fp32: Collection[str], seen: Observation
) -> dict[str, Form]:
    """How each result is held: as the candidate says, else as the subject does, by the base name. in_fp32: the
    results that are in fp32, or fp64 with fp64, whatever the dtype."""
    plain = str(fmt.torch_dtype).removeprefix("torch.")
    forms = {}
    for name in names:
        said = seen.layouts.get(name)
        layout = said if said is not None else cuts[name.removesuffix(".grad").partition("[")[0]]
        forms[name] = Form(layout, "float32" if name in in_fp32 and fmt.name != "fp64" else plain)
    return forms


def explanation(
    forms: Mapping[str, Form],
    mesh: Mesh,
    observed: Sequence[Observation],
    others: Mapping[str, torch.Tensor | None],
    micro_batches: int,
    suspects: Callable[[str], Sequence[Suspect]] = lambda name: (),
    counts: Mapping[str, int] | None = None,
) -> Callable[[str, Values, Values | None], Diagnosis | None]:
    """Says why a result is wrong: by the general patterns, and by the subject's own suspects. others: tensors of the
    case that a wrong result may be equal to. counts: as of `Evidence`."""
    values = {name: one.to(torch.float64).numpy() for name, one in others.items() if one is not None}

    def why(name: str, want: Values, tolerance: Values | None) -> Diagnosis | None:
        evidence = evidence_of(
            name, observed, forms[name].layout, mesh, want, tolerance, forms[name].dtype,
            others=values, micro_batches=micro_batches, counts=counts, suspects=lambda: suspects(name),
        )  # fmt: skip
        return None if evidence is None else diagnose(evidence)

    return why
