"""Checkpoints under a URL of fsspec: an object store, or a file system that fsspec reaches. No torch.

Retries and timeouts are those of fsspec and of the store's client. Options come from fsspec's configuration, and
credentials from where the store's client looks for them.

OBJECTS-1  A description of a share, and the manifest, appear whole under their names: by one put, and by a rename on a
    file system, where a put is not atomic. A shard has no reader before its description is there.
OBJECTS-2  A deletion begins with the manifest, and lists the folder again until it is empty: a writer that is still at
    work may have written to it.
OBJECTS-3  Every error of fsspec, or of the store's client, becomes an OSError that names the file and the reason.
OBJECTS-4  Only the last part of a name that a store lists is used, below the folder that was listed. A link is no file
    of a checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

from elasticgang.checkpoint.manifest import MANIFEST
from elasticgang.checkpoint.storage import before_call
from elasticgang.errors import NotSupportedError, OperationalError

# The protocols of file systems with directories, whose `mv` within a directory is a rename.
_FILE_SYSTEMS = frozenset(("file", "local", "sftp", "ssh", "ftp", "smb", "hdfs", "webhdfs"))
_POLL_S = 0.5
_RANGE_BYTES = 16 << 20  # in one request
_REMOVALS = 3  # how often a folder is listed, at most, until it is empty
_CREDENTIALS = re.compile(r"(?<=://)[^/@]*@")


class ObjectStorage:
    """A `Storage` under a URL."""

    poll_s = _POLL_S

    def __init__(self, url: str) -> None:
        """Raises:
        NotSupportedError: fsspec, or the package that it needs for such URLs, is missing; or it knows no such ones.
        OperationalError: fsspec cannot open it, for example because a part of it or of the credentials is missing.
        """
        try:
            from fsspec.core import url_to_fs
        except ImportError as exc:
            raise NotSupportedError(
                f"checkpoints at {_shown(url)} need fsspec: pip install 'elasticgang[fsspec]'"
            ) from exc
        try:
            self._fs, self._root = url_to_fs(url)
        except (ImportError, ValueError) as exc:
            raise NotSupportedError(f"fsspec cannot open {_shown(url)}: {exc}") from exc
        except Exception as exc:  # OBJECTS-3
            raise OperationalError(f"cannot open {_shown(url)}: {_reason(exc)}") from exc
        protocols = (self._fs.protocol,) if isinstance(self._fs.protocol, str) else self._fs.protocol
        self._is_file_system = not _FILE_SYSTEMS.isdisjoint(protocols)
        self.path = _shown(url)

    def prepare(self, *, makes: bool = True) -> None:
        try:
            with _errors_of(self.path):
                if self._is_file_system and makes:
                    self._fs.makedirs(self._root, exist_ok=True)
                self._look()
        except OSError as exc:
            raise OperationalError(f"cannot list the checkpoints of {self.path}: {exc.strerror}") from exc

    def _look(self) -> None:
        self._fs.invalidate_cache()
        try:
            self._fs.ls(self._root, detail=False)
        except FileNotFoundError:  # a store has no empty directories, but its bucket has to be there
            bucket = self._root.partition("/")[0]
            if bucket:
                self._fs.info(bucket)

    def names(self) -> list[str]:
        return [*self.as_folder().list()]

    def folder(self, name: str) -> ObjectFolder:
        return ObjectFolder(self._fs, f"{self._root}/{name}", f"{self.path}/{name}", self._is_file_system)

    def as_folder(self) -> ObjectFolder:
        return ObjectFolder(self._fs, self._root, self.path, self._is_file_system)


class ObjectFolder:
    """A `Folder` under a URL. `root`: its path in `fs`."""

    def __init__(self, fs: Any, root: str, path: str, is_file_system: bool) -> None:
        self._fs, self._root, self._is_file_system = fs, root, is_file_system
        self.path = path

    @property
    def name(self) -> str:
        return self._root.rpartition("/")[2]

    def make(self) -> None:
        if self._is_file_system:
            before_call()
            with _errors_of(self.path):
                self._fs.makedirs(self._root, exist_ok=True)

    def write(self, file: str, chunks: Iterable[memoryview]) -> None:
        with self._errors_of(file):
            before_call()
            try:
                with self._fs.open(self._in(file), "wb") as opened:
                    for chunk in chunks:
                        before_call()
                        opened.write(bytes(chunk))
                    before_call()
            except BaseException:  # the end of the `with` has written what there was
                self._try_to_remove(file)
                raise

    def put(self, file: str, data: bytes) -> None:
        """OBJECTS-1."""
        with self._errors_of(file):
            if not self._is_file_system:
                before_call()
                self._fs.pipe_file(self._in(file), data)
                return
            staged = f".{file}.tmp"
            try:
                before_call()
                self._fs.pipe_file(self._in(staged), data)
                before_call()
                self._fs.mv(self._in(staged), self._in(file))
            except BaseException:
                self._try_to_remove(staged)
                raise

    def has_manifest(self) -> bool:
        try:
            return MANIFEST in self.list()
        except FileNotFoundError:
            return False

    def sizes(self, files: Iterable[str]) -> dict[str, int]:
        listed, sizes = self.list(), {}
        for file in files:
            if file not in listed:
                raise _not_found(self._shown(file))
            if listed[file]["type"] != "file":  # OBJECTS-4
                raise OSError(errno.EINVAL, "it is not a plain file", self._shown(file))
            sizes[file] = int(listed[file]["size"])
        return sizes

    def read(self, file: str, limit: int) -> bytes:
        with self._errors_of(file):
            return self._range(file, 0, limit)

    def read_into(self, file: str, offset: int, buffer: memoryview) -> None:
        """Never CheckpointError: `sizes` has been right, so that a store that returns less has failed for now."""
        with self._errors_of(file):
            for start in range(0, len(buffer), _RANGE_BYTES):
                part = buffer[start : start + _RANGE_BYTES]
                data = self._range(file, offset + start, offset + start + len(part))
                if len(data) != len(part):
                    raise OSError(errno.EIO, f"the store has returned {len(data)} bytes instead of {len(part)}")
                part[:] = data

    def unlink(self, file: str) -> None:
        before_call()
        with self._errors_of(file), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._in(file))

    def remove(self) -> None:
        """OBJECTS-2."""
        with contextlib.suppress(FileNotFoundError):
            for _ in range(_REMOVALS):
                if not (listed := self.list()):
                    break
                for file in sorted(listed, key=lambda file: file != MANIFEST):
                    self.unlink(file)
            else:
                raise OSError(errno.ENOTEMPTY, "files are written to it while it is deleted", self.path)
            if self._is_file_system:
                before_call()
                with _errors_of(self.path):
                    self._fs.rmdir(self._root)

    def list(self) -> dict[str, dict[str, Any]]:
        """What fsspec says of each file, by name (OBJECTS-4)."""
        with _errors_of(self.path):
            self._fs.invalidate_cache()
            found = {each["name"].rstrip("/"): each for each in self._fs.ls(self._root, detail=True)}
        return {path.rpartition("/")[2]: info for path, info in found.items() if path != self._root}

    def _range(self, file: str, start: int, end: int) -> bytes:
        return bytes(self._fs.cat_file(self._in(file), start=start, end=end))  # s3fs has other positions

    def _in(self, file: str) -> str:
        return f"{self._root}/{file}"

    def _shown(self, file: str) -> str:
        return f"{self.path}/{file}"

    def _errors_of(self, file: str) -> contextlib.AbstractContextManager[None]:
        return _errors_of(self._shown(file))

    def _try_to_remove(self, file: str) -> None:
        with contextlib.suppress(Exception):
            self._fs.rm_file(self._in(file))


def _shown(url: str) -> str:
    """Without a user's name and password."""
    return _CREDENTIALS.sub("", url).rstrip("/")


def _not_found(shown: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), shown)


def _reason(exc: Exception) -> str:
    if isinstance(exc, OSError) and exc.strerror:
        return exc.strerror
    return f"{type(exc).__name__}: {exc}"


@contextlib.contextmanager
def _errors_of(shown: str) -> Iterator[None]:
    """OBJECTS-3."""
    try:
        yield
    except FileNotFoundError as exc:
        raise _not_found(shown) from exc
    except Exception as exc:
        number = exc.errno if isinstance(exc, OSError) and exc.errno else errno.EIO
        raise OSError(number, _reason(exc), shown) from exc
