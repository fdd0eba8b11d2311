"""Reads blocks of the tensors of a checkpoint, or of what other ranks keep."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from elasticgang.checkpoint.digest import digest_of
from elasticgang.checkpoint.listing import check_header, read_into
from elasticgang.checkpoint.manifest import Manifest, Piece, TensorEntry
from elasticgang.checkpoint.names import stage_in, without_axes
from elasticgang.checkpoint.saved_objects import ModelMismatch
from elasticgang.checkpoint.storage import Folder
from elasticgang.errors import CheckpointError
from elasticgang.state.serialization import as_bytes


class BlockReader:
    """Reads blocks of the tensors that a manifest lists."""

    def __init__(self, manifest: Manifest, other_axes: Collection[str] = ()) -> None:
        """`other_axes`: the axes along which the reader's layout differs from the manifest's."""
        self.manifest, self.other_axes = manifest, other_axes
        self._entries: dict[str, list[TensorEntry]] = {}
        for tensor in manifest.tensors:
            self._entries.setdefault(without_axes(tensor.name, other_axes), []).append(tensor)

    def entry(self, name: str) -> TensorEntry:
        """Raises:
        CheckpointError: there is none.
        ModelMismatch: LOADER-3.
        """
        name = without_axes(name, self.other_axes)
        if name not in self._entries:
            raise CheckpointError(f"its manifest is invalid: {name} is not among its tensors")
        first, *others = self._entries[name]
        for other in others:
            if not self.is_same(first, other):
                raise ModelMismatch(_difference(name, first, other))
        self._entries[name] = [first]
        return first

    def is_same(self, one: TensorEntry, other: TensorEntry) -> bool:
        """Whether two entries have the same content, if their pieces are cut alike. Raises CheckpointError."""
        return _content(one) == _content(other)

    def read(self, entry: TensorEntry, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The block of `shape` from `start` on. Raises CheckpointError: it is corrupt, or cannot be read."""
        tensor = torch.empty(tuple(shape), dtype=getattr(torch, entry.dtype), device="cpu")
        num_read = 0
        for piece, low, high in overlapping(entry, start, shape):
            destination = tensor[_slices(low, high, start)]
            num_read += destination.numel()
            is_whole = tuple(destination.shape) == piece.shape
            if is_whole and destination.is_contiguous():
                self.read_piece(entry, piece, destination)
            else:
                block = torch.empty(piece.shape, dtype=tensor.dtype, device="cpu")
                self.read_piece(entry, piece, block)
                destination.copy_(block[_slices(low, high, piece.start)])
        if num_read != tensor.numel():
            raise CheckpointError(f"its manifest is invalid: the pieces of {entry.name} do not cover it")
        return tensor

    def read_whole(self, name: str) -> Tensor:
        """Raises CheckpointError."""
        entry = self.entry(name)
        return self.read(entry, [0] * len(entry.shape), entry.shape)

    def read_piece(self, entry: TensorEntry, piece: Piece, block: Tensor) -> None:
        """Read all of `piece` into `block`, a contiguous tensor of its shape. Raises CheckpointError."""
        raise NotImplementedError


class CheckpointReader(BlockReader):
    """Reads blocks of the tensors of one checkpoint."""

    def __init__(self, folder: Folder, manifest: Manifest, other_axes: Collection[str] = ()) -> None:
        """Raises CheckpointError: a file is missing, or its header is corrupt."""
        super().__init__(manifest, other_axes)
        self.folder = folder
        for file in manifest.files:
            check_header(folder, file)

    def is_same(self, one: TensorEntry, other: TensorEntry) -> bool:
        """Also if the writers of two stages have cut a tensor at different rows: then its bytes are read."""
        if super().is_same(one, other):
            return True
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        blocks = ([self.read(each, piece.start, piece.shape) for each in (one, other)] for piece in one.pieces)
        return all(as_bytes(first) == as_bytes(second) for first, second in blocks)

    def read_piece(self, entry: TensorEntry, piece: Piece, block: Tensor) -> None:
        data = as_bytes(block)
        read_into(self.folder, piece.file, piece.offset, data)
        if digest_of(data) != piece.digest:
            raise CheckpointError(f"{entry.name} in {piece.file} is corrupt: the digest does not match")


def overlapping(
    entry: TensorEntry, start: Sequence[int], shape: Sequence[int]
) -> Iterator[tuple[Piece, list[int], list[int]]]:
    """The pieces that the block of `shape` from `start` on overlaps, and where the overlap of each begins and ends."""
    for piece in entry.pieces:
        low = [max(*firsts) for firsts in zip(start, piece.start, strict=True)]
        high = [
            min(first + size, piece_first + piece_size)
            for first, size, piece_first, piece_size in zip(start, shape, piece.start, piece.shape, strict=True)
        ]
        if all(first < last for first, last in zip(low, high, strict=True)):
            yield piece, low, high


def _slices(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first - zero, last - zero) for first, last, zero in zip(low, high, origin, strict=True))


def _content(entry: TensorEntry) -> object:
    return entry.shape, entry.dtype, {(piece.start, piece.shape, piece.digest) for piece in entry.pieces}


def _difference(name: str, one: TensorEntry, other: TensorEntry) -> str:
    """Why the tensor `name` cannot be loaded: `one` and `other` differ."""
    if stage_in(one.name) != stage_in(other.name):
        return (
            f"two stages have different tensors of the name {name} ({one.name} and {other.name} differ): only a job of "
            "the same stages can load it. Let a stage's tensors have the names that they have in the whole model, by "
            "its modules or by `names` of `manager.build`"
        )
    return (
        f"{name} is a plain tensor of which each seat has its own ({one.name} and {other.name} differ): "
        "only a job of the same layout can load it"
    )
