"""The GPT on tensor-, pipeline- and data-parallel ranks."""

from __future__ import annotations

import torch

from harness.gpt import Gpt
from reference.gpt import GptCase
from reference.layout import Layout, Split
from sharded.gpt_parallel import MakeOptimizer, ParallelGPT
from sharded.process_groups import ProcessGroups
from sharded.sharded_optimizer import ShardedOptimizer
from sharded.transformer import Recompute
from sharded.updates import SGD

_RECOMPUTE: dict[str, Recompute] = {"none": "none", "selective": "selective", "full": "full", "stage": "none"}


def gpt(case: GptCase, groups: ProcessGroups) -> Gpt:
    data = groups.group("dp")

    def optimizer(named: object) -> ShardedOptimizer:
        return ShardedOptimizer(named, data, SGD(lr=1.0), reduction="sum")  # type: ignore[arg-type]

    model = model_of(case, groups, optimizer=optimizer if case.update == "sharded" else None)

    def step(ids: torch.Tensor, targets: torch.Tensor, valid: torch.Tensor) -> torch.Tensor | None:
        sizes = list(case.sizes)
        pairs = zip(torch.split(targets, sizes), torch.split(valid, sizes), strict=True)
        return model.step(torch.split(ids, sizes), list(pairs))

    parameters = {own_name(name): parameter for name, parameter in model.named_parameters().items()}
    return Gpt(
        step,
        dict(parameters),
        layouts(case),
        before_forward=lambda hook: setattr(model, "before_forward", hook),
    )


def model_of(
    case: GptCase, groups: ProcessGroups, *, optimizer: MakeOptimizer | None = None, reduces: bool = True
) -> ParallelGPT:
    """This rank's part of the model. optimizer, reduces: as of ParallelGPT."""
    return ParallelGPT(
        case.vocabulary,
        case.hidden,
        case.heads,
        case.ffn,
        [case.layers_on(stage) for stage in range(case.stages)],
        tensor=groups.group("tp"),
        pipeline=groups.group("pp"),
        data=groups.group("dp"),
        schedule=case.schedule,
        recompute_stages=case.recompute == "stage",
        optimizer=optimizer,
        reduces=reduces,
        tied=case.tied,
        positions=case.length if case.positions == "learned" else None,
        kv_heads=case.kv_heads,
        norm=case.norm,
        activation=case.activation,
        qk_norm=case.qk_norm,
        rotary=case.positions == "rotary",
        recompute=_RECOMPUTE[case.recompute],
        bias=case.bias,
        sequence_parallel=case.sequence_parallel,
        main_grad=case.main_grad,
        attention_dropout=case.dropout,
        hidden_dropout=case.dropout,
        seed=case.ids.seed,
        dtype=case.format.torch_dtype,
    )


def own_name(name: str) -> str:
    """The subject's name of a parameter: ``layers.3.attention.q.weight`` as ``layers.3.q_weight``."""
    *places, kind = name.split(".")
    return ".".join([*places[:2], f"{places[-1]}_{kind}"]) if places[0] == "layers" else f"{places[-1]}_{kind}"


def layouts(case: GptCase) -> dict[str, Layout]:
    """How each parameter is cut, by what follows the last dot of its name."""
    rows, columns = Split(0, "tp"), Split(1, "tp")
    heads = Split(0, "tp", copies=case.layer(1).kv_copies)
    cuts: dict[str, Layout] = {"embedding_weight": rows, "output_weight": rows}
    for name in ("q", "gate", "up"):
        cuts |= {f"{name}_weight": rows, f"{name}_bias": rows}
    for name in ("k", "v"):
        cuts |= {f"{name}_weight": heads, f"{name}_bias": heads}
    return cuts | {"o_weight": columns, "down_weight": columns}
