"""Who holds the newest committed state of a soaked job, and whom its faults leave alone.

Pure: no clock, file or process.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from scripts.demo_job.run_log import Part, RunLog, StepAttempt, parts_of


def holders_of(run_log: RunLog, live: Collection[str]) -> dict[Part, list[str]]:
    """Those of `live` that hold each part of the newest committed state, as `RunLog.holders` says; {} before the first
    commit."""
    if run_log.newest is None:
        return {}
    step, generation = run_log.newest
    near = {StepAttempt(step, generation), StepAttempt(step - 1, generation)}
    parts: list[Part] = [()] if run_log.sizes is None else parts_of(run_log.sizes)
    found: dict[Part, list[str]] = {part: [] for part in parts}
    for member in sorted(live):
        if run_log.last_committed.get(member) in near:
            found[run_log.part_of[member]].append(member)
    return found


def passive_members(
    generation: Mapping[str, Any], live: Mapping[str, tuple[str | None, int]], before: Collection[str]
) -> set[str]:
    """Those of `live`, by agent and local rank, that the event `generation` gives no active seat: others may commit a
    step without them at any moment. While state moves to another layout nobody has one, and those that were not in
    `before` keep what they hold."""
    if not generation["active"]:
        return set(before)
    seats = [
        (agent["agent"], local_rank, status)
        for agent in generation["seats"]
        for local_rank, _, status in agent["seats"]
    ]
    active = {(agent, local_rank) for agent, local_rank, status in seats if status == "active"}
    return {member for member, where in live.items() if where not in active}


def choose_safe(
    holders: Mapping[Part, Sequence[str]], host_of: Mapping[str, int], source: random.Random
) -> set[str] | None:
    """One holder of each part. As many of them as possible are on one host, drawn from `source`, so that other hosts
    may be lost. None: a part has no holder, or there is no part."""
    if not holders or not all(holders.values()):
        return None
    hosts = sorted({host_of[member] for members in holders.values() for member in members})
    source.shuffle(hosts)
    safe = set()
    for members in holders.values():
        host = next(host for host in hosts if any(host_of[member] == host for member in members))
        safe.add(source.choice([member for member in members if host_of[member] == host]))
    return safe
