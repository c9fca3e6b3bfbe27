"""What a pipeline schedule is written in: actions of one rank, in the order in which it takes them.

A model is cut into ``chunks * p`` stages for p pipeline ranks: chunk c of rank r is stage ``c * p + r``, so that a
rank with several chunks (virtual stages) comes round several times (arXiv 2104.04473, section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "backward", "recv_forward", "send_forward", "recv_backward", "send_backward"]


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a rank on its stage ``chunk * p + rank``.

    kind: ``forward`` and ``backward`` compute. ``recv_forward`` waits for the activation from the stage before,
        ``send_forward`` starts to send that for the stage after; ``recv_backward`` waits for the gradient from the
        stage after, ``send_backward`` starts to send that for the stage before.
    micro_batch: from 0. chunk: from 0.
    """

    kind: Kind
    micro_batch: int
    chunk: int = 0


#: The actions of one rank.
Actions = tuple[Action, ...]
