"""Random schedules of a job: a phase of faults, then quiet, in which the job must go on (RULE-7).

Each schedule draws its own weights at its start: some faults occur often and others never, and one host or coordinator
at a time may be slow. So each schedule combines few kinds of faults, but repeats them. In every fourth one, several
coordinators, with and without a state directory, contend for the agents: what leads to two leaders needs many such
faults at once.

Equal seeds give equal schedules, in every process and Python version.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from elasticgang.layout import ParallelLayout
from elasticgang.protocol.coordinator_messages import Push
from elasticgang.simulation.cluster import Cluster, Move, Setting
from elasticgang.simulation.coordinator_process import CoordinatorProcess
from elasticgang.simulation.faults import CONTENDED_FAULTS, FAULTS, NARROW_FAULTS, PATH_FAULTS, RARE, Faults
from elasticgang.simulation.invariants import Violation
from elasticgang.simulation.recovery import recover

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

# Jobs that take another layout while their ranks do not fill the first.
RESHAPING = (
    Setting(ParallelLayout(sdp=2, fallback=(FLAT,)), (1, 1, 1)),
    Setting(ParallelLayout(sdp=2, min_replicas=2, fallback=(FLAT,)), (2, 1, 1)),
    Setting(ParallelLayout(sdp=3, fallback=(SDP, FLAT)), (2, 1, 1)),
    Setting(ParallelLayout(tp=2, fallback=(FLAT,)), (2, 2)),
    Setting(ParallelLayout(pp=2, fallback=(FLAT,)), (2, 2), num_spares=1),
)
_RESHAPING_EVERY = 8

_CONTENDED_EVERY = 4
_CONTENTION = {
    "coordinator crashes": 1.0,
    "second coordinator": 2.0,
    "network is parted": 2.0,
    "coordinator stands still": 1.0,
    "sessions are slow": 2.0,
    "operator's word": 2.0,
    "joins": 1.0,
    "loses its address": 0.3,
}

_NARROW_EVERY = 8
_NARROW_WEIGHT = 4.0
_PATHS_EVERY = 8
_PATHS_WEIGHT = 6.0

_SELDOM = {"kills": 0.2, "resets": 0.2, "hangs": 0.3, "misses": 0.3, "founds": 0.2, "fails": 0.5, "times": 0.2}
_HICCUP_WORDS = (
    *("hangs", "kills", "resets", "misses", "founds", "prepares", "reports an error", "misses a heal"),
    *("fails", "times"),
)
_FAULT_PHASE_MOVES = (500, 2200)
_FIRST_QUIET_MOVES = 300
_PASSES = (*(1, 1, 1, 2, 2, 5, 8, 15, 15, 15) * 3, 45)  # of 0.9 s each
_LONG_PASS = 8  # in which leases end that nobody renews
_PASS_RATES = (0.002, 0.005, 0.015)
_REPAIR_RATES = (0.002, 0.01, 0.03)
_SLOW_MOVES = 150
_FAULT_RATES = (0.007, 0.02, 0.06)
_BURST_MOVES, _BURST_RATE = 40, 0.1
_MOVE_WEIGHTS = (0.0, 1.0, 1.0, 4.0)
_RARE_MOVE_RATES = (0.01, 0.1, 0.5)
_SLOWNESS = 0.95


@dataclass(frozen=True)
class Failure:
    """`moves` lead from `setting` to the violation. For a standstill (RULE-7) they lead to the beginning of the quiet
    phase."""

    seed: int
    setting: Setting
    moves: tuple[Move, ...]
    violation: str


class Schedule:
    """`has_directory`: None to draw it. `has_seconds`: whether several coordinators run at once."""

    def __init__(
        self,
        seed: int,
        setting: Setting | None = None,
        has_directory: bool | None = None,
        has_seconds: bool = True,
    ) -> None:
        self.seed = seed
        chance = self._chance = random.Random(seed)
        self.setting = setting or chance.choice(SETTINGS)
        if setting is None and seed % _RESHAPING_EVERY == 0:
            self.setting = RESHAPING[seed // _RESHAPING_EVERY % len(RESHAPING)]
        self.moves: list[Move] = []
        self._num_fault_moves = 0
        drawn = chance.random() < 0.5
        self.is_contended = has_seconds and not has_directory and seed % _CONTENDED_EVERY == 2
        self.setting = replace(
            self.setting,
            has_directory=drawn if has_directory is None else has_directory,
            saves_last=seed % 2 == 1,
            keeps=seed % 6 == 1,
        )
        self.has_seconds = has_seconds
        self._likings = [chance.choice(_MOVE_WEIGHTS) * RARE.get(fault, 1.0) for fault in FAULTS]
        self._likings = [liking + 0.01 for liking in self._likings] + [0.0 for _ in CONTENDED_FAULTS]
        if self.is_contended:
            self._likings = [
                _CONTENTION.get(fault, liking / 2)
                for fault, liking in zip(FAULTS + CONTENDED_FAULTS, self._likings, strict=True)
            ]
        is_narrow = seed % _NARROW_EVERY == 3
        self._likings += [_NARROW_WEIGHT if is_narrow else 0.0 for _ in NARROW_FAULTS]
        has_paths = seed % _PATHS_EVERY == 5
        self._likings += [_PATHS_WEIGHT if has_paths else 0.0 for _ in PATH_FAULTS]
        self._rates = {word: chance.choice(_RARE_MOVE_RATES) * _SELDOM.get(word, 1.0) for word in _HICCUP_WORDS}
        self._pass_rate = chance.choice(_PASS_RATES)
        self._repair_rate = chance.choice(_REPAIR_RATES)
        self._restart_at = -1

    def run(self) -> Failure | None:
        self.cluster = Cluster(self.setting)
        self._faults = Faults(
            self.cluster, self._chance, self._do, self._pick, self._likings, has_seconds=self.has_seconds
        )
        try:
            self._fault_phase()
            self._num_fault_moves = len(self.moves)
            self._quiet_phase()
        except Violation as violation:
            is_still = str(violation).startswith("RULE-7: ")
            moves = self.moves[: self._num_fault_moves] if is_still else self.moves
            return Failure(self.seed, self.setting, tuple(moves), str(violation))
        return None

    def _quiet_phase(self) -> None:
        recover(self.cluster, self._do, self._make, self._pick)

    def _pick(self, options: Sequence[Any]) -> Any:
        return options[int(self._chance.random() * len(options))]

    def _rate_of(self, verb: str) -> float:
        word = verb if verb == "reports an error" else verb.split()[0]
        return self._rates["misses a heal" if verb == "misses" else word]

    # -- faults

    def _fault_phase(self) -> None:
        chance, cluster, faults, actors = self._chance.random, self.cluster, self._faults, self.cluster.actors
        rate, pass_rate, repair_rate = self._chance.choice(_FAULT_RATES), self._pass_rate, self._repair_rate
        has_slow = chance() < 0.5
        quiet = _FIRST_QUIET_MOVES if chance() < 0.7 else 0
        burst = 0
        for number in range(self._chance.randint(*_FAULT_PHASE_MOVES)):
            if cluster.given_up:
                return
            if faults.aim or number == self._restart_at:
                self._crash_where_aimed(number)
            if not actors:
                self._do(("operator", faults.restart()))
            if chance() < repair_rate:
                faults.repair_one()
                continue
            if chance() < pass_rate:
                num_steps = self._chance.choice(_PASSES)
                if num_steps < _LONG_PASS or faults.may_pass_leases():
                    self._do(("clock", f"passes {num_steps}"))
                continue
            if number >= quiet and chance() < (_BURST_RATE if number < burst else rate):
                burst = number + _BURST_MOVES if chance() < 0.3 else burst
                faults.inject_one()
                continue
            if has_slow and number % _SLOW_MOVES == 0:
                faults.slow = self._chance.choice(["", *cluster.hosts, *(c.name for c in cluster.living())])
            actor = actors[int(chance() * len(actors))]
            if faults.slow and actor.home == faults.slow and chance() < _SLOWNESS:
                continue
            options = cluster.moves_of(actor)
            if options:
                verb = options[int(chance() * len(options))]
                if not cluster.is_rare(verb) or chance() < self._rate_of(verb):
                    self._make((actor.name, verb))

    def _crash_where_aimed(self, number: int) -> None:
        cluster, chance = self.cluster, self._chance
        if self._faults.aim and any(self._is_at(c, self._faults.aim) for c in cluster.living()):
            self._faults.aim = ""
            for c in cluster.living():
                if c.zone == "":
                    self._do((c.name, "crashes"))
            self._restart_at = number + chance.randint(0, 150)
        if number == self._restart_at and not any(c.zone == "" for c in cluster.living()):
            self._do(("operator", self._faults.restart()))

    @staticmethod
    def _is_at(c: CoordinatorProcess, aim: str) -> bool:
        if aim == "deciding":
            return c.state.is_deciding
        if not c.outbox:
            return False
        num_pushes = sum(isinstance(getattr(one, "message", None), Push) for one in c.outbox)
        if aim == "pushed to one":
            return c.state.record is not None and 0 < num_pushes < len(c.state.record.agents)
        return num_pushes > 0 and not (aim == "written" and c.writing)

    def _do(self, move: Move) -> None:
        if self.cluster.is_possible(move):  # no rank of a frozen host does anything
            self._make(move)

    def _make(self, move: Move) -> None:
        """`move` is one of those that its actor offers."""
        self.moves.append(move)
        self.cluster.perform(move)
