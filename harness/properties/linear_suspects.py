"""Why a linear layer's result is wrong: it is compared with what each of the known mistakes would give."""

from __future__ import annotations

from collections.abc import Sequence

from harness.observation import Observation
from harness.oracle.diagnose import Diagnosis, diagnose, evidence_of
from harness.oracle.patterns.evidence import Suspect
from harness.properties.base import Description
from harness.properties.linear_backward_suspects import input_grad, parameter_grad
from harness.properties.linear_forward_suspects import output, output_bias
from harness.properties.linear_pieces import Layer, Values
from reference.layout import Layout, Rule
from reference.linear import LinearCase, expected, tensors


def explain(
    case: LinearCase,
    description: Description,
    name: str,
    observed: Sequence[Observation],
    layout: Layout,
    want: Values | None,
    tolerance: Values | None,
    dtype: str,
) -> Diagnosis | None:
    """Why tensor ``name`` is not ``want`` (global, float64) on the ranks.

    layout, dtype: as compared. tolerance: of the global shape, how far off an element may be; None where it must be
    exact. None where nothing is wrong, or where there are no numbers to compare.
    """
    given = {key: tensor.numpy() for key, tensor in tensors(case).items()}
    made = {key: tensor.numpy() for key, tensor in expected(case, tensors(case)).items() if tensor is not None}
    evidence = evidence_of(
        name,
        observed,
        layout,
        case.mesh,
        want,
        tolerance,
        dtype,
        others={**given, **made},
        micro_batches=len(case.leading),
        suspects=lambda: suspects(case, given, name, description.uneven),
    )
    return None if evidence is None else diagnose(evidence)


def suspects(case: LinearCase, given: dict[str, Values], name: str, uneven: Rule = "balanced") -> list[Suspect]:
    """The wrong values that known mistakes give for a result: ``output[m]``, ``output_bias[m]``, ``input[m].grad``,
    ``weight.grad``, ``bias.grad``; none for other names. given: the case's tensors, float64. uneven: how the candidate
    cuts what is not divisible."""
    base, _, rest = name.partition("[")
    m = int(rest.partition("]")[0]) if rest else 0
    layer = Layer(case, given, uneven)
    if name.endswith(".grad"):
        makers = {"input": input_grad, "weight": parameter_grad, "bias": parameter_grad}
        made = makers[base.removesuffix(".grad")](layer, name, m) if base.removesuffix(".grad") in makers else ()
    else:
        made = output(layer, m) if base == "output" else output_bias(layer) if base == "output_bias" else ()
    return list(made)
