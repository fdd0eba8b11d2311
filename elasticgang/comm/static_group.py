"""Static process groups, whose ranks are fixed until they are reconfigured. All static groups of a process share one
comm process; a group that was reconfigured has its own.

STATIC-1  The shared comm process starts with the first group and ends with the last.
STATIC-2  An error of one group ends all groups that share the comm process: it could still write to tensors, and is
    killed.
STATIC-3  A group that is reconfigured leaves the shared process first. If a collective is pending there, the process is
    killed, as after an error: its other groups end too.
"""

from __future__ import annotations

import contextlib
import ipaddress
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
from elasticgang.collectives.collective import Collective, check_ranks
from elasticgang.collectives.torch_arguments import seconds
from elasticgang.collectives.torch_calls import Call
from elasticgang.collectives.torch_methods import TorchWork
from elasticgang.collectives.work import Work
from elasticgang.comm.comm_process import GroupSpec
from elasticgang.comm.group_set import Configuration
from elasticgang.comm.isolated import IsolatedCollectives, ProcessGroupIsolatedGloo
from elasticgang.comm.membership import Handle, ReconfigureOptions, membership
from elasticgang.comm.standby_pool import local_launcher
from elasticgang.errors import (
    ClosedError,
    CollectiveTimeoutError,
    GangError,
    InvalidOperationError,
    NotSupportedError,
    StaleGenerationError,
)

_START_TIMEOUT_S = 120.0
_MEETING = "elasticgang"  # the key in the group's store
_MEETING_POLL_S = 0.01
_LOOPBACK = "127.0.0.1"
_ELSEWHERE = "192.0.2.1"  # reserved for documentation: no host has it, so that the default route leads there


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
    _shared._lock = threading.Lock()  # the parent's groups have it, and another thread may have held it at the fork
    _shared = _Shared()


os.register_at_fork(after_in_child=_forget_parents)


class StaticProcessGroup(IsolatedCollectives, ProcessGroup):  # type: ignore[misc]  # names that torch fixes
    """Made by `torch.distributed`. Thread-safe."""

    supports_reconfigure = True
    _timeout: float

    def __init__(self, store: Store, rank: int, size: int, timeout: float, *, connects: bool = True) -> None:
        """Block until all ranks of the group have connected, at most `timeout` seconds. Any of them may destroy the
        group or exit as soon as it returns. `connects=False`: return at once; the group has no collectives before
        `reconfigure`.

        Raises:
            GangError: a peer did not connect.
        """
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub lacks this form
        self._rank, self._size, self._timeout = rank, size, timeout
        self._closed = False
        self._store, self._num_splits = store, 0
        self._server: TCPStore | None = None
        self._shared = _shared
        self._configuration: Configuration | None = None  # of the shared comm process
        self._own: ProcessGroupIsolatedGloo | None = None  # once it was reconfigured
        self._own_server: TCPStore | None = None
        self._handle: Handle | None = None
        self._uuids: set[int] = set()
        if connects:
            self._connect(store)

    def _connect(self, store: Store) -> None:
        address, prefix = self._meet(store)
        self._group = prefix
        configuration = self._shared.enter()
        try:
            configuration.add(prefix, GroupSpec(prefix, self._rank, self._size), store=address, timeout=self._timeout)
        except GangError:
            self._shared.leave(configuration)
            raise
        self._configuration = configuration

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
        if self._own is not None:
            self._own.set_timeout(timeout)

    def get_reconfigure_handle(self) -> str:
        """This member's handle, for `reconfigure` on all members. It is the same one until the group is reconfigured.
        The first call starts a store in this process, by which the members connect, if the handle is the first one. Its
        address is the one by which this host reaches the group's `TCPStore`; without one, that of the host's name.

        Raises:
            ClosedError: the group was destroyed.
        """
        self._check_open()
        if self._handle is None:
            host = _own_host_towards(_tcp_store(self._store))
            self._own_server = TCPStore(host, 0, is_master=True, wait_for_workers=False)
            self._handle = Handle(uuid.uuid4().hex, 0, f"{host}:{self._own_server.port}")
        return str(self._handle)

    def reconfigure(self, opts: ReconfigureOptions) -> TorchWork:
        """Make the group consist of the members with `opts.handles`: those of this group that are left, and others. All
        of them call it, with the same handles and a uuid that was never used. Blocks until all have connected, at most
        `opts.timeout`. Pending collectives end with an error (STATIC-3). The returned work has completed. One thread
        may call it, and no other thread may start a collective meanwhile.

        This is the interface of torch 2.15 for reconfigurable groups (`torch.distributed._reconfigure`); with earlier
        versions, call it directly. It needs neither the group's store nor a member that has gone: the members connect
        by the store of the member that becomes rank 0. `dist.new_group` and `dist.split_group` need the group's store,
        and know the group's first members only.

        Raises:
            ClosedError: the group was destroyed.
            MembershipError: the handles or the uuid are invalid. Nothing has changed.
            GangError: a member did not connect. Rank, size and handle are as before, and collectives raise; try again
                with another uuid, and without the member.
        """
        self.get_reconfigure_handle()
        assert self._handle is not None
        found = membership(opts, self._handle, self._uuids)
        within = self._timeout if opts.timeout is None else seconds(opts.timeout)
        self._uuids.add(opts.uuid)  # MEMBERSHIP-3
        self._leave_shared()
        if self._own is None:
            self._own = ProcessGroupIsolatedGloo(within)
        self._own.set_timeout(timedelta(seconds=within))
        self._own.configure(f"{found.address}/{found.prefix}", self._handle.member, found.rank, found.size)
        self._own.set_timeout(timedelta(seconds=self._timeout))
        self._rank, self._size, self._handle = found.rank, found.size, self._handle.next()
        return TorchWork([], Call((), []))

    def _leave_shared(self) -> None:
        """STATIC-3"""
        configuration, self._configuration = self._configuration, None
        if configuration is None:
            return
        if configuration.comm.num_works:
            configuration.fail(StaleGenerationError("the process group is reconfigured"))
        else:
            configuration.comm.remove_group(self._group)
        self._shared.leave(configuration)

    def start(self, collective: Collective) -> Work:
        return super().start(collective) if self._own is None else self._own.start(collective)

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
            NotSupportedError: the group was reconfigured. Make another one, and reconfigure that.
            GangError: a peer did not connect.
        """
        if self._own is not None:
            raise NotSupportedError("a group that was reconfigured cannot be split")
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
            if self._configuration is not None:
                self._configuration.comm.remove_group(self._group)
                self._shared.leave(self._configuration)
            if self._own is not None:
                self._own.shutdown()
            self._server = self._own_server = None

    def abort(self) -> None:
        """Fail every collective under way, in every group of this process that was not reconfigured (STATIC-2); in a
        group that was, its own only."""
        if self._own is not None:
            self._own.abort()
        elif self._configuration is not None:
            self._configuration.fail(GangError("the process group was aborted"))

    def __repr__(self) -> str:
        return f"StaticProcessGroup(rank={self._rank}, size={self._size})"

    def _meet(self, store: Store) -> tuple[str, str]:
        """The address of the store for the comm processes, and a unique prefix in it. Rank 0 chooses both."""
        if self._rank:
            return self._wait_for_meeting(store)
        tcp = _tcp_store(store)
        if tcp is None:  # a file or memory store, to which comm processes cannot connect
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

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("the process group's handle is closed: it was destroyed")

    def _present(self) -> Configuration:
        self._check_open()
        if self._configuration is None:
            raise InvalidOperationError("the process group has no members yet; call `reconfigure` first")
        return self._configuration


def _tcp_store(store: Store) -> TCPStore | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, TCPStore) else None


def _own_host_towards(store: TCPStore | None) -> str:
    """The address by which this host reaches the store, and the other members reach this host. It is a loopback address
    only if the store was named by one: then all members are on this host."""
    if store is not None:
        with contextlib.suppress(OSError):
            address = _source_towards(store.host, store.port)
            if not _is_loopback(address) or _is_loopback(store.host):
                return address
    return _own_host()


def _own_host() -> str:
    """The address of the host's name. Where that is a loopback address, as with Debian's 127.0.1.1 in /etc/hosts, the
    one of the default route, if there is one."""
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        address = _LOOPBACK
    if _is_loopback(address):
        with contextlib.suppress(OSError):
            return _source_towards(_ELSEWHERE, 9)
    return address


def _source_towards(host: str, port: int) -> str:
    """The address of this host's end of connections to `host`. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # of UDP: nothing is sent
        return str(probe.getsockname()[0])


def _is_loopback(host: str) -> bool:
    """Whether `host` names this host's loopback interface, without a look-up."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
