"""What an agent gives to a rank process that it starts."""

from __future__ import annotations

from dataclasses import dataclass

from elasticgang.member.drain import Drain


@dataclass(frozen=True)
class RankContext:
    """What an agent gives to a rank process that it starts. `store` is the address for the rendezvous; `host` is how
    peers reach this host; `process_group` names what carries the data. `link`, `forks`, `page` and `lease` are
    descriptors: to the agent, to its fork server, of what the agent watches, and of the host's lease; `drain` knows
    whether it is to go."""

    member: str
    local_rank: int
    num_ranks: int
    job: str
    store: str
    host: str
    collective_timeout: float
    process_group: str
    link: int
    forks: int
    page: int
    lease: int
    drain: Drain


_context: RankContext | None = None


def inherit(context: RankContext) -> None:
    """Called once, before the user's script runs."""
    global _context
    _context = context


def inherited() -> RankContext | None:
    """The context that an agent gave to this process; None in a process that no agent started, and in forked children
    of a rank (a DataLoader worker is no rank)."""
    return _context


def disinherit() -> None:
    global _context
    _context = None
