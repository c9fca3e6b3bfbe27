"""Off by a multiple of another tensor of the case, or by the same number everywhere."""

from __future__ import annotations

import math

import numpy as np

from harness.oracle.compare import different
from harness.oracle.patterns.evidence import Evidence, Values
from harness.oracle.patterns.factors import is_multiple
from harness.oracle.patterns.fit import Explanation, allowances, fit
from harness.oracle.patterns.wording import listed, of_ranks

_LEAST_ELEMENTS = 4
#: Only these have a sum under a logarithm.
_LOGARITHMS = ("loss",)
#: How many times their tolerance elements must be off by one number.
_CLEARLY = 16


def off_by_another_tensor(evidence: Evidence) -> str | None:
    """got = want + k times another tensor, for a k that the field's mistakes give."""
    multiples = _multiples(evidence)
    shape = evidence.want.shape
    candidates = {
        name: np.broadcast_to(values, shape)
        for name, values in evidence.others.items()
        if _adds(evidence, name, values)
    }
    said: list[tuple[Values, str]] = []
    for name, offset in candidates.items():
        if any(not different(offset, other).any() for other, _ in said):
            continue  # the same tensor under another name
        for k, text in multiples.items():
            found = fit(evidence, Explanation(evidence.local(evidence.want + k * offset)))
            if found is not None and found.sure(evidence, len(candidates) * len(multiples)):
                said.append((offset, f"{of_ranks(evidence, found.ranks)} is off by {text.format(name)}"))
    return said[0][1] if len(said) == 1 else None


def _adds(evidence: Evidence, name: str, values: Values) -> bool:
    if name == evidence.name or not values.any() or not np.isfinite(values).all():
        return False
    try:
        fits = np.broadcast_shapes(values.shape, evidence.want.shape) == evidence.want.shape
    except ValueError:
        return False
    # A multiple of the tensor itself is a factor, and says nothing of the other tensor.
    return fits and not is_multiple(np.broadcast_to(values, evidence.want.shape), evidence.want)


def _multiples(evidence: Evidence) -> dict[float, str]:
    """The multiples by what they say, ``{0}`` for the tensor's name."""
    found = {1.0: "{0}, which is added once too often", -1.0: "-{0}, which is missing"}
    found[-2.0] = "-2 times {0}: subtracted where it is to be added"
    for size in sorted(set(evidence.group_sizes.values())):
        names = listed([name for name, s in evidence.group_sizes.items() if s == size], "or")
        if size == 2:
            found[1.0] = f"{{0}}: added on both ranks of {names} before a sum, or twice on each"
        else:
            found[size - 1.0] = f"{size - 1} times {{0}}: added on every rank of {names} before a sum"
        found[1 / size - 1] = f"(1/{size} - 1) times {{0}}: divided by the size of {names} where it is due whole"
    return found


def off_by_a_constant(evidence: Evidence) -> str | None:
    """The same number too much everywhere: the logarithm of a group's size, or any."""
    parts = [(evidence.got[rank], evidence.wants[rank]) for rank in evidence.wrong_ranks]
    errors = np.concatenate([np.zeros(0), *((got - want)[np.isfinite(want)] for got, want in parts)])
    if errors.size < _LEAST_ELEMENTS or not np.isfinite(errors).all():
        return None
    for sign, word in ((1, "large"), (-1, "small")) if evidence.name.startswith(_LOGARITHMS) else ():
        names = []
        for name, size in evidence.group_sizes.items():
            # Only what is worth trying: whether it fits, within what rounding allows, is for `fit` to say.
            if math.isclose(float(np.median(errors)), sign * math.log(size), rel_tol=0.1):
                found = fit(evidence, Explanation(tuple(w + sign * math.log(size) for w in evidence.wants)))
                if found is not None and found.sure(evidence, 2 * len(evidence.group_sizes)):
                    names.append(name)
        if names:
            return (
                f"every element of {evidence.name} is log({listed(names, 'or')}) too {word}: as if the sum under the "
                f"logarithm were {'added up' if sign > 0 else 'averaged'} over the ranks once more"
            )
    offset = float(np.median(errors))
    values = tuple(want + offset for want in evidence.wants)
    allowed = evidence.limits or allowances(evidence, values)
    room = max((float(part[np.isfinite(part)].max(initial=0.0)) for part in allowed), default=0.0)
    varied = len(np.unique(np.concatenate([evidence.wants[rank].ravel() for rank in evidence.wrong_ranks])))
    # Errors not much larger than their tolerance are all near their mean.
    if abs(offset) < _CLEARLY * room or varied < _LEAST_ELEMENTS or fit(evidence, Explanation(values, allowed)) is None:
        return None
    return f"every element of {evidence.name} is off by the same number, {offset:.6g}"
