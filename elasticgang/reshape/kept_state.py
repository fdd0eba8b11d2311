"""The training state that a rank keeps aside for its peers while the job takes another layout.

KEPT-1  Kept state is in pieces of at most about `PIECE_BYTES`, whole rows of a tensor, each with a digest. What several
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

from elasticgang.checkpoint.capture import LARGE, SMALL
from elasticgang.checkpoint.manifest import SUFFIX, Piece, TensorEntry, tensor_to_json
from elasticgang.checkpoint.placed import Placed, Seated, name_tensors, place, replace_names
from elasticgang.layout import ParallelLayout
from elasticgang.protocol.record import FormerState
from elasticgang.state import transport
from elasticgang.state.serialization import as_bytes

PIECE_BYTES = 4 << 20


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
        named = {kind: name_tensors(state[kind]) for kind in (*LARGE, *SMALL)}
        placed = {
            kind: {name: place(name, tensor, seated) for name, tensor in tensors.items()}
            for kind, (_, tensors) in named.items()
        }
        self.objects = {
            kind: replace_names(spec, {name: each.name for name, each in placed[kind].items()})
            for kind, (spec, _) in named.items()
        }
        self._tensors = [each for kind in placed for each in placed[kind].values() if each.is_owner]
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
    step = max(1, PIECE_BYTES // row_bytes)
    for first in range(0, tensor.shape[0], step):
        yield (start[0] + first, *start[1:]), tensor[first : first + step]
