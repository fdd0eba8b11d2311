"""One writer's part of a checkpoint: a safetensors file, and the description that the manifest is made of. No torch.

SHARD-1  A file of the library safetensors: its header, then the tensors behind one another. The header also says where
    each block starts in its tensor, as torch.distributed.checkpoint's HuggingFaceStorageReader expects it.
SHARD-2  The manifest is written only from descriptions of one plan, each of which is on the disk after its file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from elasticgang.checkpoint.digest import digest_of, new_digest
from elasticgang.checkpoint.listing import CHUNK_BYTES
from elasticgang.checkpoint.manifest import (
    DTYPES,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    SUFFIX,
    FileEntry,
    Manifest,
    Piece,
    TensorEntry,
    file_from_json,
    merge_tensors,
    parse,
    tensor_from_json,
    tensor_to_json,
)
from elasticgang.checkpoint.storage import Folder
from elasticgang.errors import CheckpointError
from elasticgang.progress import no_progress
from elasticgang.protocol.commit import Attempt


@dataclass(frozen=True)
class Block:
    """A block of a tensor that a writer has, before it is written."""

    name: str
    whole: tuple[int, ...]
    dtype: str
    placement: str
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][1]


@dataclass(frozen=True)
class Shard:
    """What one writer writes. `place`: "pp-sdp-tp" of its part of the model; `number` of `count` writers of it.
    `blocks`: at most one of each tensor, in the order of their bytes. `objects`: from the first writer of a place."""

    place: str
    number: int
    count: int
    blocks: tuple[Block, ...]
    objects: dict[str, Any] | None

    @property
    def file(self) -> str:
        return f"shard-{self.place}-{self.number:05d}{SUFFIX}"

    @property
    def num_bytes(self) -> int:
        return sum(block.num_bytes for block in self.blocks)

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "blocks": [vars(block) for block in self.blocks]}

    @staticmethod
    def from_json(data: dict[str, Any]) -> Shard:
        blocks = [
            Block(**{**block, **{name: tuple(block[name]) for name in ("whole", "start", "shape")}})
            for block in data["blocks"]
        ]
        return Shard(**{**data, "blocks": tuple(blocks)})


def header_of(blocks: Sequence[Block], *, is_sharded: bool = True) -> bytes:
    """SHARD-1. `is_sharded`: the blocks may be parts of their tensors."""
    starts = {block.name: {"saved_offsets": list(block.start)} for block in blocks}
    sharding = {"DCP_SHARDING_INFO": json.dumps(starts)} if is_sharded else {}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **sharding}}
    offset = 0
    for block in blocks:
        end = offset + block.num_bytes
        header[block.name] = {
            "dtype": DTYPES[block.dtype][0],
            "shape": list(block.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def write_shard(folder: Folder, shard: Shard, data: memoryview, wrote: Callable[[int], None] = no_progress) -> None:
    """Write the file and then its description. `data`: the bytes of the blocks, in order. `wrote`: called with the
    number of bytes of each piece that is written. Raises OSError."""
    header = header_of(shard.blocks)
    digests: list[str] = []
    folder.write(shard.file, _digested(header, shard.blocks, data, digests, wrote))
    tensors = []
    offset = len(header)
    for block, digest in zip(shard.blocks, digests, strict=True):
        piece = Piece(shard.file, offset, block.start, block.shape, digest)
        tensors.append(TensorEntry(block.name, block.whole, block.dtype, block.placement, (piece,)))
        offset += block.num_bytes
    entry = FileEntry(shard.file, offset, len(header), digest_of(header))
    part = {
        "place": shard.place,
        "number": shard.number,
        "count": shard.count,
        "file": vars(entry),
        "tensors": [tensor_to_json(tensor) for tensor in tensors],
        "objects": shard.objects,
    }
    text = json.dumps(part, separators=(",", ":")).encode()
    folder.put(part_name(shard.place, shard.number), text)


def part_name(place: str, number: int) -> str:
    return f"part-{place}-{number:05d}.json"


def read_parts(folder: Folder, places: Iterable[str]) -> tuple[list[dict[str, Any]], set[str]]:
    """The descriptions of the writers of `places`, and the names of those that are missing so far.

    Raises:
        OSError: the folder cannot be read.
        CheckpointError: a description is too large.
    """
    parts: list[dict[str, Any]] = []
    missing: set[str] = set()
    for place in places:
        count, number = 1, 0
        while number < count:
            part = _read_part(folder, part_name(place, number))
            if part is None:
                missing.add(part_name(place, number))
            else:
                parts.append(part)
                count = part["count"]
            number += 1
    return parts, missing


def _read_part(folder: Folder, file: str) -> dict[str, Any] | None:
    try:
        data = folder.read(file, MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError:
        return None
    if len(data) > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{folder.path}/{file} is over the limit of {MAX_MANIFEST_BYTES} bytes")
    part: dict[str, Any] = json.loads(data)
    return part


def write_manifest(
    folder: Folder, attempt: Attempt, job: str, record: str, layout: dict[str, Any], parts: Sequence[dict[str, Any]]
) -> Manifest:
    """SHARD-2. From here on the checkpoint is complete. Returns the manifest, with its digest.

    Raises:
        OSError: the manifest was not written.
        CheckpointError, KeyError, TypeError, ValueError: the parts do not fit together. Nothing was written.
    """
    manifest = Manifest(
        job=job,
        attempt=attempt,
        record=record,
        layout=layout,
        files=tuple(file_from_json(part["file"]) for part in parts),
        tensors=merge_tensors(map(tensor_from_json, part["tensors"]) for part in parts),
        objects={part["place"]: part["objects"] for part in parts if part["objects"] is not None},
    )
    data = manifest.encode()
    manifest = parse(data)
    folder.put(MANIFEST, data)
    return manifest


def _digested(
    header: bytes, blocks: Iterable[Block], data: memoryview, digests: list[str], wrote: Callable[[int], None]
) -> Iterator[memoryview]:
    """The bytes of a file. The digest of each block is in `digests` once its bytes are read."""
    yield memoryview(header)
    position = 0
    for block in blocks:
        digest = new_digest()
        end = position + block.num_bytes
        for chunk in _chunks(data[position:end]):
            digest.update(chunk)
            yield chunk
            wrote(len(chunk))
        digests.append(digest.hexdigest())
        position = end


def _chunks(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]
