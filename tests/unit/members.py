"""Members of a job by host, for tests of plans."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from elasticgang.layout import Member, ParallelLayout, Plan

ANYWHERE = ParallelLayout(within_host=())


def crew(**hosts: str) -> list[Member]:
    """`crew(A="a b", B="c")`: members a and b on host A, c on B."""
    return [Member(id, host) for host, ids in hosts.items() for id in ids.split()]


def without(members: Iterable[Member], lost: Collection[str]) -> list[Member]:
    return [member for member in members if member.id not in lost]


def ids(plan: Plan) -> str:
    return " ".join(plan.ranks)
