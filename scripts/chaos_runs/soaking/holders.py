"""Who holds the newest committed state of a soaked job, and whom its faults leave alone.

Pure: no clock, file or process.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from elasticgang.layout import ParallelLayout
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


def seats_by_part(generation: Mapping[str, Any]) -> dict[Part, list[tuple[str, int]]]:
    """The agent and local rank of each active seat of the event `generation` by part of the model; of all seats, while
    state moves to its layout."""
    layout = ParallelLayout.parse(generation["layout"])
    seats = [(rank, agent["agent"], *seat) for agent in generation["seats"] for *seat, rank in _seats_of(agent)]
    num_replicas = len(seats) // layout.unit
    places = itertools.product(range(layout.pp), range(num_replicas), range(layout.sdp), range(layout.tp))
    found: dict[Part, list[tuple[str, int]]] = {part: [] for part in parts_of((layout.pp, layout.sdp, layout.tp))}
    for (pp, _, sdp, tp), (_, agent, local_rank, status) in zip(places, sorted(seats), strict=False):
        if status == "active" or not generation["active"]:
            found[pp, sdp, tp].append((agent, local_rank))
    return found


def seated_members(
    generation: Mapping[str, Any], live: Mapping[str, tuple[str | None, int]], entered: Mapping[str, int]
) -> dict[tuple[str | None, int], str]:
    """Those of `live` that have entered the generation of the event `generation`, by agent and local rank. `entered`:
    the newest generation of each member. The successor of a member that has died since holds nothing of what that one
    held."""
    number = generation["generation"]
    return {where: member for member, where in live.items() if entered.get(member) == number}


def _seats_of(agent: Mapping[str, Any]) -> list[tuple[int, str, int]]:
    return [(local_rank, status, rank) for local_rank, rank, status in agent["seats"] if rank is not None]


def choose_safe(groups: Sequence[Sequence[str]], host_of: Mapping[str, int], source: random.Random) -> set[str] | None:
    """One member of each of `groups`. As many of them as possible are on one host, drawn from `source`, so that other
    hosts may be lost. None: a group is empty, or there is none."""
    if not groups or not all(groups):
        return None
    hosts = sorted({host_of[member] for members in groups for member in members})
    source.shuffle(hosts)
    safe: set[str] = set()
    for members in groups:
        if safe.intersection(members):
            continue
        host = next(host for host in hosts if any(host_of[member] == host for member in members))
        safe.add(source.choice([member for member in members if host_of[member] == host]))
    return safe
