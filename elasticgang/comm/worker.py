"""The comm process: runs all process groups of one rank, and is killed to abort them.

WORKER-1  It never outlives its rank: a thread polls the rank's pidfd. EOF of a pipe or socket is not enough, because
    children of the rank may hold the other end.
WORKER-2  The command loop starts works and never waits for one. Gloo's thread sends the message of a completion.
WORKER-3  It reads and writes only memory of the arena.
WORKER-4  With a handshake, making a group returns on a rank only when all ranks have connected. A rank may then exit at
    once, also with the store's server, and no peer fails.
WORKER-5  Two ranks of a group of more than `EAGER_SIZE` connect when they first exchange something, if the agent has
    the keys that they then need: of the 496 pairs of 32 ranks, a ring and a tree use few.
WORKER-6  Tags of messages count from the largest downwards. The messages of Gloo's monitored barrier have the number of
    the collective as their tag, from 0 upwards; one under the same tag would take the place of the other.
WORKER-7  A process that has had nothing to do for `WARM_UP_S` makes a group with itself, and reduces something in it.
    It is forked, so that its first use of any code and memory costs a page fault: 600 of them in its first groups,
    which a standby makes while the cores are needed for a recovery. Commands do not wait for that.
WORKER-8  A group that is added uses its client of the store until it has connected; the next one takes the client over.
    For each new connection the server of the store looks up a name, which takes 5 s where the DNS loses an answer.
WORKER-9  Making a group of Gloo fails `CONNECT_MARGIN_S` after its timeout: on a path that drops what is sent, Gloo
    waits for a connection five times as long as its timeout, and would be ended without a cause by the rank's deadline.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from elasticgang.collectives.collective import BitwiseOperation, Collective, ReduceOperation
from elasticgang.collectives.table import TABLE, Step
from elasticgang.comm.agent_store import AgentStore, AgentStoreClient, Peers
from elasticgang.comm.arena import bytes_as, map_memory
from elasticgang.comm.task_threads import TaskThreads
from elasticgang.environment import ask_size
from elasticgang.process.parent_death import signal_at_parent_death
from elasticgang.process.status_page import PULSE_MS, CommBlock, StatusPage
from elasticgang.process.stop_signals import ignore_stop_signals
from elasticgang.torch_private import gloo_device, new_gloo

_MAX_MESSAGE = 1 << 17
MAX_FDS = 253  # the limit of one message
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_FDS * 4)

# The messages of a collective and of its end are a mark and a number, then a JSON body or the error's text. All other
# messages are JSON.
RUN = struct.Struct("<BQ")
RUN_MARK = 1
_MAX_PREPARED = 4096
_CONNECT_TIMEOUT = timedelta(seconds=5)
CONNECT_MARGIN_S = 0.5  # for the store's own words, which name the missing keys
_MAX_TEXT = 4096
_MAX_TAG = (1 << 31) - 1
_PROBE_TIMEOUT_S = 2.0
EAGER_SIZE = 8  # up to here connecting all pairs is as fast
WARM_UP_S = 0.3
_WARM_UP_TIMEOUT = timedelta(seconds=10)
_WARM_UP_NUMBERS = 1024

_OPERATIONS: dict[str, ReduceOperation | BitwiseOperation] = {
    op.name: op for op in (*ReduceOperation, *BitwiseOperation)
}


def encoded(group: str, c: Collective, timeout: float | None, described: Sequence[object]) -> list[object]:
    """A collective as JSON. `described`: its outputs, then its inputs; the tensors of an in-place collective once."""
    return [group, c.call, c.op.name, c.peer, c.tag, timeout, c.wait_all_ranks, c.messages, len(c.outputs), described]


def decoded(body: Sequence[Any], tensor: Callable[..., Tensor]) -> tuple[str, Collective]:
    """The inverse of `encoded`, but for the tags: the group, and the collective. `tensor` makes a tensor of each
    description."""
    group, call, op, peer, tag, timeout, wait_all_ranks, given, num_outputs, described = body
    tensors = [tensor(*each) for each in described]
    kind = TABLE[call]
    if not kind.reduces:  # as bytes, because Gloo supports few dtypes
        tensors = [tensor.view(-1).view(torch.uint8) for tensor in tensors]
    outputs, inputs = tuple(tensors[:num_outputs]), tuple(tensors[0 if kind.is_in_place else num_outputs :])
    messages = tuple((partner, _sent_tag(tag)) for partner, tag in given)
    operation, tag = _OPERATIONS[op], _sent_tag(tag)
    return group, Collective(call, outputs, inputs, operation, peer, tag, timeout, wait_all_ranks, messages)


def _sent_tag(tag: int) -> int:
    """WORKER-6."""
    return _MAX_TAG - tag if tag >= 0 else tag


def main(args: dict[str, Any], fds: list[int]) -> int:
    """The process. `args`: `store` ("host:port" of a `TCPStore`, or None to use the agent), `host` (the address at
    which peers reach this process, or None to let Gloo choose), `timeout_s`, `block` (the index in the status page, or
    None) and `has_agent`. `fds`: the socket to the rank, the rank's pidfd, then its page and the connection to its
    agent, if it has them."""
    _let_ranks_compute()
    return run(lambda sock, block: Worker(sock, args, block), args, fds)


def run(make: Callable[[socket.socket, CommBlock], Worker], args: dict[str, Any], fds: list[int]) -> int:
    """Serve the rank with the worker that `make` returns, until the rank closes its socket or exits."""
    ignore_stop_signals()  # the rank decides when it exits
    if args.get("has_agent"):
        signal_at_parent_death(signal.SIGKILL)  # STOP-4: its parent is the agent, or the rank
    sock = socket.socket(fileno=fds[0])
    block_index = args.get("block")
    page = StatusPage() if block_index is None else StatusPage(fds[2])
    block = page.block(block_index or 0)
    args["agent"] = fds[-1] if args.get("has_agent") else None
    block.start()
    threading.Thread(target=_die_with, args=(fds[1], block), name="rank-watch", daemon=True).start()
    torch.set_num_threads(1)
    # torch resolves the names of its peers for its log. Without this, a lost DNS answer delays it by 5 s.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
    # The rank may have exited before this process was ready.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        make(sock, block).serve()
    os._exit(0)  # without finalizers: Gloo's would wait for works that never complete


def _let_ranks_compute() -> None:
    """Use SCHED_BATCH, so that a thread of this process that wakes up does not preempt a computing rank. It then finds
    more bytes at once, with half of the context switches and reads. An idle core is not affected. A scheduling policy
    other than the default is kept."""
    if os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):  # not permitted
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)


def _die_with(pidfd: int, block: CommBlock) -> None:
    """WORKER-1."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    while not poll.poll(PULSE_MS):
        block.beat()
    os._exit(0)


def _listens(store: str) -> bool:
    host, _, port = store.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_TIMEOUT_S).close()
    except OSError:
        return False
    return True


class Worker:
    """The command loop, and the groups of one rank over Gloo."""

    def __init__(self, sock: socket.socket, args: dict[str, Any], block: CommBlock) -> None:
        self._sock = sock
        self._block = block
        self._host: str | None = args["host"]
        self._timeout = timedelta(seconds=args["timeout_s"])
        self._buffer = bytearray(_MAX_MESSAGE)
        self._slabs: dict[int, Tensor] = {}
        self._groups: dict[str, Any] = {}
        self._devices: list[Any] = []  # of Gloo, without a group
        self._lazy_stores: list[Store] = []  # of these groups: Gloo alone would not keep a Python object
        self._prepared: dict[bytes, tuple[str, Collective]] = {}
        self._threads = TaskThreads()
        agent: int | None = args["agent"]
        self._agent = None if agent is None else AgentStoreClient(socket.socket(fileno=agent))
        self._store: str | None = args["store"]
        # One client per group: a group that waits for a peer's key on a shared client would block the others.
        self._stores: list[TCPStore] = []
        self._idle: dict[str, TCPStore] = {}  # WORKER-8: at most one client that no group uses, by its server's address
        if self._store is not None and _listens(self._store):
            with contextlib.suppress(RuntimeError):  # it may be unreachable for a while; `_configure` connects again
                for _ in range(3):
                    self._stores.append(self._connect(self._store, _CONNECT_TIMEOUT))
        self._send({"ready": True})

    def serve(self) -> None:
        first = select.poll()
        first.register(self._sock, select.POLLIN)
        if not first.poll(WARM_UP_S * 1000):
            with contextlib.suppress(RuntimeError):  # no thread is left
                self._threads.submit(self._warm_up)
        while True:
            length, ancillary, _, _ = self._sock.recvmsg_into([self._buffer], _ANCILLARY_BYTES)
            data = self._buffer[:length]
            if not data:
                return
            if data[0] == RUN_MARK:
                self._run(RUN.unpack_from(data)[1], bytes(data[RUN.size :]))
                continue
            command = json.loads(data)
            kind = command["kind"]
            if kind == "map":
                self._map(command["slabs"], _descriptors(ancillary))
            elif kind == "unmap":
                self._prepared.clear()
                for slab in command["slabs"]:
                    self._slabs.pop(slab, None)
            elif kind == "configure":
                self._reply(self._configure, command)
            elif kind == "add":
                self._block.append_group(command["groups"][0]["name"])
                self._threads.submit(self._reply, self._add, command)  # works of other groups continue meanwhile
            elif kind == "close":
                self._reply(self._close, command)
            elif kind == "remove":
                self._threads.submit(self._remove, command["name"])
            else:
                self._learn(command)

    def _warm_up(self) -> None:
        """WORKER-7. What fails here fails again, and is told, where it is needed."""
        store, devices = HashStore(), [gloo_device(self._host) for _ in range(2)]
        self._devices += devices  # several groups may have the same one
        other = self._threads.submit(new_gloo, store, 1, 2, _WARM_UP_TIMEOUT, devices[1])
        groups = [new_gloo(store, 0, 2, _WARM_UP_TIMEOUT, devices[0]), other.result()]
        works = []
        for group in groups:
            numbers = torch.zeros(_WARM_UP_NUMBERS, device="cpu")
            collective = Collective("all_reduce", (numbers,), (numbers,))
            works.append(TABLE[collective.call].issue(group, collective)[0])
        for work in works:
            work.get_future().wait()

    def _learn(self, command: dict[str, Any]) -> None:
        """Handle a command of a subclass."""
        raise ValueError(f"unknown kind of message: {command['kind']}")

    def _send(self, message: dict[str, Any]) -> None:
        self._sock.send(json.dumps(message).encode())

    def _reply(self, perform: Callable[[dict[str, Any]], None], command: dict[str, Any]) -> None:
        try:
            perform(command)
        except Exception as exc:
            self._send({"configured": str(exc) or type(exc).__name__})
        else:
            self._send({"configured": None})

    def _configure(self, command: dict[str, Any]) -> None:
        self._close(command)
        self._block.set_groups([group["name"] for group in command["groups"]])
        self._timeout = timedelta(seconds=command["timeout_s"])
        if command["store"] is not None and command["store"] != self._store:
            self._store, self._stores = command["store"], []
        while self._store is not None and len(self._stores) < len(command["groups"]):
            self._stores.append(self._connect(self._store))
        started = {
            group["name"]: self._threads.submit(self._create_with, number, command, group)
            for number, group in enumerate(command["groups"])
        }
        until_s = self._until_s(self._timeout)
        self._groups = {name: self._made(future, until_s) for name, future in started.items()}

    @staticmethod
    def _until_s(timeout: timedelta) -> float:
        """WORKER-9. Of groups that begin now."""
        return time.monotonic() + timeout.total_seconds() + CONNECT_MARGIN_S

    def _made(self, making: futures.Future[Any], until_s: float) -> Any:
        """WORKER-9"""
        try:
            return making.result(max(0.0, until_s - time.monotonic()))
        except futures.TimeoutError:
            raise RuntimeError("wait timeout: a rank did not connect, although its keys have come") from None

    def _create_with(self, number: int, command: dict[str, Any], group: dict[str, Any]) -> Any:
        made = self._create(self._store_of(number, command["prefix"], group), group, self._timeout)
        if command["handshake"]:
            self._handshake(made)
        return made

    def _store_of(self, number: int, prefix: str, group: dict[str, Any]) -> Store:
        """The store of a group: the agent's, or a prefix of the `TCPStore` over a client that is connected already."""
        if self._store is None:
            return self._agent_store(prefix, group, self._timeout)
        client = self._stores[number] = self._connected(self._stores[number], self._store, prefix)
        return PrefixStore(f"{prefix}/{group['name']}", client)

    def _connected(self, client: TCPStore | None, store: str, prefix: str) -> TCPStore:
        """`client`, or a new one where there is none or it has lost its server: clients do not reconnect."""
        if client is not None:
            with contextlib.suppress(RuntimeError):
                client.check([prefix])
                return client
        return self._connect(store)

    def _agent_store(self, prefix: str, group: dict[str, Any], timeout: timedelta) -> Store:
        if self._agent is None:
            raise RuntimeError("there is neither a store nor a connection to an agent")
        peers = Peers(group["rank"], group["size"]) if group["size"] > ask_size() else None
        return self._agent.store(prefix, group["name"], timeout, peers)

    def _handshake(self, group: Any) -> None:
        """WORKER-4. Uses a barrier of the group, not of the store, whose server may exit with the first rank that
        returns. A rank that has passed the barrier has written every key that its peers still read."""
        if group.size() > 1:
            group.barrier().wait()

    def _add(self, command: dict[str, Any]) -> None:
        """Add a group to the configured ones. The rank adds one at a time."""
        (group,) = command["groups"]
        groups, prefix = self._groups, command["prefix"]
        address = command["store"] or self._store
        timeout = timedelta(seconds=command["timeout_s"])
        idle, self._idle = self._idle, {}
        if address is None:
            store = self._agent_store(prefix, group, timeout)
        else:
            client = self._connected(idle.get(address), address, prefix)
            client.set_timeout(timeout)
            idle = {address: client}
            store = PrefixStore(f"{prefix}/{group['name']}", client)
        made = self._made(self._threads.submit(self._create, store, group, timeout), self._until_s(timeout))
        self._handshake(made)
        groups[group["name"]] = made
        self._idle = idle

    def _connect(self, store: str, timeout: timedelta | None = None) -> TCPStore:
        host, _, port = store.rpartition(":")
        # The timeout of collectives may be too short for this on a loaded machine. The rank has its own deadline.
        timeout = timeout or max(self._timeout, _CONNECT_TIMEOUT)
        client = TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=timeout)
        client.set_timeout(self._timeout)
        return client

    def _create(self, store: Store, group: dict[str, Any], timeout: timedelta) -> Any:
        lazy = isinstance(store, AgentStore) and group["size"] > EAGER_SIZE  # WORKER-5
        if lazy:
            self._lazy_stores.append(store)
        try:
            device = gloo_device(self._host, lazy=True) if lazy else self._devices.pop()
        except IndexError:
            device = gloo_device(self._host)
        return new_gloo(store, group["rank"], group["size"], timeout, device)

    def _close(self, command: dict[str, Any]) -> None:
        """Drop the groups. They have no pending works (otherwise the rank kills this process), so they access no
        memory. Their threads take 40 ms to end, for which no one waits."""
        ended, self._groups = self._groups, {}
        self._lazy_stores = []
        if ended:
            self._threads.submit(ended.clear)

    def _remove(self, name: str) -> None:
        """Drop one group, as `_close`."""
        self._groups.pop(name, None)

    def _map(self, slabs: list[tuple[int, int]], fds: list[int]) -> None:
        for (slab, size), fd in zip(slabs, fds, strict=True):
            self._slabs[slab] = map_memory(fd, size)
            os.close(fd)  # the mapping stays

    def _run(self, id: int, body: bytes) -> None:
        try:
            group, collective = prepared = self._prepared.get(body) or self._prepare(body)
            work, last = TABLE[collective.call].issue(self._groups[group], collective)  # TABLE-1
            # WORKER-2. The callback keeps the tensors until the work has ended.
            self._at_end(work, collective, lambda wait: self._completed(id, wait, last, prepared))
        except Exception as exc:
            self._end(id, exc)

    def _prepare(self, body: bytes) -> tuple[str, Collective]:
        """Decode a body, with a cache: bodies recur, because blocks are reused."""
        if len(self._prepared) >= _MAX_PREPARED:
            self._prepared.clear()
        self._prepared[body] = prepared = decoded(json.loads(body), self._tensor)
        return prepared

    def _tensor(self, slab: int, offset: int, shape: list[int], dtype: str) -> Tensor:
        return bytes_as(self._slabs[slab], torch.Size(shape), getattr(torch, dtype), offset)  # WORKER-3

    def _at_end(self, work: Any, collective: Collective, then: Callable[[Callable[[], object]], None]) -> None:
        """Call `then` once `work` has ended, with a function that raises its error."""
        try:
            future = work.get_future()
        except RuntimeError:  # works of Gloo's reduce_scatter, send, recv and barrier have none
            timed = TABLE[collective.call].is_message and collective.timeout_s is not None  # messages have no options
            timeout = [timedelta(seconds=collective.timeout_s or 0.0)] if timed else []
            self._threads.submit(then, lambda: work.wait(*timeout))
        else:
            future.add_done_callback(lambda future: then(future.wait))

    def _completed(
        self, id: int, wait: Callable[[], object], last: Step | None, prepared: tuple[str, Collective]
    ) -> None:
        group, collective = prepared
        error = None
        try:
            wait()
            if last is not None:
                last()
        except Exception as exc:
            error = exc
        if error is None:  # the rank's last counts show where it had stopped
            self._block.completed(group, TABLE[collective.call].is_message)
        self._end(id, error)

    def _end(self, id: int, error: Exception | None) -> None:
        text = "" if error is None else str(error) or type(error).__name__
        with contextlib.suppress(OSError):
            self._sock.send(RUN.pack(RUN_MARK, id) + text.encode()[:_MAX_TEXT])
