"""What a rank of the simulation can do next. Faults, and what is in `RARE_MOVES`, need not happen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from elasticgang.protocol import member_instructions as do
from elasticgang.protocol.member_instructions import Do
from elasticgang.protocol.member_lifecycle import Next
from elasticgang.simulation.rank_script import (
    APPLYING,
    BETWEEN,
    COMPUTING,
    CONFIGURING,
    DIVIDING,
    REDUCING,
    REQUESTING,
    SAVING,
    STARTING,
)

if TYPE_CHECKING:
    from elasticgang.simulation.cluster import Cluster
    from elasticgang.simulation.rank import Rank

RARE_MOVES = frozenset({"misses", "prepares not", "reports an error"})


def moves(rank: Rank, cluster: Cluster) -> list[str]:
    moves = []
    if rank.sent:
        moves.append("is received")
    elif not rank.alive:
        moves.append("is reaped")
    if not rank.is_noticed and (rank.seems_to_exit if rank.alive else not rank.sent):  # DEATH-3, RANK-2
        moves.append("is noticed")
    if not rank.alive:
        return moves
    if rank.received:
        moves.append("receives")
    if rank.raised or (rank.hangs and not rank.draining):
        return moves
    phase = rank.phase
    if phase is STARTING:
        moves.append("drains" if rank.draining else "requests")
    elif phase is REQUESTING:
        if rank.is_retired:
            moves.append("ends")
        elif rank.draining and not (rank.lifecycle.has_seat or rank.member_state.former):
            moves.append("drains")
        elif rank.records:
            moves.append("acts")
    elif phase is BETWEEN:
        moves += _between(rank, cluster)
    elif phase is APPLYING:
        moves.append("applies")
    else:
        moves += _waiting(rank, cluster)
    return moves


def _between(rank: Rank, cluster: Cluster) -> Sequence[str]:
    if rank.paused is Do.LEAVE_GENERATION:
        return ("requests",)
    rank.lifecycle.observed = rank.observe()
    match rank.lifecycle.at_boundary(cluster.num_steps):
        case Next.REGROUP:
            return ("requests",)
        case Next.SAVE:
            return ("saves",)
        case Next.GIVE_UP:
            return ("stops trying",)
        case Next.LEAVE:
            return ("finishes" if rank.member_state.committed.step >= cluster.num_steps else "drains",)
    return ("begins", "reports an error")


def _waiting(rank: Rank, cluster: Cluster) -> Iterator[str]:
    generation = rank.generation
    assert generation is not None
    if rank.poisoned or generation.broken:
        yield "fails"
    if rank.phase is CONFIGURING:
        if generation.is_gathered and not rank.poisoned:
            yield "configures"
    elif isinstance(rank.paused, do.Move):
        if not rank.poisoned:
            yield from _moving(rank, cluster, rank.paused)
    elif isinstance(rank.paused, do.Heal):
        if not rank.poisoned:
            sources = rank.sources(cluster, rank.paused)
            if any(source.serving == rank.member_state.committed for source in sources):
                yield "heals"
            # One that has a source to wait for gives it up only after a while.
            yield "misses" if sources else "misses all"
    elif rank.phase is DIVIDING:
        if generation.division(rank.round).has_outcome(rank.name) and not rank.poisoned:
            yield "divides"
    elif rank.phase is COMPUTING:
        if not rank.poisoned and rank.may_compute():
            yield "computes"
    elif rank.phase is REDUCING:
        if generation.reduction(rank.round).is_complete and (
            rank.member_state.only_heals or generation.totals(rank.round).has_outcome(rank.name)
        ):
            yield "prepares"
            if rank.member_state.tip is not None and not rank.member_state.is_active:
                yield "prepares not"
    elif rank.phase is SAVING:
        if generation.last_save(rank.round).has_outcome(rank.name):
            yield "knows of all saves"
    elif generation.vote(rank.round).has_outcome(rank.name):
        yield "counts"


def _moving(rank: Rank, cluster: Cluster, move: do.Move) -> Iterator[str]:
    sources = rank.keepers(cluster, move)
    if all(any(peer.kept == peer.member_state.former for peer in peers) for peers in sources.values()):
        yield "moves"
    yield "misses" if all(sources.values()) else "misses all"


def faults(rank: Rank) -> list[str]:
    faults = ["dies"] if rank.seems_to_exit else ["dies", "seems to exit"]
    if rank.raised:
        return faults
    if rank.generation is not None and not rank.poisoned:
        faults.append("breaks")
    if not rank.draining:
        faults.append("is to drain")
        faults.append("leaves by its script")
    if rank.phase is STARTING:
        faults.append("hangs")
    else:
        faults += ["leaves", "exits early", "raises"]
    if rank.phase is APPLYING:
        faults.append("tears")
    return faults
