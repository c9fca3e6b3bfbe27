"""The patterns that a wrong tensor is compared with, the most specific first.

A pattern takes the evidence and returns a sentence that is sure, or None. Where two fit, the earlier one speaks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from harness.oracle.patterns.alike import alike_along_an_axis
from harness.oracle.patterns.evidence import Evidence
from harness.oracle.patterns.factors import any_factor, named_factor, slight_factor
from harness.oracle.patterns.low_precision import low_precision, rounding
from harness.oracle.patterns.moved import moved_shards, shifted_cut, transposed
from harness.oracle.patterns.offsets import off_by_a_constant, off_by_another_tensor
from harness.oracle.patterns.region import (
    at_the_borders,
    not_finite,
    one_element,
    one_slice,
    only_some_ranks,
    past_an_index,
)
from harness.oracle.patterns.reordered import joined_along_the_wrong_dimension, reordered_slices
from harness.oracle.patterns.stale import another_tensor, zeros
from harness.oracle.patterns.suspected import suspected

Pattern = Callable[[Evidence], str | None]

PATTERNS: Mapping[str, Pattern] = {
    pattern.__name__: pattern
    for pattern in (
        zeros,
        suspected,
        low_precision,
        rounding,
        alike_along_an_axis,
        joined_along_the_wrong_dimension,
        moved_shards,
        shifted_cut,
        transposed,
        reordered_slices,
        another_tensor,
        named_factor,
        off_by_another_tensor,
        off_by_a_constant,
        any_factor,
        slight_factor,
        not_finite,
        one_element,
        past_an_index,
        at_the_borders,
        only_some_ranks,
        one_slice,
    )
}

#: Those that say what is wrong, but not why.
FACTS = frozenset(
    pattern.__name__
    for pattern in (
        any_factor,
        off_by_a_constant,
        not_finite,
        one_element,
        past_an_index,
        at_the_borders,
        only_some_ranks,
        one_slice,
    )
)
