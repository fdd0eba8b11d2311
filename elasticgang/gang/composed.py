"""Collectives that fairseq2's gangs lack, built on those that they have, for users' own subclasses of `Gang`.

COMPOSED-1  Every rank makes the same calls of the gang, in the same order, whatever its role in the collective.
COMPOSED-2  Inputs are not changed.
COMPOSED-3  Sizes that a poisoned gang has gathered are not used: the outputs are zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from elasticgang.collectives.collective import Collective, ReduceOperation
from elasticgang.collectives.preparation import contiguous
from elasticgang.collectives.table import compose, copy
from elasticgang.errors import NotSupportedError

if TYPE_CHECKING:
    from elasticgang.gang.base import Gang


def perform(gang: Gang, collective: Collective) -> None:
    """Perform a checked collective with the abstract methods of `gang` (COMPOSED-1, COMPOSED-2). Blocks until it has
    ended.

    Raises:
        NotSupportedError: the collective cannot be built on them.
    """
    op = collective.op
    if not isinstance(op, ReduceOperation):
        raise NotSupportedError(f"{type(gang).__name__} has no reduction by {op.name}.")
    basic, last = compose(collective, gang.rank, gang.size)
    taken, unpack = contiguous(basic)
    with torch.no_grad():
        match taken.call:
            case "all_reduce":
                gang.all_reduce(taken.outputs[0].detach(), op)
            case "broadcast":
                gang.broadcast(taken.outputs[0].detach(), taken.peer)
            case "all_gather":
                gang.all_gather_to_list(list(taken.outputs), taken.inputs[0].detach())
            case "all_to_all":
                _exchange(gang, taken.inputs, taken.outputs)
            case "monitored_barrier":
                gang.barrier()
            case call:
                raise NotSupportedError(
                    f"{type(gang).__name__} has no `{call}`: the collectives that it has cannot make one."
                )
    for step in (unpack, last):
        if step is not None:
            step()


def _all_gathered(gang: Gang, source: Tensor) -> list[Tensor]:
    gathered = [torch.empty_like(source) for _ in range(gang.size)]
    gang.all_gather_to_list(gathered, source)
    return gathered


def _exchange(gang: Gang, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
    """An all-to-all: all ranks gather all tensors, padded to the longest, and each keeps its own parts."""
    sizes = torch.tensor([part.numel() for part in sent], device=gang.device)
    all_sizes = torch.stack(_all_gathered(gang, sizes)).tolist()
    if gang.is_poisoned:  # COMPOSED-3
        for target in received:
            target.zero_()
        return
    flat = torch.cat([part.reshape(-1) for part in sent])
    longest = max(sum(row) for row in all_sizes)
    padded = torch.cat([flat, flat.new_zeros(longest - flat.numel())])
    for rank, (whole, row) in enumerate(zip(_all_gathered(gang, padded), all_sizes, strict=True)):
        part, target = torch.split(whole[: sum(row)], row)[gang.rank], received[rank]
        if part.numel() != target.numel():
            raise ValueError(
                f"`output_tensors[{rank}]` must have as many elements as rank {rank} sends ({part.numel()}), but has "
                f"{target.numel()} instead."
            )
        copy(part, target)
