"""A column-parallel layer of your own, verified: `shardproof verify examples/my_adapter.py:Mine`."""

import torch
import torch.distributed as dist

from harness import Candidate, Sharded, Split, new_group


class MyColumnLinear(torch.nn.Linear):
    def __init__(self, in_features, out_features, group, **options):
        super().__init__(in_features, out_features // group.size(), **options)
        self.group = group

    def forward(self, x):
        x = x.view_as(x)
        if x.requires_grad:  # every rank's output depends on all of x, so its gradient is a sum over ranks
            x.register_hook(self.sum_over_ranks)
        return super().forward(x)

    def sum_over_ranks(self, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=self.group)
        return grad


class Mine(Candidate):
    def open(self, mesh):
        self.group_tp = new_group(mesh, "tp")

    def column_linear(self, case):
        options = {"bias": case.bias, "dtype": case.format.torch_dtype}
        layer = MyColumnLinear(case.in_features, case.out_features, self.group_tp, **options)
        return Sharded(layer, weight=Split(0, "tp"), bias=Split(0, "tp"))
