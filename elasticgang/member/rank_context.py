"""What an agent passes to a rank process that it starts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from elasticgang.member.drain import Drain
from elasticgang.session.credentials import Credentials


@dataclass(frozen=True)
class RankContext:
    """What an agent passes to a rank process that it starts. `host`: the address at which peers reach this host.
    `process_group`: the kind that carries the data; None: the default of the rank's device. `compare_state`: as of
    `Job`. `credentials` authenticate the rank and the peers that heal from it. `link`, `door`, `forks`, `page` and
    `lease` are descriptors: the connection to the agent, the socket by which the agent takes further ones, the
    connection to its fork server, the rank's status page, and the host's lease. `drain`: whether the rank drains.
    `optimizer_bytes`: the size of the state of optimizers of a rank of this host, as of `StatusPage`; 0: not known.
    `has_trained`: whether the job has committed a step, as far as the agent knows. `got_state`: called once the rank
    holds the state of the job (GROUP-3)."""

    member: str
    local_rank: int
    num_ranks: int
    job: str
    host: str
    collective_timeout: float
    process_group: str | None
    compare_state: int
    credentials: Credentials
    link: int
    door: int
    forks: int
    page: int
    lease: int
    drain: Drain
    optimizer_bytes: int = 0
    has_trained: bool = False
    got_state: Callable[[], None] = lambda: None


_context: RankContext | None = None


def inherit(context: RankContext) -> None:
    """Set the context of this process. Called once, before the user's script runs."""
    global _context
    _context = context


def inherited() -> RankContext | None:
    """The context from the agent; None in a process that no agent started, and in forked children of a rank, such as
    DataLoader workers."""
    return _context


def disinherit() -> None:
    global _context
    _context = None
