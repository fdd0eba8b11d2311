"""An agent's process supervisor in a process of its own, whose fork server fails.

`python -m tests.integration.tries CASE` prints what came of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from elasticgang.agent import process_supervisor
from elasticgang.agent.process_supervisor import ProcessSupervisor
from elasticgang.agent.rank_launch import LaunchedRank, RankLaunch
from elasticgang.errors import OperationalError
from elasticgang.launch.output import PrefixedOutput
from elasticgang.process.forkserver import ForkServer, Spawned
from elasticgang.process.lease import Lease
from elasticgang.session.credentials import Credentials
from tests.support import wait_dead

GUARD_S = 20.0
_NOBODY = 65534
_SLEEPING = """
import os, pathlib, time
pathlib.Path(__file__).with_suffix(f".{os.getpid()}").touch()
time.sleep(1000)
"""


class _Deaf(ForkServer):
    """A real one, whose answer does not arrive: it is killed when it has forked."""

    first: Spawned

    def __init__(self, server: ForkServer) -> None:
        self.__dict__.update(vars(server))

    def spawn(
        self,
        target: str,
        args: dict[str, Any],
        *,
        fds: Sequence[int] = (),
        stdio: Sequence[int] = (),
        env: Mapping[str, str] | None = None,
        group: int = 0,
        name: str = "",
    ) -> Spawned:
        type(self).first = super().spawn(target, args, fds=fds, stdio=stdio, env=dict(env or {}), name=name)
        self.process.kill()
        self._sock.close()
        raise OperationalError("it was killed before it answered")


async def _stopped(supervisor: ProcessSupervisor) -> dict[str, Any]:
    """The fork server stands still while it is asked."""
    tries: list[int] = []

    def fork(server: ForkServer) -> Spawned:
        tries.append(server.process.pid)
        if len(tries) == 1:
            os.kill(server.process.pid, signal.SIGSTOP)
        return server.spawn("tests.integration.children:sleep", {})

    spawned = await supervisor.fork(fork, is_own=True)
    told = [line.replace(str(tries[0]), "PID") for line in _told]
    runs = wait_dead([spawned.pidfd], 0.0) != []
    return {"tries": len(tries), "servers": len(set(tries)), "runs": runs, "told": told}


async def _stopped_at_first(supervisor: ProcessSupervisor) -> dict[str, Any]:
    """The fork server has stood still while it imported, until that was told."""
    spawned = await supervisor.fork(lambda server: server.spawn("tests.integration.children:sleep", {}), is_own=True)
    return {"told": len(_told), "runs": wait_dead([spawned.pidfd], 0.0) != []}


async def _twin(supervisor: ProcessSupervisor) -> dict[str, Any]:
    """The fork server dies between its fork and its answer."""
    script = Path(sys.argv[2])
    script.write_text(_SLEEPING)
    args = {
        "command": {"script": str(script), "args": [], "module": False},
        "agent_pid": os.getpid(),
        "num_ranks": 1,
        "host": "127.0.0.1",
        "job": "job",
        "collective_timeout": 1.0,
        "process_group": None,
        "compare_state": 0,
        "credentials": Credentials().to_json(),
    }
    launch = RankLaunch("agent", 0, "elasticgang.member.rank_main:main", args, {}, Lease.create().fd)
    output = PrefixedOutput()
    tries = 0

    def fork(server: ForkServer) -> LaunchedRank:
        nonlocal tries
        tries += 1
        return launch.start(_Deaf(server) if tries == 1 else server, output)

    launched = await supervisor.fork(fork, is_own=True)
    left = wait_dead([_Deaf.first.pidfd], GUARD_S)
    await _until(lambda: script.with_suffix(f".{launched.pid}").exists(), "the second one does not run its script")
    return {"tries": tries, "twin lives": left != [], "runs": wait_dead([launched.pidfd], 0.0) != []}


async def _after_the_end(supervisor: ProcessSupervisor) -> dict[str, Any]:
    """The fork server dies when nothing is forked any more."""
    supervisor.stop()
    supervisor.kill()
    os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    supervisor.reap()
    await _until_reaped()
    return {}


async def _orphan(supervisor: ProcessSupervisor) -> dict[str, Any]:
    """A process ends that the supervisor has not forked."""
    orphan = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, orphan.pid, os.WEXITED | os.WNOWAIT)
    for _ in range(3):  # one timer, however many signals there are
        supervisor.reap()
    is_unreaped = _has_unreaped()
    await _until_reaped()
    return {"is unreaped at first": is_unreaped}


async def _orphan_of_a_fork(supervisor: ProcessSupervisor) -> dict[str, Any]:
    """A process ends while another one is forked, and no signal comes after that."""

    orphans: list[subprocess.Popen[bytes]] = []  # `Popen` reaps one that nobody refers to

    def fork(server: ForkServer) -> Spawned:
        orphans.append(subprocess.Popen([sys.executable, "-c", ""]))
        os.waitid(os.P_PID, orphans[0].pid, os.WEXITED | os.WNOWAIT)
        return server.spawn("tests.integration.children:sleep", {})

    await supervisor.fork(fork, is_own=True)
    is_unreaped = _has_unreaped()
    await _until_reaped()
    return {"is unreaped at first": is_unreaped}


async def _earlier(supervisor: ProcessSupervisor) -> dict[str, Any]:
    """This process has two children at the end, one of them since before the supervisor was opened."""
    later = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    await supervisor.close()
    (earlier,) = psutil.Process().children()
    earlier.terminate()
    return {"earlier": earlier.wait(GUARD_S), "later": later.pid == earlier.pid}


async def _foreign(supervisor: ProcessSupervisor) -> dict[str, Any]:
    """This process has two children at the end. It may not kill the first one."""
    command = ["setpriv", "--reuid", str(_NOBODY), "--clear-groups", "sh", "-c", "echo; exec cat"]
    foreign = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert foreign.stdin is not None
    assert foreign.stdout is not None
    foreign.stdout.readline()
    own = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    began_s = time.monotonic()
    await supervisor.close()
    took_s = time.monotonic() - began_s
    foreign.stdin.close()
    return {"foreign": foreign.wait(GUARD_S), "own": psutil.pid_exists(own.pid), "spun": took_s >= 2.0}


async def _server(supervisor: ProcessSupervisor) -> dict[str, Any]:
    """The fork server dies when nothing is forked."""
    before: list[int] = []
    forked = await supervisor.fork(lambda server: _noted(server, before), is_own=True)
    supervisor.kill()
    os.waitid(os.P_PID, before[0], os.WEXITED | os.WNOWAIT)
    supervisor.reap()
    is_unreaped = psutil.pid_exists(before[0])
    await _until(lambda: _fork_servers(without=forked.pid) != [], "the fork server is not replaced")
    found = _fork_servers(without=forked.pid)
    after: list[int] = []
    await supervisor.fork(lambda server: _noted(server, after), is_own=True)
    return {"is unreaped at first": is_unreaped, "tries": len(after), "another": after == found != before}


def _fork_servers(without: int) -> list[int]:
    """`without`: a process that one has forked, which has its command line."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):  # it has just ended
            if child.pid != without and "elasticgang.process.forkserver" in child.cmdline():
                found.append(child.pid)
    return found


def _noted(server: ForkServer, pids: list[int]) -> Spawned:
    pids.append(server.process.pid)
    return server.spawn("tests.integration.children:sleep", {})


def _has_unreaped() -> bool:
    return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


async def _until_reaped() -> None:
    with contextlib.suppress(ChildProcessError):  # there is no other child
        await _until(lambda: not _has_unreaped(), "a dead child is not reaped")


async def _until(happened: Callable[[], bool], otherwise: str) -> None:
    end_s = time.monotonic() + GUARD_S
    while not happened():
        assert time.monotonic() < end_s, otherwise
        await asyncio.sleep(0.01)


CASES: dict[str, Callable[[ProcessSupervisor], Any]] = {
    "stopped": _stopped,
    "stopped at first": _stopped_at_first,
    "twin": _twin,
    "after the end": _after_the_end,
    "orphan": _orphan,
    "orphan of a fork": _orphan_of_a_fork,
    "earlier": _earlier,
    "foreign": _foreign,
    "server": _server,
}


class _Told(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _told.append(record.getMessage())
        for server in _stopped_servers:
            server.resume()


_told: list[str] = []
_stopped_servers: list[psutil.Process] = []


async def main() -> None:
    logging.getLogger("elasticgang").addHandler(_Told())
    supervisor = ProcessSupervisor({}, (), threading.Event(), lambda _: None)
    earlier = [subprocess.Popen(["cat"], stdin=subprocess.PIPE)] if sys.argv[1] == "earlier" else []
    supervisor.open()
    if sys.argv[1] == "stopped at first":
        process_supervisor.SLOW_START_S = 0.2
        _stopped_servers.extend(psutil.Process().children())
        for server in _stopped_servers:
            server.suspend()
    await supervisor.ready()
    try:
        print(json.dumps(await CASES[sys.argv[1]](supervisor)))
    finally:
        await supervisor.close()
        del earlier


if __name__ == "__main__":
    asyncio.run(main())
