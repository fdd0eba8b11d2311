"""The rule of a sharded job, for `commit_model.py`: what `recovery.py` makes of a proposal, checked in the same way.

Each member is alone on its host, and has its part of the model (along `tp`) for life. There is no checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from elasticgang.layout import Member, ParallelLayout, Plan
from elasticgang.protocol import recovery
from elasticgang.protocol.commit import Action, Attempt, action, resolve
from elasticgang.protocol.record import MemberReport, Record, RecordRef, Report, Seat, Undecided, Unrecoverable
from tests.unit import commit_model, commit_search
from tests.unit.commit_model import AWAY, DIES, PRESENT, Mem, Outcome, Rule, World, check_actions, check_truth


@dataclass(frozen=True)
class ShardedRule(Rule):
    """`known`: what `recover` has returned before, by all that it was asked."""

    known: dict[object, recovery.CommittedState | Undecided | Unrecoverable] = field(
        default_factory=dict, compare=False
    )

    def decide(self, world: World, fates: Sequence[str], heard: Attempt | None) -> Outcome:
        present = {at: world.mems[at] for at, fate in enumerate(fates) if fate == PRESENT}
        if {mem.part for mem in present.values()} != set(range(world.num_parts)):
            raise commit_model.Impossible("too few for one replica group")
        truth = self._truth(world, fates, heard)
        if not isinstance(truth, recovery.CommittedState):
            raise commit_model.Impossible(truth.reason)
        actions = {at: self.action(mem.tip, mem.pending, truth.committed) for at, mem in present.items()}
        check_actions(world, truth.committed, actions)
        held = {world.mems[at].part for at, answer in actions.items() if answer is not Action.HEAL}
        if not truth.designated and len(held) < world.num_parts:
            raise commit_model.Violation(
                f"RECOVERY-2: nobody holds all of {commit_model.format_attempt(truth.committed)}"
            )
        away = [mem for mem, fate in zip(world.mems, fates, strict=True) if fate == AWAY]
        check_truth(world, truth.committed, [*present.values(), *away])
        return Outcome(truth.committed, actions, is_lost=truth.designated)

    def _truth(
        self, world: World, fates: Sequence[str], heard: Attempt | None
    ) -> recovery.CommittedState | Undecided | Unrecoverable:
        said = sorted(zip(map(commit_search.number, world.mems), fates, strict=True))
        key = (tuple(said), heard, world.record, world.generation)
        if key not in self.known:
            record = _record(world)
            reports = _reports(world, fates)
            undecided = recovery.without_witness(record, reports)
            known = [] if heard is None else [heard]
            self.known[key] = undecided if undecided is not None else recovery.recover(record, reports, known)
        return self.known[key]


def _name(at: int) -> str:
    return f"r{at}"


def _record(world: World) -> Record:
    """With a seat for each that has one; where a part has fewer than another, places are left for nobody."""
    generation, num_parts = world.generation, world.num_parts
    seated = [at for at, mem in enumerate(world.mems) if mem.seat == generation]
    columns = [[at for at in seated if world.mems[at].part == part] for part in range(num_parts)]
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
        layout=ParallelLayout(tp=num_parts, within_host=()),
        plan=Plan((1, num_groups, 1, num_parts), tuple(Member(name, name) for name in places)),
        seats=tuple(Seat(_name(at), _name(at), _name(at), 0, "", world.mems[at].seated) for at in seated),
        agents=tuple(_name(at) for at in seated),
        committed=world.record.committed,
        absent_agents=tuple(_name(at) for at, mem in enumerate(world.mems) if 0 < mem.seat < generation),
        digest="record",
    )


def _reports(world: World, fates: Sequence[str]) -> list[Report]:
    lost = tuple(_name(at) for at, fate in enumerate(fates) if fate == DIES)
    return [
        Report(
            agent=_name(at),
            host=_name(at),
            job="job",
            coordinator="c",
            layout=ParallelLayout(tp=world.num_parts, within_host=()),
            newest_record=RecordRef(world.generation, "record"),
            members=(_member(at, mem, world.generation),),
            dead_agents=lost,
        )
        for at, (mem, fate) in enumerate(zip(world.mems, fates, strict=True))
        if fate == PRESENT
    ]


def _member(at: int, mem: Mem, generation: int) -> MemberReport:
    holds = (0, 0, mem.part) if mem.tip is not None else None
    is_active = mem.generation == generation and mem.role == commit_model.ACTIVE
    return MemberReport(_name(at), 0, "", mem.tip, mem.pending, holds, mem.generation, is_active)


SETTLE_PY = ShardedRule("recovery.py", resolve, action)
