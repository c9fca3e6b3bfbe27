"""The parameters of a GPT case, the stages that hold them, and its tensors. Legend as in `reference.gpt`."""

from __future__ import annotations

import math

import torch

from reference.gpt import GptCase
from reference.ids import fill_ids
from reference.layout import cut
from reference.recipe import fill
from reference.transformer import shapes as layer_shapes

Tensors = dict[str, torch.Tensor]

#: The names of what a stage holds beside layers. A tied output is listed too: it is a copy of the embedding.
EMBEDDING, POSITIONS, OUTPUT = "embedding_weight", "positions_weight", "output_weight"


def layer_name(number: int, name: str) -> str:
    """The full name of a parameter of a layer."""
    return f"layers.{number}.{name}"


def base_name(name: str) -> str:
    """What parameters of all layers are called alike: ``q_weight`` of ``layers.3.q_weight``."""
    return name.rpartition(".")[2]


def shapes(case: GptCase) -> dict[str, tuple[int, ...]]:
    """The global shape of every parameter by its full name, in the order of the model."""
    found: dict[str, tuple[int, ...]] = {EMBEDDING: (case.vocabulary, case.hidden)}
    if case.positions == "learned":
        found[POSITIONS] = (case.length, case.hidden)
    of_layer = layer_shapes(case.layer(1))
    for number in range(case.layers):
        found |= {layer_name(number, name): shape for name, shape in of_layer.items()}
    found["norm_weight"] = (case.hidden,)
    if case.norm == "layer":
        found["norm_bias"] = (case.hidden,)
    found[OUTPUT] = (case.vocabulary, case.hidden)
    return found


def stage_of(case: GptCase, name: str) -> int:
    """The stage that holds a parameter."""
    if name in (EMBEDDING, POSITIONS):
        return 0
    if name.startswith("layers."):
        number = int(name.split(".")[1])
        return next(stage for stage in range(case.stages) if number in case.layers_on(stage))
    return case.stages - 1


def owner_of(case: GptCase, name: str) -> int:
    """Along pp, the coordinate of the ranks that hold a parameter."""
    return stage_of(case, name) % case.mesh.axis_size("pp")


def tensors(case: GptCase) -> Tensors:
    """Every parameter, global, float64, filled by its recipe and rounded to the case's dtype; a tied output is the
    embedding's. Matrices are divided by the root of their fan-in."""
    made: Tensors = {}
    for name, shape in shapes(case).items():
        if name == OUTPUT and case.tied:
            continue
        recipe = case.recipes.weight if len(shape) == 2 else case.recipes.vector
        values = fill(recipe, name, shape, case.format)
        if len(shape) == 2:
            values = values / math.sqrt(shape[1])
        else:
            values = 1 + values / 4 if "norm" in name and name.endswith("weight") else values / 2
        made[name] = values.to(case.format.torch_dtype).to(torch.float64)
    return made


def tokens(case: GptCase) -> tuple[torch.Tensor, torch.Tensor]:
    """ids and targets, int64 [N, D, B, S]."""
    shape = case.replicas, case.data_parallel_size, case.sequences, case.length
    pieces = cut(case.vocabulary, case.mesh.axis_size("tp"))
    borders = [sum(pieces[:i]) for i in range(len(pieces))]
    ids, targets = (fill_ids(case.ids, name, shape, case.vocabulary, borders) for name in ("ids", "targets"))
    return ids, targets


def valid_tokens(case: GptCase) -> torch.Tensor:
    """Which tokens have a loss: bool [N, D, B, S]."""
    N, D, B = case.replicas, case.data_parallel_size, case.sequences
    # Ranks are told apart by the fastest index, so that few counts differ between them.
    places = torch.arange(N * D * B).view(B, N, D).permute(1, 2, 0)
    counts = torch.tensor(case.counts)[places % len(case.counts)]
    return torch.arange(case.length) < counts.unsqueeze(-1)
