"""Time passes: whoever is neither slow nor stopped nor cut off sends and receives all that is under way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticgang.protocol.coordinator_messages import Ticked
from elasticgang.simulation import fact_checks, host_session

if TYPE_CHECKING:
    from elasticgang.simulation.cluster import Cluster
    from elasticgang.simulation.coordinator_process import CoordinatorProcess
    from elasticgang.simulation.host import Host

STEP_S = 0.9  # by which time passes at once: no coordinator stands still for long


def pass_time(cluster: Cluster, num_steps: int) -> None:
    for _ in range(num_steps):
        cluster.now_s += STEP_S
        for host in list(cluster.hosts.values()):
            if host.alive and not host.is_frozen:
                if not host.is_stopped:
                    host_session.tick(host, cluster)
                    fact_checks.check_session(host)
                if host.alive:
                    host_session.watch(host, cluster)
        for coordinator in cluster.living():
            if not coordinator.is_stopped:
                coordinator.do(cluster, Ticked())
                fact_checks.check_sums(coordinator.name, coordinator.state)
        _exchange(cluster)


def _exchange(cluster: Cluster) -> None:
    """What is under way arrives, between those that are not slow."""
    for host in list(cluster.hosts.values()):
        if host.connection is None and _is_prompt(host) and not host.session.is_ended:
            _reconnect(cluster, host)
    coordinators = [coordinator for coordinator in cluster.living() if not coordinator.is_stopped]
    for _ in range(4):
        has_moved = False
        for coordinator in coordinators:
            has_moved |= _serve(cluster, coordinator)
        for host in list(cluster.hosts.values()):
            connection = host.connection
            if connection is not None and (connection.to_agent or not connection.is_coordinator_open):
                has_moved |= _receive_all(cluster, host)
        if not has_moved:
            return


def _serve(cluster: Cluster, coordinator: CoordinatorProcess) -> bool:
    """Returns whether there was something to do."""
    has_moved = False
    while coordinator.writing and coordinator.may_write:
        coordinator.perform(cluster, "writes")
        has_moved = True
    for number, session in list(coordinator.sessions.items()):
        if session.is_agent_open and not session.to_coordinator:
            continue  # idle
        if number not in coordinator.sessions or not _is_prompt(session.host):
            continue
        while session.to_coordinator and coordinator.reaches(session):
            coordinator.receive(cluster, session)
            has_moved = True
        if not session.is_agent_open and number in coordinator.sessions:
            coordinator.lose(cluster, number)
            has_moved = True
    while coordinator.writing and coordinator.may_write:
        coordinator.perform(cluster, "writes")
    has_moved |= bool(coordinator.outbox)
    while coordinator.outbox:
        coordinator.send(cluster, coordinator.outbox.popleft())
    return has_moved


def _receive_all(cluster: Cluster, host: Host) -> bool:
    has_moved = False
    while _is_prompt(host) and host.connection is not None:
        connection = host.connection
        if connection.coordinator.zone != host.zone:
            break
        if host.may_receive:
            host_session.receive(host, cluster)
            fact_checks.check_session(host)
        elif not connection.is_coordinator_open:
            host.perform(cluster, "loses its session")
        else:
            break
        has_moved = True
    return has_moved


def _reconnect(cluster: Cluster, host: Host) -> None:
    listening = [c for c in cluster.listening(host.zone) if host.may_dial(c)]
    if listening:
        host_session.dial(host, cluster, listening[cluster.num_sessions % len(listening)])
    else:
        for address in cluster.refusing(host.zone):
            host.perform(cluster, f"finds nobody at {address}")


def _is_prompt(host: Host) -> bool:
    return host.alive and not (host.is_slow or host.is_frozen or host.is_stopped)
