"""The coordinator: torchft's lighthouse and one `TCPStore` in one process, at one address.

The store's address is the coordinator's; the lighthouse's is found in the store. A step makes no call to either.

COORDINATOR-1  Who reaches a coordinator finds the records in its store that it was started with: they are there first.
COORDINATOR-2  Nobody asks a coordinator that may have been restarted before the agents of its job had time to come
    back: after its restart the lighthouse knows nobody, and gives the first to ask a quorum alone.
COORDINATOR-3  A record in the state folder is whole. It may be older than the store's: the agents bring theirs.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import os
import select
import signal
import socket
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torchft.coordination import LighthouseServer

from elasticgang.coordinator.endpoint import COORDINATOR_KEY, JOBS_KEY, OPEN_KEY, record_key
from elasticgang.errors import OperationalError

log = logging.getLogger("elasticgang")


GRACE_S = 1.0


# Why these (all tried): min_replicas above 1 keeps the survivors of a small job from ever getting a quorum; a short
# join timeout splits jobs and speeds nothing up.
MIN_REPLICAS = 1
JOIN_TIMEOUT_MS = 60_000
TICK_MS = 50
HEARTBEAT_TIMEOUT_MS = 1_000
_KEEP_INTERVAL_S = 0.05


class ReservedPort:
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
        kept = None if state_dir is None else _RecordFolder(Path(state_dir))
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

    def _keep(self, kept: _RecordFolder) -> None:
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


class _RecordFolder:
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
