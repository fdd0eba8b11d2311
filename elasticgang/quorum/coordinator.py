"""The coordinator: torchft's lighthouse and one `TCPStore` in one process, at one address.

The store's address is the coordinator's; the lighthouse's is found in the store. A step makes no call to either.

C1  Who reaches a coordinator finds the records in its store that it was started with: they are there first.
C2  Nobody asks a coordinator that may have been restarted before the agents of its job had time to come back: after
    its restart the lighthouse knows nobody, and gives the first to ask a quorum alone.
C3  A record in the state folder is whole. It may be older than the store's: the agents bring theirs.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import queue
import select
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError
from torchft.coordination import LighthouseServer

from elasticgang.errors import OperationalError

log = logging.getLogger("elasticgang")

_T = TypeVar("_T")

COORDINATOR_KEY = "elasticgang/coordinator"
OPEN_KEY = "elasticgang/open"  # there once agents may ask (C2)
JOBS_KEY = "elasticgang/jobs"  # the names of all jobs, JSON
CURRENT_KEY = "elasticgang/current"  # the job whose record was written last

GRACE_S = 1.0

_ALL_ADDRESSES = ("", "0.0.0.0")
_ANYWHERE = ("192.0.2.1", 9)  # an address for examples, beyond the default route

# Why these (all tried): min_replicas above 1 keeps the survivors of a small job from ever getting a quorum; a short
# join timeout splits jobs and speeds nothing up.
MIN_REPLICAS = 1
JOIN_TIMEOUT_MS = 60_000
TICK_MS = 50
HEARTBEAT_TIMEOUT_MS = 1_000
_KEEP_INTERVAL_S = 0.05


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


class Reserved:
    """A port on `host` that is this process's, and on which nobody listens: whoever connects is refused, while a
    coordinator that is given the port can listen on it, again and again."""

    def __init__(self, host: str) -> None:
        """Raises OperationalError: there is none to be had."""
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


class Coordinator:
    """Both servers, running in this process until `close`."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        records: Mapping[str, str] | None = None,
        state_dir: str | None = None,
        grace_s: float = GRACE_S,
    ) -> None:
        """Listen on `host`:`port`; port 0 takes a free one. `records`: those to begin with, by job. `state_dir`: the
        folder from which records are taken, and where they are kept.

        Raises:
            OperationalError: the address cannot be listened on, or the folder not be used. Nothing was started.
        """
        kept = None if state_dir is None else _Kept(Path(state_dir))
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
        known = {**({} if kept is None else kept.records), **(records or {})}
        for job, record in known.items():
            self._store.set(record_key(job), record)
        self._store.set(JOBS_KEY, json.dumps(sorted(known)))
        self._lighthouse = LighthouseServer(
            bind=f"{host}:0",
            min_replicas=MIN_REPLICAS,
            join_timeout_ms=JOIN_TIMEOUT_MS,
            quorum_tick_ms=TICK_MS,
            heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS,
        )
        lighthouse_port = int(self._lighthouse.address().rpartition(":")[2])
        self._store.set(
            COORDINATOR_KEY,
            json.dumps({"lighthouse_port": lighthouse_port, "incarnation": uuid.uuid4().hex, "host": host}),
        )
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._open, args=(grace_s,), name="open", daemon=True)]
        if kept is not None:
            self._threads.append(threading.Thread(target=self._keep, args=(kept,), name="keep", daemon=True))
        for thread in self._threads:
            thread.start()

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def close(self) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join()
        self._lighthouse.shutdown()
        del self._store

    def _open(self, grace_s: float) -> None:
        if not self._closed.wait(grace_s):
            self._store.set(OPEN_KEY, "1")

    def _keep(self, kept: _Kept) -> None:
        failing: set[str] = set()
        while not self._closed.wait(_KEEP_INTERVAL_S):
            for job in json.loads(self._store.get(JOBS_KEY)):
                key = record_key(job)
                if not self._store.check([key]):
                    continue
                try:
                    kept.write(job, self._store.get(key).decode())
                    failing.discard(job)
                except OSError as exc:  # a full disk, say: tried again, and the agents have the record too
                    if job not in failing:
                        log.warning("the record of job %s is not kept: %s", job, exc)
                    failing.add(job)


class _Kept:
    """Records in a folder: a file for each job, replaced as a whole."""

    def __init__(self, folder: Path) -> None:
        """Raises OperationalError: the folder cannot be used."""
        self._folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.records = {self._job(path): path.read_text() for path in folder.glob("*.record")}
            (folder / "writable").touch()
        except (OSError, ValueError) as exc:
            raise OperationalError(f"cannot keep records in {folder}: {exc}") from exc

    def write(self, job: str, record: str) -> None:
        if self.records.get(job) == record:
            return
        name = base64.urlsafe_b64encode(job.encode()).decode()
        partial = self._folder / f"{name}.partial"
        with partial.open("w") as file:
            file.write(record)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._folder / f"{name}.record")
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self.records[job] = record

    @staticmethod
    def _job(path: Path) -> str:
        return base64.urlsafe_b64decode(path.stem.encode()).decode()


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
            raise OperationalError(f"{host!r} is no name of a host") from exc
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
        coordinator = Coordinator(args["host"], args["port"], records=args["records"], grace_s=args["grace_s"])
    except OperationalError as exc:
        os.write(announce, json.dumps({"error": str(exc)}).encode())
        return 1
    try:
        os.write(announce, json.dumps({"address": coordinator.address}).encode())
    except OSError:
        os._exit(1)  # whoever asked for it has given it up
    os.close(announce)
    poll = select.poll()
    poll.register(owner, select.POLLIN)
    with contextlib.suppress(KeyboardInterrupt):
        poll.poll()
    os._exit(0)
