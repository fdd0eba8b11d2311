"""The manifest of a checkpoint: what it holds, where each piece of a tensor lies, and the digest of every byte.

Pure: no I/O.

MANIFEST-1  Every byte of every file of a checkpoint, and of the manifest itself, is under a digest.
MANIFEST-2  A parsed manifest is consistent. File names are plain names. Each piece lies within its file and its tensor,
    the pieces of a file fill it, and the pieces of a tensor cover it without overlap.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from elasticgang.checkpoint.digest import DIGEST_CHARS, digest_of
from elasticgang.errors import CheckpointError
from elasticgang.layout import MODEL_AXES
from elasticgang.protocol.commit import Attempt

FORMAT = 3
# 1: optimizers know their parameters by numbers, so that another pipeline cannot load it. 2: modules have no keys of
# their state dicts, so that an export of tied weights lacks keys.
READABLE = (1, 2, FORMAT)
MANIFEST = "manifest.json"
SUFFIX = ".safetensors"
MAX_MANIFEST_BYTES = 256 << 20

# By torch's name of a dtype: the name in safetensors, and the bytes of an element.
DTYPES = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float32": ("F32", 4),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
}

INVALID = (KeyError, TypeError, IndexError, AttributeError, ValueError, RecursionError)
"""What readers of `Manifest.objects` raise if these are of another form: a digest does not say who has written them."""

_HEAD = b'{"digest":"'
_MAX_SIZE = 1 << 60
_MAX_DIMS = 64
_MAX_NAME = 4096
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors")
_DIGEST = re.compile(rf"[0-9a-f]{{{DIGEST_CHARS}}}")
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True)
class Piece:
    """A block of a tensor: `shape` elements from `start` on, at `offset` of `file`."""

    file: str
    offset: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True)
class TensorEntry:
    """`shape`: of the whole tensor. `placement`: how the ranks held it, for readers of the manifest."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    placement: str
    pieces: tuple[Piece, ...]

    def num_bytes(self, piece: Piece) -> int:
        return math.prod(piece.shape) * DTYPES[self.dtype][1]


@dataclass(frozen=True)
class FileEntry:
    """A safetensors file. Its header is `header_size` bytes long, and is under `header_digest`."""

    name: str
    size: int
    header_size: int
    header_digest: str


@dataclass(frozen=True)
class Manifest:
    """`record`: the digest of the generation's record. `objects`: by the place of its writer ("pp-sdp-tp"), the tree of
    each kind of state, and of the keys of the modules' state dicts, in which `{"tensor": name}` stands for a tensor.
    `data_position`: the samples up to that step
    are in the state. `digest`: the one at the head of the encoded manifest, which names the checkpoint; "" if the
    manifest was not parsed."""

    job: str
    attempt: Attempt
    record: str
    layout: dict[str, Any]
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]
    objects: dict[str, Any]
    digest: str = field(default="", compare=False)

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def by_name(self) -> dict[str, TensorEntry]:
        return {tensor.name: tensor for tensor in self.tensors}

    def encode(self) -> bytes:
        content = {
            "format": FORMAT,
            "job": self.job,
            "step": self.attempt.step,
            "generation": self.attempt.generation,
            "record": self.record,
            "layout": self.layout,
            "data_position": {"step": self.attempt.step},
            "files": [vars(file) for file in self.files],
            "tensors": [tensor_to_json(tensor) for tensor in self.tensors],
            "objects": self.objects,
        }
        rest = b'",' + _ENCODER.encode(content).encode()[1:]
        return _HEAD + digest_of(rest).encode() + rest


def parse(data: bytes) -> Manifest:
    """Raises CheckpointError: `data` is no manifest, is corrupt, or of a newer format."""
    head, rest = data[: len(_HEAD) + DIGEST_CHARS], data[len(_HEAD) + DIGEST_CHARS :]
    if not head.startswith(_HEAD):
        raise CheckpointError("its manifest is not one of elasticgang, or is corrupt")
    if digest_of(rest).encode() != head[len(_HEAD) :]:  # MANIFEST-1
        raise CheckpointError("its manifest is truncated or corrupt: the digest does not match")
    try:
        content = json.loads(data)
        if content["format"] not in READABLE:
            raise CheckpointError(
                f"its format is {content['format']!r}, and this version of elasticgang reads "
                f"{', '.join(map(str, READABLE[:-1]))} and {FORMAT}: use the version that wrote it, or a newer one"
            )
        manifest = Manifest(
            _text(content["job"]),
            Attempt(_size(content["step"]), _size(content["generation"])),
            _text(content["record"]),
            _layout(content["layout"]),
            tuple(map(file_from_json, content["files"])),
            tuple(map(tensor_from_json, content["tensors"])),
            dict(content["objects"]),
            digest=head[len(_HEAD) :].decode(),
        )
        if content["data_position"] != {"step": manifest.attempt.step}:
            raise ValueError("the data position is not the step")
        _check(manifest)
    except CheckpointError:
        raise
    except INVALID as exc:
        raise CheckpointError(f"its manifest is invalid: {exc!r}") from exc
    return manifest


def tensor_to_json(tensor: TensorEntry) -> dict[str, Any]:
    return {**vars(tensor), "pieces": [vars(piece) for piece in tensor.pieces]}


def tensor_from_json(data: dict[str, Any]) -> TensorEntry:
    """Raises KeyError, TypeError or ValueError."""
    if data["dtype"] not in DTYPES:
        raise ValueError(f"there is no dtype {data['dtype']!r}")
    pieces = tuple(
        Piece(
            _file_name(piece["file"]),
            _size(piece["offset"]),
            _sizes(piece["start"]),
            _sizes(piece["shape"]),
            _digest(piece["digest"]),
        )
        for piece in data["pieces"]
    )
    shape = _sizes(data["shape"])
    if 0 in shape and math.prod(max(1, size) for size in shape) >= _MAX_SIZE:
        raise ValueError(f"{list(shape)} is no shape")  # torch computes strides of it
    return TensorEntry(_text(data["name"]), shape, data["dtype"], _text(data["placement"]), pieces)


def file_from_json(data: dict[str, Any]) -> FileEntry:
    """Raises KeyError, TypeError or ValueError."""
    return FileEntry(
        _file_name(data["name"]), _size(data["size"]), _size(data["header_size"]), _digest(data["header_digest"])
    )


def merge_tensors(parts: Iterable[Iterable[TensorEntry]]) -> tuple[TensorEntry, ...]:
    """The tensors of all files. A block that several files have counts once.

    Raises:
        CheckpointError: files disagree on a tensor's shape or dtype.
    """
    merged: dict[str, TensorEntry] = {}
    for tensor in (tensor for part in parts for tensor in part):
        known = merged.get(tensor.name)
        if known is None:
            merged[tensor.name] = tensor
            continue
        if (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
            raise CheckpointError(f"{tensor.name} is {_kind(known)} in one file and {_kind(tensor)} in another")
        pieces = (*known.pieces, *tensor.pieces)
        merged[tensor.name] = TensorEntry(known.name, known.shape, known.dtype, known.placement, pieces)
    return tuple(merged[name] for name in sorted(merged))


def _kind(tensor: TensorEntry) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _check(manifest: Manifest) -> None:
    """MANIFEST-2."""
    files = {file.name: file for file in manifest.files}
    ranges: dict[str, list[tuple[int, int]]] = {name: [] for name in files}
    _require(len(files) == len(manifest.files), "a file appears twice")
    _require(len(manifest.by_name) == len(manifest.tensors), "a tensor appears twice")
    for tensor in manifest.tensors:
        check_pieces(tensor)
        covered = 0
        for piece in tensor.pieces:
            _require(piece.file in files, f"{tensor.name} lies in {piece.file}, which is not listed")
            covered += math.prod(piece.shape)
            ranges[piece.file].append((piece.offset, piece.offset + tensor.num_bytes(piece)))
        _require(covered == math.prod(tensor.shape), f"the pieces of {tensor.name} do not cover it")
    for name, used in ranges.items():
        end = files[name].header_size
        for first, last in sorted(used):
            _require(first == end, f"{name} has a gap or an overlap at byte {first}")
            end = last
        _require(
            end == files[name].size, f"{name} is said to have {files[name].size} bytes, but its pieces end at {end}"
        )


def check_pieces(tensor: TensorEntry) -> None:
    """Raises ValueError: a piece lies outside the tensor, or two overlap."""
    for piece in tensor.pieces:
        _require(
            len(piece.start) == len(piece.shape) == len(tensor.shape)
            and all(
                first + size <= whole for first, size, whole in zip(piece.start, piece.shape, tensor.shape, strict=True)
            ),
            f"a piece of {tensor.name} lies outside it",
        )
    _require(not _overlap(tensor.pieces), f"pieces of {tensor.name} overlap")


def _overlap(pieces: Sequence[Piece]) -> bool:
    open_pieces: list[Piece] = []
    for piece in sorted(pieces, key=lambda piece: piece.start):
        if not math.prod(piece.shape):
            continue
        if piece.start:
            open_pieces = [each for each in open_pieces if each.start[0] + each.shape[0] > piece.start[0]]
        if any(_intersects(piece, other) for other in open_pieces):
            return True
        open_pieces.append(piece)
    return False


def _intersects(one: Piece, other: Piece) -> bool:
    return all(
        first < other_first + other_size and other_first < first + size
        for first, size, other_first, other_size in zip(one.start, one.shape, other.start, other.shape, strict=True)
    )


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def _checked(kind: type, limit: Callable[[Any], bool], what: str) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if type(value) is not kind or not limit(value):
            raise ValueError(f"{value!r:.200} is no {what}")
        return value

    return check


_size = _checked(int, lambda value: 0 <= value < _MAX_SIZE, "size or offset")
_text = _checked(str, lambda value: len(value) <= _MAX_NAME, "name")
_digest = _checked(str, lambda value: _DIGEST.fullmatch(value) is not None, "digest")
_file_name = _checked(str, lambda value: _FILE_NAME.fullmatch(value) is not None, "name of a file of a checkpoint")


def _layout(values: Any) -> dict[str, Any]:
    for axis in MODEL_AXES:
        if type(size := values.get(axis, 1)) is not int or size < 1:
            raise ValueError(f"{size!r:.200} is no size of {axis}")
    return dict(values)


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or len(values) > _MAX_DIMS:
        raise ValueError(f"{values!r:.200} is no shape")
    return tuple(map(_size, values))
