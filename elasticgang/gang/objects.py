"""Broadcasts objects by two collectives of a gang.

GANGOBJECTS-1  All ranks learn of lists of different lengths before anything else is sent: all of them raise, and the
    gang stays usable.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable

import torch

from elasticgang.collectives.collective import Collective, ReduceOperation
from elasticgang.gang.base import Gang


def broadcast_pickled(
    gang: Gang, objects: list[object], source_rank: int, perform: Callable[[Collective], object]
) -> None:
    """Replace the items of `objects` by those of rank `source_rank`. `perform`: performs a collective of `gang` to its
    end.

    Raises:
        ValueError: the lists differ in length. `objects` is unchanged on every rank.
    """
    data = pickle.dumps(objects) if gang.rank == source_rank else b""
    largest = torch.tensor([len(objects), -len(objects), len(data)], device=gang.device)
    perform(Collective("all_reduce", (largest,), (largest,), ReduceOperation.MAX))
    most, fewest_negated, num_bytes = (int(number) for number in largest.tolist())
    if most != -fewest_negated:  # GANGOBJECTS-1
        raise ValueError(
            f"`objects` must have as many items on every rank, but has {-fewest_negated} to {most}, and "
            f"{len(objects)} on rank {gang.rank}."
        )
    payload = torch.frombuffer(bytearray(data or bytes(num_bytes)), dtype=torch.uint8).to(gang.device)
    perform(Collective("broadcast", (payload,), (payload,), peer=source_rank))
    objects[:] = pickle.loads(payload.cpu().numpy().tobytes())
