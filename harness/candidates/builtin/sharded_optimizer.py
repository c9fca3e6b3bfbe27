"""The optimizer whose state is cut over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from harness.sharded_optimizer import ShardedOptimizer
from reference.dtypes import format_of
from reference.sharded_optimizer import ShardedOptimizerCase
from sharded import sharded_optimizer as ours
from sharded import updates
from sharded.process_groups import ProcessGroups


def sharded_optimizer(
    case: ShardedOptimizerCase, parameters: Mapping[str, torch.nn.Parameter], groups: ProcessGroups
) -> ShardedOptimizer:
    if case.optimizer == "adamw":
        rule: updates.Rule = updates.AdamW(case.lr, case.betas, case.eps, case.weight_decay)
    else:
        rule = updates.SGD(case.lr, case.momentum, case.weight_decay)
    made = ours.ShardedOptimizer(
        parameters.items(),
        groups.group(case.axis),
        rule,
        reduction=case.reduction,
        reduce_dtype=None if case.reduce_dtype == "same" else format_of(case.reduce_dtype).torch_dtype,
        master_weights=case.master,
    )
    return ShardedOptimizer(
        made.step,
        owned=lambda name: [made.owned()[name]],
        state=lambda name, kind: made.state()[name][kind],
        save=made.save,
        load=made.load,
    )
