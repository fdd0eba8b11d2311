"""The unit tier is pure: a test that opens a socket, starts a process or writes beyond the temporary folder fails.

Python's audit events tell of most of it. What raises none (socket pairs, the start of a process by multiprocessing,
torch's stores) is refused by name.
"""

from __future__ import annotations

import _posixsubprocess
import os
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

REPOSITORY = Path(__file__).parents[2]
FORBIDDEN = {
    "socket.__new__": "opens a socket",
    "os.fork": "forks",
    "os.forkpty": "forks",
    "os.posix_spawn": "starts a process",
    "subprocess.Popen": "starts a process",
}
STORES = ("TCPStore", "FileStore")
WRITES = os.O_WRONLY | os.O_RDWR
CACHES = ("__pycache__", ".hypothesis")  # what Python and hypothesis write beside the tests

_is_on = False


def _fail(what: str) -> NoReturn:
    pytest.fail(f"tests/unit is pure, but this test {what}: such tests belong in tests/integration")


def _is_temporary(path: Path) -> bool:
    """A clone below the temporary folder is not temporary."""
    folder = Path(tempfile.gettempdir())
    is_own = path.is_relative_to(REPOSITORY) and not folder.is_relative_to(REPOSITORY)
    return (path.is_relative_to(folder) and not is_own) or path == Path(os.devnull)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if not _is_on:
        return
    if event in FORBIDDEN:
        _fail(f"{FORBIDDEN[event]} ({event}{args})")
    if event == "open" and isinstance(args[0], str | bytes) and args[2] & WRITES:
        path = Path(os.fsdecode(args[0])).absolute()
        if not _is_temporary(path) and not set(path.parts) & set(CACHES):
            _fail(f"writes {path}")


sys.addaudithook(_audit)


@pytest.fixture(autouse=True)
def _pure(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    global _is_on
    monkeypatch.setattr(_posixsubprocess, "fork_exec", lambda *_: _fail("starts a process (multiprocessing)"))
    monkeypatch.setattr(socket, "socketpair", lambda *_, **__: _fail("opens a socket (socketpair)"))
    dist = sys.modules.get("torch.distributed")  # where no module has imported it, nothing opens a store
    for name in STORES if dist is not None else ():
        monkeypatch.setattr(
            getattr(dist, name), "__init__", lambda *_, _name=name, **__: _fail(f"opens a store ({_name})")
        )
    _is_on = True
    try:
        yield
    finally:
        _is_on = False
