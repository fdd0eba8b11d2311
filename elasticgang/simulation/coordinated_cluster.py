"""A simulated job under coordinators that decide: the real state machines of coordinator, session, agent and member.

Ranks, generations and the promises are those of the other simulation. Time is one number, which only the move `clock
passes N` increases; each process reads it by a clock of its own, too fast or too slow. While time passes, whoever is
neither slow nor stopped nor cut off sends and receives all that is under way; otherwise a message may take any time.

LOST-1   An agent that a coordinator declares lost is dead, or its lease is over and none of its ranks is in a
         generation; or it has promised a higher term, and has a lease of another coordinator.
LOST-2   It was silent for `lost_after_s` of the time during which the coordinator ran.
FENCE-1  No rank is given a record while the lease of its agent is over.
OFFICE-1 A coordinator that decides holds its directory, was granted its office, or was promised its term by every agent
         of the record.
PRESENT-1 A record leaves out no agent of the record before, unless it says that the agent is lost.
REPORT-1 Every agent of a record has a session with the coordinator that decides it, and has promised its term.
ACCEPT-1 A joiner is sent a record without a directory only after an agent of the record before has accepted it, or when
         all of these are dead.
FOUNDER  The operator founds a job without a directory anew only when no living host knows a record of it.
WORD     The operator grants an office only when no other coordinator lives, whoever is absent is dead or fenced, and
         no living agent, and no state directory, knows a newer record.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

from elasticgang.protocol.coordinator_messages import Decision, Push, Ticked
from elasticgang.protocol.record import Record, Report
from elasticgang.simulation import rank as ranks
from elasticgang.simulation.cluster import Cluster, Move, Setting, _describe, _name_of
from elasticgang.simulation.coordinated_host import CoordinatedHost
from elasticgang.simulation.coordinated_recovery import in_turn, recover
from elasticgang.simulation.coordinator_process import CoordinatorProcess, Disk
from elasticgang.simulation.generation import SimulatedGeneration
from elasticgang.simulation.invariants import Invariants, State, Violation
from elasticgang.simulation.rank import Rank

RARE_MOVES = ranks.RARE_MOVES | {"hangs up", "kills a fenced rank", "founds"}
_RARE_WORDS = ("resets ", "misses ")  # of coordinators

STEP_S = 0.9  # by which time passes at once: no coordinator stands still for long
MAIN = "main"

_JOINS = re.compile(r"joins with (\d+)(?: of another (\w+))?(?: as (\w+))?")
_HOST_FAULTS = frozenset(
    {"dies", "is cut off", "is parted", "is back", "freezes", "thaws", "stops", "goes on", "is slow", "is quick"}
)
_COORDINATOR_FAULTS = frozenset({"crashes", "is parted", "is back", "stops", "goes on"})

Actor: TypeAlias = "Rank | CoordinatedHost | CoordinatorProcess | Clock"


class Clock:
    """Time passes only by a move that the schedule chooses."""

    name = "clock"
    home = ""

    def moves(self, cluster: CoordinatedCluster) -> list[str]:
        return []


class StableInvariants(Invariants):
    """A record has one state, also when it is looked up before the record has an effect."""

    def __init__(self, models: Any) -> None:
        super().__init__(models)
        self._known: dict[str, State] = {}

    def _state_of(self, record: Record, parent: Record | None) -> State:
        if record.digest not in self._known:
            self._known[record.digest] = super()._state_of(record, parent)
        return self._known[record.digest]

    def forget(self, base: State | None, held: Collection[State]) -> None:
        """What builds on no more than `base` stays, and what somebody holds; the rest never happened."""
        for newest in list(self._newest):
            for past in list(self._past(newest)):
                if (base is None or not base.holds(past)) and not any(state.holds(past) for state in held):
                    self.given_up.add(past)
            if newest in self.given_up:
                self._newest.pop(newest, None)


class CoordinatedCluster(Cluster):
    recovery = ("recover", "")

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.layout = setting.layout
        self.num_steps = setting.num_steps
        self.now_s = 0.0
        self.record: Record | None = None
        self.chain: list[Record] = []
        self.written: set[str] = set()  # digests of records that have had an effect
        self.tentative: dict[str, tuple[Decision, list[Report]]] = {}
        self.records: dict[str, Record] = {}  # whatever was decided, by digest
        self.generations: dict[str, SimulatedGeneration] = {}
        self.hosts: dict[str, CoordinatedHost] = {}  # type: ignore[assignment]
        self.agents: dict[str, CoordinatedHost] = {}  # type: ignore[assignment]  # by id: the first of that id
        self.seen: set[str] = set()
        self.ranks: dict[str, Rank] = {}
        self.actors: list[Any] = [Clock()]
        self.coordinators: dict[str, CoordinatorProcess] = {}
        self._living: list[CoordinatorProcess] = []
        self.num_alive: Counter[str] = Counter()  # hosts, by id
        self.zone_of: dict[str, str] = {}  # of each address
        self.disk = Disk() if setting.has_directory else None
        self.given_up = ""
        self.finished = False
        self.log: list[str] = []
        self.num_void = 0
        self.num_dead_hosts = self.num_only_healed = self.num_sessions = 0
        self.num_forgotten = 0
        self.declared_lost: set[str] = set()  # hosts
        layout = setting.layout
        self.invariants: StableInvariants = StableInvariants(
            [(pp, sdp, tp) for pp in range(layout.pp) for sdp in range(layout.sdp) for tp in range(layout.tp)]
        )
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

    def may_found(self, coordinator: CoordinatorProcess) -> bool:
        """FOUNDER"""
        if len(self.living()) > 1 or self.disk is not None:
            return False
        for host in self.hosts.values():
            pushes = () if host.connection is None else host.connection.to_agent
            if host.alive and (host.session.decision is not None or any(isinstance(m, Push) for m in pushes)):
                return False
        return True

    def may_grant(self, coordinator: CoordinatorProcess) -> bool:
        """WORD"""
        state = coordinator.state
        if (state.in_office and not state.awaits_word) or state.decision is None or len(self.living()) > 1:
            return False
        kept = None if self.disk is None else self.disk.decision
        if kept is not None and kept.ref.order > state.decision.ref.order:
            return False
        present = {session.host.name for number, session in coordinator.sessions.items() if number in state.sessions}
        for host in self.hosts.values():
            if not host.alive or host.name in present:
                continue
            known = host.session.decision
            if known is not None and known.ref.order > state.decision.ref.order:
                return False
            if host.id in state.decision.record.agents and not (host.session.is_fenced and host.is_inert):
                return False
        return True

    def hosts_of(self, agent: str) -> list[CoordinatedHost]:
        """The processes with this id: one, as a rule."""
        return [host for host in self.hosts.values() if host.id == agent]

    def check_lost(
        self, coordinator: CoordinatorProcess, lost: Collection[str], dead: Collection[str], *, silent: bool
    ) -> None:
        """`silent`: for no other reason."""
        for name in lost:
            silent_s = coordinator.silent_s(self, name)
            if silent and silent_s < coordinator.state.timeouts.lost_after_s:
                raise Violation(
                    f"LOST-2: {coordinator.name} declares {name} lost after it has run for {silent_s:.1f} s"
                )
            for host in self.hosts_of(name):
                self._check_lost(coordinator, host)
        for name in dead:
            for host in self.hosts_of(name):
                self._check_dead(coordinator, host)

    def _check_lost(self, coordinator: CoordinatorProcess, host: CoordinatedHost) -> None:
        if host.alive:
            self.seen.add("lost but alive")
        if not host.alive or host.is_frozen or (host.is_inert and host.is_lease_over(self)):
            return
        holder = host.lease_holder
        is_led_elsewhere = holder is not None and holder is not coordinator
        if not (is_led_elsewhere and host.session.promised > coordinator.state.term):
            raise Violation(
                f"LOST-1: {coordinator.name} declares {host.name} lost, whose lease "
                f"{'is over' if host.is_lease_over(self) else 'goes on'} and whose ranks "
                f"{'wait' if host.is_inert else 'run'}"
            )

    def _check_dead(self, coordinator: CoordinatorProcess, host: CoordinatedHost) -> None:
        if host.alive and host.is_frozen:
            self.end_host(host, "")  # when it goes on, its ranks end before they do anything
        elif host.lease_until_s is None:
            return  # its ranks never acted: they hold nothing
        elif host.alive and (host.lease_holder is None or host.lease_holder is coordinator):
            raise Violation(f"LOST-1: {coordinator.name} declares {host.name} dead, which lives")

    def check_decision(self, coordinator: CoordinatorProcess, decision: Decision) -> None:
        """`coordinator` has decided it just now."""
        record = decision.record
        before = self.records.get(record.parent)
        if record.absent_agents:
            raise Violation(f"PRESENT-1: generation {record.generation} goes on without {record.absent_agents}")
        present = {coordinator.sessions[n].host for n in coordinator.state.sessions if n in coordinator.sessions}
        promised = {host.id for host in present if host.session.promised >= decision.term}
        if not promised.issuperset(record.agents):
            raise Violation(
                f"REPORT-1: generation {record.generation} of {record.agents}, but only {promised} are here"
            )
        needed = () if before is None else before.agents
        if not coordinator.is_granted and not (needed and coordinator.promises.issuperset(needed)):
            raise Violation(f"OFFICE-1: {coordinator.name} decides, but only {sorted(coordinator.promises)} promised")
        if any(c is not coordinator and c.state.in_office for c in self.living()):
            self.seen.add("decided beside another in office")

    def check_push(self, coordinator: CoordinatorProcess, host: CoordinatedHost, decision: Decision) -> None:
        record = decision.record
        before = self.records.get(record.parent)
        if coordinator.disk is not None or before is None or host.id in before.agents:
            return
        parents = [other for other in self.hosts.values() if other.id in before.agents and other.id in record.agents]
        for other in parents:
            known = other.session.decision
            if known is not None and known.ref.order >= decision.ref.order:
                self.seen.add("joiner waited")
                return
        if any(other.alive for other in parents):
            raise Violation(f"ACCEPT-1: {coordinator.name} sends {record.generation} to {host.name} before its parents")

    # -- time

    def pass_time(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.now_s += STEP_S
            for host in list(self.hosts.values()):
                if host.alive and not host.is_frozen:
                    if not host.is_stopped:
                        host.tick(self)
                    if host.alive:
                        host.watch(self)
            for coordinator in self.living():
                if not coordinator.is_stopped:
                    self._tick(coordinator)
            self._exchange()

    @staticmethod
    def _is_prompt(host: CoordinatedHost) -> bool:
        return host.alive and not (host.is_slow or host.is_frozen or host.is_stopped)

    def _tick(self, coordinator: CoordinatorProcess) -> None:
        coordinator.do(self, Ticked())

    def _exchange(self) -> None:
        """What is under way arrives, between those that are not slow."""
        for host in list(self.hosts.values()):
            if host.connection is None and self._is_prompt(host):
                self._reconnect(host)
        coordinators = [coordinator for coordinator in self.living() if not coordinator.is_stopped]
        for _ in range(4):
            has_moved = False
            for coordinator in coordinators:
                has_moved |= self._serve(coordinator)
            for host in list(self.hosts.values()):
                connection = host.connection
                if connection is not None and (connection.to_agent or not connection.is_coordinator_open):
                    has_moved |= self._receive_all(host)
            if not has_moved:
                return

    def _serve(self, coordinator: CoordinatorProcess) -> bool:
        """Returns whether there was something to do."""
        has_moved = False
        while coordinator.may_write:
            coordinator.perform(self, "writes")
            has_moved = True
        for number, session in list(coordinator.sessions.items()):
            is_waiting = bool(session.to_coordinator) or not session.is_agent_open
            if not is_waiting or number not in coordinator.sessions or not self._is_prompt(session.host):
                continue
            while session.to_coordinator and coordinator.reaches(session):
                coordinator.receive(self, session)
                has_moved = True
            if not session.is_agent_open and number in coordinator.sessions:
                coordinator.lose(self, number)
                has_moved = True
        while coordinator.may_write:
            coordinator.perform(self, "writes")
        has_moved |= bool(coordinator.outbox)
        while coordinator.outbox:
            coordinator.perform(self, "sends")
        return has_moved

    def _receive_all(self, host: CoordinatedHost) -> bool:
        has_moved = False
        while self._is_prompt(host) and host.connection is not None:
            connection = host.connection
            if connection.coordinator.zone != host.zone:
                break
            if connection.to_agent:
                host.receive(self)
            elif not connection.is_coordinator_open:
                host.perform(self, "loses its session")
            else:
                break
            has_moved = True
        return has_moved

    def _reconnect(self, host: CoordinatedHost) -> None:
        listening = [c for c in self.listening(host.zone) if host.may_dial(c)]
        if listening:
            host.dial(self, listening[self.num_sessions % len(listening)])
        else:
            for address in self.refusing(host.zone):
                host.perform(self, f"finds nobody at {address}")

    # -- moves

    @staticmethod
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
                return self.may_grant(coordinator)
            return verb in coordinator.moves(self)
        if name in self.hosts:
            host = self.hosts[name]
            if not host.alive:
                return False
            if verb in ("freezes", "thaws"):
                return host.is_frozen == (verb == "thaws")
            if verb in ("stops", "goes on"):
                return host.is_stopped == (verb == "goes on")
            if verb in _HOST_FAULTS or verb == "gives up":
                return True
            return verb in host.moves(self)
        rank = self.ranks.get(name)
        if rank is None or rank not in self.actors:
            return False
        if self.hosts[rank.host].is_frozen:
            return False
        return verb in rank.moves(self) or (rank.alive and verb in rank.faults())

    def moves_of(self, actor: Any) -> list[str]:
        """Nothing of a rank whose host or agent cannot do its part."""
        if isinstance(actor, Rank):
            host = self.hosts[actor.host]
            if host.is_frozen:
                return []
            if host.is_stopped:
                return [verb for verb in actor.moves(self) if verb not in ("is received", "is reaped")]
        moves: list[str] = actor.moves(self)
        return moves

    def perform(self, move: Move) -> None:
        name, verb = move
        if name == "host":
            joins = _JOINS.fullmatch(verb)
            if joins is None:
                raise ValueError(f"`host {verb}` is not a move")
            self.add_host(int(joins[1]), joins[2] or "", agent=joins[3] or "")
        elif name == "operator":
            self.start_coordinator("without" not in verb, zone="side" if "side" in verb else "")
        elif name == "disk":
            assert self.disk is not None
            self.disk.is_stuck = verb == "hangs"
        elif name == "clock":
            self.pass_time(int(verb.split()[1]))
        elif name == "recover":
            recover(self, self._perform_if_possible, self.perform, in_turn(), attended=verb != "unattended")
        elif name in self.coordinators:
            self._perform_coordinator(self.coordinators[name], verb)
        elif name in self.hosts:
            self._perform_host(self.hosts[name], verb)
        elif verb == "is received":
            self.hosts[self.ranks[name].host].receive_from(self, self.ranks[name])
        elif verb == "is reaped":
            rank = self.ranks[name]
            self.hosts[rank.host].on_exit(self, rank)
            self.actors.remove(rank)
        else:
            self.ranks[name].perform(self, verb)

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

    def _perform_host(self, host: Any, verb: str) -> None:
        match verb:
            case "dies":
                self.end_host(host, "")
            case "is cut off" | "is parted" | "is back":
                host.zone = {"is cut off": host.name, "is parted": "side", "is back": ""}[verb]
                for generation in self.generations.values():
                    if host.name in generation.hosts and self._is_parted(generation):
                        generation.sever()
            case "freezes":
                host.is_frozen = True
            case "thaws":
                host.is_frozen = False
                self._note_pause(host, "host")
                host.watch(self)
            case "stops":
                host.is_stopped = True
            case "goes on":
                host.is_stopped = False
                self._note_pause(host, "agent")
            case "is slow" | "is quick":
                host.is_slow = verb == "is slow"
                self.seen.add("slow session")
            case "gives up":
                host.give_up_last_step(self)
            case _:
                host.perform(self, verb)

    def _note_pause(self, host: CoordinatedHost, what: str) -> None:
        if host.lease_until_s is not None and host.is_lease_over(self):
            self.seen.add(f"{what} paused beyond its lease")

    def _is_parted(self, generation: SimulatedGeneration) -> bool:
        return len({self.hosts[name].zone for name in generation.hosts}) > 1

    def add_host(self, num_ranks: int, mismatch: str = "", *, forks_late: bool = False, agent: str = "") -> None:
        """`agent`: the id of another one that it has too; "" for one of its own."""
        name = _name_of(len(self.hosts))
        host = CoordinatedHost(self, name, num_ranks, mismatch, agent)
        self.hosts[name] = host
        self.agents.setdefault(host.id, host)
        self.num_alive[host.id] += 1
        self.actors.append(host)

    def end_host(self, host: Any, reason: str) -> None:
        if not host.alive:
            return
        if "state is lost" in reason:
            if self.record is not None:
                self.invariants.lose(self.record, self.counting())
            self.given_up = reason
        if reason.startswith("evicted"):
            self.seen.add("evicted")
        if reason:
            self.log.append(f"{host.name} ends: {reason}")
        host.alive = False
        self.num_alive[host.id] -= 1
        self.num_dead_hosts += 1
        self.actors.remove(host)
        if host.connection is not None:
            host.hang_up()
        for rank in host.ranks:
            if rank.alive:
                rank.end(ranks.KILLED)
            self.actors.remove(rank)

    # -- what the parts ask of it

    def reaches(self, one: str, other: str) -> bool:
        a, b = self.hosts[one], self.hosts[other]
        return one == other or (a.alive and b.alive and a.zone == b.zone)

    def generation(self, record: Record) -> SimulatedGeneration:
        if record.digest not in self.generations:
            generation = SimulatedGeneration(record, {name: rank.host for name, rank in self.ranks.items()})
            self.generations[record.digest] = generation
            if any(not self.ranks[member].alive for member in generation.seated):
                generation.broken = True
            if self._is_parted(generation):
                generation.sever()
        return self.generations[record.digest]

    # -- records

    def note_decision(self, decision: Decision, proposal: Sequence[Report]) -> None:
        digest = decision.record.digest
        if digest not in self.tentative and digest not in self.written:
            self.tentative[digest] = (decision, list(proposal))
            self.records[digest] = decision.record

    def make_effective(self, decision: Decision) -> None:
        """An agent has the record, or a directory: from now on it counts."""
        record = decision.record
        if record.digest in self.written:
            return
        if record.parent and record.parent not in self.written and record.parent in self.tentative:
            self.make_effective(self.tentative[record.parent][0])  # only joiners knew it, and its parent's agents died
        self._forget_unknown(record)
        present = self.record
        expected = (1, "") if present is None else (present.generation + 1, present.digest)
        if (record.generation, record.parent) != expected:
            raise Violation(
                f"RULE-1: generation {record.generation} of {record.parent or 'nothing'} (term {decision.term.number} "
                f"of {decision.term.name}) does not follow {expected}"
            )
        _, proposal = self.tentative[record.digest]
        self.log.append(f"{decision.term.name}: {_describe(record)}")
        self._check_size(record, proposal)
        self.invariants.write(record, present, proposal, self.counting())
        self.declared_lost.update(host.name for agent, _ in record.dead_agents for host in self.hosts_of(agent))
        self.declared_lost.difference_update(self._hosts_in(record))
        self.record = record
        self.chain.append(record)
        self.written.add(record.digest)

    def _hosts_in(self, record: Record) -> set[str]:
        """Those whose agents take part: of several with one id, that whose ranks have seats."""
        seated = {self.ranks[seat.member].host for seat in record.seats}
        taken = {self.hosts[name].id for name in seated}
        return seated | {self.agents[agent].name for agent in record.agents if agent not in taken}

    def counting(self) -> list[Rank]:
        """The ranks of hosts that no record has declared lost."""
        return [rank for rank in self.ranks.values() if rank.host not in self.declared_lost]

    def begin_anew(self) -> None:
        self.forget()
        self.declared_lost.clear()
        for host in [host for host in self.hosts.values() if host.alive and host.mismatch]:
            self.end_host(host, "")

    def _forget_unknown(self, record: Record) -> None:
        """Without a directory, records that no living agent knows never were, except to agents declared lost."""
        known = {
            host.session.decision.record.digest
            for host in self.hosts.values()
            if host.alive and host.session.decision is not None and host.name not in self.declared_lost
        }
        back = list(self.chain)
        while back and back[-1].digest != record.parent:
            if back[-1].digest in known or (self.disk is not None and self.disk.decision is not None):
                return
            back.pop()
        if len(back) == len(self.chain) or (record.parent and not back):
            return
        self.num_forgotten += 1
        self.log.append(f"generation {self.chain[-1].generation} is forgotten: every agent that knew it is gone")
        for forgotten in self.chain[len(back) :]:
            self.declared_lost.difference_update(
                host.name for agent, _ in forgotten.dead_agents for host in self.hosts_of(agent)
            )
        self.chain = back
        self.record = back[-1] if back else None
        base = self.invariants.of[self.record.digest] if self.record is not None else None
        held = [s for rank in self.counting() if rank.alive for s in (rank.state, rank.prepared) if s is not None]
        self.invariants.forget(base, held)
