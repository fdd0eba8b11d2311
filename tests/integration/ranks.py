"""A process that is to a comm process what a rank is."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from typing import Any

from elasticgang.comm import worker
from elasticgang.comm.arena import Arena
from elasticgang.comm.comm_process import CommProcess
from elasticgang.process.forkserver import ForkServerClient
from tests.integration.children import fork_busy


def rank(args: dict[str, Any], fds: list[int]) -> int:
    """A rank process: it has a comm process and a busy child, and tells their pids."""
    report, forks = fds
    comm = CommProcess(
        ForkServerClient(socket.socket(fileno=forks)),
        Arena(),
        store=args["store"],
        host="127.0.0.1",
        timeout=30.0,
        group=os.getpgid(0),
    )
    comm.wait_ready()
    busy = fork_busy()
    os.write(report, json.dumps([comm.pid, busy]).encode() + b"\n")
    time.sleep(600)
    return 0


def cold_comm(args: dict[str, Any], fds: list[int]) -> int:
    """A comm process that does not warm up, and so starts threads only when it is told to do something."""
    worker.WARM_UP_S = 600.0
    return worker.main(args, fds)


def deaf_comm(args: dict[str, Any], fds: list[int]) -> int:
    """A comm process that ignores the signal which ends a halted one."""
    signal.signal(signal.SIGVTALRM, signal.SIG_IGN)
    return worker.main(args, fds)
