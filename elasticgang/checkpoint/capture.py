"""What one rank writes of a checkpoint: its share of the registered state, as blocks and their memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elasticgang.checkpoint.manifest import DTYPES
from elasticgang.checkpoint.placed import Placed, Seated, place_state
from elasticgang.checkpoint.plan import num_writers, share_of_rows
from elasticgang.checkpoint.shard import Block, Shard
from elasticgang.state import staging

LARGE, SMALL = ("parameters", "optimizers"), ("buffers", "others")


@dataclass(frozen=True)
class Captured:
    """`sources`: the memory of each of the shard's blocks, which must not change while it is copied."""

    shard: Shard
    sources: tuple[Tensor, ...]

    def copy_to(self, memory: memoryview, is_cancelled: Callable[[], bool], written: Any = None) -> bool:
        """Copy the blocks into `memory`, one behind another. False: cancelled. `written`: a mark behind the last change
        of the sources (PINNED-2)."""
        if not self.shard.num_bytes:
            return not is_cancelled()
        flat, offset, reader = torch.frombuffer(memory, dtype=torch.uint8), 0, staging.Reader(written)
        for block, source in zip(self.shard.blocks, self.sources, strict=True):
            if is_cancelled():
                return False
            end = offset + block.num_bytes
            if not staging.device.holds(source):
                flat[offset:end].view(source.dtype).view(source.shape).copy_(source)
                offset = end
                continue
            for chunk in reader.chunks(source):
                if is_cancelled():
                    return False
                memory[offset : offset + len(chunk)] = chunk
                offset += len(chunk)
        return True


def capture(state: dict[str, Any], seated: Seated, number: int, num_holders: int) -> Captured | None:
    """The share of the holder `number` of a part of the model; None if the state is too small for so many writers.

    `state`: the trees of `RegisteredState.tree`, with DTensors.

    Raises:
        NotSupportedError, TypeError: a checkpoint cannot hold the state.
    """
    objects, placed = place_state(state, seated, has_objects=number == 0)
    large = [each for kind in LARGE for each in placed[kind] if each.is_owner]
    large.sort(key=lambda each: (-_element_bytes(each), each.name))  # so that each block is aligned in memory
    rows = [(each.shape[0] if each.shape else 1, math.prod(each.shape[1:]) * _element_bytes(each)) for each in large]
    count = num_writers(num_holders, sum(num_rows * row_bytes for num_rows, row_bytes in rows))
    if number >= count:
        return None
    blocks: list[tuple[Block, Tensor]] = []
    for each, share in zip(large, share_of_rows(rows, number, count), strict=True):
        if share:
            blocks.append(_block(each, share))
        elif number == 0 and not each.tensor.numel():
            blocks.append(_block(each, None))
    if number == 0:  # what forward changes may differ between holders, so all of it comes from one
        blocks += [_block(each, None) for kind in SMALL for each in placed[kind] if each.is_owner]
    blocks.sort(key=lambda each: -DTYPES[each[0].dtype][1])
    shard = Shard(seated.place, number, count, tuple(block for block, _ in blocks), None if number else objects)
    return Captured(shard, tuple(source for _, source in blocks))


def _element_bytes(placed: Placed) -> int:
    return DTYPES[placed.dtype][1]


def _block(placed: Placed, rows: range | None) -> tuple[Block, Tensor]:
    source, start = placed.tensor, placed.start
    if rows is not None and placed.shape:
        source, start = source[rows.start : rows.stop], (start[0] + rows.start, *start[1:])
    return Block(placed.name, placed.whole, placed.dtype, placed.placement, start, tuple(source.shape)), source
