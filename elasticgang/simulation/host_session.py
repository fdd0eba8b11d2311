"""A simulated host's half of its session with a coordinator, and the lease that its ranks read."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from elasticgang.protocol import agent_events as events
from elasticgang.protocol.coordinator_messages import (
    Answer,
    CollectReport,
    Connected,
    ConnectionRefused,
    HangUp,
    Inform,
    KillRanks,
    Notice,
    ReportCollected,
    SendToCoordinator,
    SessionEvent,
    SetLease,
    Ticked,
)
from elasticgang.protocol.job_facts import JobFacts, KnownSuccessors
from elasticgang.protocol.record import PROTOCOL, Record, Undecided
from elasticgang.simulation.coordinator_process import TIMEOUTS, CoordinatorProcess, SimulatedSession
from elasticgang.simulation.invariants import Violation

if TYPE_CHECKING:
    from elasticgang.simulation.cluster import Cluster
    from elasticgang.simulation.host import Host


def dial(host: Host, cluster: Cluster, coordinator: CoordinatorProcess) -> None:
    cluster.num_sessions += 1
    if any(session.host is host for c in cluster.living() for session in c.sessions.values()):
        cluster.seen.add("half-open session")
    connection = SimulatedSession(cluster.num_sessions, host, coordinator)
    host.connection = coordinator.sessions[connection.number] = connection
    do(host, cluster, Connected(coordinator.address))


def receive(host: Host, cluster: Cluster) -> None:
    assert host.connection is not None
    do(host, cluster, Answer(host.connection.to_agent.popleft()))
    if not host.has_begun and host.alive and host.session.is_welcome and not host.former:
        _begin(host, cluster)


def _begin(host: Host, cluster: Cluster) -> None:
    """The agent was welcomed under its present id."""
    if host.session.former:
        cluster.seen.add("rejoined")
        host.num_not_started = 0  # each id has its own budget
    host.has_begun, host.is_fenced = True, False
    host.handle(cluster, events.CoordinatorConnected(host.name, host.name))
    host.is_watched = True
    facts, host.facts = host.facts, JobFacts()
    take(host, cluster, facts)
    early, host.early = host.early, []
    for event in early:
        _inform(host, cluster, event)


def rejoin(host: Host, cluster: Cluster) -> None:
    """A session under the agent's new id follows."""
    if host.connection is not None:
        host.hang_up(cluster)
    host.former = ""
    host.has_begun = False
    host.newest_over = host.newest_join = 0
    host.early.clear()
    host.facts, host.successors = JobFacts(), KnownSuccessors()
    host.lease_until_s = host.lease_holder = None  # UNBOUND
    host.session = host.session.under(host.id)


def tick(host: Host, cluster: Cluster) -> None:
    do(host, cluster, Ticked())
    while host.alive and host.tries and not host.is_slow:
        host.try_hosts(cluster)
    if host.alive and host.is_watched:
        host.tell(cluster, has_successors=host.stamp_successors(cluster) > 0)
    deadline_s = host.agent.deadline_s
    if host.alive and deadline_s is not None and deadline_s <= host.clock_s(cluster) + host.ahead_s:
        host.handle(cluster, events.TimePassed())


def do(host: Host, cluster: Cluster, event: SessionEvent) -> None:
    session, known, granted_at = host.session, host.session.decision, host.session.lease_address
    for instruction in session.handle(event, cluster.now_s * host.rate):
        if not host.alive:
            return
        match instruction:
            case SendToCoordinator(message):
                if host.connection is not None and host.connection.is_coordinator_open:
                    host.connection.to_coordinator.append(message)
            case HangUp():
                host.hang_up(cluster)
            case SetLease(until_s):
                host.lease_until_s = until_s
                if isinstance(event, ConnectionRefused):
                    cluster.seen.add("lease renewed by a refusal")
                if host.connection is not None:
                    host.lease_holder = host.connection.coordinator
            case CollectReport():
                _report(host, cluster)
            case Inform(inner):
                _inform(host, cluster, inner)
            case KillRanks(reason):
                if reason.startswith("evicted"):
                    cluster.seen.add("evicted")
                elif host.is_lease_over(cluster):
                    cluster.seen.add("lease over")
                host.handle(cluster, events.LeaseExpired(reason))
    if host.connection is not None and session.lease_address not in ("", granted_at):
        host.lease_holder = host.connection.coordinator  # also if the lease was as long before
    decision = session.decision
    if decision is not None and decision is not known and host.alive:
        cluster.chain.make_effective(decision)


def _report(host: Host, cluster: Cluster) -> None:
    if not host.has_begun or not host.agent_state.may_request():
        return
    for rank in host.ranks:
        if rank.generation is not None:
            generation = rank.generation.record.generation
            raise Violation(f"RULE-3: {host.name} is ready while {rank.name} runs in {generation}")
    report = host.agent_state.report()
    for rank in host.ranks:
        if rank.is_exiting and any(member.id == rank.name for member in report.members):
            raise Violation(f"SIMHOST-4: {host.name} reports {rank.name}, whose exit has begun")
    if host.mismatch == "protocol":
        report = replace(report, protocol=PROTOCOL + 1)
    do(host, cluster, ReportCollected(report))


def _inform(host: Host, cluster: Cluster, event: Any) -> None:
    answer = event.answer if isinstance(event, events.RecordAnswered) else None
    if isinstance(answer, Undecided) and answer.refused and not host.session.is_welcome:
        if not host.has_begun:  # CONTROL-8
            cluster.log.append(f"{host.name} ends: the job refused this host: {answer.refused[0][1]}")
            cluster.end_host(host)
    elif isinstance(event, JobFacts):
        host.successors.hear(event.have_successors)
        take(host, cluster, event)
    elif not host.has_begun:
        host.early.append(event)
    elif isinstance(event, Notice):
        cluster.note(event)
    else:
        if isinstance(answer, Record):
            _check_record(host, cluster, answer)
        host.handle(cluster, event)


def take(host: Host, cluster: Cluster, facts: JobFacts) -> None:
    known, host.facts = host.facts, facts
    if host.has_begun and facts != known:
        host.stamp_successors(cluster)
        for failure in facts.failures:
            if failure not in known.failures and failure.agent != host.id and host.alive:
                told = events.PeerFailed(failure.agent, failure.member, failure.local_rank, failure.step)
                host.handle(cluster, told)


def _check_record(host: Host, cluster: Cluster, record: Record) -> None:
    known = host.agent_state.record
    if known is None or record.generation > known.generation:
        if host.is_lease_over(cluster):
            raise Violation(f"FENCE-1: {host.name} is given {record.generation} while its lease is over")
        if any(rank.alive and rank.generation is not None for rank in host.ranks):
            raise Violation(f"RULE-3: {host.name} is given {record.generation} while its ranks run")
        if any(cluster.ranks[seat.member].host != host.name for seat in record.seats_of(host.id)):
            raise Violation(f"SIMHOST-3: {host.name} is given {record.generation}, which seats ranks of another")
        assert host.session.decision is not None
        cluster.chain.make_effective(host.session.decision)


def watch(host: Host, cluster: Cluster) -> None:
    """What each rank does by itself when it reads the lease: once that is over, it kills itself."""
    if host.lease_until_s is None:
        return
    over_s = host.clock_s(cluster) - host.lease_until_s
    if over_s >= (TIMEOUTS.grace_s if host.is_slow else 0):
        host.kill_ranks()
