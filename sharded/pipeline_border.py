"""What crosses the border between two stages on different ranks: messages of several tensors, point to point.

A message is a header of whole numbers and one send for each tensor. The header says what comes: which stage and
micro-batch, and shape, dtype and need of a gradient of every tensor; so shapes need not be known before, and may differ
from one micro-batch to the next. A header may also say that its rank has failed and that nothing more comes of it.
Messages of two ranks are matched by their order alone, as every backend does it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, Work

Direction = Literal["forward", "backward"]
_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip

#: Whole numbers in a header; a longer one is continued in a second message.
HEADER = 48
_FIXED = 6  # status, direction, stage, micro-batch, tensors, length of their descriptions
_SENT, _FAILED = 1, 2


@dataclass(frozen=True)
class Form:
    """A tensor of a message, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False

    @staticmethod
    def of(x: torch.Tensor) -> Form:
        return Form(tuple(x.shape), x.dtype, x.requires_grad)

    def empty(self, device: torch.device) -> torch.Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@dataclass(frozen=True)
class Label:
    """Whose message it is: the activation that goes to ``stage``, or the gradient that does."""

    direction: Direction
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        what = "activation" if self.direction == "forward" else "gradient"
        return f"the {what} of micro-batch {self.micro_batch} for stage {self.stage}"


class Border:
    """The messages of this rank with the others of a pipeline group. Sends do not wait; `finish` waits for them all."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._ranks = dist.get_process_group_ranks(group)
        self._sends: list[tuple[Work, torch.Tensor]] = []  # memory must stay until it is sent

    def send(self, peer: int, label: Label, tensors: Sequence[torch.Tensor] | None) -> None:
        """Starts to send to the group's rank ``peer``; None where this rank has failed and has nothing to send.

        The tensors must not be changed before `finish`.
        """
        forms = [Form.of(x) for x in tensors or ()]
        numbers = _written(label, None if tensors is None else forms)
        self._post(peer, torch.tensor(numbers[:HEADER], dtype=torch.int64, device=self._device))
        if len(numbers) > HEADER:
            self._post(peer, torch.tensor(numbers[HEADER:], dtype=torch.int64, device=self._device))
        for x in tensors or ():
            if x.numel():
                self._post(peer, x.detach().contiguous())

    def receive(self, peer: int, label: Label) -> list[torch.Tensor] | None:
        """Waits for a message from the group's rank ``peer``: its tensors, leaves that require a gradient where those
        that were sent did; None where the sender has failed.

        Raises RuntimeError where another message comes: then the ranks do not follow one schedule.
        """
        numbers = self._numbers(peer, HEADER)
        length = numbers[_FIXED - 1]
        if _FIXED + length > HEADER:
            numbers += self._numbers(peer, _FIXED + length - HEADER)
        came, forms = _read(numbers)
        if came != label:
            raise RuntimeError(
                f"expected {label} from rank {self._ranks[peer]}, and {came} came: the ranks do not follow one schedule"
            )
        if forms is None:
            return None
        tensors = [form.empty(self._device) for form in forms]
        wait_for([dist.irecv(x, group=self._group, group_src=peer) for x in tensors if x.numel()])
        return [x.requires_grad_(form.requires_grad) for x, form in zip(tensors, forms, strict=True)]

    def finish(self) -> None:
        """Waits until all that was sent has gone."""
        wait_for([work for work, _ in self._sends])
        self._sends = []

    def _post(self, peer: int, x: torch.Tensor) -> None:
        work = dist.isend(x, group=self._group, group_dst=peer)
        assert work is not None
        self._sends.append((work, x))

    def _numbers(self, peer: int, length: int) -> list[int]:
        numbers = torch.empty(length, dtype=torch.int64, device=self._device)
        wait_for([dist.irecv(numbers, group=self._group, group_src=peer)])
        found: list[int] = numbers.tolist()
        return found


def wait_for(works: Sequence[Work | None]) -> None:
    """Waits for every message."""
    for work in works:
        if work is not None:
            work.wait()


def _written(label: Label, forms: Sequence[Form] | None) -> list[int]:
    described = [
        number
        for form in forms or ()
        for number in (DTYPES.index(form.dtype), int(form.requires_grad), len(form.shape), *form.shape)
    ]
    status = _FAILED if forms is None else _SENT
    fixed = [status, _DIRECTIONS.index(label.direction), label.stage, label.micro_batch, len(forms or ())]
    numbers = [*fixed, len(described), *described]
    return numbers + [0] * (HEADER - len(numbers))


def _read(numbers: Sequence[int]) -> tuple[Label, list[Form] | None]:
    status, direction, stage, micro_batch, count, _ = numbers[:_FIXED]
    label = Label(_DIRECTIONS[direction], stage, micro_batch)
    if status == _FAILED:
        return label, None
    rest, forms = list(numbers[_FIXED:]), []
    for _ in range(count):
        dtype, requires_grad, dims = rest[:3]
        forms.append(Form(tuple(rest[3 : 3 + dims]), DTYPES[dtype], bool(requires_grad)))
        rest = rest[3 + dims :]
    return label, forms


def require_sendable(tensors: Sequence[object]) -> None:
    """Raises TypeError for what cannot cross a border."""
    for i, x in enumerate(tensors):
        if not isinstance(x, torch.Tensor) or x.layout != torch.strided or x.dtype not in DTYPES:
            form = f"{x.dtype}, {x.layout}" if isinstance(x, torch.Tensor) else type(x).__name__
            raise TypeError(f"output {i} is {form}: expected a dense tensor of one of {', '.join(map(str, DTYPES))}")
