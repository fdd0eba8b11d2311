"""Finds the checkpoints of a storage, and verifies them. No torch.

LISTING-1  A folder without a manifest is no checkpoint: it is being written, or its writers died.
LISTING-2  A checkpoint whose digests were found not to match is marked, and no rank loads it again.
LISTING-3  A manifest is read only up to `MAX_MANIFEST_BYTES`, and a file only if it has the size of the manifest.
LISTING-4  A checkpoint that a later save deletes while the others are listed is none: they are listed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from elasticgang.checkpoint.digest import new_digest
from elasticgang.checkpoint.manifest import MANIFEST, MAX_MANIFEST_BYTES, FileEntry, Manifest, parse
from elasticgang.checkpoint.plan import attempt_in
from elasticgang.checkpoint.storage import Folder, Storage
from elasticgang.errors import CheckpointError
from elasticgang.progress import no_progress
from elasticgang.protocol.commit import Attempt

CHUNK_BYTES = 4 << 20
_MARK = "corrupt"
_MAX_REASON = 1000
_MAX_LISTINGS = 10


class UnreadableError(CheckpointError):
    """The system cannot read a file. It may be able to later, or on another host."""


@dataclass(frozen=True)
class Found:
    """One complete checkpoint. `manifest` is None, and `problem` says why, if it cannot be used. `is_unreadable`: the
    system cannot read it, as of `UnreadableError`."""

    folder: Folder
    attempt: Attempt
    manifest: Manifest | None
    problem: str = ""
    is_unreadable: bool = False

    @property
    def path(self) -> str:
        """As messages name it."""
        return self.folder.path


def names(storage: Storage) -> tuple[list[str], list[str]]:
    """The names of complete and of incomplete checkpoints, oldest first. Raises OSError."""
    complete: list[str] = []
    incomplete: list[str] = []
    for name in sorted(storage.names(), key=lambda name: (attempt_in(name) or (0, 0), name)):
        if attempt_in(name) is not None:
            (complete if storage.folder(name).has_manifest() else incomplete).append(name)  # LISTING-1
    return complete, incomplete


def scan(storage: Storage) -> Iterator[Found]:
    """The complete checkpoints, newest first, with their sizes checked and no digest but the manifest's. A place that
    does not exist holds none.

    Raises:
        UnreadableError: the place cannot be read.
    """
    returned: set[str] = set()
    for _ in range(_MAX_LISTINGS):
        for name in _newest_first(storage):
            if name not in returned:
                folder = storage.folder(name)
                found = _look_at(folder)
                if found.problem and _is_deleted(folder):  # LISTING-4
                    break
                returned.add(name)
                yield found
        else:
            return
    raise UnreadableError(f"cannot read the checkpoints of {storage.path}: they are deleted as fast as they are read")


def _newest_first(storage: Storage) -> list[str]:
    """The names of complete checkpoints. Raises UnreadableError."""
    try:
        return names(storage)[0][::-1]
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise UnreadableError(f"cannot read the checkpoints of {storage.path}: {exc.strerror}") from exc


def _look_at(folder: Folder) -> Found:
    attempt = attempt_in(folder.name)
    assert attempt is not None
    try:
        if (mark := _read_mark(folder)) is not None:
            raise CheckpointError(mark)
        return Found(folder, attempt, read_manifest(folder))
    except CheckpointError as exc:
        return Found(folder, attempt, None, str(exc), isinstance(exc, UnreadableError))


def _is_deleted(folder: Folder) -> bool:
    """Whether its manifest is gone, with which a deletion begins."""
    try:
        return not folder.has_manifest()
    except OSError:
        return False


def mark_corrupt(folder: Folder, reason: str) -> None:
    """LISTING-2. Raises OSError: it is not marked."""
    folder.put(_MARK, reason.encode())


def is_marked(folder: Folder) -> bool:
    """Whether the checkpoint is marked as corrupt, as far as that can be read."""
    try:
        return _read_mark(folder) is not None
    except UnreadableError:
        return False


def _read_mark(folder: Folder) -> str | None:
    try:
        return folder.read(_MARK, 4 * _MAX_REASON).decode(errors="replace")[:_MAX_REASON]
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise _unreadable(folder, exc) from exc


def read_manifest(folder: Folder) -> Manifest:
    """The manifest of the checkpoint in `folder`, whose files have the right sizes. Raises CheckpointError."""
    try:
        data = folder.read(MANIFEST, MAX_MANIFEST_BYTES + 1)  # LISTING-3
        if len(data) > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"its manifest is over the limit of {MAX_MANIFEST_BYTES} bytes")
        manifest = parse(data)
        if manifest.attempt != attempt_in(folder.name):
            raise CheckpointError(f"its manifest is of step {manifest.attempt.step}, and its name says otherwise")
        sizes = folder.sizes(entry.name for entry in manifest.files)
    except OSError as exc:
        raise _unreadable(folder, exc) from exc
    for entry in manifest.files:
        if sizes[entry.name] != entry.size:
            raise CheckpointError(f"{entry.name} has {sizes[entry.name]} bytes instead of {entry.size}")
    return manifest


def verify(folder: Folder, manifest: Manifest, on_read: Callable[[int], None] = no_progress) -> None:
    """Check every digest. `on_read`: gets the number of bytes of each part that was read.

    Raises:
        CheckpointError: a digest does not match, or a file cannot be read.
    """
    for entry in manifest.files:
        check_header(folder, entry)
        on_read(entry.header_size)
    pieces = [(piece.file, piece.offset, tensor, piece) for tensor in manifest.tensors for piece in tensor.pieces]
    for name, offset, tensor, piece in sorted(pieces, key=lambda each: each[:2]):
        if _digest_of_range(folder, name, offset, tensor.num_bytes(piece), on_read) != piece.digest:
            raise CheckpointError(f"{tensor.name} in {name} is corrupt: the digest does not match")


def check_header(folder: Folder, entry: FileEntry) -> None:
    """Raises CheckpointError: the header of a file is corrupt, or cannot be read."""
    if _digest_of_range(folder, entry.name, 0, entry.header_size) != entry.header_digest:
        raise CheckpointError(f"the header of {entry.name} is corrupt: the digest does not match")


def read_into(folder: Folder, file: str, offset: int, buffer: memoryview) -> None:
    """Fill `buffer` with the bytes from `offset` on. Raises CheckpointError: it cannot be read, or is truncated."""
    try:
        folder.read_into(file, offset, buffer)
    except OSError as exc:
        raise _unreadable(folder, exc) from exc


def _digest_of_range(
    folder: Folder, file: str, offset: int, size: int, on_read: Callable[[int], None] = no_progress
) -> str:
    digest = new_digest()
    buffer = memoryview(bytearray(min(size, CHUNK_BYTES)))
    for start in range(0, size, CHUNK_BYTES):
        part = buffer[: min(size - start, CHUNK_BYTES)]
        read_into(folder, file, offset + start, part)
        digest.update(part)
        on_read(len(part))
    return digest.hexdigest()


def _unreadable(folder: Folder, exc: OSError) -> UnreadableError:
    return UnreadableError(f"{exc.filename or folder.path}: {exc.strerror}")
