"""Gathers what a person needs after a generation change that nobody planned, and leaves it in a file for each.

INCIDENT-1  The counters of the collectives are read before the agent notifies any rank of the end of its generation,
    because ranks configure other groups then; those of a rank that has exited before, when it exits. A rank that has
    noticed the end by itself, and has left its groups, keeps their counters until then.
INCIDENT-2  What is kept for changes to come is bounded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from elasticgang.agent.job import Events
from elasticgang.agent.rank_processes import RankProcess
from elasticgang.observe.change_report import is_planned

MAX_KEPT = 64


class IncidentLog:
    """Belongs to the agent's event loop."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self.counters: dict[int, list[dict[str, Any]]] = {}  # by generation
        self._exits: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}  # by member, with its counters
        self.stacks: dict[str, str] = {}

    def ending(self, generation: int, ranks: Iterable[RankProcess]) -> None:
        """The generation ends: keep where its ranks of this host are. The first call for a generation counts."""
        if generation not in self.counters:
            self.counters[generation] = [_counters(rank) for rank in ranks]
            _bound(self.counters)

    def exited(self, rank: RankProcess) -> None:
        traceback = None if rank.failure is None else rank.failure["traceback"]
        exit = {
            "member": rank.member,
            "local_rank": rank.local_rank,
            "pid": rank.pid,
            "status": rank.status,
            "step": rank.page.step,
            "traceback": traceback,
            "stack": self.stacks.pop(rank.member, None),
            "tail": rank.tail,
        }
        self._exits[rank.member] = exit, _counters(rank)
        _bound(self._exits)

    def hung(self, member: str, stack: str) -> None:
        """`stack`: of the member when it is killed."""
        self.stacks[member] = stack
        _bound(self.stacks)

    def write(self, change: Mapping[str, Any]) -> None:
        """The change is over: see `change_report.describe`."""
        generation = change["generation"]
        counters = self.counters.pop(generation - 1, [])
        exits = [self._exits.pop(member) for member in change["left"] if member in self._exits]
        if is_planned(change):
            return
        lost = [{**exit, "tail": exit["tail"]()} for exit, _ in exits]
        known = {rank["member"] for rank in counters}
        counters += [last for _, last in exits if last["member"] not in known]
        counters.sort(key=lambda rank: rank["local_rank"])
        text = json.dumps({**change, "lost": lost, "counters": counters}, indent=1)
        self._events.write_file(f"incident-{generation}.json", text)


def _bound(kept: dict[Any, Any]) -> None:
    """INCIDENT-2."""
    while len(kept) > MAX_KEPT:
        del kept[next(iter(kept))]


def _counters(rank: RankProcess) -> dict[str, Any]:
    page = rank.page
    block = page.last_comm
    groups = [] if block is None else block.last_groups()
    names = {} if block is None else block.last_names()
    return {
        "member": rank.member,
        "local_rank": rank.local_rank,
        "step": page.step,
        "committed": page.committed[0],
        "doing": page.thread_state.name,
        "groups": {
            f"{stamps.group:016x}": {
                "gangs": names.get(stamps.group, ""),
                "submitted": stamps.submitted,
                "completed": stamps.completed,
                "messages_submitted": stamps.messages_submitted,
                "messages_completed": stamps.messages_completed,
            }
            for stamps in groups
        },
    }
