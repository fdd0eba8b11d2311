"""The guard of this tier: what `conftest.py` forbids fails here, with a message that says where such tests belong."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from torch._C._distributed_c10d import FileStore, TCPStore

from tests.conftest import LONG, TESTS


@pytest.mark.parametrize(
    ("act", "what"),
    [
        (lambda: socket.socket(), "opens a socket"),
        (lambda: socket.socketpair(), "opens a socket"),
        (lambda: subprocess.run([sys.executable, "-c", ""]), "starts a process"),
        (lambda: os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {}), "starts a process"),
        (lambda: multiprocessing.get_context("spawn").Process(target=print).start(), "starts a process"),
        (lambda: TCPStore("127.0.0.1", 0, is_master=True), "opens a store"),
        (lambda: FileStore("/tmp/no-such-store", 1), "opens a store"),
        (lambda: Path(__file__).with_name("written.txt").open("x"), "writes .*written.txt"),
        (lambda: os.open(Path(__file__).with_name("written"), os.O_CREAT | os.O_WRONLY), "writes .*written"),
    ],
)
def test_impure_acts_fail(act: Callable[[], object], what: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=rf"tests/unit is pure, but this test {what}.*tests/integration"):
        act()


def test_a_clone_below_the_temporary_folder_is_not_written_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(TESTS.parent.parent))
    path = Path(__file__).with_name("written.txt")
    with pytest.raises(pytest.fail.Exception, match=r"writes .*written\.txt"):
        path.open("x").close()
    assert not path.exists()


def fork() -> None:
    if os.fork() == 0:
        os._exit(0)  # the guard let it pass


def test_a_fork_fails() -> None:
    with pytest.raises(pytest.fail.Exception, match="forks"):
        fork()


def test_the_files_that_begin_first_are_there() -> None:
    assert set(LONG) <= {path.name for path in TESTS.rglob("test_*.py")}


def test_files_in_the_temporary_folder_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "written.txt").write_text("text")
    assert Path(__file__).read_text()
