"""The findings of docs/findings.md, in plain calls of the libraries and without shardproof.

torchrun --nproc-per-node 3 tests/library_findings.py row_bias
"""

from __future__ import annotations

import ast
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode


def row_bias(partial=0.0, bias=193.0, dtype=torch.bfloat16):
    """The output of a row layer whose first rank contributes `partial`, beside what it should be."""
    n = dist.get_world_size()
    layer = nn.Linear(n, 1, dtype=dtype)
    nn.init.ones_(layer.weight)
    nn.init.constant_(layer.bias, bias)
    layer = parallelize_module(layer, init_device_mesh("cpu", (n,)), RowwiseParallel())
    x = torch.full((1, 1), partial if dist.get_rank() == 0 else 0.0, dtype=dtype)
    return layer(x).item(), partial + bias


def one_feature_column():
    """Backward of a column layer with one output feature and a bias, on a mesh of one rank."""
    layer = parallelize_module(nn.Linear(3, 1), init_device_mesh("cpu", (1,)), ColwiseParallel())
    layer(torch.ones(2, 3)).sum().backward()


def one_feature_row():
    """Forward of a row layer with one input feature, on a mesh of one rank."""
    layer = parallelize_module(nn.Linear(1, 3), init_device_mesh("cpu", (1,)), RowwiseParallel())
    layer(torch.ones(2, 1, 1))


def view_with_gaps():
    """Every second of 0 1 2 3 (10 11 12 13 on the second rank), summed over two ranks; and all four after that."""
    whole = torch.arange(4.0) + 10 * dist.get_rank()
    view = whole[::2]
    dist.all_reduce(view)
    return view.tolist(), whole.tolist()


def parallel_loss(classes, *targets):
    """The loss of each target, where all classes are alike: log(classes)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    widths = [len(part) for part in torch.arange(classes).chunk(mesh.size())] + [0] * mesh.size()
    logits = torch.zeros(len(targets), widths[dist.get_rank()])
    shape = torch.Size((len(targets), classes))
    with loss_parallel():
        logits = DTensor.from_local(logits, mesh, [Shard(1)], shape=shape, stride=(classes, 1))
        return cross_entropy(logits, torch.tensor(targets), reduction="none").to_local().tolist()


def listed_1f1b(stages=4, micro_batches=8):
    """What Schedule1F1B lists for its last rank."""
    stage = PipelineStage(nn.Identity(), 0, stages, torch.device("cpu"))
    order = Schedule1F1B(stage, micro_batches).pipeline_order[stages - 1]
    return [str(action) for action in order if action is not None]


def initialize_megatron():
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())


def present_the_cpu():
    """Where there is no GPU, buffers are allocated on the CPU, and the device's random streams are the CPU's."""
    from megatron.core.tensor_parallel import random

    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: torch.device("cpu")
        torch.cuda.get_rng_state, torch.cuda.manual_seed = torch.get_rng_state, torch.manual_seed
        random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
        random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def megatron_loss(logits, target, label_smoothing):
    """The loss of one token; the logits are the rank's own."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    initialize_megatron()
    logits = torch.tensor([[logits]])
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([[target]]), label_smoothing)
    return loss.item(), logits.flatten().tolist()


def logits_changed():
    """Two logits on each rank, all 0, after the loss."""
    return megatron_loss([0.0, 0.0], 0, 0.0)[1]


def smoothed_labels():
    """The loss with logits 0, 0 on the first rank, and 8, 8 on the second, of which one is the target."""
    return megatron_loss([8.0 * dist.get_rank()] * 2, 2, 0.1)[0]


def smoothed_underflow():
    """The loss with logits 200 and 0, of which the first is the target."""
    return megatron_loss([200.0, 0.0], 0, 0.1)[0]


def copied_gradient(transposed):
    """The input's gradient of the region whose backward sums over ranks, and the output's gradient afterwards. Every
    rank gives ones, so the sum is the number of ranks."""
    initialize_megatron()
    from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

    x = torch.zeros(2, 3, requires_grad=True)
    gradient = torch.ones(3, 2).T if transposed else torch.ones(2, 3)
    copy_to_tensor_model_parallel_region(x).backward(gradient)
    return x.grad.unique().tolist(), gradient.unique().tolist()


def megatron_column(out_features, **options):
    from megatron.core import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear

    n = dist.get_world_size()
    initialize_megatron()
    present_the_cpu()
    config = ModelParallelConfig(tensor_model_parallel_size=n, use_cpu_initialization=True)
    return ColumnParallelLinear(3, out_features, config=config, init_method=nn.init.ones_, **options)


def frozen_weight():
    """The gradient of the bias of a column layer whose weight is frozen."""
    layer = megatron_column(4)
    layer.weight.requires_grad_(False)
    y, _ = layer(torch.ones(2, 1, 3, requires_grad=True))
    y.sum().backward()
    return layer.bias.grad


def gathered_bias(out_features):
    """The output with the returned bias added, of a column layer with bias 0, 1, 2 ... and weight 0."""
    layer = megatron_column(out_features, gather_output=True, skip_bias_add=True)
    local = layer.bias.numel()
    with torch.no_grad():
        layer.weight.zero_()
        layer.bias.copy_(torch.arange(local) + dist.get_rank() * local)
    y, bias = layer(torch.ones(1, 1, 3))
    return (y + bias).flatten().tolist()


def megatron_config(**options):
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.transformer_config import TransformerConfig

    present_the_cpu()
    random.model_parallel_cuda_manual_seed(1)
    return TransformerConfig(
        hidden_size=2, num_attention_heads=2, hidden_dropout=0.0, attention_dropout=0.0,
        masked_softmax_fusion=False, use_cpu_initialization=True, **options,
    )  # fmt: skip


def other_groups_keys():
    """On four ranks, two and two, an attention that is given the groups across: two heads that share a key and a value,
    all of one feature. The rows of the fused weight give 1 and 2, the queries, then 3, the key, and 4, the value.
    Returns what a rank takes for its query, the key and the value."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    groups = ProcessGroupCollection(tp=parallel_state.get_data_parallel_group(), cp=None)
    config = megatron_config(num_layers=1, num_query_groups=1, tensor_model_parallel_size=2, add_bias_linear=False)
    spec = get_gpt_layer_local_spec().submodules.self_attention
    attention = build_module(spec, config=config, layer_number=1, pg_collection=groups)
    with torch.no_grad():
        attention.linear_qkv.weight[:] = 2 * groups.tp.rank() + torch.tensor([[1.0], [2.0]])
    found = attention.get_query_key_value_tensors(torch.tensor([[[1.0, 0.0]]]))
    return [x.item() for x in found]


def frozen_input(needs_gradient=False):
    """Which of two layers get a gradient, where the first is computed again in backward."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlock

    initialize_megatron()
    again = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    config = megatron_config(num_layers=2, **again)
    block = TransformerBlock(config, get_gpt_layer_local_spec(), post_layer_norm=False)
    x = torch.ones(1, 1, 2, requires_grad=needs_gradient)
    block(x, torch.zeros(1, 1, 1, 1, dtype=torch.bool)).sum().backward()
    return [layer.mlp.linear_fc1.weight.grad is not None for layer in block.layers]


def overlapped_in_other_orders():
    """Gradients of two weights in the second step: 1 and 10 on rank 0, 2 and 20 on rank 1, which uses them the other
    way round; their sums are 3 and 30. Each weight has a bucket of its own."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: torch.device("cpu")  # where it allocates the gradients
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    rank, module = dist.get_rank(), nn.ParameterList([torch.zeros(1), torch.zeros(1)])
    # calculate_per_token_loss: a sum instead of an average
    config = TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1, calculate_per_token_loss=True)
    buckets = DistributedDataParallelConfig(overlap_grad_reduce=True, bucket_size=1)
    wrapped = DistributedDataParallel(config, buckets, module)
    for _ in range(2):
        wrapped.zero_grad_buffer()
        order = (0, 1) if rank == 0 else (1, 0)
        sum(module[i] * (1, 10)[i] * (1 + rank) for i in order).backward()
        wrapped.finish_grad_sync()
    return [weight.main_grad.item() for weight in module]


def zero_bubble_of_linear_layers():
    """Three stages on one rank, each a linear layer with a bias, and inputs of three dimensions."""
    stages = [PipelineStage(nn.Linear(2, 2), number, 3, torch.device("cpu")) for number in range(3)]
    schedule = ScheduleInterleavedZeroBubble(stages, 1, loss_fn=lambda y, target: y.sum())
    schedule.step(torch.ones(1, 1, 2), target=torch.ones(1))


class Two(nn.Module):
    """A stage that gives two tensors, or adds the sum of the second to the first: its gradient is an expanded one."""

    def __init__(self, first):
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)
        self.first = first

    def forward(self, x, extra=None):
        x = self.linear(x)
        return (x, 2 * x) if self.first else x + extra.sum(-1, keepdim=True)


def expanded_gradient(schedule="ScheduleGPipe"):
    """One micro-batch through two stages, the second of which makes use of a tensor by its sum."""
    rank = dist.get_rank()
    stage = PipelineStage(Two(rank == 0), rank, 2, torch.device("cpu"))
    kind = getattr(torch.distributed.pipelining, schedule)
    run = kind(stage if schedule == "ScheduleGPipe" else [stage], 1, loss_fn=lambda y, target: y.sum())
    run.step(torch.ones(1, 2)) if rank == 0 else run.step(target=torch.ones(1))


def interleaved_on_two_ranks(overlap=False):
    """Four micro-batches, 1 to 4, which the four stages multiply by 2, 3, 5 and 7: the gradients of a rank's factors,
    (1 + 2 + 3 + 4) 210 divided by each of them."""
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import get_forward_backward_func

    class Times(nn.Module):
        def __init__(self, factor, first):
            super().__init__()
            self.factor, self.first, self.x = nn.Parameter(torch.tensor(float(factor))), first, None
            self.config, self.model_type = config, ModelType.encoder_or_decoder

        def set_input_tensor(self, received):
            self.x = received[0]

        def forward(self, given):
            return (given if self.first else self.x) * self.factor

    def step(batches, model):
        y = model(next(batches))
        return y, lambda out: (out.sum(), torch.tensor(1), out.item())

    if not torch.cuda.is_available():
        torch.cuda.current_device, torch.cuda.synchronize = lambda: torch.device("cpu"), lambda: None
    chunks = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(**chunks)
    overlapped = {"overlap_p2p_comm": overlap, "batch_p2p_comm": not overlap}
    config = megatron_config(num_layers=4, pipeline_dtype=torch.float32, **chunks, **overlapped)
    config.hidden_size, config.calculate_per_token_loss = 1, True
    rank = dist.get_rank()
    models = [Times((2, 3, 5, 7)[2 * chunk + rank], first=chunk == rank == 0) for chunk in range(2)]
    batches = [iter([torch.full((1, 1, 1), k) for k in (1.0, 2.0, 3.0, 4.0)]) for _ in models]
    with OnCpu():
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=batches,
            model=models,
            num_microbatches=4,
            seq_length=1,
            micro_batch_size=1,
        )
    return [model.factor.grad.item() for model in models]


def scale_after_another_interval(good=1, interval=1):
    """The scale, at first 8, after good steps at an interval of 4, and 6 more at another interval."""
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)
    for step in range(good + 6):
        if step == good:
            scaler.set_growth_interval(interval)
        weight.grad = scaler.scale(torch.ones(1))
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


def sharded_inf_norm(*shards):
    """The largest element of a gradient of which each rank has a shard, by clip_grad_norm_."""
    mesh = init_device_mesh("cpu", (len(shards),))
    own = torch.tensor([float(x) for x in shards[dist.get_rank()]])
    shape = torch.Size((sum(map(len, shards)),))
    whole = DTensor.from_local(own, mesh, [Shard(0)], shape=shape, stride=(1,))
    weight = nn.Parameter(torch.zeros_like(whole))
    weight.grad = whole
    norm = nn.utils.clip_grad_norm_([weight], 1.0, norm_type=float("inf"), error_if_nonfinite=True)
    return norm.full_tensor().item()


def scale_of_cut_gradients(first):
    """The scale, at first 8, where one element of the cut gradient overflows, and which parameter comes first."""
    mesh = init_device_mesh("cpu", (2,))
    gradients = {"cut": ([0.0, float("inf")], Shard(0)), "replicated": ([0.0, 0.0], Replicate())}
    parameters = {}
    for name, (values, placement) in gradients.items():
        whole = distribute_tensor(torch.tensor(values), mesh, [placement])
        parameters[name] = nn.Parameter(torch.zeros_like(whole))
        parameters[name].grad = whole
    optimizer = torch.optim.SGD(sorted(parameters.values(), key=lambda p: p is not parameters[first]), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(1))
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


def norm_on_mesh(*axes):
    """The norm of the gradients of a layer that is cut over tp, and by FSDP over dp, on a 2 x 2 mesh of these axes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
    layer = nn.Linear(4, 4, bias=False)
    nn.init.ones_(layer.weight)
    parallelize_module(layer, mesh["tp"], ColwiseParallel())
    fully_shard(layer, mesh=mesh["dp"])
    layer(torch.ones(1, 4)).sum().backward()
    return nn.utils.clip_grad_norm_(layer.parameters(), 1.0).full_tensor().item()


def megatron_norm(norm_type, *gradients):
    """Megatron's norm of the gradients that count: of each rank a list of them, each a list of numbers."""
    from megatron.core.optimizer.clip_grads import get_grad_norm_fp32

    own = [torch.tensor([float(x) for x in one]) for one in gradients[dist.get_rank()]]
    with OnCpu():
        return float(get_grad_norm_fp32(own, float(norm_type), grad_stats_parallel_group=dist.group.WORLD))


class OnCpu(TorchFunctionMode):
    """Where there is no GPU, what is made on one is made on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda" and not torch.cuda.is_available():
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = globals()[sys.argv[1]](*map(ast.literal_eval, sys.argv[2:]))
    print(f"rank {dist.get_rank()}: {found}")
    dist.destroy_process_group()
