"""The coordinator: torchft's lighthouse and one `TCPStore` in one process, at one address.

The store's address is the coordinator's; the lighthouse's is found in the store. A step makes no call to either.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError
from torchft.coordination import LighthouseServer

from elasticgang.errors import OperationalError

_T = TypeVar("_T")

COORDINATOR_KEY = "elasticgang/coordinator"

# Why these (all tried): min_replicas above 1 keeps the survivors of a small job from ever getting a quorum; a short
# join timeout splits jobs and speeds nothing up.
MIN_REPLICAS = 1
JOIN_TIMEOUT_MS = 60_000
TICK_MS = 10
HEARTBEAT_TIMEOUT_MS = 1_000


@dataclass(frozen=True)
class Endpoint:
    """A reached coordinator. `host`: this machine's address as the coordinator's network sees it."""

    store: Store
    address: str
    lighthouse: str
    incarnation: str
    host: str


class Coordinator:
    """Both servers, running in this process until `close`."""

    def __init__(self, host: str, port: int) -> None:
        """Listen on `host`:`port`; port 0 takes a free one.

        Raises:
            OperationalError: the address cannot be listened on. Nothing was started.
        """
        try:
            listener = socket.create_server((host, port))
        except OSError as exc:
            reason = os.strerror(exc.errno) if exc.errno else str(exc)
            raise OperationalError(f"cannot listen on {host}:{port}: {reason}") from exc
        self.port: int = listener.getsockname()[1]
        self.host = host
        self._store = TCPStore(
            host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        self._lighthouse = LighthouseServer(
            bind=f"{host}:0",
            min_replicas=MIN_REPLICAS,
            join_timeout_ms=JOIN_TIMEOUT_MS,
            quorum_tick_ms=TICK_MS,
            heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS,
        )
        lighthouse_port = int(self._lighthouse.address().rpartition(":")[2])
        self._store.set(
            COORDINATOR_KEY, json.dumps({"lighthouse_port": lighthouse_port, "incarnation": uuid.uuid4().hex})
        )

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def close(self) -> None:
        self._lighthouse.shutdown()
        del self._store


def reach(address: str, timeout: float) -> Endpoint:
    """Connect to the coordinator at `address` ("host:port").

    Raises:
        ValueError: `address` is not of that form.
        OperationalError: nobody answers there within `timeout` seconds, or what answers is not a coordinator.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdigit():
        raise ValueError(f"a coordinator's address must be host:port, but is {address!r} instead.")
    mine = _first_contact(host, int(port), address, timeout)

    def ask() -> tuple[Store, Any]:
        store = TCPStore(
            host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=max(timeout, 1))
        )
        return store, json.loads(store.get(COORDINATOR_KEY))

    try:
        store, found = _within(timeout + 1.0, ask)
        lighthouse = f"http://{host}:{found['lighthouse_port']}"
        incarnation = str(found["incarnation"])
    except (DistError, RuntimeError, ValueError, KeyError, TimeoutError) as exc:
        raise OperationalError(f"what answers at {address} is not a coordinator of elasticgang") from exc
    return Endpoint(store, address, lighthouse, incarnation, mine)


def _within(timeout: float, function: Callable[[], _T]) -> _T:
    """torch's client waits for ever for a server that accepts and says nothing. Raises TimeoutError; the thread that
    hangs is left behind."""
    outcome: queue.SimpleQueue[tuple[_T | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((function(), None))
        except Exception as exc:
            outcome.put((None, exc))

    threading.Thread(target=run, name="reach", daemon=True).start()
    try:
        result, error = outcome.get(timeout=timeout)
    except queue.Empty:
        raise TimeoutError(f"no answer within {timeout:g} s") from None
    if error is not None:
        raise error
    return cast(_T, result)


def _first_contact(host: str, port: int, address: str, timeout: float) -> str:
    """Wait until somebody listens there, so that torch's client does not fill the log; this end's address."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            with socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())) as probe:
                return str(probe.getsockname()[0])
        except OSError as exc:
            if time.monotonic() + 0.2 >= deadline:
                reason = exc.strerror or str(exc)
                raise OperationalError(
                    f"cannot reach the coordinator at {address} within {timeout:g} s: {reason}"
                ) from exc
            time.sleep(0.1)


def main(args: dict[str, Any], fds: list[int]) -> int:
    """The embedded coordinator's process. `fds`: where to announce the address, the pidfd of the owner, with whom it
    ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    announce, owner = fds
    try:
        coordinator = Coordinator(args["host"], args["port"])
    except OperationalError as exc:
        os.write(announce, json.dumps({"error": str(exc)}).encode())
        return 1
    os.write(announce, json.dumps({"address": coordinator.address}).encode())
    os.close(announce)
    poll = select.poll()
    poll.register(owner, select.POLLIN)
    with contextlib.suppress(KeyboardInterrupt):
        poll.poll()
    os._exit(0)
