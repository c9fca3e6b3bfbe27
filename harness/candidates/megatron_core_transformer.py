"""Megatron-Core's transformer block of one layer, by its local spec: without Transformer Engine and APEX, on CPU.

Its norms come from APEX, or refuse sequence parallelism: torch's are put in the spec, their parameters marked as those
of its own are. Its random streams switch the generator of the device: here the CPU's, which forward has to itself.
Nothing of the arithmetic is touched.

Its trainer sums over tp what the layer leaves to it: so does ``finish``, by the library's own function.

Not offered: main_grad (a CUDA kernel of APEX), rotary embedding in fp64 (its angles are fp32).
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812

from harness.candidate import NotOffered
from harness.candidates.megatron_core_on_cpu import Generator
from harness.module import PartOf, Sharded
from reference.attention import visible_keys
from reference.layout import Split, Whole
from reference.traffic import Transfer, gathers, reduce_scatters
from reference.transformer import TransformerCase, shapes

if importlib.util.find_spec("megatron") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about Transformer Engine and APEX, as in megatron_core.py
        from megatron.core.distributed.finalize_model_grads import _allreduce_non_tensor_model_parallel_grads
        from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.enums import AttnMaskType
        from megatron.core.transformer.transformer_block import TransformerBlock
        from megatron.core.transformer.transformer_config import TransformerConfig

FEATURES = (
    "transformer_gqa",
    "transformer_mqa_replicated",
    "transformer_swiglu",
    "transformer_rms_norm",
    "transformer_qk_norm",
    "transformer_rotary",
    "transformer_padding_mask",
    "transformer_selective_recompute",
    "transformer_full_recompute",
    "transformer_dropout",
    "transformer_sequence_parallel",
)

#: The masks of one rank must have 128 elements: tokens a rank, times at least 4 features.
_TOKENS_OF_A_MASK = 32


def transformer_layer(case: TransformerCase, group: dist.ProcessGroup) -> Sharded:
    """The layer of the case, cut over the group."""
    block = _block(case, group)
    parameters, layouts = _parameters(case, block, group.rank())
    masks = iter([_mask(case, m) for m in range(len(case.leading))])
    # What finalize_model_grads does beside is about replicas, stages and embeddings.
    chunk = SimpleNamespace(module=block, ddp_config=SimpleNamespace(use_megatron_fsdp=False))
    generator, rotary = Generator(case.seed, group.rank()), _rotary(case, block)

    def forward(x: torch.Tensor) -> Any:
        with generator.current():
            return block(x, next(masks), rotary_pos_emb=rotary(x))

    return Sharded(
        block,
        forward=forward,
        parameters=parameters,
        finish=lambda: _allreduce_non_tensor_model_parallel_grads([chunk], block.config, group),
        masks=("probabilities", "o", "down"),
        **layouts,
    )


def dropout_masks(case: TransformerCase, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """What the layer makes of ones at the places of its dropouts, in a forward of its own."""
    block, found = _block(case, group), dict[str, torch.Tensor]()
    layer, generator = block.layers[0], Generator(case.seed, group.rank())
    dropout, add = layer.self_attention.core_attention.attention_dropout, layer.self_attn_bda

    def adding(*how: bool) -> Callable[..., torch.Tensor]:
        def added(x_and_bias: Any, residual: torch.Tensor, p: float) -> torch.Tensor:
            x, _ = x_and_bias
            found["residual"] = add(*how)((torch.ones_like(x), None), torch.zeros_like(residual), p)
            return residual

        return added

    layer.self_attn_bda = adding
    dropout.register_forward_pre_hook(lambda _, given: (torch.ones_like(given[0]),))
    dropout.register_forward_hook(lambda _, given, made: found.update(attention=made))
    local = _TOKENS_OF_A_MASK * (1 if case.sequence_parallel else case.parallel_size)
    x, rotary = torch.zeros(local, 1, case.hidden, dtype=case.format.torch_dtype), _rotary(case, block)
    hidden = torch.zeros(1, 1, 1, _TOKENS_OF_A_MASK * case.parallel_size, dtype=torch.bool)
    with generator.current(), torch.no_grad():
        block(x, hidden, rotary_pos_emb=rotary(x))
    residual = "sharded" if case.sequence_parallel else "replicated"
    return {"sharded": found["attention"].detach(), residual: found["residual"].detach()}


def traffic(case: TransformerCase, needed: Sequence[Transfer]) -> Sequence[Transfer]:
    """Key/value heads that are fewer than ranks are no copies here: all ranks gather the queries, keys and values."""
    if case.kv_heads >= case.parallel_size:
        return needed
    made, width = list(needed), case.hidden + 2 * case.kv_heads * case.head_size
    dtype = str(case.format.torch_dtype).removeprefix("torch.")
    for m, (tokens, sequences) in enumerate(case.leading):
        whole = (m, case.axis, dtype, width, tokens * sequences, case.parallel_size)
        made.append(gathers("forward", *whole))
        if case.trains:
            made.append(reduce_scatters("backward", *whole))
        if case.trains and case.recompute == "full":
            made.append(gathers("backward", *whole, optional=True))
    return made


def _block(case: TransformerCase, group: dist.ProcessGroup) -> Any:
    if case.rotary and case.dtype == "fp64":
        raise NotOffered("the angles of its rotary embedding are fp32")
    width = case.hidden + 2 * case.kv_heads * case.head_size
    if width % case.parallel_size:
        raise NotOffered("the rows of its fused weight for queries, keys and values must be a multiple of the ranks")
    rms = case.norm == "rms"
    config = TransformerConfig(
        num_layers=1,
        hidden_size=case.hidden,
        num_attention_heads=case.heads,
        num_query_groups=case.kv_heads,
        kv_channels=case.head_size,
        ffn_hidden_size=case.ffn,
        normalization="RMSNorm" if rms else "LayerNorm",
        activation_func=F.silu if case.activation == "swiglu" else F.gelu,
        gated_linear_unit=case.activation == "swiglu",
        add_bias_linear=case.bias,
        qk_layernorm=case.qk_norm,
        hidden_dropout=case.dropout,
        attention_dropout=case.dropout,
        masked_softmax_fusion=False,
        tensor_model_parallel_size=case.parallel_size,
        sequence_parallel=case.sequence_parallel and case.parallel_size > 1,
        params_dtype=case.format.torch_dtype,
        bf16=case.dtype == "bf16",
        fp16=case.dtype == "fp16",
        use_cpu_initialization=True,
        **_recompute(case),
    )
    spec = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=case.qk_norm)
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = _Norm
    attention = spec.submodules.self_attention
    masks = {"causal": AttnMaskType.causal, "padding": AttnMaskType.padding, "none": AttnMaskType.no_mask}
    attention.params = {"attn_mask_type": masks[case.mask]}
    if case.qk_norm:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = _Norm
    groups = ProcessGroupCollection.use_mpu_process_groups()
    groups.tp = group
    block = TransformerBlock(config, spec, post_layer_norm=False, pg_collection=groups)
    return block.to(case.format.torch_dtype)  # norms are built in fp32; its Float16Module does this


def _recompute(case: TransformerCase) -> dict[str, Any]:
    if case.recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": "selective"} if case.recompute == "selective" else {}


class _Norm:
    """Torch's norm, whose parameters say that under sequence parallelism each rank has part of their gradient."""

    def __new__(cls, config: Any, hidden_size: int, eps: float) -> Any:
        kind = torch.nn.RMSNorm if config.normalization == "RMSNorm" else torch.nn.LayerNorm
        norm = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm


def _rotary(case: TransformerCase, block: Any) -> Callable[[torch.Tensor], torch.Tensor | None]:
    if not case.rotary:
        return lambda x: None
    embedding = RotaryEmbedding(case.head_size, rotary_percent=1.0, use_cpu_initialization=True)
    # Not its forward: ranks along cp have whole sequences of their own here, and no part of a longer one.
    return lambda x: embedding.get_emb(embedding.get_rotary_seq_len(None, block, x, block.config))


def _mask(case: TransformerCase, m: int) -> torch.Tensor | None:
    """True for what is hidden, [sequences or 1, 1, tokens, tokens]."""
    tokens, sequences = case.leading[m]
    if case.mask == "padding":
        return ~visible_keys(tokens, sequences, m)[:, None, None].expand(-1, 1, tokens, -1)
    return torch.ones(1, 1, tokens, tokens, dtype=torch.bool).triu(1) if case.mask == "causal" else None


def _parameters(case: TransformerCase, block: Any, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters by their names, and how each is cut."""
    (layer,) = block.layers
    attention, mlp = layer.self_attention, layer.mlp
    modules = {"norm1": layer.input_layernorm, "norm2": layer.pre_mlp_layernorm}
    modules |= {"q_norm": attention.q_layernorm, "k_norm": attention.k_layernorm}
    modules |= {"o": attention.linear_proj, "down": mlp.linear_fc2, "up": mlp.linear_fc1}
    rows, parts = _rows(case), dict[str, Callable[[torch.Tensor], torch.Tensor]]()
    for name in ("q", "k", "v"):
        modules[name], parts[name] = attention.linear_qkv, _picks(rows[name][rank])
    if case.activation == "swiglu":
        modules["gate"] = mlp.linear_fc1
        parts |= {"gate": lambda w: w.chunk(2)[0], "up": lambda w: w.chunk(2)[1]}
    parameters: dict[str, Any] = {}
    layouts: dict[str, Any] = {}
    for full in shapes(case):
        name, _, kind = full.rpartition("_")
        tensor = getattr(modules[name], kind)
        parameters[full] = PartOf(tensor, parts[name]) if name in parts else tensor
        if name in rows:
            layouts[full] = Split(0, case.axis, sizes=tuple(len(own) for own in rows[name]))
        elif name in ("gate", "up"):
            layouts[full] = Split(0, case.axis)
        else:
            layouts[full] = Split(1, case.axis) if name in ("o", "down") and kind == "weight" else Whole()
    return parameters, layouts


def _picks(rows: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda w: w[torch.tensor(rows, dtype=torch.int64)]


def _rows(case: TransformerCase) -> dict[str, list[list[int]]]:
    """Of each rank's rows of the fused weight, those that are queries, keys and values. The whole has one group after
    the other, each the queries of its heads, then its key and its value; it is cut evenly, wherever that falls."""
    group = ["q"] * (case.heads // case.kv_heads) + ["k", "v"]
    whole = [name for head in group * case.kv_heads for name in [head] * case.head_size]
    each = len(whole) // case.parallel_size
    pieces = [whole[rank * each : (rank + 1) * each] for rank in range(case.parallel_size)]
    return {name: [[i for i, row in enumerate(own) if row == name] for own in pieces] for name in ("q", "k", "v")}
