"""Ranks that take different decisions mostly wait for each other then: the hang says who decided what."""

from __future__ import annotations

import pytest

from harness import check
from harness.properties.mixed_precision_decisions import stuck
from reference.gpt import GptCase
from reference.loss_scale import ScalerState
from reference.mesh import Mesh
from reference.mixed_precision import MixedPrecisionCase
from reference.mixed_precision_parts import MixedParameter, Overflow
from reference.mixed_precision_steps import Planned
from reference.train_step import TrainStepCase

STAGES = Mesh.of(pp=2)
OPTIMIZER = MixedPrecisionCase(
    STAGES,
    (MixedParameter(2), MixedParameter(2, stage=1)),
    clip=0.5,
    steps=2,
    overflows=(Overflow(1, axes=("pp",), at=1),),
)
TRAINER = TrainStepCase(
    GptCase(STAGES, 5, 4, 1, 1, 2, sizes=(1,), length=2, counts=(2,)),
    steps=2,
    clip=0.5,
    overflows=(Overflow(1, axes=("pp",), at=1),),
)


def planned(*skipped: bool) -> list[Planned]:
    return [Planned(1.0, one, ScalerState(1.0, 0, 1), 0) for one in skipped]


@pytest.mark.parametrize(
    ("case", "mutant"), [(OPTIMIZER, "F25"), (TRAINER, "F25d")], ids=["mixed_precision", "train_step"]
)
def test_a_hang_says_who_skipped_the_step(case: MixedPrecisionCase | TrainStepCase, mutant: str) -> None:
    """Over pp only the norm waits for the stage that saw no overflow."""
    subject = "mixed_precision" if case is OPTIMIZER else "train_step"
    with pytest.raises(AssertionError) as raised:
        check(subject, f"builtin+{mutant}", case)
    message = str(raised.value)
    assert "hang" in message
    assert "step 1 is to be skipped (inf at 1 along pp): rank 1 skipped it, rank 0 had not finished it" in message, (
        message
    )


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (("m", "m"), None),
        (("", ""), None),
        ((None, None), None),
        (("ms", "m"), "step 1 is to be skipped (gradients overflow with a scale of 1): rank 0 skipped it, "
         "rank 1 had not finished it"),
        (("mm", "m"), "step 1 is to be skipped (gradients overflow with a scale of 1): rank 0 made it, "
         "rank 1 had not finished it"),
        (("mm", "ms"), "step 1 is to be skipped (gradients overflow with a scale of 1): rank 1 skipped it, "
         "rank 0 made it"),
        (("s", "s"), "step 0 is to be made (no gradient overflows): every rank skipped it"),
        (("m", None), "step 0 is to be made (no gradient overflows): rank 0 made it, rank 1 had not finished it"),
        (("msm", "msm"), None),
    ],
)  # fmt: skip
def test_what_is_said_of_how_far_the_ranks_were(told: tuple[str | None, ...], said: str | None) -> None:
    assert stuck(MixedPrecisionCase(STAGES, steps=3), planned(False, True, False), told) == said
