"""Broadcasts objects by two collectives of a gang.

GANGOBJECTS-1  All ranks learn of lists of different lengths, and of one that cannot be pickled, before anything else is
    sent: all of them raise, and the gang stays usable.
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
        ValueError: the lists differ in length; or that of rank `source_rank` cannot be pickled, and raises pickle's
            error there. `objects` is unchanged on every rank.
    """
    data, failure = b"", None
    try:
        if gang.rank == source_rank:
            data = pickle.dumps(objects)
    except Exception as error:  # of any class: those of the objects are pickled by methods of their own
        failure = error
    largest = torch.tensor([len(objects), -len(objects), len(data), int(failure is not None)], device=gang.device)
    perform(Collective("all_reduce", (largest,), (largest,), ReduceOperation.MAX))
    most, fewest_negated, num_bytes, has_failed = (int(number) for number in largest.tolist())
    if failure is not None:
        raise failure
    if has_failed:  # GANGOBJECTS-1
        raise ValueError(f"`objects` could not be pickled on rank {source_rank}, which has raised the reason.")
    if most != -fewest_negated:
        raise ValueError(
            f"`objects` must have as many items on every rank, but has {-fewest_negated} to {most}, and "
            f"{len(objects)} on rank {gang.rank}."
        )
    payload = torch.frombuffer(bytearray(data or bytes(num_bytes)), dtype=torch.uint8).to(gang.device)
    perform(Collective("broadcast", (payload,), (payload,), peer=source_rank))
    objects[:] = pickle.loads(payload.cpu().numpy().tobytes())
