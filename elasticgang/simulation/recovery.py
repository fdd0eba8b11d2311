"""The end of all faults in a job: it must go on (RULE-7).

The operator repairs what is broken, leaves one coordinator, and does what is left to an operator once nothing has
happened for long. A recovery that is unattended has no operator beyond the repair.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from elasticgang.simulation import promises
from elasticgang.simulation.invariants import Violation

if TYPE_CHECKING:
    from elasticgang.simulation.cluster import Actor, Cluster, Move
    from elasticgang.simulation.host import Host

_QUIET_MOVES = 12_000
_IDLE_PASSES = 20
_MAX_WAITS = 16
_MAX_ADDED = 3
_TRIES = 4


def by_chance(seed: int) -> Callable[[Sequence[Any]], Any]:
    """Picks so that, before long, every process has its turn. Equal seeds give equal picks."""
    chance = random.Random(seed).random

    def pick(options: Sequence[Any]) -> Any:
        return options[int(chance() * len(options))]

    return pick


def recover(
    cluster: Cluster,
    do: Callable[[Move], None],
    make: Callable[[Move], None],
    pick: Callable[[Sequence[Any]], Any],
    *,
    attended: bool = True,
) -> None:
    """All is repaired, nobody is late for ever, and there are enough ranks: raises Violation if the job does not go
    on. `do` makes a move if it is possible, `make` one that is; `pick` chooses the next one."""
    if _is_over(cluster):
        return
    num_whole = cluster.setting.layout.unit + cluster.setting.num_spares
    _repair(cluster, do, num_whole)
    may_end = any(host.alive and _may_end(host, cluster) for host in cluster.hosts.values())
    goal: int | None = None
    num_waits = num_added = 0
    for number in range(1, _QUIET_MOVES):
        options = some_moves(cluster, cluster.actors, pick)
        if options:
            make(pick(options))
            if _is_over(cluster):
                return _check_end(cluster, may_end)
        if number % 8 == 0 and _is_whole(cluster):
            num_steps = max((r.member_state.committed.step for r in cluster.ranks.values() if r.alive), default=0)
            if goal is not None and num_steps >= goal:
                return
            goal = goal or num_steps + 1
        if not options or number % 500 == 0:
            do(("clock", f"passes {_IDLE_PASSES}"))
            if attended:
                num_added += _operate(cluster, do, num_whole if num_added < _MAX_ADDED else 0)
            num_waits += not options
            if num_waits > _MAX_WAITS:
                raise Violation(f"RULE-7: nothing happens any more; {standstill(cluster)}")
            if _is_over(cluster):
                return _check_end(cluster, may_end)
    raise Violation(f"RULE-7: the job does not go on; {standstill(cluster)}")


def _may_end(host: Host, cluster: Cluster) -> bool:
    return (
        host.is_lease_over(cluster)
        or host.signal != 0
        or any(host.ended.values())
        or any(rank.draining or (not rank.alive and rank.status == 0) for rank in host.ranks)
    )


def some_moves(cluster: Cluster, actors: Sequence[Actor], pick: Callable[[Sequence[Any]], Any]) -> list[Move]:
    """What one of `actors` could do, or, when the first few have nothing to do, all of them."""
    for number in range(_TRIES + 1 if actors else 0):
        polled = [pick(actors)] if number < _TRIES else actors
        options = [(a.name, verb) for a in polled for verb in cluster.moves_of(a) if not cluster.is_rare(verb)]
        if options:
            return options
    return []


def _check_end(cluster: Cluster, may_end: bool) -> None:
    """Without a fault, a job ends only when its steps are done or its state is lost. `may_end`: or as its agents were
    fenced already."""
    if not (may_end or cluster.given_up or cluster.finished):
        raise Violation(f"RULE-7: every agent has ended; {'; '.join(cluster.log[-len(cluster.hosts) :])}")


def _is_over(cluster: Cluster) -> bool:
    return bool(cluster.given_up) or cluster.num_dead_hosts == len(cluster.hosts)


def _repair(cluster: Cluster, do: Callable[[Move], None], num_whole: int) -> None:
    if cluster.disk is not None and cluster.disk.is_stuck:
        do(("disk", "works"))
    for c in cluster.living():
        if c.zone:
            do((c.name, "is back"))
        if c.is_stopped:
            do((c.name, "goes on"))
    for one, other in sorted(cluster.blocked):
        do((one, f"regains its path to {other}"))
    for host in [host for host in cluster.hosts.values() if host.alive]:
        mends = ((host.is_frozen, "thaws"), (host.is_stopped, "goes on"), (host.is_slow, "is quick"))
        for is_so, verb in (*mends, (host.is_narrow, "is wide")):
            if is_so:
                do((host.name, verb))
        if host.alive and host.zone:
            do((host.name, "is back"))
        if host.alive and host.is_exhausted:
            do((host.name, "recovers"))
        if host.alive and (host.is_duplicate or host.mismatch):  # of another job, it may found that one here
            do((host.name, "dies"))
    _leave_one_coordinator(cluster, do)
    hosts = [host for host in cluster.hosts.values() if host.alive]
    staying = [_num_staying(host) for host in hosts if not host.mismatch]
    lacking = cluster.setting.min_hosts - sum(map(bool, staying)) if cluster.chain.record is None else 0
    if max(staying, default=0) < cluster.setting.layout.unit:
        lacking = max(lacking, 1)
    for _ in range(lacking):
        do(("host", f"joins with {num_whole}"))


def _num_staying(host: Host) -> int:
    """Ranks that take part or are going to."""
    if host.signal:
        return 0
    if host.is_fenced or not host.has_begun:
        return host.num_ranks
    ready = sum(rank.alive and not (rank.draining or rank.hangs or rank.raised) for rank in host.ranks)
    return ready + host.agent.num_coming


def _leave_one_coordinator(cluster: Cluster, do: Callable[[Move], None]) -> None:
    """The operator keeps the one in office, if there is one."""
    living = cluster.living()
    if not living:
        do(("operator", "starts one with its directory"))
        return
    order = {
        c.name: (0, "", 0) if (d := c.state.newest.decision) is None else (*d.term, d.record.generation) for c in living
    }
    newest = max(living, key=lambda c: (c.state.in_office, order[c.name]))
    for c in living:
        if c is not newest:
            do((c.name, "crashes"))


def _operate(cluster: Cluster, do: Callable[[Move], None], num_whole: int) -> int:
    """What an operator does when nothing happens for long. Returns how many hosts were added."""
    _leave_one_coordinator(cluster, do)
    (c,) = cluster.living()
    num_added = 0
    state = c.state
    if num_whole and (" needed" in state.next_decision.reason or "agents are here" in state.next_decision.reason):
        do(("host", f"joins with {num_whole}"))
        num_added = 1
    if cluster.is_possible((c.name, "founds")):
        do((c.name, "founds"))
    elif promises.may_grant(cluster, c):
        do((c.name, "is granted its office"))
    elif not state.in_office and cluster.disk is not None and cluster.disk.holder is None:
        do((c.name, "crashes"))
        do(("operator", "starts one with its directory"))
    return num_added


def _is_whole(cluster: Cluster) -> bool:
    """Every living rank is in the present generation."""
    record = cluster.chain.record
    return record is not None and all(
        rank.member_state.entered == record.generation
        for host in cluster.hosts.values()
        if host.alive
        for rank in host.ranks
        if rank.alive and not rank.hangs
    )


def standstill(cluster: Cluster) -> str:
    """Where every process is, in words."""
    generation = 0 if cluster.chain.record is None else cluster.chain.record.generation
    hosts = "; ".join(
        f"{h.name} at {0 if h.agent_state.record is None else h.agent_state.record.generation}"
        f"{' fenced' if h.is_fenced else ''}"
        f" {'without a session' if h.connection is None else h.connection.coordinator.name}: "
        + ", ".join(f"{r.name} {r.phase} at {r.member_state.entered}" for r in h.ranks if r.alive)
        for h in cluster.hosts.values()
        if h.alive
    )
    coordinators = "; ".join(
        f"{c.name} {'in office' if c.state.in_office else 'not in office'} at "
        f"{0 if c.state.record is None else c.state.record.generation} ({c.state.next_decision.reason}) "
        f"{c.state.unrecoverable}"
        for c in cluster.living()
    )
    return f"generation {generation}; {hosts}; {coordinators}"
