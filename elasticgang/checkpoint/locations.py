"""From what users name, a directory or a URL, to the storage of its checkpoints. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from elasticgang.checkpoint.files import LocalStorage
from elasticgang.checkpoint.storage import Storage
from elasticgang.errors import NotSupportedError


def is_url(location: str | os.PathLike[str]) -> bool:
    """Whether `location` is a URL of fsspec, and not a directory."""
    return "://" in os.fspath(location)


def absolute(location: str | os.PathLike[str]) -> str:
    """The directory or URL `location`, whatever the working directory is later."""
    return os.fspath(location) if is_url(location) else os.path.abspath(location)


def check_lasting(location: str) -> None:
    """Raises NotSupportedError: what is saved there ends with the process that saves it."""
    if is_url(location) and location.partition("://")[0].rpartition("::")[2] == "memory":
        raise NotSupportedError(
            f"{location} is the memory of the process that writes to it, so that a checkpoint there ends with that "
            "process, and no other one can load it. Name a directory, or the URL of a store"
        )


def storage_at(location: str | os.PathLike[str]) -> Storage:
    """The checkpoints of the directory or URL `location`.

    Raises:
        NotSupportedError: it is a URL, and fsspec or what fsspec needs for it is missing.
        OperationalError: it is a URL, and fsspec cannot open it.
    """
    if not is_url(location):
        return LocalStorage(Path(location))
    from elasticgang.checkpoint.object_store import ObjectStorage  # fsspec is imported for URLs alone

    return ObjectStorage(os.fspath(location))
