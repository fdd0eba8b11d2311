"""A simulated job in one thread: ranks, agents, the lighthouse, the store, and their faults.

A run is a sequence of moves, each a line of text such as `a0 votes`. The moves so far determine which ones are possible
next, so that a sequence replays exactly. There is no time: an action may take arbitrarily long. `invariants.py` checks
the rules after every move.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from elasticgang.layout import ParallelLayout
from elasticgang.protocol import next_record
from elasticgang.protocol.agent_events import RankEntered
from elasticgang.protocol.record import ACTIVE, LEARNER, SPARE, Record, Report, Undecided, Unrecoverable
from elasticgang.simulation import host as hosts
from elasticgang.simulation import lighthouse as lighthouses
from elasticgang.simulation import rank as ranks
from elasticgang.simulation.generation import Part, SimulatedGeneration
from elasticgang.simulation.host import Host
from elasticgang.simulation.invariants import Invariants, Violation, format_attempt
from elasticgang.simulation.lighthouse import Lighthouse
from elasticgang.simulation.rank import Rank

RARE_MOVES = ranks.RARE_MOVES | hosts.RARE_MOVES | lighthouses.RARE_MOVES

_HOST_FAULTS = frozenset({"dies", "is cut off", "is back"})
_JOINS = re.compile(r"joins (slowly )?with (\d+)(?: of another (\w+))?")

Move = tuple[str, str]  # the actor and its action
Actor: TypeAlias = Rank | Host | Lighthouse


@dataclass(frozen=True)
class Setting:
    """The job at its start. `hosts`: the number of ranks of each; of these, on each host, `num_spares` are asked for as
    spares. `has_directory`: the first coordinator has a state directory, if it is one that decides."""

    layout: ParallelLayout
    hosts: tuple[int, ...]
    num_steps: int = 1_000_000
    num_spares: int = 0
    min_hosts: int = 1
    max_hosts: int = 0
    has_directory: bool = False


def _describe(record: Record) -> str:
    """A record in one line."""
    active, learners, spares = (" ".join(record.members(status)) for status in (ACTIVE, LEARNER, SPARE))
    words = [f"generation {record.generation}  {{{active}}}"]
    words += [f"learn {learners}"] if learners else []
    words += [f"wait {spares}"] if spares else []
    words += [f" {format_attempt(record.committed)}"]
    words += [" rolled forward"] if record.rolled_forward else []
    words += [" goes back"] if record.rolled_back else []
    words += (
        [f" lost {', '.join(f'{agent} (says {by})' for agent, by in record.dead_agents)}"] if record.dead_agents else []
    )
    words += [f" away {' '.join(record.absent_agents)}"] if record.absent_agents else []
    return " ".join(words)


def _name_of(number: int) -> str:
    """a, b, ..., z, ba, bb, ..."""
    more, last = divmod(number, 26)
    return (_name_of(more) if more else "") + chr(ord("a") + last)


class Cluster:
    recovery: ClassVar[Move | None] = None  # the move by which all faults end, where there is one

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.layout = setting.layout
        self.num_steps = setting.num_steps
        self.incarnation = 1
        self.record: Record | None = None
        self.chain: list[Record] = []
        self.written: set[str] = set()  # digests
        self.notices: set[tuple[int, bool]] = set()
        self.generations: dict[str, SimulatedGeneration] = {}
        self.lighthouse = Lighthouse()
        self.hosts: dict[str, Host] = {}
        self.agents: dict[str, Host] = {}  # by the id: a host has a new one after it was fenced
        self.ranks: dict[str, Rank] = {}
        self.actors: list[Actor] = [self.lighthouse]
        self.given_up = ""  # why the job was given up
        self.finished = False  # a notice says so
        self.log: list[str] = []
        self._followed: tuple[Record | None, list[Report], bool, Record | Undecided | Unrecoverable] | None = None
        self.num_void = 0  # answers in a row
        self.num_lost_agents = 0
        self.seen: set[str] = set()  # what agents have done
        self.num_only_healed = 0  # votes on steps in which no rank has a share
        layout = setting.layout
        self.invariants = Invariants(
            [(pp, sdp, tp) for pp in range(layout.pp) for sdp in range(layout.sdp) for tp in range(layout.tp)]
        )
        for num_ranks in setting.hosts:
            self.add_host(num_ranks)

    # -- moves

    @staticmethod
    def is_rare(verb: str) -> bool:
        return verb in RARE_MOVES

    def moves_of(self, actor: Any) -> list[str]:
        """What `actor` can do by itself."""
        moves: list[str] = actor.moves(self)
        return moves

    def is_possible(self, move: Move) -> bool:
        """Whether `move` is possible now, as a regular move or as a fault."""
        name, verb = move
        if name in ("host", "store"):
            return True
        if name == "lighthouse":
            return verb == "restarts" or verb in self.lighthouse.moves(self)
        if name in self.hosts:
            host = self.hosts[name]
            if verb in _HOST_FAULTS:
                return host.alive and (verb == "dies" or host.is_cut == (verb == "is back"))
            return host.alive and (verb in host.moves(self) or verb in host.faults())
        rank = self.ranks.get(name)
        if rank is None or rank not in self.actors:
            return False
        return verb in rank.moves(self) or (rank.alive and verb in rank.faults())

    def perform(self, move: Move) -> None:
        """Raises Violation: the move violates a rule."""
        name, verb = move
        if name == "lighthouse":
            if verb == "restarts":
                self.restart_lighthouse()
            else:
                self.lighthouse.perform(self, verb)
        elif name in self.hosts:
            self._perform_host(self.hosts[name], verb)
        elif name == "store":
            self.forget()
        elif name == "host":
            joins = _JOINS.fullmatch(verb)
            if joins is None:
                raise ValueError(f"`host {verb}` is not a move")
            self.add_host(int(joins[2]), joins[3] or "", forks_late=bool(joins[1]))
        elif verb == "is received":
            rank = self.ranks[name]
            self.hosts[rank.host].receive(self, rank)
        elif verb == "is reaped":
            rank = self.ranks[name]
            self.hosts[rank.host].on_exit(self, rank)
            self.actors.remove(rank)
        else:
            rank = self.ranks[name]
            if self.is_lost(rank.agent) and verb not in rank.faults():
                raise Violation(f"RULE-3: {name} {verb}, but its agent {rank.agent} may be held to be lost")
            rank.perform(self, verb)
            if verb == "configures":
                self.hosts[rank.host].handle(self, RankEntered())

    def _perform_host(self, host: Host, verb: str) -> None:
        match verb:
            case "dies":
                self.end_host(host, "")
            case "is cut off":
                host.is_cut = True
                for generation in self.generations.values():
                    if host.name in generation.hosts and len(generation.hosts) > 1:
                        generation.sever()
            case "is back":
                host.is_cut = False
            case _ if verb in host.faults():
                host.inject(self, verb)
            case _:
                host.perform(self, verb)

    def add_host(self, num_ranks: int, mismatch: str = "", *, forks_late: bool = False) -> None:
        name = _name_of(len(self.hosts))
        host = Host(self, name, num_ranks, mismatch, forks_late=forks_late)
        self.hosts[name] = self.agents[name] = host
        self.actors.append(host)
        host.connect(self)

    def end_host(self, host: Host, reason: str) -> None:
        """The host dies, or its agent exits; `reason`: why the agent has failed, "" otherwise."""
        if "state is lost" in reason:
            assert self.record is not None
            self.invariants.lose(self.record, self.ranks.values())
            self.given_up = reason
        host.alive = False
        self.num_lost_agents += 1
        self.actors.remove(host)
        for rank in host.ranks:
            if rank.alive:
                rank.end(ranks.KILLED)
            self.actors.remove(rank)

    def restart_lighthouse(self) -> None:
        """Restart the coordinator's process, which keeps only the record, in its file."""
        self.incarnation += 1
        self.notices.clear()
        fresh = Lighthouse()
        self.actors[self.actors.index(self.lighthouse)] = fresh
        self.lighthouse = fresh
        for generation in self.generations.values():
            if not generation.has_begun:
                generation.sever()

    def forget(self) -> None:
        """The store loses the record, as if its file were lost: all committed steps are given up."""
        self.record = None
        self.chain.clear()
        self.invariants.give_up_all()

    # -- queries and shared operations of the actors

    def reaches(self, one: str, other: str) -> bool:
        return one == other or (self.hosts[one].is_connected and self.hosts[other].is_connected)

    def is_lost(self, agent: str) -> bool:
        """Whether other agents may declare it lost: it is dead, or its lease has expired."""
        host = self.agents[agent]
        return not host.alive or host.id != agent or host.is_fenced

    def hears_of(self, agent: str) -> bool:
        """Whether the coordinator gets heartbeats of `agent`."""
        return self.agents[agent].is_connected and not self.is_lost(agent)

    def num_heirs(self, at: str) -> int:
        """The number of successors that the host `at` knows."""
        return sum(host.num_successors for host in self.hosts.values() if host.alive and self.reaches(at, host.name))

    def generation(self, record: Record) -> SimulatedGeneration:
        if record.digest not in self.generations:
            generation = SimulatedGeneration(record, {name: rank.host for name, rank in self.ranks.items()})
            self.generations[record.digest] = generation
            if any(not self.ranks[member].alive for member in generation.seated):
                generation.broken = True
            if len(generation.hosts) > 1 and any(self.hosts[name].is_cut for name in generation.hosts):
                generation.sever()
        return self.generations[record.digest]

    def follow(self, mine: Report, proposal: list[Report]) -> Record | Undecided | Unrecoverable:
        """The agent's answer to `proposal`. Equal proposals give equal answers, so each is computed once."""
        is_mine = self.record is not None and next_record.is_for(self.record, mine)
        known = self._followed
        if known is None or known[0] is not self.record or known[1] is not proposal or known[2] != is_mine:
            known = self._followed = (self.record, proposal, is_mine, next_record.follow(self.record, mine, proposal))
        return known[3]

    def write(self, record: Record, proposal: Sequence[Report]) -> None:
        """Set the record, which follows from `proposal`, in the store."""
        present = self.record
        expected = (1, "") if present is None else (present.generation + 1, present.digest)
        if (record.generation, record.parent) != expected:
            raise Violation(f"RULE-1: generation {record.generation} of {record.parent} follows {expected}")
        self.log.append(_describe(record))
        self._check_size(record, proposal)
        self.invariants.write(record, present, proposal, self.ranks.values())
        self.record = record
        self.chain.append(record)
        self.written.add(record.digest)

    def _check_size(self, record: Record, proposal: Sequence[Report]) -> None:
        """PLAN-2: as many replica groups as possible, but no more than seats are requested or than before, not counting
        groups with a draining member."""
        layout, setting = self.layout, self.setting
        lost = {agent for report in proposal for agent in report.dead_agents}
        num_members = {report.agent: len(report.members) for report in proposal if report.agent not in lost}
        asked = {agent: self.agents[agent].num_seats for agent in num_members}
        num_asked = sum(num_members[agent] if num is None else num for agent, num in asked.items())
        before = num_going = 0
        if self.record is not None:
            draining = [
                member.id
                for report in proposal
                if report.agent not in lost
                for member in report.members
                if member.draining
            ]
            before = self.record.plan.shape[1] - self.record.groups_of(self.record.draining_members)
            num_going = self.record.groups_of(draining)
        most = max(max(num_asked // layout.unit, before) + num_going, layout.min_replicas)
        block = math.prod(getattr(layout, axis) for axis in layout.within_host)
        possible = sum(num // block for num in num_members.values()) * block // layout.unit
        num_groups = record.plan.shape[1]
        if num_groups > most or (num_groups < min(most, possible) and not setting.max_hosts):
            raise Violation(
                f"PLAN-2: generation {record.generation} has {num_groups} replica groups of {possible}; {num_asked} "
                f"seats are requested, and there were {before}"
            )

    def answered(self, answer: Record | Undecided | Unrecoverable) -> None:
        """Count and log the answer to an agent's request."""
        if isinstance(answer, Undecided):
            self.num_void += 1
            if answer.reason and self.log[-1:] != [f"undecided  {answer.reason}"]:
                self.log.append(f"undecided  {answer.reason}")
        else:
            self.num_void = 0

    def holdings(self) -> str:
        """The state of each live rank, for the log."""
        living = (rank for rank in self.ranks.values() if rank.alive)
        return "; ".join(f"{rank.name} holds {rank.state or 'nothing'}" for rank in living) or "nobody is left"

    def check_step(self, generation: SimulatedGeneration, parts: Sequence[Part]) -> None:
        """RULE-4 and RULE-5: the ranks reduce one step of one state, and each slot once."""
        first = parts[0]
        covered: Counter[int] = Counter()
        for part in parts:
            if part.attempt != first.attempt:
                raise Violation(f"RULE-4: {part.attempt} and {first.attempt} are reduced together")
            if part.active != first.active:
                raise Violation(f"RULE-5: ranks disagree on who is active: {part.active} and {first.active}")
            if part.share is not None:
                covered[part.share[0]] += 1
                if part.state is None:
                    raise Violation(f"RULE-5: a rank without state has a share of {part.attempt}")
        states = {part.state for part in parts if part.state is not None}
        if len(states) > 1:
            raise Violation(f"RULE-4: {states} take {first.attempt} together")
        count = max((part.share[1] for part in parts if part.share is not None), default=0)
        if not count:
            raise Violation(f"RULE-5: nobody has a share of {first.attempt}")
        if covered != Counter(dict.fromkeys(range(count), self.layout.pp * self.layout.tp)):
            raise Violation(f"RULE-5: the shares of {first.attempt} are {dict(covered)} of {count}")
