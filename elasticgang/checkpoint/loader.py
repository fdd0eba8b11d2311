"""Loads a checkpoint into the registered state of a rank.

LOADER-1  Nothing of the state changes before all of it is read and every digest is right.
LOADER-2  A tensor is read only after its name, shape and dtype are found to be the model's.
LOADER-3  Another layout loads a plain tensor only if all seats along the axes that differ have saved the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from elasticgang.checkpoint.digest import digest_of
from elasticgang.checkpoint.listing import check_header, read_into
from elasticgang.checkpoint.manifest import Manifest, Piece, TensorEntry
from elasticgang.checkpoint.placed import DIVIDING_AXES, Seated, name_tensors, place, tensor_names, without_axes
from elasticgang.checkpoint.storage import Folder
from elasticgang.errors import CheckpointError
from elasticgang.layout import MODEL_AXES
from elasticgang.state.serialization import as_bytes, unflatten


class ModelMismatch(CheckpointError):
    """The checkpoint is of another model, or of a layout that this one cannot load."""


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
            if _content(other) != _content(first):
                raise ModelMismatch(
                    f"{name} is a plain tensor of which each seat has its own ({first.name} and {other.name} differ): "
                    "only a job of the same layout can load it"
                )
        return first

    def read(self, entry: TensorEntry, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The block of `shape` from `start` on. Raises CheckpointError: it is corrupt, or cannot be read."""
        tensor = torch.empty(tuple(shape), dtype=getattr(torch, entry.dtype))
        num_read = 0
        for piece in entry.pieces:
            low = [max(*firsts) for firsts in zip(start, piece.start, strict=True)]
            high = [
                min(first + size, piece_first + piece_size)
                for first, size, piece_first, piece_size in zip(start, shape, piece.start, piece.shape, strict=True)
            ]
            if any(first >= last for first, last in zip(low, high, strict=True)):
                continue
            destination = tensor[_slices(low, high, start)]
            num_read += destination.numel()
            is_whole = tuple(destination.shape) == piece.shape
            if is_whole and destination.is_contiguous():
                self.read_piece(entry, piece, destination)
            else:
                block = torch.empty(piece.shape, dtype=tensor.dtype)
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

    def read_piece(self, entry: TensorEntry, piece: Piece, block: Tensor) -> None:
        data = as_bytes(block)
        read_into(self.folder, piece.file, piece.offset, data)
        if digest_of(data) != piece.digest:
            raise CheckpointError(f"{entry.name} in {piece.file} is corrupt: the digest does not match")


def read_state(folder: Folder, manifest: Manifest, state: dict[str, Any], seated: Seated) -> dict[str, Any]:
    """The state of a seat, as `RegisteredState.load` takes it (LOADER-1). `state`: the live one, with DTensors.

    Raises:
        ModelMismatch: the first difference between the model and the checkpoint.
        CheckpointError: the checkpoint is corrupt, or cannot be read.
    """
    return state_of(CheckpointReader(folder, manifest, differing_axes(manifest, seated)), state, seated)


def differing_axes(manifest: Manifest, seated: Seated) -> list[str]:
    """The axes along which the layout of the seat differs from the manifest's."""
    return [axis for axis in DIVIDING_AXES if manifest.layout.get(axis, 1) != getattr(seated.layout, axis)]


def state_of(reader: BlockReader, state: dict[str, Any], seated: Seated) -> dict[str, Any]:
    """As `read_state`, from any reader."""
    manifest = reader.manifest
    objects = manifest.objects.get(seated.place) or _objects_like(manifest, seated, reader.other_axes)
    if objects is None:
        raise ModelMismatch(f"it was saved with the layout {manifest.layout}, which has no stage {seated.model[0]}")
    try:
        _check_model(reader, objects, state, seated)
        read = {kind: _read_like(reader, state[kind], seated) for kind in ("parameters", "buffers")}
        others = unflatten(objects["others"], _Whole(reader))  # type: ignore[arg-type]
        optimizers = unflatten(objects["optimizers"], _Entries(reader))  # type: ignore[arg-type]
        for name, saved in optimizers.items():
            groups = state["optimizers"].get(name, {}).get("param_groups", [])
            if name not in state["optimizers"]:
                raise ModelMismatch(f"it has the optimizer {name!r}, and this job has none of that name")
            optimizers[name] = _read_optimizer(reader, saved, state["owned"][name], seated, len(groups))
        if missing := sorted(set(state["optimizers"]) - set(optimizers)):
            raise ModelMismatch(f"it has no optimizer {missing[0]!r}")
        if missing := sorted(set(state["others"]) ^ set(others)):
            raise ModelMismatch(f"only one of it and this job has the registered object {missing[0]!r}")
    except (KeyError, TypeError, IndexError, AttributeError) as exc:
        raise CheckpointError(f"its manifest is invalid: {exc!r}") from exc
    return {
        "small": {"buffers": read["buffers"], "others": others},
        "large": {"parameters": read["parameters"], "optimizers": optimizers},
    }


def _objects_like(manifest: Manifest, seated: Seated, other_axes: Collection[str]) -> Any:
    """The objects of a seat with the same coordinates, but along `other_axes`; None if there are none."""
    kept = [index for index, axis in enumerate(MODEL_AXES) if axis not in other_axes]
    own = seated.place.split("-")
    for saved, objects in sorted(manifest.objects.items()):
        found = saved.split("-")
        if len(found) == len(own) and all(found[index] == own[index] for index in kept):
            return objects
    return None


def _content(entry: TensorEntry) -> object:
    return entry.shape, entry.dtype, {(piece.start, piece.shape, piece.digest) for piece in entry.pieces}


class _Whole:
    """The tensors by name, for `unflatten`."""

    def __init__(self, reader: BlockReader) -> None:
        self._reader = reader

    def __getitem__(self, name: str) -> Tensor:
        return self._reader.read_whole(name)


class _Entries:
    def __init__(self, reader: BlockReader) -> None:
        self._reader = reader

    def __getitem__(self, name: str) -> TensorEntry:
        return self._reader.entry(name)


def _check_model(reader: BlockReader, objects: dict[str, Any], state: dict[str, Any], seated: Seated) -> None:
    """LOADER-2. Raises ModelMismatch with the first difference."""
    axes = reader.other_axes
    saved = {without_axes(name, axes) for kind in ("parameters", "buffers") for name in tensor_names(objects[kind])}
    present = set()
    for kind in ("parameters", "buffers"):
        for name, tensor in name_tensors(state[kind])[1].items():
            here = place(name, tensor, seated)
            known = without_axes(here.name, axes)
            present.add(known)
            if known not in saved:
                raise ModelMismatch(f"{_what(kind)} {here.name} of this job's model is not in it")
            entry = reader.entry(here.name)
            if entry.shape != here.whole:
                raise ModelMismatch(f"{here.name} is {list(entry.shape)} in it, but {list(here.whole)} in this job")
            if entry.dtype != here.dtype:
                raise ModelMismatch(f"{here.name} is {entry.dtype} in it, but {here.dtype} in this job")
    if absent := sorted(saved - present):
        raise ModelMismatch(f"{absent[0]} is in it, and this job's model has none of that name")


def _what(kind: str) -> str:
    return {"parameters": "the parameter", "buffers": "the buffer"}[kind]


def _read_like(reader: BlockReader, tree: dict[str, Any], seated: Seated) -> dict[str, Any]:
    """The local parts of the tensors of `tree`, by object and name."""
    return {
        owner: {name: _read_placed(reader, f"{owner}.{name}", tensor, seated) for name, tensor in tensors.items()}
        for owner, tensors in tree.items()
    }


def _read_placed(reader: BlockReader, name: str, tensor: Tensor, seated: Seated) -> Tensor:
    here = place(name, tensor, seated)
    return reader.read(reader.entry(here.name), here.start, here.shape)


def _read_optimizer(
    reader: BlockReader, saved: dict[str, Any], parameters: Sequence[Tensor], seated: Seated, num_groups: int
) -> dict[str, Any]:
    """An optimizer's state dict. A tensor of the shape of a sharded parameter is read like the parameter."""
    if len(saved["param_groups"]) != num_groups:
        raise ModelMismatch(f"its optimizer has {len(saved['param_groups'])} parameter groups instead of {num_groups}")
    num_saved = sum(len(group["params"]) for group in saved["param_groups"])
    if num_saved != len(parameters):
        raise ModelMismatch(f"its optimizer has {num_saved} parameters instead of {len(parameters)}")

    def read(key: Any, value: Any) -> Any:
        if not isinstance(value, TensorEntry):
            return _read_entries(reader, value)
        parameter = parameters[key] if isinstance(key, int) and key < len(parameters) else None
        if isinstance(parameter, DTensor) and tuple(parameter.shape) == value.shape and math.prod(value.shape) > 1:
            here = place("", parameter, seated)
            return reader.read(value, here.start, here.shape)
        return _read_entries(reader, value)

    state = {
        key: {name: read(key, value) for name, value in of_parameter.items()}
        if isinstance(of_parameter, dict)
        else read(key, of_parameter)
        for key, of_parameter in saved["state"].items()
    }
    rest = {name: _read_entries(reader, value) for name, value in saved.items() if name != "state"}
    return {**rest, "state": state}


def _read_entries(reader: BlockReader, tree: Any) -> Any:
    if isinstance(tree, TensorEntry):
        return reader.read(tree, [0] * len(tree.shape), tree.shape)
    if isinstance(tree, dict):
        return {key: _read_entries(reader, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_read_entries(reader, item) for item in tree)
    return tree


def _slices(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first - zero, last - zero) for first, last, zero in zip(low, high, origin, strict=True))
