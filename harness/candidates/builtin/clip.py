"""Clipping by the global norm."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from harness.clip import Clipper
from reference.clip import ClipCase
from sharded import clip as ours
from sharded.process_groups import ProcessGroups


def clip_gradients(case: ClipCase, parameters: Mapping[str, torch.nn.Parameter], groups: ProcessGroups) -> Clipper:
    along = {axis: groups.group(axis) for axis in case.mesh.names}
    held = []
    for i, one in enumerate(case.parameters):
        parameter = parameters.get(f"parameter{i}")
        if parameter is not None:
            cut = {"tp": one.split, "dp": one.sharded, "pp": True}
            alike = {axis: group for axis, group in along.items() if not cut[axis]}
            stage = groups.group("pp").rank()
            held.append(ours.Held(parameter, alike, copy=stage != case.stages(i)[0]))
    result: list[ours.Clipped] = []

    def clip() -> float:
        result[:] = [
            ours.clip_gradients(
                held,
                case.asked_limit,
                norm_type=case.asked_norm_type,
                groups=along,
                loss_scale=case.loss_scale,
                policy=case.asked_policy,
                eps=case.eps,
            )
        ]
        return result[0].norm

    return Clipper(clip, coefficient=lambda: result[0].coefficient, skips=lambda: result[0].skipped)
