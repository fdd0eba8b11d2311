"""One attempt to start a rank process. Runs on the forking thread.

LAUNCH-1  A failed launch may leave a process behind. Each launch has a member id, a link and a status page of its own,
    and a failed one closes its link, so that the process exits.
"""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from dataclasses import dataclass
from typing import Any

from elasticgang.agent.job import Output
from elasticgang.errors import OperationalError
from elasticgang.process import stacks
from elasticgang.process.forkserver import ForkServer, Spawned
from elasticgang.process.status_page import StatusPage


@dataclass(frozen=True)
class LaunchedRank(Spawned):
    """The receiver also owns and closes `link`, `door` and `stack_file`. `door`: see `rank_rendezvous.py`."""

    member: str
    link: socket.socket
    door: socket.socket
    page: StatusPage
    stack_file: int


@dataclass(frozen=True)
class RankLaunch:
    """How to start the rank `local_rank` of `agent`.

    `target`: the function that the child runs, "module:function". `args`, `env`: its arguments and environment, besides
    those that `start` adds. `lease`: the descriptor of the host's lease.
    """

    agent: str
    local_rank: int
    target: str
    args: dict[str, Any]
    env: dict[str, str]
    lease: int

    def start(self, server: ForkServer, output: Output) -> LaunchedRank:
        """Raises OperationalError: the fork server has exited or cannot fork, or this process has no memory or
        descriptor left."""
        try:
            return self._start(server, output)
        except OSError as exc:
            raise OperationalError(str(exc)) from exc

    def _start(self, server: ForkServer, output: Output) -> LaunchedRank:
        member = f"{self.agent}/{self.local_rank}/{uuid.uuid4().hex[:8]}"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.ExitStack() as failed, contextlib.ExitStack() as given:
            failed.enter_context(ours)  # LAUNCH-1
            given.enter_context(theirs)
            door, their_door = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            failed.enter_context(door)
            given.enter_context(their_door)
            page = StatusPage.create()
            given.callback(os.close, page)
            stack_file = stacks.create_file()
            failed.callback(os.close, stack_file)
            forks = given.enter_context(server.connect())
            stdio = output.open(self.local_rank)
            for descriptor in stdio:
                given.callback(os.close, descriptor)
            spawned = server.spawn(
                self.target,
                {**self.args, "member": member, "local_rank": self.local_rank},
                fds=[theirs.fileno(), forks.fileno(), page, self.lease, stack_file, their_door.fileno()],
                stdio=stdio,
                name=f"eg-rank-{self.local_rank}",
                env={**self.env, "LOCAL_RANK": str(self.local_rank)},
            )
            failed.callback(os.close, spawned.pidfd)
            launched = LaunchedRank(spawned.pid, spawned.pidfd, member, ours, door, StatusPage(page), stack_file)
            failed.pop_all()
        return launched
