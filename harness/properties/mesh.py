"""Mesh: every group holds the ranks that the mesh arithmetic says, on paper and on real process groups."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import strategies.mesh
from harness.candidate import NotOffered
from harness.find import Spec
from harness.local import WrongResult
from harness.observation import Observation
from harness.properties.base import Description, Property, World
from harness.session import Session, phase
from harness.verdict import Finding, Verdict
from harness.world import RankContext
from reference.mesh import MeshCase, Ranks, expected_groups

Groups = dict[tuple[str, ...], Ranks]
#: What a rank found of its groups: member ranks, name, and what their collectives gave.
Facts = dict[tuple[str, ...], dict[str, Any]]


def on_rank(context: RankContext, spec: Spec, case: MeshCase) -> Observation:
    """The candidate's groups: computed, or made and used for an all-gather and an all-reduce of rank numbers."""
    session = Session.of(context, spec)
    return _live(session, case) if case.live else _pure(session, case)


def _pure(session: Session, case: MeshCase) -> Observation:
    candidate = session.make()
    if not candidate.offers("group_ranks"):
        raise NotOffered("the candidate has no group_ranks")
    computed = {}
    for axes in expected_groups(case.mesh):
        with phase(f"group_ranks of {'-'.join(axes)}"):
            ranks = candidate.group_ranks(case.mesh, axes)
            found = computed[axes] = None if ranks is None else np.asarray(ranks)
        if found is not None and found.dtype.kind not in "iu":
            raise WrongResult(
                f"group_ranks of {'-'.join(axes)} returned {reprlib.repr(ranks)}; expected ranks, [groups, group size]"
            )
    if all(ranks is None for ranks in computed.values()):
        raise NotOffered("group_ranks returned None for every axis")
    return Observation(facts=computed)


def _live(session: Session, case: MeshCase) -> Observation:
    candidate = session.on(case.mesh)
    if not candidate.offers("group"):
        raise NotOffered("the candidate has no group")
    groups, facts = {}, Facts()
    for axes in expected_groups(case.mesh):
        with phase(f"group of {'-'.join(axes)}"):
            group = candidate.group(axes)
        if group is None or group == dist.GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
            continue
        if not isinstance(group, dist.ProcessGroup):
            raise WrongResult(f"group of {'-'.join(axes)} returned {reprlib.repr(group)}; expected a ProcessGroup")
        facts[axes] = {"ranks": tuple(dist.get_process_group_ranks(group)), "name": group.group_name}
        groups[axes] = group
    everyone = _exchange(facts)
    if not any(everyone):
        raise NotOffered("group returned None for every axis")
    # Only collectives that cannot cross-talk are started: a wrong answer is better than a hang.
    if not _problems(case, everyone):
        for axes, group in groups.items():
            facts[axes] |= _use(group)
    return Observation(facts=facts)


def _exchange(facts: Facts) -> list[Facts]:
    everyone: list[Facts] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, facts)
    return everyone


def _use(group: dist.ProcessGroup) -> dict[str, Any]:
    rank = torch.tensor([dist.get_rank()])
    gathered = [torch.empty_like(rank) for _ in range(group.size())]
    dist.all_gather(gathered, rank, group=group)
    total = torch.tensor([(dist.get_rank() + 1) ** 2])
    dist.all_reduce(total, group=group)
    return {"gathered": tuple(int(t) for t in gathered), "sum": int(total)}


def _problems(case: MeshCase, everyone: Sequence[Facts]) -> list[Finding]:
    """What is wrong with the groups as they are, before any collective."""
    findings = []
    members_of: dict[str, tuple[int, tuple[int, ...]]] = {}
    for axes, groups in expected_groups(case.mesh).items():
        want = {int(rank): tuple(int(r) for r in group) for group in groups for rank in group}
        has = [rank for rank in want if axes in everyone[rank]]
        for rank, facts in enumerate(everyone):
            # A rank outside every such group (a middle stage and the embedding) may have none or one of its own.
            if rank not in want or not has:
                continue
            label = "-".join(axes)
            if axes not in facts:
                message = f"{case.mesh.describe(rank)} has no {label} group; {case.mesh.describe(has[0])} has one"
                findings.append(_finding(case, rank, label, message, "disagree"))
                continue
            found = facts[axes]
            if found["ranks"] != want[rank]:
                message = (
                    f"the {label} group of {case.mesh.describe(rank)} holds ranks {list(found['ranks'])}; "
                    f"expected {list(want[rank])}"
                )
                findings.append(_finding(case, rank, label, message))
            other, ranks = members_of.setdefault(found["name"], (rank, found["ranks"]))
            if ranks != found["ranks"]:
                message = (
                    f"process group name {found['name']!r} stands for ranks {list(ranks)} on rank {other} and for "
                    f"{list(found['ranks'])} on rank {rank}: they share one store prefix, so their messages mix; "
                    "ranks created their groups in different orders"
                )
                findings.append(_finding(case, rank, label, message, "disagree"))
        findings += _names_differ(case, axes, want, everyone)
    return findings


def _names_differ(
    case: MeshCase,
    axes: tuple[str, ...],
    want: dict[int, tuple[int, ...]],
    everyone: Sequence[Facts],
) -> list[Finding]:
    for rank, members in want.items():
        first = members[0]
        if axes in everyone[rank] and axes in everyone[first] and rank < len(everyone):
            here, there = everyone[rank][axes]["name"], everyone[first][axes]["name"]
            if here != there:
                message = (
                    f"the {'-'.join(axes)} group of ranks {list(members)} is named {there!r} on rank {first} and "
                    f"{here!r} on rank {rank}: ranks created their groups in different orders"
                )
                return [_finding(case, rank, "-".join(axes), message, "disagree")]
    return []


def judge(case: MeshCase, description: Description, want: Groups, worlds: Sequence[World]) -> Verdict:
    everyone = [dict(o.facts) for o in worlds[0]]
    if not case.live:
        return Verdict(tuple(_judge_pure(case, want, everyone[0])))
    findings = list({finding.message: finding for finding in _problems(case, everyone)}.values())
    for axes, groups in want.items():
        for group in groups:
            members = tuple(int(r) for r in group)
            for rank in members:
                found = everyone[rank].get(axes)
                if found is None or "gathered" not in found:
                    continue
                total = sum((r + 1) ** 2 for r in members)
                if found["gathered"] != members or found["sum"] != total:
                    label = "-".join(axes)
                    message = (
                        f"in the {label} group of {case.mesh.describe(rank)} an all-gather of rank numbers gave "
                        f"{list(found['gathered'])} and an all-reduce of (rank + 1)^2 gave {found['sum']}; expected "
                        f"{list(members)} and {total}"
                    )
                    findings.append(_finding(case, rank, label, message))
    return Verdict(tuple(findings))


def _judge_pure(case: MeshCase, want: Groups, computed: dict[tuple[str, ...], Any]) -> list[Finding]:
    findings = []
    for axes, groups in want.items():
        found = computed[axes]
        if found is None:
            continue
        if found.shape == groups.shape:  # the order in which groups are listed is free, that of their members is not
            found, groups = _by_first_rank(found), _by_first_rank(groups)
        if np.array_equal(found, groups):
            continue
        label = "-".join(axes)
        if found.shape != groups.shape:
            message = f"{label} groups have shape {found.shape}; expected {groups.shape} (groups, ranks in each)"
        else:
            row = int(np.argwhere((found != groups).any(axis=1))[0, 0])
            message = f"a {label} group holds ranks {_short(found[row])}; expected {_short(groups[row])}"
        findings.append(_finding(case, None, label, message))
    return findings


def _by_first_rank(groups: Ranks) -> Ranks:
    return groups[np.argsort(groups[:, 0], kind="stable")] if groups.size else groups


def _short(ranks: Ranks) -> str:
    shown = ", ".join(str(int(r)) for r in ranks[:8])
    return f"[{shown}{', ...' if len(ranks) > 8 else ''}]"


def _finding(case: MeshCase, rank: int | None, label: str, message: str, kind: Any = "mismatch") -> Finding:
    place = case.mesh.describe(rank) if rank is not None else None
    return Finding(kind, message, rank, place, f"{label} group")


MESH = Property(
    subject="mesh",
    case_type=MeshCase,
    methods=("group", "group_ranks"),
    features={},
    cases=strategies.mesh.cases,
    simpler=strategies.mesh.simpler,
    world=lambda case: case.mesh.size if case.live else 1,
    on_rank="harness.properties.mesh:on_rank",
    expected=lambda case: expected_groups(case.mesh),
    judge=judge,
    uses_dtype=False,
)
