"""What checkpoints need of the place where they lie: a directory (`files.py`), or a URL (`object_store.py`). No torch.

A storage has one folder for each checkpoint, and a folder has files. Their methods raise OSError with `filename` and
`strerror` set; FileNotFoundError if the file or the folder is not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from elasticgang.testing import reached


class Folder(Protocol):
    """The files of one checkpoint. `path`: the folder as messages name it; `name`: its last part."""

    @property
    def path(self) -> str: ...

    @property
    def name(self) -> str: ...

    def make(self) -> None:
        """Make the folder, if it is not there."""

    def write(self, file: str, chunks: Iterable[memoryview]) -> None:
        """Write a shard. It is whole once this has returned. If this raises, nothing of it is left where possible."""

    def put(self, file: str, data: bytes) -> None:
        """Write a small file, which appears under its name whole or not at all. The manifest is one."""

    def has_manifest(self) -> bool:
        """Whether the manifest is there, and the checkpoint complete. False if the folder is not there."""

    def sizes(self, files: Iterable[str]) -> Mapping[str, int]:
        """The sizes of `files` in bytes. Raises OSError also if one is missing, or is a link."""

    def read(self, file: str, limit: int) -> bytes:
        """The first `limit` bytes of a file, or all of it if it has less."""

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset` on. Raises CheckpointError: the file ends before."""

    def unlink(self, file: str) -> None:
        """Delete a file, if it is there."""

    def remove(self) -> None:
        """Delete the manifest, then all other files, then the folder. If this raises, it is not removed, or only in
        part. Another process may remove it at the same time."""


class Storage(Protocol):
    """The checkpoints of a job. `path`: the place as messages name it. `poll_s`: the time between two looks for a file
    that another process writes."""

    @property
    def path(self) -> str: ...

    @property
    def poll_s(self) -> float: ...

    def prepare(self, *, makes: bool = True) -> None:
        """Find out whether the place can be used. `makes`: make it, if it is not there.

        Raises:
            OperationalError: it cannot. The message names the place and the reason.
        """

    def names(self) -> list[str]:
        """The names of the folders, and of whatever else is there, in any order."""

    def folder(self, name: str) -> Folder:
        """The folder of that name. Does not look whether it is there."""

    def as_folder(self) -> Folder:
        """The place itself, for one that is a checkpoint."""


def before_call() -> None:
    """Comes before each call that changes what others see."""
    reached("checkpoint_io")
