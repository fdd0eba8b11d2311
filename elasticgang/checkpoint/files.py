"""Changes of a checkpoint directory, each durable before the next one begins. No torch.

FILES-1  A file appears under its name by a rename, after its bytes are on the disk; then its directory is synced.
FILES-2  A checkpoint is complete once its manifest has its name. A deletion begins with the manifest.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from elasticgang.checkpoint.manifest import MANIFEST
from elasticgang.testing import reached


def _before_call() -> None:
    reached("checkpoint_io")


def make_directory(path: Path) -> None:
    """Raises OSError."""
    _before_call()
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """FILES-1. Raises OSError: the file was not written, and nothing of it is left."""
    temporary = path.with_name(f".{path.name}.tmp")
    _before_call()
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        try:
            for chunk in chunks:
                _write_all(descriptor, memoryview(chunk))
            _before_call()
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        _before_call()
        os.rename(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    sync_directory(path.parent)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        _before_call()
        data = data[os.write(descriptor, data) :]


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _before_call()
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_checkpoint(path: Path) -> None:
    """FILES-2. Raises OSError: it is not removed, or only in part. Another process may remove it at the same time."""
    unlink(path / MANIFEST)
    sync_directory(path)
    for name in os.listdir(path):
        unlink(path / name)
    _before_call()
    path.rmdir()


def unlink(path: Path) -> None:
    _before_call()
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
