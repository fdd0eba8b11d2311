"""The rule of a sharded job, for `commit_model.py`: what `recovery.py` makes of a proposal, checked in the same way.

Each member is alone on its host, and has its part of the model (along `tp`) for life. There is no checkpoint.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from elasticgang.layout import Member, ParallelLayout, Plan
from elasticgang.protocol import recovery
from elasticgang.protocol.commit import Action, Attempt, action, resolve
from elasticgang.protocol.record import MemberReport, Record, RecordRef, Report, Seat, Undecided, Unrecoverable
from tests.unit import commit_model, commit_search
from tests.unit.commit_model import AWAY, DIES, PRESENT, Mem, Outcome, Rule, World, check_actions, check_truth


@dataclass(frozen=True)
class ShardedRule(Rule):
    """`known`: what `recover` has returned before, by all that it was asked. `newest`: the world that was asked about
    last, and the numbers of its members."""

    known: dict[object, recovery.CommittedState | Undecided | Unrecoverable] = field(
        default_factory=dict, compare=False
    )
    newest: list[Any] = field(default_factory=list, compare=False)

    def decide(self, world: World, fates: Sequence[str], heard: Attempt | None) -> Outcome:
        if not _is_group(tuple(fates), tuple([mem.part for mem in world.mems]), world.num_parts):
            raise commit_model.Impossible("too few for one replica group")
        truth = self._truth(world, fates, heard)
        if not isinstance(truth, recovery.CommittedState):
            raise commit_model.Impossible(truth.reason)
        present = {at: world.mems[at] for at, fate in enumerate(fates) if fate == PRESENT}
        actions = {at: self.action(mem.tip, mem.pending, truth.committed) for at, mem in present.items()}
        check_actions(world, truth.committed, actions)
        held = {world.mems[at].part for at, answer in actions.items() if answer is not Action.HEAL}
        if not truth.designated and len(held) < world.num_parts:
            raise commit_model.Violation(
                f"RECOVERY-2: nobody holds all of {commit_model.format_attempt(truth.committed)}"
            )
        # A member that a record has left out was declared lost: its state is given up (LOST).
        away = [
            mem for mem, fate in zip(world.mems, fates, strict=True) if fate == AWAY and mem.seat == world.generation
        ]
        check_truth(world, truth.committed, [*present.values(), *away])
        return Outcome(truth.committed, actions, is_lost=truth.designated)

    def _truth(
        self, world: World, fates: Sequence[str], heard: Attempt | None
    ) -> recovery.CommittedState | Undecided | Unrecoverable:
        generation = len(world.records)
        if not self.newest or self.newest[0] is not world:
            self.newest[:] = world, [commit_search.number(mem) for mem in world.mems]
        said = [_said(mem, fate, generation) for mem, fate in zip(self.newest[1], fates, strict=True)]
        key = (tuple(sorted(said)), heard, world.record, generation)
        if key not in self.known:
            record = _record(world)
            reports = _reports(world, fates)
            lost = [_name(at) for at, fate in enumerate(fates) if fate == DIES]
            undecided = recovery.without_witness(record, reports, lost)
            known = [] if heard is None else [heard]
            self.known[key] = undecided if undecided is not None else recovery.recover(record, reports, known, lost)
        return self.known[key]


@functools.cache
def _is_group(fates: tuple[str, ...], parts: tuple[int, ...], num_parts: int) -> bool:
    """Whether the present members hold every part. `parts`: of each member."""
    return len({part for part, fate in zip(parts, fates, strict=True) if fate == PRESENT}) == num_parts


@functools.cache
def _said(number: int, fate: str, generation: int) -> int:
    """The number of all that a record and the reports say of the member with that number."""
    mem: Any = commit_search.numbered(number)
    said: tuple[object, ...] = (fate, mem.seat, mem.seated, mem.part)
    if fate == PRESENT:
        said += mem.tip, mem.pending, mem.generation, mem.is_active(generation)
    return commit_search.number(said)


@functools.cache
def _name(at: int) -> str:
    return f"r{at}"


@functools.cache
def _layout(num_parts: int) -> ParallelLayout:
    return ParallelLayout(tp=num_parts, within_host=())


def _record(world: World) -> Record:
    seated = tuple((mem.seat, mem.seated, mem.part) for mem in world.mems)
    return _record_of(seated, world.generation, world.record.committed, world.num_parts)


@functools.cache
def _record_of(mems: tuple[tuple[int, str, int], ...], generation: int, committed: Attempt, num_parts: int) -> Record:
    """With a seat for each that has one; where a part has fewer than another, places are left for nobody."""
    seated = [at for at, (seat, _, _) in enumerate(mems) if seat == generation]
    columns = [[at for at in seated if mems[at][2] == part] for part in range(num_parts)]
    num_groups = max(1, *map(len, columns))
    places = [
        _name(column[group]) if group < len(column) else f"nobody {group} {part}"
        for group in range(num_groups)
        for part, column in enumerate(columns)
    ]
    return Record(
        job="job",
        generation=generation,
        parent="",
        layout=_layout(num_parts),
        plan=Plan((1, num_groups, 1, num_parts), tuple(Member(name, name) for name in places)),
        seats=tuple(Seat(_name(at), _name(at), _name(at), 0, "", mems[at][1]) for at in seated),
        agents=tuple(_name(at) for at in seated),
        committed=committed,
        digest="record",
    )


def _reports(world: World, fates: Sequence[str]) -> list[Report]:
    return [
        _report(at, mem, world.generation, world.num_parts)
        for at, (mem, fate) in enumerate(zip(world.mems, fates, strict=True))
        if fate == PRESENT
    ]


@functools.cache
def _report(at: int, mem: Mem, generation: int, num_parts: int) -> Report:
    holds = (0, 0, mem.part) if mem.tip is not None else None
    is_active = mem.generation == generation and mem.role == commit_model.ACTIVE
    member = MemberReport(_name(at), 0, "", mem.tip, mem.pending, holds, mem.generation, is_active)
    return Report(
        agent=_name(at),
        host=_name(at),
        job="job",
        layout=_layout(num_parts),
        newest_record=RecordRef(generation, "record"),
        members=(member,),
    )


SETTLE_PY = ShardedRule("recovery.py", resolve, action)
