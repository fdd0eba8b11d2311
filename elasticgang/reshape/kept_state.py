"""The training state that a rank keeps aside for its peers while the job takes another layout.

KEPT-1  Kept state is in pieces of at most about `PIECE_BYTES`, whole rows of a tensor, each with a digest. A tensor of
    some size is in several pieces, because a peer fetches a piece whole even if it needs a few rows of it. What several
    parts of the model hold alike is kept by one of them.
KEPT-2  Kept tensors do not change: they belong to objects of the former seat, which nothing trains any more, and what
    forward changes is copied. A description is sent only if the state was still kept after its digests were made.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from elasticgang.checkpoint.manifest import SUFFIX, Piece, TensorEntry, tensor_to_json
from elasticgang.checkpoint.placed import Placed, Seated, place_state
from elasticgang.layout import ParallelLayout
from elasticgang.protocol.record import FormerState
from elasticgang.state import transport
from elasticgang.state.serialization import as_bytes

PIECE_BYTES = 4 << 20
_NUM_PIECES = 8  # of a tensor with so many rows, at least
_LEAST_BYTES = 64 << 10  # of such a piece


class KeptState:
    """What one rank keeps, by the names that the tensors have in a checkpoint. Any thread may read it."""

    def __init__(self, former: FormerState, layout: ParallelLayout, state: dict[str, Any]) -> None:
        """`state`: the trees of `RegisteredState.tree`, with DTensors.

        Raises:
            NotSupportedError, TypeError: the state has tensors that have no such name.
        """
        self.former = former
        seated = Seated(layout, former.model)
        self.place = seated.place
        self.objects, placed = place_state(state, seated)
        self._tensors = [each for of_kind in placed.values() for each in of_kind if each.is_owner]
        self._blocks: dict[int, Tensor] = {}  # by the offset that stands for the piece
        self._entries: list[TensorEntry] = []
        self._lock = threading.Lock()

    def entries(self) -> list[TensorEntry]:
        """The tensors. The first call makes the digests."""
        with self._lock:
            if not self._entries:
                self._entries = list(map(self._entry, self._tensors))
        return self._entries

    def describe(self) -> dict[str, Any]:
        """The objects and the tensors, as JSON."""
        return {"objects": self.objects, "tensors": list(map(tensor_to_json, self.entries()))}

    def data(self, offset: int) -> memoryview:
        """The bytes of a piece. Raises KeyError: there is none at `offset`."""
        return as_bytes(self._blocks[offset])

    def _entry(self, placed: Placed) -> TensorEntry:
        pieces = []
        for start, block in _rows(placed):
            offset = len(self._blocks)
            self._blocks[offset] = block
            digest = transport.digest(as_bytes(block)).hex()
            pieces.append(Piece(f"kept-{self.place}{SUFFIX}", offset, start, tuple(block.shape), digest))
        return TensorEntry(placed.name, placed.whole, placed.dtype, placed.placement, tuple(pieces))


def _rows(placed: Placed) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """KEPT-1: where each piece starts, and the piece."""
    tensor, start = placed.tensor, placed.start
    if not tensor.shape:
        yield start, tensor
        return
    row_bytes = max(1, math.prod(tensor.shape[1:]) * tensor.element_size())
    few = max(tensor.shape[0] // _NUM_PIECES, _LEAST_BYTES // row_bytes)
    step = max(1, min(PIECE_BYTES // row_bytes, few))
    for first in range(0, tensor.shape[0], step):
        yield (start[0] + first, *start[1:]), tensor[first : first + step]
