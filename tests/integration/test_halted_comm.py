"""Comm processes that are halted in place of killed, and killed later."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from elasticgang.comm import comm_process
from elasticgang.comm.arena import Arena
from elasticgang.comm.comm_process import CommProcess, GroupSpec
from elasticgang.comm.group_set import GroupSet
from elasticgang.errors import PeerLostError
from elasticgang.process.forkserver import ForkServer
from elasticgang.process.stop_fence import is_halted
from tests.integration.comm_calls import GUARD_S, settle, start_sum, started_comm
from tests.integration.conftest import Worlds
from tests.preloaded import PreloadedProcess
from tests.support import environment, wait_dead, wait_until

NEVER_S = 600.0
ERROR = PeerLostError("rank 1 died")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still ends no halt. It lets no comm process warm up either, which starts threads: one that
    is being started refuses the halt (STOP-2)."""
    monkeypatch.setattr(comm_process, "HALT_TIMEOUT_S", GUARD_S)
    monkeypatch.setattr(CommProcess, "target", "tests.integration.ranks:cold_comm")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """No halted process is killed for its age."""
    monkeypatch.setattr(comm_process, "HALTED_S", NEVER_S)


@pytest.fixture
def pidfds() -> Iterator[list[int]]:
    found: list[int] = []
    yield found
    for pidfd in found:
        os.close(pidfd)


# COMM-6
def test_a_halted_process_has_ended_its_works_and_is_killed_later(
    worlds: Worlds, kept: None, pidfds: list[int]
) -> None:
    world = worlds(2)
    comm = world.comms[0]
    pidfds.append(os.pidfd_open(comm.pid))
    work = start_sum(comm, torch.ones(5))
    settle(comm.pid)
    comm.kill(ERROR, halt=True)
    comm.abort(PeerLostError("a later error"))  # waits for the end of the works
    assert work.error is ERROR
    assert is_halted(comm.pid)
    comm.close(wait=False)
    assert is_halted(comm.pid)
    comm.end_halted()
    assert not wait_dead(pidfds, GUARD_S)
    wait_until(lambda: comm.fileno() < 0 and comm.block is None, "its descriptors are closed", GUARD_S)


# COMM-6
@pytest.mark.parametrize("how", ["by its age", "by its close"])
def test_a_halted_process_is_killed_in_any_case(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch, pidfds: list[int], how: str
) -> None:
    monkeypatch.setattr(comm_process, "HALTED_S", 0.05 if how == "by its age" else NEVER_S)
    comm = worlds(1).comms[0]
    pidfds.append(os.pidfd_open(comm.pid))
    settle(comm.pid)
    comm.kill(ERROR, halt=True)
    comm.abort(ERROR)
    if how == "by its close":
        assert is_halted(comm.pid)
        comm.close()
    assert not wait_dead(pidfds, GUARD_S)


def test_a_halted_process_keeps_its_connections_until_it_is_killed(worlds: Worlds, kept: None) -> None:
    """Its peer learns of the end by the kill, as RENDEZVOUS-3 has it."""
    world = worlds(2)
    waits = start_sum(world.comms[1], torch.ones(5))
    settle(world.comms[0].pid)
    world.comms[0].kill(ERROR, halt=True)
    world.comms[0].abort(ERROR)
    assert not waits.done()
    world.comms[0].end_halted()
    with pytest.raises(PeerLostError):
        waits.wait(GUARD_S)


class _Deaf(CommProcess):
    """Its process ignores the signal that would end it."""

    target = "tests.integration.ranks:deaf_comm"


# STOP-2
def test_a_process_that_cannot_be_halted_is_killed(
    forkserver: ForkServer, store: str, kept: None, pidfds: list[int]
) -> None:
    comm = _Deaf(forkserver, Arena(), store=store, host="127.0.0.1", timeout=5.0, group=0)
    comm.wait_ready()
    pidfds.append(os.pidfd_open(comm.pid))
    comm.kill(ERROR, halt=True)
    comm.abort(ERROR)
    assert not wait_dead(pidfds, GUARD_S)
    comm.close()


class _OnDevice(CommProcess):
    uses_device = True


def test_a_process_that_uses_a_device_is_killed(
    forkserver: ForkServer, store: str, kept: None, pidfds: list[int]
) -> None:
    comm = _OnDevice(forkserver, Arena(), store=store, host="127.0.0.1", timeout=5.0, group=0)
    comm.wait_ready()
    pidfds.append(os.pidfd_open(comm.pid))
    comm.kill(ERROR, halt=True)
    comm.abort(ERROR)
    assert not wait_dead(pidfds, 0.0), "it is gone"
    comm.close()


# GROUPS-4
def test_one_process_of_a_former_configuration_is_halted_at_most(
    forkserver: ForkServer, store: str, kept: None, pidfds: list[int]
) -> None:
    groups = GroupSet(lambda: started_comm(forkserver, store, 5.0))
    pids = []
    for number in range(3):
        present = groups.open(GUARD_S)
        pids.append(present.comm.pid)
        pidfds.append(os.pidfd_open(present.comm.pid))
        present.connect(f"halted/{time.monotonic_ns()}", [GroupSpec("all", 0, 1)])
        settle(present.comm.pid)
        present.kill(ERROR, halt=True)
        groups.leave()
        assert is_halted(pids[number])
        assert not wait_dead(pidfds[:number], GUARD_S)
    groups.end_halted()
    assert not wait_dead(pidfds, GUARD_S)
    groups.close()


# A process with a fork server of its own, as a rank has it without its agent's. It halts a comm process. One that warms
# up at that moment may be starting a thread, and is killed instead (STOP-2): then it takes another.
_OWNER = """
import contextlib, json, os, socket, sys, time
from elasticgang.comm import comm_process
from elasticgang.comm.arena import Arena
from elasticgang.comm.comm_process import CommProcess
from elasticgang.comm.standby_pool import PRELOAD
from elasticgang.errors import PeerLostError
from elasticgang.process.forkserver import ForkServer
from elasticgang.process.stop_fence import is_halted
from tests.integration.comm_calls import settle

comm_process.HALTED_S = comm_process.HALT_TIMEOUT_S = 600.0
server = ForkServer(PRELOAD)
server.wait_ready()
for _ in range(20):
    ours, theirs = socket.socketpair()
    comm = CommProcess(server, Arena(), timeout=5.0, agent=theirs)
    comm.wait_ready()
    settle(comm.pid)
    comm.kill(PeerLostError("over"), halt=True)
    comm.abort(PeerLostError("over"))
    with contextlib.suppress(OSError):  # it is gone
        if is_halted(comm.pid):
            break
print(json.dumps([comm.pid, server.process.pid]), flush=True)
time.sleep(600)
"""


# STOP-4
def test_a_halted_process_dies_with_its_parent_though_the_fork_server_dies_first(
    pidfds: list[int], tmp_path: Path
) -> None:
    """Nobody is left to kill its process group, and it cannot notice anything."""
    (script := tmp_path / "owner.py").write_text(_OWNER)
    command = [sys.executable, str(script)]
    owner = PreloadedProcess(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment(), text=True)
    try:
        assert owner.stdout is not None
        comm, server = json.loads(owner.stdout.readline())
        assert is_halted(comm)
        assert psutil.Process(comm).ppid() == owner.pid
        pidfds.extend(map(os.pidfd_open, (server, comm)))
        os.kill(server, signal.SIGKILL)
        assert not wait_dead(pidfds[:1], GUARD_S)
        assert is_halted(comm)
    finally:
        owner.kill()
        owner.wait()
        assert owner.stdout is not None
        owner.stdout.close()
    assert not wait_dead(pidfds, GUARD_S)
