"""How a coordinator is reached: its address, its keys in the store, clients of the store."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError

from elasticgang.errors import OperationalError

_T = TypeVar("_T")

COORDINATOR_KEY = "elasticgang/coordinator"

OPEN_KEY = "elasticgang/open"  # there once agents may ask (COORDINATOR-2)

JOBS_KEY = "elasticgang/jobs"  # the names of all jobs, JSON

CURRENT_KEY = "elasticgang/current"  # the job whose record was written last

_ALL_ADDRESSES = ("", "0.0.0.0")

_ANYWHERE = ("192.0.2.1", 9)  # an address for examples, beyond the default route


def record_key(job: str) -> str:
    return f"elasticgang/record/{job}"


@dataclass(frozen=True)
class Endpoint:
    """A reached coordinator. `host`: this machine's address as the coordinator's network sees it."""

    store: Store
    address: str
    lighthouse: str
    incarnation: str
    host: str


class SilentError(OperationalError):
    """Nothing answers there: the network, or the host, is gone. A refused connection is an answer."""


def reach(address: str, timeout: float) -> Endpoint:
    """Connect to the coordinator at `address` ("host:port").

    Raises:
        ValueError: `address` is not of that form.
        OperationalError: nobody answers there within `timeout` seconds, or what answers is not a coordinator.
    """
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal():
        raise ValueError(f"a coordinator's address must be host:port, but is {address!r} instead.")
    mine = _first_contact(host, int(port), address, timeout)

    def ask() -> tuple[Store, Any]:
        store = connect(address, max(timeout, 1))
        return store, json.loads(store.get(COORDINATOR_KEY))

    try:
        store, found = _within(timeout + 1.0, ask)
        lighthouse = f"http://{host}:{found['lighthouse_port']}"
        incarnation = str(found["incarnation"])
        mine = seen_from_outside(mine, str(found.get("host", mine)))
    except (DistError, RuntimeError, ValueError, KeyError, TimeoutError) as exc:
        raise OperationalError(f"what answers at {address} is not a coordinator of elasticgang") from exc
    return Endpoint(store, address, lighthouse, incarnation, mine)


def seen_from_outside(mine: str, listens_on: str) -> str:
    """Where others reach this machine, which has reached the coordinator from `mine`. Beside a coordinator that listens
    on all addresses there may be agents of other machines, to which a loopback address means themselves."""
    if not mine.startswith("127.") or listens_on not in _ALL_ADDRESSES:
        return mine
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_ANYWHERE)  # sends nothing
        return str(probe.getsockname()[0])
    return mine


def connect(address: str, timeout: float) -> Store:
    """A client of the store. One that has lost its connection never recovers, and one that waits for a key does nothing
    else: each has one use. May block for ever where somebody listens and is silent."""
    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))


def refuses(address: str, timeout: float) -> bool:
    """Whether a connection to `address` is refused: its host is there, and nobody listens.

    Raises:
        SilentError: no answer within `timeout` seconds.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=timeout).close()
    except ConnectionRefusedError:
        return True
    except OSError as exc:
        raise SilentError(f"{address} does not answer: {exc.strerror or exc}") from exc
    return False


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
        except UnicodeError as exc:
            raise OperationalError(f"{host!r} is not a valid host name") from exc
        except OSError as exc:
            if time.monotonic() + 0.2 >= deadline:
                reason = exc.strerror or str(exc)
                raise OperationalError(
                    f"cannot reach the coordinator at {address} within {timeout:g} s: {reason}"
                ) from exc
            time.sleep(0.1)
