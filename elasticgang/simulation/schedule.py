"""Random schedules: a phase of faults, then a quiet phase in which the job must go on (RULE-7).

Each schedule draws its own weights at its start: some faults occur often and others never, and one host at a time may
be slow. So each schedule combines few kinds of faults, but repeats them.

Equal seeds give equal schedules, in every process and Python version.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from elasticgang.layout import ParallelLayout
from elasticgang.simulation.cluster import RARE_MOVES, Cluster, Move, Setting
from elasticgang.simulation.host import Host
from elasticgang.simulation.invariants import Model, Violation
from elasticgang.simulation.rank import APPLYING, REDUCING, VOTING, Rank

FLAT = ParallelLayout()
TP = ParallelLayout(tp=2)
TP_ACROSS = ParallelLayout(tp=2, within_host=())
SDP = ParallelLayout(sdp=2)
PP = ParallelLayout(pp=2)
PP_SDP = ParallelLayout(pp=2, sdp=2)

SETTINGS = (
    *(Setting(FLAT, hosts) for hosts in ((1, 1), (2, 1), (1, 1, 1), (2, 2), (1, 1, 1, 1))),
    *(Setting(TP, hosts) for hosts in ((2, 2), (3, 2), (2, 2, 2))),
    *(Setting(TP_ACROSS, hosts) for hosts in ((1, 1, 1), (2, 2), (2, 1, 1))),
    *(Setting(SDP, hosts) for hosts in ((2, 2), (1, 1, 1), (1, 1, 1, 1))),
    *(Setting(PP, hosts) for hosts in ((2, 2), (2, 1, 1))),
    Setting(PP_SDP, (4, 2, 2)),
    Setting(FLAT, (2, 2), num_spares=1),
    Setting(FLAT, (2, 3, 2), num_spares=1),
    Setting(SDP, (3, 2), num_spares=1),
    Setting(FLAT, (1, 1, 1), min_hosts=2, max_hosts=2),
    Setting(TP, (3, 3), num_spares=1),
    Setting(TP_ACROSS, (2, 2, 1), num_spares=1, max_hosts=2),
    Setting(FLAT, (2, 1), num_steps=4),
    Setting(TP_ACROSS, (1, 1, 1), num_steps=4),
)

_FAULT_PHASE_MOVES = (200, 900)
_FIRST_QUIET_MOVES = 200
_SLOW_MOVES = 150
_QUIET_MOVES = 6000
_TIMEOUT_MOVES = 400  # an open request times out
_FAULT_RATES = (0.007, 0.02, 0.06)
_BURST_MOVES, _BURST_RATE = 40, 0.1
_MOVE_WEIGHTS = (0.0, 1.0, 1.0, 4.0)
_RARITY = 0.25
_RARE_MOVE_RATES = (0.01, 0.1, 0.5)
_SELDOM = {"gives up": 0.05, "gives up late": 0.05, "fails to start a rank": 0.5, "times out: ": 0.2}
_FAULTS = (
    "joins",
    "restarts",
    "is cut off",
    "is back",
    "host dies",
    "rank dies",
    "breaks",
    "leaves",
    "tears",
    "is to drain",
)
_RARE_FAULTS = (
    "leaves by its script",
    "exits early",
    "raises",
    "hangs",
    "gets SIGTERM",
    "gets SIGINT",
    "is exhausted",
    "recovers",
    "forks late",
)
_TIMER = "times out: "  # an agent's timer, which expires rarely, so that much happens before it
_OF_HOSTS = frozenset({"is cut off", "host dies", "gets SIGTERM", "gets SIGINT"})
_INCOMPATIBLE = ("job", "layout", "protocol")
_INCOMPATIBLE_RATE = 0.1
_SLOW_JOIN_RATE = 0.5
_RUTHLESS_RATE = 0.02
_AIMED_RATE = 0.5
_SLOWNESS = 0.95
_MAX_HOSTS = 5
_MAX_WAITS = 5


@dataclass(frozen=True)
class Failure:
    """`moves` lead from `setting` to the violation. For a standstill (RULE-7) they lead to the beginning of the quiet
    phase."""

    seed: int
    setting: Setting
    moves: tuple[Move, ...]
    violation: str


class Schedule:
    """One random run. `run` may be called once."""

    def __init__(self, seed: int, setting: Setting | None = None) -> None:
        self.seed = seed
        self._chance = random.Random(seed)
        self.setting = setting or self._chance.choice(SETTINGS)
        self.moves: list[Move] = []
        self.num_waits = 0
        self._num_fault_moves = 0
        self._move_weights = [self._chance.choice(_MOVE_WEIGHTS) for _ in _FAULTS]
        self._move_weights += [self._chance.choice(_MOVE_WEIGHTS) * _RARITY for _ in _RARE_FAULTS]
        seldom = [*sorted(RARE_MOVES), _TIMER]
        self._rare_move_rates = {
            verb: self._chance.choice(_RARE_MOVE_RATES) * _SELDOM.get(verb, 1.0) for verb in seldom
        }
        self._slow = ""

    def run(self) -> Failure | None:
        self.cluster = self._make_cluster()
        try:
            self._fault_phase()
            self._num_fault_moves = len(self.moves)
            self._quiet_phase()
        except Violation as violation:
            is_still = str(violation).startswith("RULE-7: ")
            moves = self.moves[: self._num_fault_moves] if is_still else self.moves
            return Failure(self.seed, self.setting, tuple(moves), str(violation))
        return None

    def _make_cluster(self) -> Cluster:
        return Cluster(self.setting)

    def _do(self, move: Move) -> None:
        self.moves.append(move)
        self.cluster.perform(move)

    # -- faults

    def _fault_phase(self) -> None:
        chance, cluster = self._chance.random, self.cluster
        rate = self._chance.choice(_FAULT_RATES)
        has_slow_hosts = chance() < 0.5
        calm = _FIRST_QUIET_MOVES if chance() < 0.7 else 0  # mostly let the job start before the first fault
        burst = 0
        for number in range(self._chance.randint(*_FAULT_PHASE_MOVES)):
            if cluster.given_up:
                return
            if number >= calm and chance() < (_BURST_RATE if number < burst else rate):
                burst = number + _BURST_MOVES if chance() < 0.3 else burst
                self._fault()
                continue
            if has_slow_hosts and number % _SLOW_MOVES == 0:
                self._slow = self._chance.choice(["", *cluster.hosts])
            self._go_on()

    def _go_on(self) -> None:
        """Somebody does what comes by itself."""
        cluster, chance = self.cluster, self._chance.random
        actor = cluster.actors[int(chance() * len(cluster.actors))]
        if actor.home == self._slow and self._slow and chance() < _SLOWNESS:
            return
        options = actor.moves(cluster)
        if options:
            verb = options[int(chance() * len(options))]
            kind = _TIMER if verb.startswith(_TIMER) else verb
            if kind not in self._rare_move_rates or chance() < self._rare_move_rates[kind]:
                self._do((actor.name, verb))

    def _fault(self) -> None:
        cluster, chance = self.cluster, self._chance
        hosts = [host for host in cluster.hosts.values() if host.alive]
        (kind,) = chance.choices([*_FAULTS, *_RARE_FAULTS], [liking + 0.01 for liking in self._move_weights])
        if not hosts or kind == "joins":
            if len(hosts) < _MAX_HOSTS:
                # Before the first record, the side with fewer agents is the refused one.
                is_strange = chance.random() < _INCOMPATIBLE_RATE and cluster.record is not None
                mismatch = f" of another {chance.choice(_INCOMPATIBLE)}" if is_strange else ""
                slowly = "slowly " * (chance.random() < _SLOW_JOIN_RATE)
                self._do(("host", f"joins {slowly}with {chance.randint(1, self._num_whole())}{mismatch}"))
        elif kind == "restarts":
            self._do(("lighthouse", "restarts"))
        elif kind == "is back":
            cut = [host for host in hosts if host.is_cut]
            if cut:
                self._do((chance.choice(cut).name, "is back"))
        elif kind in ("is exhausted", "recovers", "forks late"):
            able = [host for host in hosts if kind in host.faults()]
            if able:
                self._do((chance.choice(able).name, kind))
        else:
            self._inject(kind)

    def _inject(self, kind: str) -> None:
        """Inject a fault into a rank or its host, preferably during a vote or into a holder of scarce state."""
        cluster, chance = self.cluster, self._chance
        ranks = [rank for rank in cluster.ranks.values() if rank.alive]
        if not ranks:
            return
        rank = chance.choice(ranks)
        if chance.random() < _AIMED_RATE:
            scarce = self._scarce(ranks)
            voting = {rank.generation for rank in ranks if rank.phase in (VOTING, APPLYING)}
            critical = [rank for rank in ranks if rank.generation in voting and rank.phase is not REDUCING]
            if scarce and chance.random() < 0.5:
                rank, other = chance.choice(scarce)
                if chance.random() < 0.5:
                    self._slow = other.host
            elif critical:
                rank = chance.choice(critical)
        host = cluster.hosts[rank.host]
        if kind in _OF_HOSTS:
            if not (host.is_cut and kind == "is cut off") and self._may_inject(host.ranks):
                self._do((host.name, kind.removeprefix("host ")))
            return
        verb = kind.removeprefix("rank ")
        if verb in rank.faults() and (verb == "breaks" or self._may_inject([rank])):
            self._do((rank.name, verb))

    @staticmethod
    def _scarce(ranks: Sequence[Rank]) -> list[tuple[Rank, Rank]]:
        """Ranks that are the only voter for their part of the state, each with another holder of the part."""
        voters: dict[Model, list[Rank]] = {}
        others: dict[Model, Rank] = {}
        for rank in ranks:
            if rank.state is not None and rank.model is not None:
                if rank.generation is not None and rank.member_state.is_active:
                    voters.setdefault(rank.model, []).append(rank)
                else:
                    others[rank.model] = rank
        return [(alone[0], others[model]) for model, alone in voters.items() if len(alone) == 1 and model in others]

    def _may_inject(self, victims: Iterable[Rank]) -> bool:
        """Whether the state survives without `victims`; rarely True although it does not, since that ends the job."""
        rest = (rank for rank in self.cluster.ranks.values() if rank.alive and rank not in victims)
        models = {rank.model for rank in rest if rank.state and not self.cluster.hosts[rank.host].is_cut}
        return len(models) == self.setting.layout.unit or self._chance.random() < _RUTHLESS_RATE

    # -- quiet

    def _quiet_phase(self) -> None:
        """After repairs, with enough ranks and without endless delays, the job must go on."""
        cluster, chance = self.cluster, self._chance.random
        if self._is_over():
            return
        self._repair()
        goal: int | None = None
        idle = 0
        for number in range(1, _QUIET_MOVES):
            actor = cluster.actors[int(chance() * len(cluster.actors))]
            options = [verb for verb in actor.moves(cluster) if verb not in RARE_MOVES]
            if options:
                idle = 0
                self._do((actor.name, options[int(chance() * len(options))]))
                if self._is_over():
                    return
            else:
                idle += 1
            if number % _TIMEOUT_MOVES == 0:
                self._time_out()
            if number % 8 == 0 and self._is_whole():
                num_steps = max(
                    (rank.member_state.committed.step for rank in cluster.ranks.values() if rank.alive), default=0
                )
                if goal is not None and num_steps >= goal:
                    return
                goal = goal or num_steps + 1
            if idle > 20 * len(cluster.actors) and not any(self._possible()):
                idle = 0
                self._wait()
        raise Violation(f"RULE-7: the job does not go on; {self._standstill()}")

    def _repair(self) -> None:
        hosts = [host for host in self.cluster.hosts.values() if host.alive]
        for host in hosts:
            if host.is_cut:
                self._do((host.name, "is back"))
            if host.is_exhausted:
                self._do((host.name, "recovers"))
        remaining = [self._num_remaining(host) for host in hosts if not host.mismatch]
        lacking = self.setting.min_hosts - sum(map(bool, remaining)) if self.cluster.record is None else 0
        if max(remaining, default=0) < self.setting.layout.unit:
            lacking = max(lacking, 1)
        for _ in range(lacking):
            self._do(("host", f"joins with {self._num_whole()}"))

    @staticmethod
    def _num_remaining(host: Host) -> int:
        """Ranks that take part or are going to."""
        if host.signal:
            return 0
        if host.is_fenced:
            return host.num_ranks
        ready = sum(rank.alive and not (rank.draining or rank.hangs or rank.raised) for rank in host.ranks)
        return ready + host.agent.num_coming

    def _num_whole(self) -> int:
        """The number of ranks of a host with one replica group and its spares."""
        return self.setting.layout.unit + self.setting.num_spares

    def _is_over(self) -> bool:
        return bool(self.cluster.given_up) or not any(host.alive for host in self.cluster.hosts.values())

    def _wait(self) -> None:
        """Let the join timeout pass or an open request time out: the lighthouse may wait for an agent that sends
        heartbeats but whose ranks hang while they start."""
        self.num_waits += 1
        early = "decides early" in self.cluster.lighthouse.moves(self.cluster)
        if early:
            self._do(("lighthouse", "decides early"))
        if not (early or self._time_out()) or self.num_waits > _MAX_WAITS:
            raise Violation(f"RULE-7: nothing happens any more; {self._standstill()}")

    def _time_out(self) -> bool:
        """Time out the open requests. Returns whether there were any."""
        calling = [host for host in self.cluster.hosts.values() if host.alive and host.calls]
        for host in calling:
            if "gives up" in host.moves(self.cluster):
                self._do((host.name, "gives up"))
        return bool(calling)

    def _possible(self) -> Iterator[str]:
        for actor in self.cluster.actors:
            yield from (verb for verb in actor.moves(self.cluster) if verb not in RARE_MOVES)

    def _is_whole(self) -> bool:
        """Whether every live rank that does not hang is in the present generation."""
        record = self.cluster.record
        return record is not None and all(
            rank.member_state.entered == record.generation
            for host in self.cluster.hosts.values()
            if host.alive
            for rank in host.ranks
            if rank.alive and not rank.hangs
        )

    def _standstill(self) -> str:
        """The phase of every live rank, for messages."""
        cluster = self.cluster
        generation = 0 if cluster.record is None else cluster.record.generation
        return f"generation {generation}; " + "; ".join(
            f"{host.name} {[call.phase for call in host.calls]} at "
            f"{0 if host.agent_state.record is None else host.agent_state.record.generation}: "
            + ", ".join(f"{rank.name} {rank.phase} at {rank.member_state.entered}" for rank in host.ranks if rank.alive)
            for host in cluster.hosts.values()
            if host.alive
        )
