"""Runs a coordinator: the process that `elasticgang coordinator` starts, and the embedded coordinator of one job."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elasticgang.coordinator.decision_server import CoordinatorServer, ServerOptions
from elasticgang.coordinator.state_directory import StateDirectory
from elasticgang.errors import OperationalError, reason_of
from elasticgang.process.stop_signals import ignore_stop_signals, release_stop_signals, signals_to_handle
from elasticgang.protocol.coordinator_messages import EMBEDDED_TIMEOUTS, JOB_TIMEOUTS, Timeouts
from elasticgang.protocol.stop_request import is_repeated
from elasticgang.session.addresses import address_of, listen_failure
from elasticgang.session.credentials import Credentials, credentials_from_json
from elasticgang.session.tls_watch import watch_tls

GRACE_S = 1.0  # without a state directory: time for the agents of a running job to reconnect (SERVE-FOUND)
_GC_OBJECTS = 50_000  # new ones, until a collection looks through these


class ReservedPort:
    """A port on `host` that no other process can take. Connections to it are refused until a coordinator listens on it,
    and again after that coordinator has exited."""

    def __init__(self, host: str) -> None:
        """Raises OperationalError: no port is free, or `host` is not an address of this machine."""
        self._sock = socket.socket()
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._sock.bind((host, 0))
        except OSError as exc:
            self._sock.close()
            raise OperationalError(f"cannot take a port on {host}: {exc}") from exc
        self.port: int = self._sock.getsockname()[1]

    def close(self) -> None:
        self._sock.close()


@dataclass(frozen=True)
class CoordinatorOptions:
    """`founds`: whether an unknown job counts as new; `grace_s`: after how many seconds (SERVE-FOUND). `advertise`: as
    of `ServerOptions`."""

    host: str
    port: int
    credentials: Credentials = field(default_factory=Credentials)
    state_dir: Path | None = None
    founds: bool = True
    grace_s: float = GRACE_S
    timeouts: Timeouts = JOB_TIMEOUTS
    advertise: str = ""


def collect_rarely() -> None:
    """For a process that decides: a record of 8,000 ranks is half a million objects and no cycle, and Python's default
    would look through all of them dozens of times while it is made."""
    gc.set_threshold(_GC_OBJECTS, 10, 10)


def prepare_process() -> None:
    """Before `serve`, in a process that does nothing else."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:  # an agent's session takes a descriptor
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    collect_rarely()


async def serve(
    options: CoordinatorOptions,
    log: Callable[[str], None],
    listening: Callable[[str], None],
    stop: asyncio.Event | None = None,
) -> None:
    """Lead jobs until the task is cancelled, or `stop` is set and no agent needs this coordinator to leave
    (SERVE-LEAVE). `listening` is called once, with the address; `log` on any thread.

    Raises:
        OperationalError: the address or the state directory cannot be used, or the server has failed (SERVE-STOP).
    """
    host = options.host
    options.credentials.check_address(host, f"the coordinator listens on loopback only, not on {host!r}")
    directory = None if options.state_dir is None else StateDirectory(options.state_dir)
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(error: BaseException) -> None:
        if not over.done():
            reason = reason_of(error) if isinstance(error, OSError) else error
            over.set_exception(OperationalError(f"the coordinator failed: {reason}"))

    try:
        server_options = ServerOptions(
            options.credentials,
            directory,
            options.founds,
            options.grace_s,
            options.timeouts,
            options.advertise,
        )
        server = CoordinatorServer(server_options, log, fail)
        port = await server.start(host, options.port)
    except OSError as exc:
        raise OperationalError(listen_failure(host, options.port, exc)) from exc
    tls_watch = watch_tls(options.credentials.tls, lambda news: log(news.text))
    stopping: asyncio.Task[None] | None = None
    try:
        listening(address_of(host, port))
        if stop is not None:
            stopping = asyncio.create_task(_stop(stop, server, over))
        await over
    finally:
        if stopping is not None:
            stopping.cancel()
        if tls_watch is not None:
            tls_watch.stop()
        await server.stop()
        if directory is not None:
            directory.close()


async def serve_until_signalled(
    options: CoordinatorOptions, log: Callable[[str], None], listening: Callable[[str], None]
) -> None:
    """`serve` in a process of its own, which holds the stop signals (STOP-HELD). They end it (SERVE-LEAVE)."""
    loop, stop, signalled_s = asyncio.get_running_loop(), asyncio.Event(), 0.0
    serving = asyncio.ensure_future(serve(options, log, listening, stop))

    def on_signal(number: int) -> None:
        nonlocal signalled_s
        if not stop.is_set() and number != signal.SIGINT:
            signalled_s = time.monotonic()
            stop.set()
        elif number == signal.SIGINT or not is_repeated(time.monotonic() - signalled_s):
            serving.cancel()

    for number in signals_to_handle():
        loop.add_signal_handler(number, on_signal, number)
    release_stop_signals()
    with contextlib.suppress(asyncio.CancelledError):
        await serving


async def _stop(stop: asyncio.Event, server: CoordinatorServer, over: asyncio.Future[None]) -> None:
    await stop.wait()
    try:
        await server.until_left()
    finally:
        if not over.done():
            over.set_result(None)


def main(args: dict[str, Any], fds: list[int]) -> int:
    """The process of an embedded coordinator. `fds`: the pipe on which it announces its address, and the pidfd of its
    owner, with which it exits."""
    ignore_stop_signals()
    prepare_process()
    announce, owner = fds
    options = CoordinatorOptions(
        args["host"],
        args["port"],
        credentials_from_json(args["credentials"]),
        founds=args["founds"],
        grace_s=0.0,
        timeouts=EMBEDDED_TIMEOUTS,
    )

    def listening(address: str) -> None:
        try:
            os.write(announce, json.dumps({"address": address}).encode())
        except OSError:
            os._exit(1)  # the owner no longer waits for it
        os.close(announce)

    async def run() -> None:
        asyncio.get_running_loop().add_reader(owner, os._exit, 0)
        await serve(options, lambda line: None, listening)

    try:
        asyncio.run(run())
    except OperationalError as exc:
        with contextlib.suppress(OSError):
            os.write(announce, json.dumps({"error": str(exc)}).encode())
    return 1
