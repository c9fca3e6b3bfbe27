"""Linear layers cut over the ranks of a group (Megatron-LM, arXiv 1909.08053, section 3).

A column layer cuts the weight's output features and leaves its output cut; a row layer cuts the input features and
sums the ranks' products. One after the other they need one collective forward and one backward. Sequence parallelism
(arXiv 2205.05198, section 4.2) keeps the tokens cut between the layers.

Legend: T tokens (any dimensions, also none; t where the first one is cut), I in_features, O out_features (i, o this
rank's piece of them).

| layer | forward | backward |
|---|---|---|
| column | none; gather_output: all-gather | all-reduce T x I, if the input needs a gradient |
| column, sequence_parallel | all-gather T x I | all-gather again, if the weight needs a gradient; reduce-scatter |
| row | all-reduce T x O | none; input not parallel: all-gather |
| row, sequence_parallel | reduce-scatter T x O | all-gather |
"""

from __future__ import annotations

from typing import Unpack

import torch

from sharded.collectives import (
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    reduce_scatter_to_group,
    scatter_to_group,
)
from sharded.linear_function import Parameters, Sequence, linear, linears
from sharded.main_grad import add_bias
from sharded.parallel_linear import Options, Output, ParallelLinear
from sharded.partial_gradients import mark_partial
from sharded.sequence_parallel import mark


class ColumnParallelLinear(ParallelLinear):
    """Y = X W^T + b with the output features cut: weight [o, I], bias [o].

    forward: x [T, I] -> [T, o]; gather_output: [T, O]; sequence_parallel: [t, I] -> [T, o]. The bias that
    skip_bias_add returns is as wide as the output. Options: see ParallelLinear.
    copies: so many neighbouring ranks hold the same piece of the output features, for work that differs between them:
    each has its part of the piece's gradient, and `partial_gradients.finish_partial_gradients` sums those.

    Raises ValueError for gather_output with sequence_parallel or with copies.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        gather_output: bool = False,
        copies: int = 1,
        **options: Unpack[Options],
    ) -> None:
        if gather_output and options.get("sequence_parallel"):
            raise ValueError(
                "gather_output=True with sequence_parallel=True: the whole output on every rank is what sequence "
                "parallelism avoids; expected one of them, turn one off"
            )
        if gather_output and copies > 1:
            raise ValueError(f"gather_output=True with copies={copies}: expected one of them")
        super().__init__(in_features, out_features, 0, 0, copies=copies, **options)
        self.gather_output = gather_output
        if copies > 1:
            for parameter in self.parameters():
                mark_partial(parameter, copies)

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor | None = None, *, sequence_length: int | None = None
    ) -> Output:
        """weight: used instead of the layer's own. sequence_length: of the whole sequence, under sequence parallelism;
        without it the ranks' pieces must be even, as an uneven cut cannot be told from one piece."""
        weight = self._weight(weight)
        self._require_input(x, self.in_features)
        bias = None if self.skip_bias_add else self.bias
        (y,) = self._products(x, [(weight, bias)], sequence_length)
        if self.gather_output:
            y = self._gathered(y)
        if not self.skip_bias_add:
            return y
        returned = self._bias_for_caller()
        if self.gather_output and returned is not None:
            returned = self._gathered(returned)
        return y, returned

    def _products(
        self, x: torch.Tensor, parameters: list[Parameters], sequence_length: int | None
    ) -> tuple[torch.Tensor, ...]:
        if self.sequence_parallel:
            sequence = Sequence(self.group, sequence_length)
            return linears(x, parameters, sequence=sequence, to_main_grad=self.main_grad)
        return linears(copy_to_group(x, self.group), parameters, to_main_grad=self.main_grad)

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        return gather_from_group(x, self.group, dim=-1, length=self.out_features)


def shared_columns(
    x: torch.Tensor, layers: tuple[ColumnParallelLinear, ...], *, sequence_length: int | None = None
) -> tuple[torch.Tensor, ...]:
    """The outputs of column layers that read the same input and have the same options but for their sizes.

    One after the other, each would gather the input and reduce its gradient again; together they do it once. x and
    sequence_length as in `ColumnParallelLinear`; every result [T, o], its layer's bias added.
    """
    first = layers[0]
    first._require_input(x, first.in_features)
    return first._products(x, [(layer._weight(None), layer.bias) for layer in layers], sequence_length)


class RowParallelLinear(ParallelLinear):
    """Y = X W^T + b with the input features cut: weight [O, i], bias [O], replicated.

    forward: x [T, i] -> [T, O]; input_is_parallel=False: [T, I] -> [T, O]; sequence_parallel: [T, i] -> [t, O].
    Options: see ParallelLinear. Under sequence parallelism a rank's bias gradient covers its own tokens: the bias is
    marked, and `sequence_parallel.finish_sequence_parallel_gradients` sums it after backward.

    Raises ValueError for input_is_parallel=False with sequence_parallel.
    """

    def __init__(
        self, in_features: int, out_features: int, *, input_is_parallel: bool = True, **options: Unpack[Options]
    ) -> None:
        if options.get("sequence_parallel") and not input_is_parallel:
            raise ValueError(
                "input_is_parallel=False with sequence_parallel=True: the column layer before leaves its output cut; "
                "expected input_is_parallel=True, or turn sequence parallelism off"
            )
        super().__init__(in_features, out_features, 1, None, **options)
        self.input_is_parallel = input_is_parallel
        if self.sequence_parallel and self.bias is not None:
            mark(self.bias)

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> Output:
        """weight: used instead of the layer's own."""
        weight = self._weight(weight)
        self._require_input(x, self._own(self.in_features) if self.input_is_parallel else self.in_features)
        if not self.input_is_parallel:
            x = scatter_to_group(x, self.group, dim=-1)
        y = self._reduced(linear(x, weight, None, to_main_grad=self.main_grad))
        return (y, self._bias_for_caller()) if self.skip_bias_add else self._with_bias(y)

    def _reduced(self, partial: torch.Tensor) -> torch.Tensor:
        """The ranks' products summed: [T, O] -> [T, O], or [t, O] under sequence parallelism."""
        if self.sequence_parallel:
            return reduce_scatter_to_group(partial, self.group, dim=0)
        return reduce_from_group(partial, self.group)

    def _with_bias(self, y: torch.Tensor) -> torch.Tensor:
        """After the reduction, which would add the bias once for every rank."""
        if self.bias is None:
            return y
        return add_bias(y, self.bias) if self.main_grad else y + self.bias
