"""What must hold of a rank of the simulation whenever it has done something: what it says is what it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from elasticgang.protocol.record import ACTIVE, Record, Seat
from elasticgang.simulation.generation import SimulatedGeneration
from elasticgang.simulation.invariants import State, Violation
from elasticgang.simulation.rank_moves import moves
from elasticgang.simulation.rank_script import APPLYING, BETWEEN

if TYPE_CHECKING:
    from elasticgang.simulation.cluster import Cluster
    from elasticgang.simulation.rank import Rank


def check_words(rank: Rank, knows_fate: bool) -> None:
    """What it says is what it has. `knows_fate`: of what it had prepared."""
    member_state = rank.member_state
    former = member_state.former
    if former is None:
        rank.former = None
    elif rank.former is None or rank.former[1] != former:
        state = rank.state
        if state is None or (state.attempt, rank.layout, rank.model) != former:
            raise Violation(f"MEMBER-7: {rank.name} says it keeps {former}, but has {state} of {rank.model}")
        rank.former = state, former
    if rank.phase is not APPLYING:
        if member_state.tip is None:
            rank.state = rank.model = None
        if member_state.pending is None:
            if rank.prepared is not None and not knows_fate and rank.alive:
                raise Violation(f"MEMBER-2: {rank.name} drops {rank.prepared}, and does not know its fate")
            rank.prepared = None
        elif rank.prepared is None:
            raise Violation(f"MANAGER-5: {rank.name} says it has prepared {member_state.pending}, but has not")
    if member_state.tip is not None and (
        rank.state is None or rank.state.attempt != member_state.tip or member_state.torn
    ):
        raise Violation(
            f"RULE-10: {rank.name} says it holds {member_state.tip}, but has {rank.state}, torn {member_state.torn}"
        )
    if member_state.tip is not None and (member_state.layout, member_state.holds) != (rank.layout, rank.model):
        raise Violation(f"RULE-6: {rank.name} says it holds the part {member_state.holds}, but has {rank.model}")


def check_order(rank: Rank, cluster: Cluster) -> None:
    """It leaves in order only at a boundary that all come to."""
    for member in rank.generation.seated if rank.generation is not None else ():
        peer = cluster.ranks[member]
        if peer is rank or not peer.alive or peer.generation is not rank.generation or peer.round < rank.round:
            continue
        if peer.round > rank.round or (peer.phase is BETWEEN and moves(peer, cluster)[-1:] == ["reports an error"]):
            raise Violation(f"MANAGER-10: {rank.name} leaves, but {peer.name} goes on")


def check_entered(rank: Rank, truth: State, record: Record, seat: Seat) -> None:
    member_state = rank.member_state
    if member_state.tip is None and seat.status == ACTIVE:
        raise Violation(f"RECOVERY-2: {rank.name} is active in generation {record.generation}, but has to heal")
    if member_state.tip is not None:
        if rank.state is not truth:
            raise Violation(f"RULE-4: {rank.name} holds {rank.state} for {truth} in generation {record.generation}")
        seated_at = record.in_force, record.model_coordinates(rank.name) if seat.status == ACTIVE else None
        if seat.status == ACTIVE and (rank.layout, rank.model) != seated_at:
            raise Violation(f"RULE-6: {rank.name} holds {rank.model}, but is seated elsewhere")


def check_healed(rank: Rank, source: Rank, generation: SimulatedGeneration) -> None:
    """RULE-6: it has taken from `source` what the others of its generation compute on."""
    if source.model != rank.model or rank.state is None:
        raise Violation(f"RULE-6: {rank.name} is at {rank.model}, but heals from {source.name} at {source.model}")
    peers = [part.state for part in generation.reduction(rank.round).parts.values() if part.state is not None]
    if any(state is not rank.state for state in peers):
        raise Violation(f"RULE-6: {rank.name} heals to {rank.state}, but the others are at {peers}")
