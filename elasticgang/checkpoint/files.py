"""Checkpoints in a local directory: each change of it is durable before the next one begins. No torch.

FILES-1  A file appears under its name by a rename, after its bytes are on the disk; then its directory is synced.
FILES-2  A checkpoint is complete once its manifest has its name. A deletion begins with the manifest.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from elasticgang.checkpoint.manifest import MANIFEST
from elasticgang.checkpoint.storage import before_call
from elasticgang.errors import CheckpointError, OperationalError

_POLL_S = 0.02
_CHUNK_BYTES = 4 << 20


class LocalStorage:
    """A `Storage` in a directory."""

    poll_s = _POLL_S

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @property
    def path(self) -> str:
        return str(self._directory)

    def prepare(self, *, makes: bool = True) -> None:
        try:
            if makes:
                self._directory.mkdir(parents=True, exist_ok=True)
            os.stat(self._directory)
            is_writable = os.access(self._directory, os.W_OK | os.X_OK)
        except OSError as exc:
            what = "make" if makes else "use"
            raise OperationalError(f"cannot {what} the checkpoint directory {self.path}: {exc.strerror}") from exc
        if not is_writable:
            raise OperationalError(f"cannot write to the checkpoint directory {self.path}")

    def names(self) -> list[str]:
        return os.listdir(self._directory)

    def folder(self, name: str) -> LocalFolder:
        return LocalFolder(self._directory / name)

    def as_folder(self) -> LocalFolder:
        return LocalFolder(self._directory)


@dataclass(frozen=True)
class LocalFolder:
    """A `Folder` in a directory."""

    directory: Path

    @property
    def path(self) -> str:
        return str(self.directory)

    @property
    def name(self) -> str:
        return self.directory.name

    def make(self) -> None:
        before_call()
        self.directory.mkdir(exist_ok=True)
        _sync_directory(self.directory.parent)

    def write(self, file: str, chunks: Iterable[memoryview]) -> None:
        write_file(self.directory / file, chunks)

    def put(self, file: str, data: bytes) -> None:
        write_file(self.directory / file, _chunks(memoryview(data)))

    def has_manifest(self) -> bool:
        return (self.directory / MANIFEST).is_file()

    def sizes(self, files: Iterable[str]) -> dict[str, int]:
        """The size of a link is that of the link."""
        return {file: os.stat(self.directory / file, follow_symlinks=False).st_size for file in files}

    def read(self, file: str, limit: int) -> bytes:
        with open(self.directory / file, "rb") as opened:
            return opened.read(limit)

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        position = 0
        with open(self.directory / file, "rb", buffering=0) as opened:
            opened.seek(offset)
            while position < len(buffer):
                count = opened.readinto(buffer[position:])
                if not count:
                    raise CheckpointError(f"{file} is truncated")
                position += count

    def unlink(self, file: str) -> None:
        before_call()
        with contextlib.suppress(FileNotFoundError):
            (self.directory / file).unlink()

    def remove(self) -> None:
        """FILES-2."""
        self.unlink(MANIFEST)
        _sync_directory(self.directory)
        for name in os.listdir(self.directory):
            self.unlink(name)
        before_call()
        self.directory.rmdir()


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """FILES-1. Raises OSError: the file was not written, and nothing of it is left."""
    with new_file(path) as write:
        for chunk in chunks:
            write(memoryview(chunk))


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[Callable[[memoryview], None]]:
    """As `write_file`, of what the body writes with the function that it gets."""
    temporary = path.with_name(f".{path.name}.tmp")
    before_call()
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        try:
            yield functools.partial(_write_all, descriptor)
            before_call()
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        before_call()
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_directory(path.parent)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        before_call()
        data = data[os.write(descriptor, data) :]


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        before_call()
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _chunks(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), _CHUNK_BYTES):
        yield data[start : start + _CHUNK_BYTES]
