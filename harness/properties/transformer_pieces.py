"""What the known mistakes of a transformer layer are made of: its results where something goes another way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from harness.oracle.patterns.evidence import Values
from reference.transformer import Tensors, TransformerCase, leaves_of, shapes
from reference.transformer_layer import Change, attend, feed, unchanged

#: Where a value has its query heads or its features of ffn; dimension 1 are its tokens.
_TOKENS, _PARTS = 1, 3


@dataclass(frozen=True, eq=False)
class Layer:
    """A case with its tensors."""

    case: TransformerCase
    given: Tensors

    @property
    def n(self) -> int:
        return self.case.parallel_size

    @property
    def axis(self) -> str:
        return self.case.axis

    @property
    def sum(self) -> str:
        """What adds the ranks' parts of an output or gradient."""
        return "a reduce-scatter" if self.case.sequence_parallel else "an all-reduce"

    @cached_property
    def parameters(self) -> Tensors:
        return {name: leaf.detach() for name, leaf in leaves_of(self.case, self.given).items()}

    @cached_property
    def right(self) -> list[Tensors]:
        return self.gradients()

    def gradients(self, change: Change = unchanged, of_each_token: str | None = None) -> list[Tensors]:
        """The gradients of each micro-batch, by parameter and ``input``. of_each_token: a vector that gets one for each
        token."""
        found = []
        for m, (tokens, _) in enumerate(self.case.leading):
            leaves = leaves_of(self.case, self.given)
            if of_each_token is not None:
                whole = leaves[of_each_token].detach()
                leaves[of_each_token] = whole.expand(-1, tokens, -1, -1).clone().requires_grad_()
            x = self.given[f"input[{m}]"].clone().requires_grad_()
            z = feed(self.case, leaves, attend(self.case, leaves, x, m, change), change)
            grads = torch.autograd.grad(z, [*leaves.values(), x], self.given[f"output[{m}].grad"])
            found.append(dict(zip([*leaves, "input"], grads, strict=True)))
        return found

    def of(self, name: str, found: list[Tensors]) -> Values:
        """A result's gradient: of a parameter [R, *shape], summed over micro-batches; of an input that of its own."""
        base, _, rest = name.removesuffix(".grad").partition("[")
        if rest:
            return found[int(rest.partition("]")[0])][base].numpy()
        total = torch.stack([one[base] for one in found]).sum(0)
        return total.reshape(self.case.replicas, *shapes(self.case)[base]).numpy()

    def of_own_tokens(self, name: str) -> list[Values]:
        """Of a vector's gradient, what each coordinate's tokens give, under sequence parallelism."""
        base = name.removesuffix(".grad")
        spread = [one[base].chunk(self.n, _TOKENS) for one in self.gradients(of_each_token=base)]
        return [self.of(name, [{base: chunks[c].sum(_TOKENS)} for chunks in spread]) for c in range(self.n)]

    def of_own_heads(self, name: str) -> list[Values]:
        """Of a gradient, what reaches it through each coordinate's query heads."""
        return [self.of(name, self.gradients(_only(("heads",), self._mine(c), False))) for c in range(self.n)]

    def ways(self, places: tuple[str, ...], zero: bool = False) -> list[Change]:
        """A sum over the ranks that is missing: each coordinate lets through the gradient of its own heads or features
        at these places, and nothing of the others'; with ``zero``, their values are lost too.

        Without sequence parallelism there is one way for each coordinate; with it one, in which every token has what
        the coordinate gives that owns it.
        """
        if not self.case.sequence_parallel:
            return [_only(places, self._mine(c), zero) for c in range(self.n)]

        def mine(x: torch.Tensor) -> torch.Tensor:
            owners = [torch.arange(length) * self.n // length for length in (x.shape[_TOKENS], x.shape[_PARTS])]
            return owners[0][:, None, None] == owners[1]

        return [_only(places, mine, zero)]

    def each(
        self, places: tuple[str, ...], value: Callable[[Change], Values], zero: bool = False
    ) -> Values | tuple[Values, ...]:
        """``value`` of each of the ways, for a suspect."""
        made = [value(way) for way in self.ways(places, zero)]
        return made[0] if self.case.sequence_parallel else self.per_rank(made)

    def per_rank(self, made: list[Values]) -> tuple[Values, ...]:
        """What each coordinate has, for each rank."""
        return tuple(made[self.case.mesh.coordinate(rank, self.axis)] for rank in range(self.case.mesh.size))

    def _mine(self, c: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: torch.arange(x.shape[_PARTS]) * self.n // x.shape[_PARTS] == c


def _only(places: tuple[str, ...], mine: Callable[[torch.Tensor], torch.Tensor], zero: bool) -> Change:
    """mine: which parts of a value stay, of a shape that its dimensions up to the parts are broadcast to."""

    def change(where: str, x: torch.Tensor) -> torch.Tensor:
        if where not in places:
            return x
        kept = mine(x)
        kept = kept.view(*kept.shape, *(1,) * (x.dim() - 1 - _PARTS))
        return torch.where(kept, x, torch.zeros(()).to(x) if zero else x.detach())

    return change
