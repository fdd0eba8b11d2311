"""Finds the checkpoints of a directory, and verifies them. No torch.

LISTING-1  A directory without a manifest is no checkpoint: it is being written, or its writers died.
LISTING-2  A checkpoint whose digests were found not to match is marked, and no rank loads it again.
LISTING-3  A manifest is read only up to `MAX_MANIFEST_BYTES`, and a file only if it has the size of the manifest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from elasticgang.checkpoint import files
from elasticgang.checkpoint.digest import new_digest
from elasticgang.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, FileEntry, Manifest, parse
from elasticgang.checkpoint.plan import attempt_in
from elasticgang.errors import CheckpointError
from elasticgang.progress import untold
from elasticgang.protocol.commit import Attempt

CHUNK_BYTES = 4 << 20
_MARK = "corrupt"
_MAX_REASON = 1000


class UnreadableError(CheckpointError):
    """The system cannot read a file. It may be able to later, or on another host."""


@dataclass(frozen=True)
class Found:
    """One complete checkpoint. `manifest` is None, and `problem` says why, if it cannot be used."""

    path: Path
    attempt: Attempt
    manifest: Manifest | None
    problem: str = ""


def names(directory: Path) -> tuple[list[str], list[str]]:
    """The directories of complete and of incomplete checkpoints, oldest first. Raises OSError."""
    complete: list[str] = []
    incomplete: list[str] = []
    for name in sorted(os.listdir(directory), key=lambda name: (attempt_in(name) or (0, 0), name)):
        if attempt_in(name) is not None:
            (complete if (directory / name / MANIFEST).is_file() else incomplete).append(name)  # LISTING-1
    return complete, incomplete


def scan(directory: Path) -> Iterator[Found]:
    """The complete checkpoints, newest first, with their sizes checked and no digest but the manifest's. Raises
    CheckpointError: the directory cannot be read. A directory that does not exist holds none."""
    try:
        complete, _ = names(directory)
    except FileNotFoundError:
        return
    except OSError as exc:
        raise CheckpointError(f"cannot read the checkpoints of {directory}: {exc.strerror}") from exc
    for name in reversed(complete):
        attempt = attempt_in(name)
        assert attempt is not None
        try:
            if (mark := _read_mark(directory / name)) is not None:
                raise CheckpointError(mark)
            yield Found(directory / name, attempt, read_manifest(directory / name))
        except CheckpointError as exc:
            yield Found(directory / name, attempt, None, str(exc))


def mark_corrupt(path: Path, reason: str) -> None:
    """LISTING-2. Raises OSError: it is not marked."""
    files.write_file(path / _MARK, [reason.encode()])


def _read_mark(path: Path) -> str | None:
    try:
        return (path / _MARK).read_text(errors="replace")[:_MAX_REASON]
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise UnreadableError(f"{path / _MARK}: {exc.strerror}") from exc


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint in the directory `path`, whose files have the right sizes. Raises
    CheckpointError."""
    try:
        with open(path / MANIFEST, "rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)  # LISTING-3
        if len(data) > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"its manifest is over the limit of {MAX_MANIFEST_BYTES} bytes")
        manifest = parse(data)
        if manifest.attempt != attempt_in(path.name):
            raise CheckpointError(f"its manifest is of step {manifest.attempt.step}, and its name says otherwise")
        for entry in manifest.files:
            status = os.stat(path / entry.name, follow_symlinks=False)
            if status.st_size != entry.size:
                raise CheckpointError(f"{entry.name} has {status.st_size} bytes instead of {entry.size}")
    except OSError as exc:
        raise UnreadableError(f"{exc.filename or path}: {exc.strerror}") from exc
    return manifest


def verify(path: Path, manifest: Manifest, on_read: Callable[[int], None] = untold) -> None:
    """Check every digest. `on_read`: gets the number of bytes of each part that was read.

    Raises:
        CheckpointError: a digest does not match, or a file cannot be read.
    """
    for entry in manifest.files:
        check_header(path, entry)
        on_read(entry.header_size)
    pieces = [(piece.file, piece.offset, tensor, piece) for tensor in manifest.tensors for piece in tensor.pieces]
    for name, offset, tensor, piece in sorted(pieces, key=lambda each: each[:2]):
        if _digest_of_range(path / name, offset, tensor.num_bytes(piece), on_read) != piece.digest:
            raise CheckpointError(f"{tensor.name} in {name} is corrupt: the digest does not match")


def check_header(path: Path, entry: FileEntry) -> None:
    """Raises CheckpointError: the header of a file is corrupt, or cannot be read."""
    if _digest_of_range(path / entry.name, 0, entry.header_size) != entry.header_digest:
        raise CheckpointError(f"the header of {entry.name} is corrupt: the digest does not match")


def _digest_of_range(path: Path, offset: int, size: int, on_read: Callable[[int], None] = untold) -> str:
    digest = new_digest()
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            while size:
                data = file.read(min(size, CHUNK_BYTES))
                if not data:
                    raise CheckpointError(f"{path.name} is truncated")
                digest.update(data)
                size -= len(data)
                on_read(len(data))
    except OSError as exc:
        raise UnreadableError(f"{path}: {exc.strerror}") from exc
    return digest.hexdigest()
