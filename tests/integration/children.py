"""What the processes of these tests run: targets for a fork server, and owners of one. Imports no torch."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from typing import Any, NoReturn

from elasticgang.process import stacks
from elasticgang.process.forkserver import ForkServer


def describe(args: dict[str, Any], fds: list[int]) -> int:
    """Writes what this process is to the first of `fds`."""
    report = {
        "args": args,
        "num_fds": len(fds),
        "open": sorted(map(int, os.listdir("/proc/self/fd"))),
        "pid": os.getpid(),
        "parent": os.getppid(),
        "group": os.getpgid(0),
        "env": dict(os.environ),
        "stdin": os.readlink("/proc/self/fd/0"),
        "random": random.random(),
        "name": open("/proc/self/comm").read().strip(),  # noqa: SIM115
        "threads": len(os.listdir("/proc/self/task")),
        "sigint": signal.getsignal(signal.SIGINT),
    }
    os.write(fds[0], json.dumps(report).encode())
    return 0


def echo(args: dict[str, Any], fds: list[int]) -> int:
    print(args["out"])
    print(args["err"], file=sys.stderr)
    return int(args["code"])


def fail(args: dict[str, Any], fds: list[int]) -> int:
    raise ValueError("it fails")


def sleep(args: dict[str, Any], fds: list[int]) -> int:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(600)
    return 0


def sleep_with_busy_children(args: dict[str, Any], fds: list[int]) -> int:
    """With children that hold every descriptor of this process and are busy, as a DataLoader's workers do. Tells the
    pids of all."""
    pids = [os.getpid(), *(fork_busy() for _ in range(2))]
    os.write(fds[0], json.dumps(pids).encode() + b"\n")
    return sleep(args, fds)


def fork_busy() -> int:
    pid = os.fork()
    if pid == 0:
        be_busy()
    return pid


def be_busy() -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        pass


def serve_stack(args: dict[str, Any], fds: list[int]) -> int:
    """Writes its stacks to the first descriptor when it is asked, and a byte to the second once it can."""
    stacks.serve(fds[0])
    os.write(fds[1], b"x")
    time.sleep(600)
    return 0


def own() -> None:
    """An owner of a fork server, whose children are as hard to end as can be. Run by `python -c`."""
    server = ForkServer(preload=())
    server.wait_ready()
    pids = [server.process.pid]
    for _ in range(2):
        reader, writer = os.pipe()
        server.spawn("tests.integration.children:sleep_with_busy_children", {}, fds=[writer])
        os.close(writer)
        with os.fdopen(reader) as told:
            pids += json.loads(told.readline())
    print(json.dumps(pids), flush=True)
    time.sleep(600)


def own_importing() -> None:
    """An owner whose fork server is still importing."""
    server = ForkServer(preload=("tests.integration.imports_for_ever",))
    print(json.dumps([server.process.pid]), flush=True)
    server.wait_ready()
