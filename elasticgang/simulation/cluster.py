"""A simulated job in one thread: the real state machines of coordinator, session, agent and member.

A run is a sequence of moves, each a line of text such as `a0 votes`. The moves so far determine which ones are possible
next, so that a sequence replays exactly. `promises.py`, `chain.py` and `invariants.py` check the rules at every move.

Time is one number, which only the move `clock passes N` increases; each process reads it by a clock of its own, too
fast or too slow. While time passes, whoever is neither slow nor stopped nor cut off sends and receives all that is
under way; otherwise a message may take any time.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TypeAlias

from elasticgang.layout import ParallelLayout
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.coordinator_messages import Notice
from elasticgang.protocol.record import Record
from elasticgang.simulation import delivery, fact_checks, host_moves, host_session, promises, rank_moves
from elasticgang.simulation.chain import Chain
from elasticgang.simulation.coordinator_process import CoordinatorProcess, Disk
from elasticgang.simulation.generation import SimulatedGeneration
from elasticgang.simulation.host import Host
from elasticgang.simulation.invariants import Violation
from elasticgang.simulation.rank import Rank
from elasticgang.simulation.recovery import by_chance, recover

RARE_MOVES = rank_moves.RARE_MOVES | host_moves.RARE_MOVES | {"founds"}
_RARE_WORDS = ("resets ", "misses ", host_moves.TIMER)

MAIN = "main"

_JOINS = re.compile(r"joins (slowly )?with (\d+)(?: of another (\w+))?(?: as (\S+))?")
_HOST_FAULTS = frozenset(
    {
        *("dies", "is cut off", "is parted", "is back", "freezes", "thaws", "stops", "goes on", "is slow", "is quick"),
        *("is narrow", "is wide"),
    }
)
_BLOCKED, _UNBLOCKED = "loses its path to ", "regains its path to "
_COORDINATOR_FAULTS = frozenset({"crashes", "is parted", "is back", "stops", "goes on"})

Move = tuple[str, str]  # the actor and its action
Actor: TypeAlias = "Rank | Host | CoordinatorProcess"


@dataclass(frozen=True)
class Setting:
    """The job at its start. `hosts`: the number of ranks of each; of these, on each host, `num_spares` are asked for as
    spares. `has_directory`: the first coordinator has a state directory.
    `keeps`: the ranks keep the gradients of slots.
    `saves_last`: the job has durable checkpoints, of which only the saves before an end are simulated."""

    layout: ParallelLayout
    hosts: tuple[int, ...]
    num_steps: int = 1_000_000
    num_spares: int = 0
    min_hosts: int = 1
    max_hosts: int = 0
    has_directory: bool = False
    saves_last: bool = False
    keeps: bool = False


def _name_of(number: int) -> str:
    """a, b, ..., z, ba, bb, ..."""
    more, last = divmod(number, 26)
    return (_name_of(more) if more else "") + chr(ord("a") + last)


class Cluster:
    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.layout = setting.layout
        self.num_steps = setting.num_steps
        self.now_s = 0.0
        self.generations: dict[str, SimulatedGeneration] = {}
        self.hosts: dict[str, Host] = {}
        self.agents: dict[str, Host] = {}  # by id: the first of that id
        self.seen: set[str] = set()
        self.ranks: dict[str, Rank] = {}
        self.actors: list[Actor] = []
        self.coordinators: dict[str, CoordinatorProcess] = {}
        self._living: list[CoordinatorProcess] = []
        self.zone_of: dict[str, str] = {}  # of each address
        self.disk = Disk() if setting.has_directory else None
        self.blocked: set[tuple[str, str]] = set()  # hosts of which the first opens no connection to the second
        self.given_up = ""
        self._held_when_lost: set[Rank] = set()  # when a coordinator last said that the state is lost
        self.finished = False
        self.saved: set[Attempt] = set()  # at the end, or where a part of the state was about to be lost
        self.log: list[str] = []
        self.num_dead_hosts = self.num_only_healed = self.num_sessions = self.num_exited = 0
        self.chain = Chain(self)
        self.start_coordinator(is_founder=True)
        for num_ranks in setting.hosts:
            self.add_host(num_ranks)

    # -- coordinators

    def start_coordinator(
        self, with_directory: bool = True, is_founder: bool = False, zone: str = ""
    ) -> CoordinatorProcess:
        disk = self.disk if with_directory and self.disk is not None and self.disk.holder is None else None
        number = len(self.coordinators) + 1
        if self.coordinators:
            self.seen.add("restarted with its directory" if disk is not None else "started without a directory")
        if self.living():
            self.seen.add("two coordinators")
        is_taken = any(c.address == MAIN for c in self.living())
        address = f"side{number}" if is_taken or zone else MAIN
        self.zone_of[address] = zone
        coordinator = CoordinatorProcess(self, number, disk, zone, address, is_founder and disk is None)
        self.coordinators[coordinator.name] = coordinator
        self._living.append(coordinator)
        self.actors.append(coordinator)
        return coordinator

    def crash_coordinator(self, coordinator: CoordinatorProcess) -> None:
        self.seen.update(coordinator.crash())
        self._living.remove(coordinator)
        self.actors.remove(coordinator)
        self.zone_of[coordinator.address] = coordinator.zone
        for generation in self.generations.values():
            if not generation.has_begun:
                generation.sever()

    def living(self) -> list[CoordinatorProcess]:
        return list(self._living)

    def listening(self, zone: str) -> list[CoordinatorProcess]:
        return [c for c in self._living if c.zone == zone]

    def refusing(self, zone: str) -> list[str]:
        """Addresses that answer, where nothing listens."""
        held = {c.address for c in self._living}
        return [address for address, at in self.zone_of.items() if at == zone and address not in held]

    def hosts_of(self, agent: str) -> list[Host]:
        """The processes with this id: one, as a rule."""
        return [host for host in self.hosts.values() if host.id == agent]

    @staticmethod
    @functools.lru_cache(4096)
    def is_rare(verb: str) -> bool:
        return verb in RARE_MOVES or (verb.startswith(_RARE_WORDS) and verb != "misses all")

    def is_possible(self, move: Move) -> bool:
        name, verb = move
        if name in ("host", "clock", "operator", "recover"):
            return True
        if name == "disk":
            return self.disk is not None and self.disk.is_stuck == (verb == "works")
        if name in self.coordinators:
            coordinator = self.coordinators[name]
            if not coordinator.is_alive:
                return False
            if verb in _COORDINATOR_FAULTS:
                return coordinator.is_stopped == (verb == "goes on") or verb not in ("stops", "goes on")
            if verb == "is granted its office":
                return promises.may_grant(self, coordinator)
            return verb in coordinator.moves(self)
        if name in self.hosts:
            host = self.hosts[name]
            if not host.alive:
                return False
            if verb in ("freezes", "thaws"):
                return host.is_frozen == (verb == "thaws")
            if verb in ("stops", "goes on"):
                return host.is_stopped == (verb == "goes on")
            if verb in _HOST_FAULTS:
                return True
            if verb.startswith((_BLOCKED, _UNBLOCKED)):
                return ((name, verb.split()[-1]) in self.blocked) == verb.startswith(_UNBLOCKED)
            return verb in host.moves(self) or (verb in host.faults() and not host.is_frozen and not host.is_stopped)
        rank = self.ranks.get(name)
        if rank is None or rank not in self.actors:
            return False
        if self.hosts[rank.host].is_frozen:
            return False
        return verb in rank.moves(self) or (rank.alive and verb in rank.faults())

    def moves_of(self, actor: Actor) -> list[str]:
        """Nothing of a rank whose host or agent cannot do its part."""
        moves: list[str] = actor.moves(self)
        if moves and isinstance(actor, Rank):
            host = self.hosts[actor.host]
            if host.is_frozen:
                return []
            if host.is_stopped:
                return [verb for verb in moves if verb not in ("is received", "is noticed", "is reaped")]
        return moves

    def perform(self, move: Move) -> None:
        name, verb = move
        if name == "host":
            joins = _JOINS.fullmatch(verb)
            if joins is None:
                raise ValueError(f"`host {verb}` is not a move")
            self.add_host(int(joins[2]), joins[3] or "", forks_late=bool(joins[1]), agent=joins[4] or "")
        elif name == "operator":
            self.start_coordinator("without" not in verb, zone="side" if "side" in verb else "")
        elif name == "disk":
            assert self.disk is not None
            self.disk.is_stuck = verb == "hangs"
        elif name == "clock":
            delivery.pass_time(self, int(verb.split()[1]))
        elif name == "recover":
            recover(self, self._perform_if_possible, self.perform, by_chance(0), attended=verb != "unattended")
        elif name in self.coordinators:
            self._perform_coordinator(self.coordinators[name], verb)
        elif name in self.hosts:
            self._perform_host(self.hosts[name], verb)
        else:
            self._perform_rank(self.ranks[name], verb)

    def _perform_rank(self, rank: Rank, verb: str) -> None:
        host = self.hosts[rank.host]
        match verb:
            case "is received":
                host.receive_from(self, rank)
            case "is noticed":
                host.on_exit_began(self, rank)
            case "is reaped":
                host.on_exit(self, rank)
                self.actors.remove(rank)
            case _:
                if (host.is_fenced or rank.agent != host.id) and verb not in rank.faults():
                    raise Violation(f"RULE-3: {rank.name} {verb}, but its agent {rank.agent} may be held to be lost")
                rank.perform(self, verb)
                return
        fact_checks.check_session(host)

    def _perform_if_possible(self, move: Move) -> None:
        if self.is_possible(move):
            self.perform(move)

    def _perform_coordinator(self, coordinator: CoordinatorProcess, verb: str) -> None:
        match verb:
            case "crashes":
                self.crash_coordinator(coordinator)
            case "is parted" | "is back":
                coordinator.zone = "side" if verb == "is parted" else ""
                self.zone_of[coordinator.address] = coordinator.zone
                self.seen.add("partition")
            case "stops":
                coordinator.stop(self)
            case "goes on":
                if coordinator.go_on(self) > coordinator.state.timeouts.lease_s:
                    self.seen.add("coordinator paused beyond a lease")
            case _:
                coordinator.perform(self, verb)

    def _perform_host(self, host: Host, verb: str) -> None:
        match verb:
            case "dies":
                self.end_host(host)
            case "is cut off" | "is parted" | "is back":
                host.zone = {"is cut off": host.name, "is parted": "side", "is back": ""}[verb]
                self._sever(host)
            case "freezes":
                host.is_frozen = True
            case "thaws":
                host.is_frozen = False
                self._note_pause(host, "host")
                host_session.watch(host, self)
            case "stops":
                host.is_stopped = True
            case "goes on":
                host.is_stopped = False
                self._note_pause(host, "agent")
            case "is slow" | "is quick":
                host.is_slow = verb == "is slow"
                self.seen.add("slow session")
            case "is narrow" | "is wide":
                host.is_narrow = verb == "is narrow"
                self.seen.add("narrow network")
            case _ if verb.startswith((_BLOCKED, _UNBLOCKED)):
                self._block(host, verb)
            case _ if verb in host_moves.FAULTS:
                host.inject(self, verb)
            case _:
                host.perform(self, verb)
                fact_checks.check_session(host)

    def _note_pause(self, host: Host, what: str) -> None:
        if host.lease_until_s is not None and host.is_lease_over(self):
            self.seen.add(f"{what} paused beyond its lease")

    def _block(self, host: Host, verb: str) -> None:
        pair = host.name, verb.split()[-1]
        if verb.startswith(_BLOCKED):
            self.blocked.add(pair)
            self.seen.add("blocked path")
        else:
            self.blocked.discard(pair)
        self._sever(host)

    def _sever(self, host: Host) -> None:
        for generation in self.generations.values():
            if host.name in generation.hosts and self._is_parted(generation):
                generation.sever()

    def _is_parted(self, generation: SimulatedGeneration) -> bool:
        if any(generation.hosts.issuperset(pair) for pair in self.blocked):
            return True
        return len({self.hosts[name].zone for name in generation.hosts}) > 1

    def add_host(self, num_ranks: int, mismatch: str = "", *, forks_late: bool = False, agent: str = "") -> None:
        """`agent`: the id of another one that it has too; "" for one of its own."""
        name = _name_of(len(self.hosts))
        host = Host(self, name, num_ranks, mismatch, agent, forks_late=forks_late)
        self.hosts[name] = host
        self.agents.setdefault(host.id, host)
        self.actors.append(host)

    def end_host(self, host: Host) -> None:
        if not host.alive:
            return
        host.alive = False
        self.num_dead_hosts += 1
        self.actors.remove(host)
        if host.connection is not None:
            host.hang_up(self)
        host.kill_ranks()
        for rank in host.ranks:
            self.actors.remove(rank)

    def lose_state(self, host: Host, reason: str) -> None:
        """The agent of `host` ends because the job's state is lost."""
        led_elsewhere = promises.led_elsewhere(self, host)
        others = {rank for rank in self._holders() if rank.host in led_elsewhere or rank not in self._held_when_lost}
        if self.chain.record is not None:
            left = [rank for rank in self.chain.counting() if rank not in others and rank.host not in led_elsewhere]
            self.chain.invariants.lose(self.chain.record, left)
        if not others:
            self.given_up = reason

    def note_lost_state(self) -> None:
        """A coordinator says that the state is lost. Who comes back before an agent has read that may get state."""
        self._held_when_lost = self._holders()

    def _holders(self) -> set[Rank]:
        return {rank for rank in self.ranks.values() if rank.alive and rank.state is not None}

    def note(self, notice: Notice) -> None:
        """What agents tell their users."""
        line = f"undecided  {notice.reason}"
        if notice.topic == "undecided" and self.log[-1:] != [line]:
            self.log.append(line)

    def reaches(self, one: str, other: str) -> bool:
        a, b = self.hosts[one], self.hosts[other]
        return one == other or (a.alive and b.alive and a.zone == b.zone and (one, other) not in self.blocked)

    def generation(self, record: Record) -> SimulatedGeneration:
        if record.digest not in self.generations:
            generation = SimulatedGeneration(record, {name: rank.host for name, rank in self.ranks.items()})
            self.generations[record.digest] = generation
            if any(not self.ranks[member].alive for member in generation.seated):
                generation.broken = True
            if self._is_parted(generation):
                generation.sever()
        return self.generations[record.digest]

    def holdings(self) -> str:
        """The state of each live rank, for the log."""
        living = (rank for rank in self.ranks.values() if rank.alive)
        return "; ".join(f"{rank.name} holds {rank.state or 'nothing'}" for rank in living) or "nobody is left"
