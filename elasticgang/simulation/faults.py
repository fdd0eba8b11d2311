"""Faults of a random schedule: which one is injected next, where it hurts most, and what is repaired."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from elasticgang.simulation import promises
from elasticgang.simulation.cluster import Cluster, Move
from elasticgang.simulation.coordinator_process import CoordinatorProcess
from elasticgang.simulation.host import Host
from elasticgang.simulation.invariants import Model
from elasticgang.simulation.rank import Rank
from elasticgang.simulation.rank_script import APPLYING, REDUCING, VOTING

FAULTS = (
    "joins",
    "is cut off",
    "is back",
    "host dies",
    "rank dies",
    "seems to exit",
    "breaks",
    "leaves",
    "tears",
    "is to drain",
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
    "id is taken",
    "operator's word",
    "raises",
    "hangs",
    "gets SIGTERM",
    "gets SIGINT",
    "is exhausted",
    "recovers",
    "forks late",
)
# Where coordinators contend. Elsewhere their weight is 0, so that equal seeds give the same schedules as before.
CONTENDED_FAULTS = ("loses its address",)
NARROW_FAULTS = ("is narrow",)  # likewise, where networks lose large packets
PATH_FAULTS = ("loses its path",)  # likewise, where hosts do not reach each other
RARE = {
    "coordinator crashes": 0.4,
    "coordinator restarts": 0.4,
    "second coordinator": 0.4,
    "network is parted": 0.5,
    "host stands still": 0.3,
    "agent stands still": 0.3,
    "coordinator stands still": 0.4,
    "disk stands still": 0.3,
    "id is taken": 0.1,
    "operator's word": 0.3,
    "seems to exit": 0.25,
    "exits early": 0.25,
    "leaves by its script": 0.25,
    "raises": 0.25,
    "hangs": 0.25,
    "gets SIGTERM": 0.25,
    "gets SIGINT": 0.25,
    "is exhausted": 0.25,
    "recovers": 0.25,
    "forks late": 0.25,
}
_AIMS = ("deciding", "pushing", "pushed to one", "written")
_OF_HOSTS = frozenset({"is cut off", "host dies", "gets SIGTERM", "gets SIGINT", "is narrow"})
_INCOMPATIBLE = ("job", "layout", "protocol")
_SLOW_JOIN_RATE = 0.5
_RUTHLESS_RATE = 0.02
_RUTHLESS_PASS_RATE = 0.3
_AIMED_RATE = 0.5
_MAX_HOSTS = 5


class Faults:
    """`do` makes a move if it is possible; `pick` chooses. `likings`: how often each of
    `FAULTS`, `CONTENDED_FAULTS`, `NARROW_FAULTS` and `PATH_FAULTS` is injected.
    `has_seconds`: whether several coordinators run at once. `slow`: the host or coordinator that is slow. `aim`: at
    which point a coordinator is to crash."""

    def __init__(
        self,
        cluster: Cluster,
        chance: random.Random,
        do: Callable[[Move], None],
        pick: Callable[[Sequence[Any]], Any],
        likings: Sequence[float],
        *,
        has_seconds: bool,
    ) -> None:
        self._cluster, self._chance = cluster, chance
        self._do, self._pick = do, pick
        self._cumulated = list(itertools.accumulate(likings))
        self._has_seconds = has_seconds
        self.slow = self.aim = ""

    def inject_one(self) -> None:
        cluster, chance = self._cluster, self._chance
        hosts = [host for host in cluster.hosts.values() if host.alive]
        kinds = FAULTS + CONTENDED_FAULTS + NARROW_FAULTS + PATH_FAULTS
        (kind,) = chance.choices(kinds, cum_weights=self._cumulated)
        living = cluster.living()
        match kind:
            case "coordinator crashes":
                if chance.random() < 0.6:
                    self.aim = chance.choice(_AIMS)
                elif living:
                    self._do((chance.choice(living).name, "crashes"))
            case "coordinator restarts":
                for c in living:
                    if c.zone == "":
                        self._do((c.name, "crashes"))
                self._do(("operator", self.restart()))
            case "second coordinator":
                if self._has_seconds and len(living) < 2:
                    self._do(("operator", "starts one without" + (" on the side" if chance.random() < 0.4 else "")))
            case "network is parted":
                if self._has_seconds:
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
            case "id is taken":
                known = [host for host in cluster.hosts.values() if any(c.has_heard(host.id) for c in living)]
                if known and len(hosts) < _MAX_HOSTS:
                    host = chance.choice(known)
                    self._do(("host", f"joins with {host.num_ranks} as {host.id}"))
            case "operator's word":
                for c in living:
                    if c.disk is None and cluster.disk is None and promises.may_grant(cluster, c):
                        self._do((c.name, "is granted its office"))
                        return
            case "loses its path":
                if len(hosts) > 1:
                    one, other = chance.sample(hosts, 2)
                    self._do((one.name, f"loses its path to {other.name}"))
            case "is back":
                cut = [host for host in hosts if host.zone]
                if cut:
                    self._do((chance.choice(cut).name, "is back"))
            case _ if kind == "joins" or not hosts:
                if len(hosts) < _MAX_HOSTS:
                    is_strange = chance.random() < 0.05 and cluster.chain.record is not None
                    mismatch = f" of another {chance.choice(_INCOMPATIBLE)}" if is_strange else ""
                    slowly = "slowly " * (chance.random() < _SLOW_JOIN_RATE)
                    self._do(("host", f"joins {slowly}with {chance.randint(1, self._num_whole())}{mismatch}"))
            case "is exhausted" | "recovers" | "forks late" | "loses its address":
                able = [host for host in hosts if kind in host.faults()]
                if able:
                    self._do((chance.choice(able).name, kind))
            case _:
                self._inject(kind)

    def _part(self, living: Sequence[CoordinatorProcess]) -> None:
        cluster, chance = self._cluster, self._chance
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

    def _inject(self, kind: str) -> None:
        """Inject a fault into a rank or its host, preferably during a vote or into a holder of scarce state."""
        cluster, chance = self._cluster, self._chance
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
                    self.slow = other.host
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

    def _may_inject(self, victims: Iterable[Rank], ruthless_rate: float = _RUTHLESS_RATE) -> bool:
        """Whether the state survives without `victims`; rarely True although it does not, since that ends the job."""
        held: set[tuple[int, Model]] = set()
        for rank in self._cluster.ranks.values():
            if rank.alive and rank not in victims and not self._cluster.hosts[rank.host].is_cut:
                if rank.state and rank.model:
                    held.add((rank.layout, rank.model))
                if rank.former:
                    held.add(rank.former[1][1:])
        return self._cluster.chain.invariants.is_whole(held) or self._chance.random() < ruthless_rate

    def may_pass_leases(self) -> bool:
        """As `_may_inject`, of those whose lease nobody renews while time passes."""
        hosts = self._cluster.hosts.values()
        return self._cluster.chain.record is None or self._may_inject(
            {rank for host in hosts if not self._is_led(host) for rank in host.ranks}, _RUTHLESS_PASS_RATE
        )

    @staticmethod
    def _is_led(host: Host) -> bool:
        """Nothing hinders it, and its coordinator is in office."""
        if host.is_cut or host.is_stopped or host.is_slow or host.connection is None:
            return False
        c = host.connection.coordinator
        return c.is_alive and c.zone == host.zone and not c.is_stopped and c.state.in_office

    def _num_whole(self) -> int:
        """The number of ranks of a host with one replica group and its spares."""
        return self._cluster.setting.layout.unit + self._cluster.setting.num_spares

    def repair_one(self) -> None:
        """Something that is broken is mended: else a job stands still for most of a schedule."""
        cluster = self._cluster
        mends: list[Move] = []
        for host in cluster.hosts.values():
            if host.alive:
                states = ((host.is_frozen, "thaws"), (host.is_stopped, "goes on"), (host.zone != "", "is back"))
                mends += [(host.name, verb) for is_so, verb in (*states, (host.is_narrow, "is wide")) if is_so]
        mends += [(one, f"regains its path to {other}") for one, other in sorted(cluster.blocked)]
        living = cluster.living()
        mends += [(c.name, "goes on") for c in living if c.is_stopped]
        mends += [(c.name, "is back") for c in living if c.zone]
        if not any(c.zone == "" and not c.is_stopped for c in living):
            mends.append(("operator", self.restart()))
        if cluster.disk is not None and cluster.disk.is_stuck:
            mends.append(("disk", "works"))
        if not any(c.state.in_office for c in living):
            mends += self._offices(living)
        elif cluster.chain.record is None:
            mends.append(("clock", "passes 8"))
        if mends:
            self._do(self._pick(mends))

    def _offices(self, living: Sequence[CoordinatorProcess]) -> list[Move]:
        """How somebody may come to lead the job."""
        if self._cluster.disk is not None:
            has_holder = self._cluster.disk.holder is not None
            return [] if has_holder else [("operator", "starts one with its directory")]
        words = [(c.name, "is granted its office") for c in living if promises.may_grant(self._cluster, c)]
        return words + [(c.name, "founds") for c in living if self._cluster.is_possible((c.name, "founds"))]

    def restart(self) -> str:
        return "starts one with its directory" if self._chance.random() < 0.7 else "starts one without"
