"""One try to start a rank process, on the forking thread.

LAUNCH-1  A try that has failed may have left a process all the same. Its member, its link and its page are of that try
    alone, and its link is closed here, by which it ends.
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
    """The receiver owns `link` and `stack_file` too."""

    member: str
    link: socket.socket
    page: StatusPage
    stack_file: int


@dataclass(frozen=True)
class RankLaunch:
    """Of the rank `local_rank` of `agent`. `target`: what the child runs, "module:function"; `args`, `env`: of the
    child, beyond the member; `lease`: a descriptor."""

    agent: str
    local_rank: int
    target: str
    args: dict[str, Any]
    env: dict[str, str]
    lease: int

    def start(self, server: ForkServer, output: Output) -> LaunchedRank:
        """Raises OperationalError: the fork server is gone, or could not fork, or there is no memory or descriptor left
        here."""
        try:
            return self._start(server, output)
        except OSError as exc:
            raise OperationalError(str(exc)) from exc

    def _start(self, server: ForkServer, output: Output) -> LaunchedRank:
        member = f"{self.agent}/{self.local_rank}/{uuid.uuid4().hex[:8]}"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.ExitStack() as failed, contextlib.ExitStack() as given:
            failed.enter_context(ours)
            given.enter_context(theirs)
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
                fds=[theirs.fileno(), forks.fileno(), page, self.lease, stack_file],
                stdio=stdio,
                name=f"eg-rank-{self.local_rank}",
                env={**self.env, "LOCAL_RANK": str(self.local_rank)},
            )
            failed.callback(os.close, spawned.pidfd)
            launched = LaunchedRank(spawned.pid, spawned.pidfd, member, ours, StatusPage(page), stack_file)
            failed.pop_all()
        return launched
