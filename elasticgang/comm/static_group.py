"""Static process groups, which have fixed ranks. All static groups of a process share one comm process.

STATIC-1  The comm process starts with the first group and ends with the last.
STATIC-2  An error of one group ends all groups: their comm process, which could still write to tensors, is killed.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Store, TCPStore

from elasticgang.collectives.backend_name import BACKEND_NAME
from elasticgang.collectives.collective import check_ranks
from elasticgang.collectives.torch_arguments import seconds
from elasticgang.comm.comm_process import GroupSpec
from elasticgang.comm.group_set import Configuration
from elasticgang.comm.isolated import IsolatedCollectives
from elasticgang.comm.standby_pool import local_launcher
from elasticgang.errors import ClosedError, CollectiveTimeoutError, GangError

_START_TIMEOUT_S = 120.0
_MEETING = "elasticgang"  # the key in the group's store
_MEETING_POLL_S = 0.01


class _Shared:
    """STATIC-1: the configuration of the shared comm process, and the number of its groups."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._configuration: Configuration | None = None
        self._num_groups = 0

    def enter(self) -> Configuration:
        with self._lock:
            if self._configuration is None:
                self._configuration = Configuration(local_launcher().start().result(_START_TIMEOUT_S))
            self._num_groups += 1
            return self._configuration

    def leave(self, configuration: Configuration) -> None:
        with self._lock:
            if configuration is not self._configuration:
                return
            self._num_groups -= 1
            if self._num_groups:
                return
            self._configuration = None
        configuration.comm.close()  # without the lock: it waits for callbacks, which may take the lock


_shared = _Shared()


def _forget_parents() -> None:
    global _shared
    _shared = _Shared()


os.register_at_fork(after_in_child=_forget_parents)


class StaticProcessGroup(IsolatedCollectives, ProcessGroup):  # type: ignore[misc]  # names that torch fixes
    """Made by `torch.distributed`. Thread-safe."""

    _timeout: float

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        """Block until all ranks of the group have connected, at most `timeout` seconds. Any of them may destroy the
        group or exit as soon as it returns.

        Raises:
            GangError: a peer did not connect.
        """
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub lacks this form
        self._rank, self._size, self._timeout = rank, size, timeout
        self._closed = False
        self._store, self._num_splits = store, 0
        self._server: TCPStore | None = None
        address, prefix = self._meet(store)
        self._group = prefix
        self._shared = _shared
        self._configuration = self._shared.enter()
        try:
            self._configuration.add(prefix, GroupSpec(prefix, rank, size), store=address, timeout=timeout)
        except GangError:
            self._shared.leave(self._configuration)
            raise

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    getRank = rank
    getSize = size

    def getBackendName(self) -> str:
        return BACKEND_NAME

    def name(self) -> str:
        return BACKEND_NAME

    def get_group_store(self) -> Store:
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later collectives without one of their own."""
        self._timeout = seconds(timeout)

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> StaticProcessGroup | None:
        """The group of some of the ranks; None on the other ranks. Call it on every rank.

        Raises:
            ValueError: `ranks` are not distinct ranks of this group.
            GangError: a peer did not connect.
        """
        ranks = check_ranks(ranks, self._size)
        self._num_splits += 1  # on every rank, so that all use the same prefix
        if self._rank not in ranks:
            return None
        name = group_name or f"{self._name}:split{self._num_splits}"
        store = PrefixStore(f"split{self._num_splits}/{name}/{ranks[0]}/", self._store)
        within = self._timeout if timeout is None else seconds(timeout)
        pg = StaticProcessGroup(store, ranks.index(self._rank), len(ranks), within)
        pg._set_group_name(name)
        pg._set_group_desc(group_desc or BACKEND_NAME)
        return pg

    def shutdown(self) -> None:
        """End the group. Idempotent."""
        if not self._closed:
            self._closed = True
            self._configuration.comm.remove_group(self._group)
            self._shared.leave(self._configuration)
            self._server = None

    def abort(self) -> None:
        """Fail every collective under way, in every group of this process (STATIC-2)."""
        self._configuration.fail(GangError("the process group was aborted"))

    def __repr__(self) -> str:
        return f"StaticProcessGroup(rank={self._rank}, size={self._size})"

    def _meet(self, store: Store) -> tuple[str, str]:
        """The address of the store for the comm processes, and a unique prefix in it. Rank 0 chooses both."""
        if self._rank:
            return self._wait_for_meeting(store)
        tcp = store
        while isinstance(tcp, PrefixStore):
            tcp = tcp.underlying_store
        if not isinstance(tcp, TCPStore):  # a file or memory store, to which comm processes cannot connect
            tcp = self._server = TCPStore(_own_host(), 0, is_master=True, wait_for_workers=False)
        address, prefix = f"{tcp.host}:{tcp.port}", f"elasticgang/{uuid.uuid4().hex}"
        store.set(_MEETING, json.dumps([address, prefix, self._size]))
        return address, prefix

    def _wait_for_meeting(self, store: Store) -> tuple[str, str]:
        """What rank 0 wrote for this group. The key may still hold the value of an earlier group of the same name:
        torch counts names from 0 again after `destroy_process_group`. Each rank uses a value once, of its group's
        size: a smaller group left some ranks unused."""
        deadline = time.monotonic() + self._timeout
        used = None
        while True:
            address, prefix, size = json.loads(store.get(_MEETING))
            if size == self._size and prefix != used and store.add(f"{prefix}/{self._rank}", 1) == 1:
                return address, prefix
            used = prefix
            if time.monotonic() >= deadline:
                raise CollectiveTimeoutError(f"rank 0 did not make the process group in {self._timeout:g} seconds")
            time.sleep(_MEETING_POLL_S)

    def _present(self) -> Configuration:
        if self._closed:
            raise ClosedError("the process group's handle is closed: it was destroyed")
        return self._configuration


def _own_host() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
