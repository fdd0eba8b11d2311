"""Random schedules of a job under coordinators that decide: a storm of faults, then quiet, in which the job must go on.

Equal seeds give equal schedules, in every process and Python version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from elasticgang.protocol.coordinator_messages import Push
from elasticgang.simulation import schedule as base
from elasticgang.simulation.cluster import Move, Setting
from elasticgang.simulation.coordinated_cluster import CoordinatedCluster, is_rare_move
from elasticgang.simulation.coordinator_process import CoordinatorProcess
from elasticgang.simulation.invariants import Violation
from elasticgang.simulation.schedule import Schedule

_FAULTS = (
    "joins",
    "is cut off",
    "is back",
    "host dies",
    "rank dies",
    "breaks",
    "leaves",
    "tears",
    "rank gets SIGTERM",
    "exits early",
    "leaves by its script",
    "coordinator crashes",
    "coordinator restarts",
    "second coordinator",
    "network is parted",
    "host stands still",
    "agent stands still",
    "coordinator stands still",
    "sessions are slow",
    "disk stands still",
)
_RARE = {
    "coordinator crashes": 0.4,
    "coordinator restarts": 0.4,
    "second coordinator": 0.3,
    "network is parted": 0.3,
    "host stands still": 0.3,
    "agent stands still": 0.3,
    "coordinator stands still": 0.3,
    "disk stands still": 0.3,
}
_SELDOM = {"kills": 0.2, "resets": 0.2, "hangs": 0.3, "misses": 0.3, "founds": 0.2}
_HICCUP_WORDS = ("hangs", "kills", "resets", "misses", "founds", "prepares", "reports an error", "misses a heal")
_AIMS = ("deciding", "pushing", "pushed to one", "written")
_FAULT_PHASE_MOVES = (600, 3000)
_FIRST_QUIET_MOVES = 300
_PASSES = (*(1, 1, 1, 2, 2, 5, 8, 15, 15, 15) * 3, 45)  # of 0.9 s each
_PASS_RATES = (0.002, 0.005, 0.015)
_QUIET_MOVES = 12_000
_IDLE_PASSES = 20
_MAX_WAITS = 16
_MAX_ADDED = 3


class CoordinatedSchedule(Schedule):
    """`has_directory`: None to draw it. `has_seconds`: whether several coordinators run at once."""

    cluster: CoordinatedCluster

    def __init__(
        self,
        seed: int,
        setting: Setting | None = None,
        has_directory: bool | None = None,
        has_seconds: bool = True,
    ) -> None:
        super().__init__(seed, setting)
        chance = self._chance
        drawn = chance.random() < 0.5
        self.has_directory = drawn if has_directory is None else has_directory
        self.has_seconds = has_seconds
        self._likings = [chance.choice(base._MOVE_WEIGHTS) * _RARE.get(fault, 1.0) for fault in _FAULTS]
        self._rates = {word: chance.choice(base._RARE_MOVE_RATES) * _SELDOM.get(word, 1.0) for word in _HICCUP_WORDS}
        self._pass_rate = chance.choice(_PASS_RATES)
        self._aim = ""  # at which point a coordinator is to crash
        self._restart_at = -1
        self._num_added = 0

    def _make_cluster(self) -> CoordinatedCluster:
        return CoordinatedCluster(self.setting, self.has_directory)

    def _quiet_phase(self) -> None:
        calm(self.cluster, self._do, self._pick, self._num_whole())

    def _pick(self, options: Sequence[Move]) -> Move:
        return options[int(self._chance.random() * len(options))]

    def _rate_of(self, verb: str) -> float:
        word = verb if verb == "reports an error" else verb.split()[0]
        return self._rates["misses a heal" if verb == "misses" else word]

    # -- faults

    def _fault_phase(self) -> None:
        chance, cluster = self._chance.random, self.cluster
        rate = self._chance.choice(base._FAULT_RATES)
        has_slow = chance() < 0.5
        quiet = _FIRST_QUIET_MOVES if chance() < 0.7 else 0
        burst = 0
        for number in range(self._chance.randint(*_FAULT_PHASE_MOVES)):
            if cluster.given_up:
                return
            self._crash_where_aimed(number)
            if chance() < self._pass_rate:
                self._do(("clock", f"passes {self._chance.choice(_PASSES)}"))
                continue
            if number >= quiet and chance() < (base._BURST_RATE if number < burst else rate):
                burst = number + base._BURST_MOVES if chance() < 0.3 else burst
                self._fault()
                continue
            if has_slow and number % base._SLOW_MOVES == 0:
                self._slow = self._chance.choice(["", *cluster.hosts, *(c.name for c in cluster.living())])
            actor = cluster.actors[int(chance() * len(cluster.actors))]
            if actor.home == self._slow and self._slow and chance() < base._SLOWNESS:
                continue
            options = cluster.moves_of(actor)
            if options:
                verb = options[int(chance() * len(options))]
                if not is_rare_move(verb) or chance() < self._rate_of(verb):
                    self._do((actor.name, verb))

    def _crash_where_aimed(self, number: int) -> None:
        cluster, chance = self.cluster, self._chance
        if self._aim and any(self._is_at(c, self._aim) for c in cluster.living()):
            self._aim = ""
            for c in cluster.living():
                if c.zone == "":
                    self._do((c.name, "crashes"))
            self._restart_at = number + chance.randint(0, 150)
        if number == self._restart_at and not any(c.zone == "" for c in cluster.living()):
            self._do(("operator", self._restart()))

    def _restart(self) -> str:
        return "starts one with its directory" if self._chance.random() < 0.7 else "starts one without"

    @staticmethod
    def _is_at(c: CoordinatorProcess, aim: str) -> bool:
        num_pushes = sum(isinstance(getattr(one, "message", None), Push) for one in c.outbox)
        record = c.state.record
        return {
            "deciding": c.state.is_deciding,
            "pushing": num_pushes > 0,
            "pushed to one": record is not None and 0 < num_pushes < len(record.agents),
            "written": num_pushes > 0 and not c.writing,
        }[aim]

    def _do(self, move: Move) -> None:
        if self.cluster.is_possible(move):  # no rank of a frozen host does anything
            super()._do(move)

    def _fault(self) -> None:
        cluster, chance = self.cluster, self._chance
        hosts = [host for host in cluster.hosts.values() if host.alive]
        (kind,) = chance.choices(_FAULTS, [liking + 0.01 for liking in self._likings])
        living = cluster.living()
        match kind:
            case "coordinator crashes":
                if chance.random() < 0.6:
                    self._aim = chance.choice(_AIMS)
                elif living:
                    self._do((chance.choice(living).name, "crashes"))
            case "coordinator restarts":
                for c in living:
                    if c.zone == "":
                        self._do((c.name, "crashes"))
                self._do(("operator", self._restart()))
            case "second coordinator":
                if self.has_seconds and len(living) < 2:
                    self._do(("operator", "starts one without" + (" on the side" if chance.random() < 0.4 else "")))
            case "network is parted":
                if self.has_seconds:
                    self._part(living)
            case "host stands still" | "agent stands still" | "sessions are slow":
                if hosts:
                    host = chance.choice(hosts)
                    begin, end, is_so = {
                        "host stands still": ("freezes", "thaws", host.is_frozen),
                        "agent stands still": ("stops", "goes on", host.is_stopped),
                        "sessions are slow": ("is slow", "is quick", host.is_slow),
                    }[kind]
                    self._do((host.name, end if is_so else begin))
            case "coordinator stands still":
                if living:
                    c = chance.choice(living)
                    self._do((c.name, "goes on" if c.is_stopped else "stops"))
            case "disk stands still":
                if cluster.disk is not None:
                    self._do(("disk", "works" if cluster.disk.is_stuck else "hangs"))
            case "is back":
                cut = [host for host in hosts if host.zone]
                if cut:
                    self._do((chance.choice(cut).name, "is back"))
            case _ if kind == "joins" or not hosts:
                if len(hosts) < base._MAX_HOSTS:
                    is_strange = chance.random() < 0.05 and cluster.record is not None
                    mismatch = f" of another {chance.choice(base._INCOMPATIBLE)}" if is_strange else ""
                    self._do(("host", f"joins with {chance.randint(1, self._num_whole())}{mismatch}"))
            case _:
                self._inject(kind)

    def _part(self, living: Sequence[CoordinatorProcess]) -> None:
        cluster, chance = self.cluster, self._chance
        hosts = [host for host in cluster.hosts.values() if host.alive]
        if any(host.zone == "side" for host in hosts):
            for host in hosts:
                if host.zone == "side":
                    self._do((host.name, "is back"))
            for c in living:
                if c.zone == "side" and chance.random() < 0.5:
                    self._do((c.name, "is back"))
            return
        for host in hosts:
            if host.zone == "" and chance.random() < 0.5:
                self._do((host.name, "is parted"))
        if living and chance.random() < 0.6:
            self._do((chance.choice(living).name, "is parted"))
        if len(cluster.living()) < 2 and chance.random() < 0.8:
            zone = "" if any(c.zone == "side" for c in cluster.living()) else " on the side"
            self._do(("operator", "starts one without" + zone))


def calm(
    cluster: CoordinatedCluster, do: Callable[[Move], None], pick: Callable[[Sequence[Move]], Move], num_whole: int
) -> None:
    """All is repaired, nobody is late for ever, and there are enough ranks: the job must go on (RULE-7)."""
    if _is_over(cluster):
        return
    _repair(cluster, do, num_whole)
    goal: int | None = None
    num_waits = num_added = 0
    for number in range(1, _QUIET_MOVES):
        options = [(a.name, verb) for a in cluster.actors for verb in cluster.moves_of(a) if not is_rare_move(verb)]
        if options:
            do(pick(options))
            if _is_over(cluster):
                return
        if number % 8 == 0 and _is_whole(cluster):
            num_steps = max((r.member_state.committed.step for r in cluster.ranks.values() if r.alive), default=0)
            if goal is not None and num_steps >= goal:
                return
            goal = goal or num_steps + 1
        if not options or number % 500 == 0:
            do(("clock", f"passes {_IDLE_PASSES}"))
            added = _operate(cluster, do, num_whole if num_added < _MAX_ADDED else 0)
            num_added += added
            num_waits += not options
            if num_waits > _MAX_WAITS:
                raise Violation(f"RULE-7: nothing happens any more; {standstill(cluster)}")
            if _is_over(cluster):
                return
    raise Violation(f"RULE-7: the job does not go on; {standstill(cluster)}")


def _is_over(cluster: CoordinatedCluster) -> bool:
    return bool(cluster.given_up) or cluster.num_dead_hosts == len(cluster.hosts)


def _repair(cluster: CoordinatedCluster, do: Callable[[Move], None], num_whole: int) -> None:
    if cluster.disk is not None and cluster.disk.is_stuck:
        do(("disk", "works"))
    for c in cluster.living():
        if c.zone:
            do((c.name, "is back"))
        if c.is_stopped:
            do((c.name, "goes on"))
    for host in [host for host in cluster.hosts.values() if host.alive]:
        for is_so, verb in ((host.is_frozen, "thaws"), (host.is_stopped, "goes on"), (host.is_slow, "is quick")):
            if is_so:
                do((host.name, verb))
        if host.alive and host.zone:
            do((host.name, "is back"))
    _leave_one_coordinator(cluster, do)
    hosts = [host for host in cluster.hosts.values() if host.alive]
    staying = [sum(not r.draining for r in host.ranks) + len(host.restarts) for host in hosts if not host.mismatch]
    lacking = cluster.setting.min_hosts - sum(map(bool, staying)) if cluster.record is None else 0
    if max(staying, default=0) < cluster.setting.layout.unit:
        lacking = max(lacking, 1)
    for _ in range(lacking):
        do(("host", f"joins with {num_whole}"))


def _leave_one_coordinator(cluster: CoordinatedCluster, do: Callable[[Move], None]) -> None:
    """The operator keeps the one in office, if there is one."""
    living = cluster.living()
    if not living:
        do(("operator", "starts one with its directory"))
        return
    order = {c.name: (0, "", 0) if (d := c.state.decision) is None else (*d.term, d.record.generation) for c in living}
    newest = max(living, key=lambda c: (c.state.in_office, order[c.name]))
    for c in living:
        if c is not newest:
            do((c.name, "crashes"))


def _operate(cluster: CoordinatedCluster, do: Callable[[Move], None], num_whole: int) -> int:
    """What an operator does when nothing happens for long. Returns how many hosts were added."""
    _leave_one_coordinator(cluster, do)
    (c,) = cluster.living()
    num_added = 0
    state = c.state
    if num_whole and (" needed" in state.reason or "agents are here" in state.reason):
        do(("host", f"joins with {num_whole}"))
        num_added = 1
    if cluster.is_possible((c.name, "founds")):
        do((c.name, "founds"))
    elif cluster.may_grant(c):
        do((c.name, "is granted its office"))
    elif not state.in_office and cluster.disk is not None and cluster.disk.holder is None:
        do((c.name, "crashes"))
        do(("operator", "starts one with its directory"))
    for host in [h for h in cluster.hosts.values() if h.alive and h.roster.finished and h.connection is not None]:
        if host.roster.may_request() and cluster.record is not None:
            do((host.name, "gives up"))
    return num_added


def _is_whole(cluster: CoordinatedCluster) -> bool:
    """Every living rank is in the present generation."""
    record = cluster.record
    return record is not None and all(
        rank.member_state.entered == record.generation
        for host in cluster.hosts.values()
        if host.alive
        for rank in host.ranks
        if rank.alive
    )


def standstill(cluster: CoordinatedCluster) -> str:
    """Where every process is, in words."""
    generation = 0 if cluster.record is None else cluster.record.generation
    hosts = "; ".join(
        f"{h.name} at {0 if h.roster.record is None else h.roster.record.generation}"
        f"{' fenced' if h.session.is_fenced else ''}"
        f" {'without a session' if h.connection is None else h.connection.coordinator.name}: "
        + ", ".join(f"{r.name} {r.phase} at {r.member_state.entered}" for r in h.ranks if r.alive)
        for h in cluster.hosts.values()
        if h.alive
    )
    coordinators = "; ".join(
        f"{c.name} {'in office' if c.state.in_office else 'not in office'} at "
        f"{0 if c.state.record is None else c.state.record.generation} ({c.state.reason}) {c.state.unrecoverable}"
        for c in cluster.living()
    )
    return f"generation {generation}; {hosts}; {coordinators}"
