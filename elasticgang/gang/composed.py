"""The collectives that fairseq2's gangs lack, built on those that they have: what a gang of the user's own gets.

COMPOSED-1  Every rank makes the same calls of the gang, in the same order, whatever its part is.
COMPOSED-2  What the caller gave as an input is not changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from elasticgang.collectives.collective import Collective, ReduceOperation, writing
from elasticgang.errors import NotSupportedError

if TYPE_CHECKING:
    from elasticgang.gang.base import Gang


def perform(gang: Gang, collective: Collective) -> None:
    """Perform a checked collective by the abstract methods of `gang` (COMPOSED-1, COMPOSED-2). Blocks until it has
    ended.

    Raises:
        NotSupportedError: it cannot be built on them.
    """
    op, outputs, inputs = collective.op, collective.outputs, collective.inputs
    if not isinstance(op, ReduceOperation):
        raise NotSupportedError(f"{type(gang).__name__} has no reduction by {op.name}.")
    with torch.no_grad():
        match collective.call:
            case "all_reduce":
                total = outputs[0].detach().contiguous()
                gang.all_reduce(total, op)
                _write(outputs, [total])
            case "broadcast":
                value = outputs[0].detach().contiguous()
                gang.broadcast(value, collective.peer)
                _write(outputs, [value])
            case "all_gather_single":
                _write(outputs, [torch.cat([part.view(-1) for part in _all_gathered(gang, inputs[0])])])
            case "all_gather" | "gather":
                _write(outputs, _all_gathered(gang, inputs[0]))  # a gather has outputs at its destination alone
            case "reduce":
                total = outputs[0].clone(memory_format=torch.contiguous_format)
                gang.all_reduce(total, op)
                if gang.rank == collective.peer:
                    _write(outputs, [total])
            case "reduce_scatter" | "reduce_scatter_single":
                total = torch.cat([source.reshape(-1) for source in inputs])
                gang.all_reduce(total, op)
                _write(outputs, [total.view(gang.size, -1)[gang.rank]])
            case "scatter":
                like = outputs[0]
                parts = torch.stack(list(inputs)) if inputs else like.new_zeros(gang.size, *like.shape)
                gang.broadcast(parts, collective.peer)
                _write(outputs, [parts[gang.rank]])
            case "monitored_barrier":
                gang.barrier()
            case "all_to_all":
                _write(outputs, _exchanged(gang, inputs, outputs))
            case call:
                raise NotSupportedError(
                    f"{type(gang).__name__} has no `{call}`: the collectives that it has cannot make one."
                )


def _all_gathered(gang: Gang, source: Tensor) -> list[Tensor]:
    gathered = [source.new_empty(source.shape) for _ in range(gang.size)]
    gang.all_gather_to_list(gathered, source.detach().contiguous())
    return gathered


def _exchanged(gang: Gang, sent: Sequence[Tensor], received: Sequence[Tensor]) -> list[Tensor]:
    """What each rank has sent to this one. All ranks gather all of it, padded to the length of the longest."""
    sizes = torch.tensor([part.numel() for part in sent], device=gang.device)
    all_sizes = torch.stack(_all_gathered(gang, sizes)).tolist()
    flat = torch.cat([part.reshape(-1) for part in sent])
    longest = max(sum(row) for row in all_sizes)
    padded = torch.cat([flat, flat.new_zeros(longest - flat.numel())])
    found = [
        torch.split(whole[: sum(row)], row)[gang.rank]
        for whole, row in zip(_all_gathered(gang, padded), all_sizes, strict=True)
    ]
    for rank, (part, target) in enumerate(zip(found, received, strict=True)):
        if part.numel() != target.numel():
            raise ValueError(
                f"`output_tensors[{rank}]` must have as many elements as rank {rank} sends ({part.numel()}), but has "
                f"{target.numel()} instead."
            )
    return found


def _write(outputs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for output, value in zip(outputs, values, strict=False):
        with writing(output):
            output.copy_(value.view(output.shape))
