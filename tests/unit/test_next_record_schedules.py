"""Random schedules of a job whose generations `next_record` decides."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from elasticgang.errors import LayoutError
from elasticgang.layout import Member, ParallelLayout, plan
from elasticgang.protocol.commit import Action, Attempt, action
from elasticgang.protocol.next_record import next_record
from elasticgang.protocol.record import (
    ACTIVE,
    LEARNER,
    SPARE,
    MemberReport,
    Record,
    Report,
    Undecided,
    Unrecoverable,
)
from tests.unit.proposals import FLAT, PAIRS, member, report

# --- random schedules

MODELS = {layout: tuple((0, 0, tp) for tp in range(layout.tp)) for layout in (FLAT, PAIRS)}


@dataclass
class Rank:
    """A member as it really is. `tip` names its state's whole history, see `Job.base`; `running`: it has entered its
    generation and has not asked since."""

    id: str
    agent: str
    tip: Attempt | None = None
    pending: Attempt | None = None
    holds: tuple[int, int, int] | None = None
    entered: int = 0
    active: bool = False
    running: bool = False

    def report(self) -> MemberReport:
        return member(self.id, self.tip, self.pending, holds=self.holds, entered=self.entered, active=self.active)


@dataclass
class Host:
    agent: str
    ranks: dict[str, Rank] = field(default_factory=dict)
    record: Record | None = None
    known: Attempt | None = None
    gone: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)


@dataclass
class Job:
    """Hosts that come and go, on a seeded schedule. Each generation runs a few whole steps and breaks off in one.

    `passed`: attempts whose vote succeeded, `committed`: those applied by somebody, `given_up`: those of them that
    were lost, with a part of the model.
    """

    chance: random.Random
    layout: ParallelLayout
    record: Record | None = None
    hosts: dict[str, Host] = field(default_factory=dict)
    base: dict[Attempt, Attempt] = field(default_factory=dict)
    passed: set[Attempt] = field(default_factory=set)
    committed: set[Attempt] = field(default_factory=set)
    given_up: set[Attempt] = field(default_factory=set)
    num_started: int = 0
    broken: int = 0
    seen: set[str] = field(default_factory=set)

    # -- what happens

    def add_host(self) -> None:
        self.num_started += 1
        host = Host(f"h{self.num_started:03}")
        self.hosts[host.agent] = host
        for _ in range(self.layout.unit):
            self.add_rank(host)

    def add_rank(self, host: Host) -> None:
        self.num_started += 1
        rank = Rank(f"m{self.num_started:03}", host.agent)
        host.ranks[rank.id] = rank

    def kill_rank(self) -> None:
        host = self.chance.choice(list(self.hosts.values()))
        if host.ranks:
            self.remove_rank(host, self.chance.choice(list(host.ranks)))
            if self.chance.random() < 0.7:
                self.add_rank(host)

    def kill_host(self) -> None:
        """Whoever is left learns of it, sooner or later."""
        dead = self.hosts.pop(self.chance.choice(list(self.hosts)))
        if not self.hosts:
            self.add_host()
        successor = self.chance.choice(list(self.hosts.values()))
        successor.lost |= dead.lost | {dead.agent}
        if self.chance.random() < 0.5:
            self.add_host()

    def remove_rank(self, host: Host, id: str) -> None:
        del host.ranks[id]
        host.gone.add(id)

    def run(self) -> None:
        """The present generation makes progress, if all of its members have entered it."""
        record = self.record
        assert record is not None
        if self.broken == record.generation:
            return
        ranks = {rank.id: rank for host in self.hosts.values() for rank in host.ranks.values()}
        seated = [seat.member for seat in record.seats if seat.status != SPARE]
        if not all(id in ranks and ranks[id].entered == record.generation and ranks[id].running for id in seated):
            return
        for _ in range(self.chance.randrange(3)):
            if not self.step([ranks[id] for id in seated], broken=False):
                return
        self.broken = record.generation
        self.step([ranks[id] for id in seated], broken=True)

    def step(self, seated: list[Rank], broken: bool) -> bool:
        """One step, or as much of it as comes before a break. False: it cannot be tried."""
        voters = [rank for rank in seated if rank.active]
        sources = {rank.holds: rank for rank in voters if rank.tip}
        for rank in seated:
            if not rank.tip and rank.holds in sources and self.chance.random() < 0.7:
                rank.tip = sources[rank.holds].tip
        if set(sources) != set(MODELS[self.layout]) or not all(rank.tip for rank in voters):
            return False
        (tip,) = {rank.tip for rank in voters if rank.tip}
        attempt = Attempt(tip.step + 1, seated[0].entered)
        assert self.base.setdefault(attempt, tip) == tip
        all_prepare = not broken or self.chance.random() < 0.6
        for rank in seated:
            if rank.tip == tip and (all_prepare or self.chance.random() < 0.6):
                rank.pending = attempt
        if all(rank.pending == attempt for rank in voters):
            self.passed.add(attempt)
            whole = [rank for rank in seated if rank.pending == attempt]
            for rank in seated:
                if not broken or self.chance.random() < 0.4:
                    self.hear_vote(rank, torn=broken and self.chance.random() < 0.2)
                    rank.active = rank.active or rank in whole
        return True

    def hear_vote(self, rank: Rank, torn: bool = False) -> None:
        if rank.pending in self.passed and rank.tip == self.base[rank.pending]:
            self.committed.add(rank.pending)
            rank.tip, rank.pending = (None if torn else rank.pending), None
            rank.running = rank.running and not torn
            if rank.tip and self.chance.random() < 0.7:
                self.hosts[rank.agent].known = rank.tip

    def propose(self, everyone: bool = False) -> None:
        """Some agents, or all of them, ask together."""
        asking = [host for host in self.hosts.values() if everyone or self.chance.random() < 0.7]
        for host in asking:
            for rank in host.ranks.values():
                rank.running = False
        proposal = [self.report(host) for host in asking]
        for host in self.hosts.values():  # those who are not asked may still hear how their old vote ended
            for rank in host.ranks.values():
                if rank.running and self.chance.random() < 0.3:
                    self.hear_vote(rank)
        if proposal:
            self.decide(asking, proposal, must_decide=everyone)

    def report(self, host: Host) -> Report:
        if host.record is None or (self.record and host.agent in self.record.agents):
            host.record = self.record if self.record and host.agent in self.record.agents else host.record
        return report(
            host.agent,
            *(rank.report() for rank in host.ranks.values()),
            seen=host.record,
            newest_commit=host.known,
            exited=tuple(sorted(host.gone)),
            layout=self.layout,
        )

    def decide(self, asking: list[Host], proposal: list[Report], must_decide: bool) -> None:
        lost = set().union(*(host.lost for host in asking)).difference(host.agent for host in asking)
        answer = next_record(self.record, proposal, lost)
        if self.record is not None and not isinstance(answer, Undecided):
            # The job goes on without agents that nobody waits for.
            lost |= {agent for agent in self.record.agents if agent not in {mine.agent for mine in proposal}}
            answer = next_record(self.record, proposal, lost)
        self.seen.add(type(answer).__name__)
        assert next_record(self.record, self.chance.sample(proposal, len(proposal)), lost) == answer
        if isinstance(answer, Undecided):
            if must_decide:  # nothing stands in the way but that there are too few
                with pytest.raises(LayoutError):
                    plan([Member(m.id, mine.host) for mine in proposal for m in mine.members], self.layout)
            return
        if isinstance(answer, Unrecoverable):
            self.check_lost(proposal)
            self.__init__(self.chance, self.layout, seen=self.seen)  # type: ignore[misc]
            for _ in range(3):
                self.add_host()
            return
        self.check(answer, proposal)
        assert Record.from_text(answer.text) == answer
        self.record = answer
        for host in asking:
            if self.chance.random() < 0.9:
                host.record = answer
                for rank in list(host.ranks.values()):
                    if self.chance.random() < 0.9:
                        self.enter(host, rank, answer)

    def enter(self, host: Host, rank: Rank, record: Record) -> None:
        """As the manager does it."""
        seat = record.seat(rank.id)
        assert seat is not None
        todo = action(rank.tip, rank.pending, record.committed)
        if todo is Action.APPLY:
            assert rank.tip == self.base[record.committed]
            self.committed.add(record.committed)
            rank.tip = record.committed
        elif seat.status == ACTIVE and todo is Action.HEAL:
            assert record.committed == Attempt(0, record.generation)
            if rank.tip is None and rank.entered:
                self.remove_rank(host, rank.id)  # torn or half healed: not fit to be where the state is taken from
                return
            rank.tip = record.committed
        elif todo is Action.HEAL or seat.status == LEARNER:
            rank.tip = None
        rank.pending, rank.entered, rank.running = None, record.generation, seat.status != SPARE
        rank.active = seat.status == ACTIVE
        if seat.status != SPARE:
            rank.holds = record.model_coordinates(rank.id)

    # -- what must hold

    def past(self, attempt: Attempt) -> list[Attempt]:
        out = [attempt]
        while out[-1] in self.base:
            out.append(self.base[out[-1]])
        return out

    def parts(self, attempt: Attempt, ranks: Iterable[Rank]) -> set[tuple[int, int, int] | None]:
        """The model coordinates for which somebody holds a state with `attempt` in it, or can apply it."""
        return {
            rank.holds
            for rank in ranks
            if rank.tip
            and (attempt in self.past(rank.tip) or (rank.pending == attempt and self.base[attempt] == rank.tip))
        }

    def reachable(self, proposal: list[Report]) -> list[Rank]:
        """Who is here, or is in the record and alive."""
        here = {m.id for mine in proposal for m in mine.members}
        if self.record:
            here |= {seat.member for seat in self.record.seats}
        return [rank for host in self.hosts.values() for rank in host.ranks.values() if rank.id in here]

    def check(self, record: Record, proposal: list[Report]) -> None:
        before = self.record
        assert record.generation == (before.generation + 1 if before else 1)
        assert record.parent == (before.digest if before else "")
        ranks = {rank.id: rank for rank in self.reachable(proposal)}
        assert sorted(record.agents) == sorted(mine.agent for mine in proposal)
        assert sorted(seat.member for seat in record.seats) == sorted(m.id for mine in proposal for m in mine.members)
        past = self.past(record.committed)
        for attempt in self.committed - set(past) - self.given_up:  # COMMIT-1
            assert self.parts(attempt, ranks.values()) != set(MODELS[self.layout]), (attempt, record)
            self.given_up.add(attempt)
        assert not self.given_up & set(past)  # COMMIT-4
        if before and record.committed != Attempt(0, record.generation):
            assert before.committed in past
            self.seen.add("rolled forward" if record.rolled_forward else "resolved")
        if record.committed == Attempt(0, record.generation):
            self.seen.add("designated")
            assert len(record.members(ACTIVE)) == self.layout.unit
            return
        assert {action(rank.tip, rank.pending, record.committed) for rank in ranks.values()} != {Action.HEAL}
        for seat in record.seats:  # RECOVERY-2
            rank = ranks[seat.member]
            fit = action(rank.tip, rank.pending, record.committed) is not Action.HEAL
            if seat.status != SPARE:
                assert (seat.status == ACTIVE) == (fit and rank.holds == record.model_coordinates(seat.member))
        here = [ranks[seat.member] for seat in record.seats]
        assert self.parts(record.committed, here) == set(MODELS[self.layout])

    def check_lost(self, proposal: list[Report]) -> None:
        self.seen.add("lost")
        assert self.record is not None
        truths = {self.record.committed} | {a for a in self.committed if a.generation == self.record.generation}
        assert any(self.parts(truth, self.reachable(proposal)) != set(MODELS[self.layout]) for truth in truths)


@pytest.mark.parametrize("layout", [FLAT, PAIRS], ids=["flat", "pairs"])
def test_random_schedules(layout: ParallelLayout) -> None:
    seen: set[str] = set()
    for seed in range(100):
        job = Job(random.Random(seed), layout, seen=seen)
        for _ in range(3):
            job.add_host()
        for _ in range(60):
            if job.record is None or job.chance.random() < 0.3:
                job.propose(everyone=job.chance.random() < 0.4)
            else:
                job.chance.choices([job.run, job.kill_rank, job.kill_host, job.add_host], [10, 3, 1, 1])[0]()
    assert seen >= {"Record", "Undecided", "Unrecoverable", "rolled forward", "resolved", "designated", "lost"}
