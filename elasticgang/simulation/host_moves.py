"""What a host of the simulation can do next. Faults, and what is in `RARE_MOVES`, need not happen."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from elasticgang.simulation.cluster import Cluster
    from elasticgang.simulation.host import Host

RARE_MOVES = frozenset({"hangs up", "fails to start a rank"})
TIMER = "times out: "
_RESTART = "restart "  # as the names of the agent's timers begin
FAULTS = frozenset({"recovers", "is exhausted", "forks late", "gets SIGTERM", "gets SIGINT", "loses its address"})
SIGNALS = {"gets SIGTERM": signal.SIGTERM, "gets SIGINT": signal.SIGINT}


def moves(host: Host, cluster: Cluster) -> list[str]:
    if host.is_frozen or host.is_stopped:
        return []
    timers = host.agent.timers()
    moves = [f"restarts {name.removeprefix(_RESTART)}" for name in timers if name.startswith(_RESTART)]
    if host.forking is not None:
        moves += ["cannot start a rank"] if host.is_exhausted else ["starts a rank", "fails to start a rank"]
    if host.former:
        moves.append("rejoins")
    if host.tries:
        moves.append("tries the hosts of the others")
    connection = host.connection
    if connection is None:
        if not host.session.is_ended:
            moves += [f"dials {c.name}" for c in cluster.listening(host.zone) if host.may_dial(c)]
            moves += [f"finds nobody at {address}" for address in cluster.refusing(host.zone)]
    else:
        if host.may_receive:
            moves.append("receives")
        elif not connection.is_coordinator_open or connection.coordinator.zone != host.zone:
            moves.append("loses its session")
        moves.append("hangs up")
    return moves + [TIMER + name for name in timers if not name.startswith(_RESTART)] if timers else moves


def faults(host: Host) -> list[str]:
    return [
        *SIGNALS,
        "recovers" if host.is_exhausted else "is exhausted",
        *([] if host.forks_late else ["forks late"]),
        *(["loses its address"] if host.has_begun and host.session.is_welcome else []),
    ]
