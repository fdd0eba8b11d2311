"""The job's secret, read from a file.

SECRET-FILE  Only the owner of the file may read or write it. If that is root, a group of this process may read it too,
             as where Kubernetes mounts it with `fsGroup`. The same holds for a private key.
SECRET-SIZE  The secret has at least 16 bytes, without white space at either end.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from elasticgang.errors import OperationalError

SECRET_FILE_VARIABLE = "ELASTICGANG_SECRET_FILE"
MIN_SECRET_BYTES = 16
_MAX_SECRET_BYTES = 4096


class Secret:
    """A secret value, which `repr` does not show and pickle refuses."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    def reveal(self) -> bytes:
        return self._value

    def __repr__(self) -> str:
        return "Secret(...)"

    def __reduce__(self) -> str:
        raise TypeError("a secret is not pickled")


def find_secret(path: Path | None, environment: Mapping[str, str]) -> Secret | None:
    """The secret in `path`, otherwise in the file that ELASTICGANG_SECRET_FILE names; None without either.

    Raises:
        OperationalError: the file cannot be read, other users may read it, or the secret is too short.
    """
    if path is None and (named := environment.get(SECRET_FILE_VARIABLE)):
        path = Path(named)
    return None if path is None else read_secret(path)


def read_secret(path: Path) -> Secret:
    """Raises OperationalError (SECRET-FILE, SECRET-SIZE)."""
    value = read_private(path, "secret file", _MAX_SECRET_BYTES).strip()
    if len(value) < MIN_SECRET_BYTES:
        raise OperationalError(
            f"the secret in {path} must have at least {MIN_SECRET_BYTES} bytes, but has {len(value)}: "
            "`head -c 32 /dev/urandom | base64` makes one"
        )
    return Secret(value)


def _allowed(status: os.stat_result) -> int:
    """The bits of its mode that others than its owner may have (SECRET-FILE)."""
    is_of_group = status.st_uid == 0 and status.st_gid in (os.getegid(), *os.getgroups())
    return stat.S_IRGRP if is_of_group else 0


def read_private(path: Path, what: str, max_bytes: int) -> bytes:
    """The contents of a file that others may not read (SECRET-FILE). `what`: the kind of file, in messages. Raises
    OperationalError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            mode = status.st_mode
            if not stat.S_ISREG(mode):
                raise OperationalError(f"the {what} {path} is not a regular file")
            if mode & (stat.S_IRWXG | stat.S_IRWXO) & ~_allowed(status):
                raise OperationalError(
                    f"the {what} {path} must be its owner's alone, but its mode is {stat.S_IMODE(mode):04o}: "
                    f"run `chmod 600 {path}`"
                )
            value = file.read(max_bytes + 1)
    except OSError as error:
        raise OperationalError(f"the {what} {path} cannot be read: {error.strerror}") from error
    if len(value) > max_bytes:
        raise OperationalError(f"the {what} {path} is over {max_bytes} bytes")
    return value
