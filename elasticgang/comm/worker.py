"""The comm process: holds all process groups of one rank, and is killed to abort them.

WORKER-1  It never outlives its rank: a thread polls the rank's pidfd. Pipe or socket EOF is not enough, since the
    rank's own children may hold the other end.
WORKER-2  The command loop starts works and never waits for one; a completion is a message, sent from Gloo's own thread.
WORKER-3  It reads and writes only memory of the arena.
WORKER-4  A rank may leave a group as soon as it is made (be killed, or end with the store's server), and no peer fails
    to make it: a group with a handshake is made on a rank only when all ranks have connected.
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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    GatherOptions,
    PrefixStore,
    ProcessGroupGloo,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
    TCPStore,
)

from elasticgang.comm.arena import bytes_as, map_memory
from elasticgang.process.status_page import PULSE_MS, CommBlock, StatusPage

_MAX_MESSAGE = 1 << 17
MAX_FDS = 253  # the most that one message can carry
_ANCILLARY_BYTES = socket.CMSG_SPACE(MAX_FDS * 4)

# A collective, and its end, are a mark and a number; a JSON body, or the error's text, follows. All else is JSON.
RUN = struct.Struct("<BQ")
RUN_MARK = 1
_MAX_PREPARED = 4096
_MAX_THREADS = 1 << 16
_CONNECT_TIMEOUT = timedelta(seconds=5)
_MAX_TEXT = 4096
_PROBE_TIMEOUT_S = 2.0

_Gloo: Any = ProcessGroupGloo  # torch's stubs lack its methods

_REDUCE_OPS: dict[str, Any] = {
    "sum": ReduceOp.SUM,
    "mean": ReduceOp.AVG,  # of NCCL alone
    "product": ReduceOp.PRODUCT,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "band": ReduceOp.BAND,
    "bor": ReduceOp.BOR,
    "bxor": ReduceOp.BXOR,
}


def _with(kind: Callable[[], Any], timeout_s: float | None, **values: object) -> Any:
    """Options. A call without a timeout of its own has the group's."""
    options = kind()
    for name, value in values.items():
        setattr(options, name, value)
    if timeout_s is not None:
        options.timeout = timedelta(seconds=timeout_s)
    return options


def _allreduce(group: Any, tensors: list[Tensor], op: str, timeout_s: float | None = None) -> Any:
    if len(tensors) > 1:
        return group.allreduce_coalesced(tensors, _with(AllreduceCoalescedOptions, timeout_s, reduceOp=_REDUCE_OPS[op]))
    return group.allreduce(tensors, _with(AllreduceOptions, timeout_s, reduceOp=_REDUCE_OPS[op]))


def _broadcast(group: Any, tensors: list[Tensor], root: int, timeout_s: float | None = None) -> Any:
    return group.broadcast(tensors, _with(BroadcastOptions, timeout_s, rootRank=root))


def _allgather(group: Any, tensors: list[Tensor], timeout_s: float | None = None) -> Any:
    *outputs, source = tensors
    return group.allgather([outputs], [source], _with(AllgatherOptions, timeout_s))


def _allgather_single(group: Any, tensors: list[Tensor], timeout_s: float | None = None) -> Any:
    output, source = tensors
    return group._allgather_base(output, source, _with(AllgatherOptions, timeout_s))


def _reduce(group: Any, tensors: list[Tensor], op: str, root: int, timeout_s: float | None = None) -> Any:
    return group.reduce(tensors, _with(ReduceOptions, timeout_s, reduceOp=_REDUCE_OPS[op], rootRank=root))


def _reduce_scatter(group: Any, tensors: list[Tensor], op: str, timeout_s: float | None = None) -> Any:
    output, *inputs = tensors
    return group.reduce_scatter([output], [inputs], _with(ReduceScatterOptions, timeout_s, reduceOp=_REDUCE_OPS[op]))


def _reduce_scatter_single(group: Any, tensors: list[Tensor], op: str, timeout_s: float | None = None) -> Any:
    output, source = (tensor.view(-1) for tensor in tensors)  # Gloo ends the process where the shapes do not multiply
    options = _with(ReduceScatterOptions, timeout_s, reduceOp=_REDUCE_OPS[op])
    return group._reduce_scatter_base(output, source, options)


def _alltoall(group: Any, tensors: list[Tensor], timeout_s: float | None = None) -> Any:
    outputs, inputs = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :]
    sizes = [[tensor.numel() for tensor in part] for part in (outputs, inputs)]
    flat = [torch.cat([tensor.reshape(-1) for tensor in part]) for part in (outputs, inputs)]
    work = group.alltoall_base(*flat, *sizes, _with(AllToAllOptions, timeout_s))  # Gloo has no alltoall of lists

    def unpack(future: Any) -> list[Tensor]:
        future.wait()
        for output, part in zip(outputs, torch.split(flat[0], sizes[0]), strict=True):
            output.copy_(part.view(output.shape))
        return outputs

    return _Unpacked(work.get_future().then(unpack))


def _alltoall_single(group: Any, tensors: list[Tensor], timeout_s: float | None = None) -> Any:
    output, source = tensors
    return group.alltoall_base(output, source, [], [], _with(AllToAllOptions, timeout_s))


class _Unpacked:
    """A work with a last step."""

    def __init__(self, future: Any) -> None:
        self._future = future

    def get_future(self) -> Any:
        return self._future


def _gather(group: Any, tensors: list[Tensor], root: int, timeout_s: float | None = None) -> Any:
    *outputs, source = tensors
    return group.gather([outputs] if outputs else [], [source], _with(GatherOptions, timeout_s, rootRank=root))


def _scatter(group: Any, tensors: list[Tensor], root: int, timeout_s: float | None = None) -> Any:
    output, *inputs = tensors
    return group.scatter([output], [inputs] if inputs else [], _with(ScatterOptions, timeout_s, rootRank=root))


def _send(group: Any, tensors: list[Tensor], peer: int, tag: int, timeout_s: float | None = None) -> Any:
    return group.send(tensors, peer, tag)


def _recv(group: Any, tensors: list[Tensor], peer: int, tag: int, timeout_s: float | None = None) -> Any:
    return group.recv(tensors, peer, tag)


class _Blocking:
    """A work without a future: `_future_of` waits for it on a thread."""

    def __init__(self, wait: Callable[..., object]) -> None:
        self.wait = wait

    def get_future(self) -> Any:
        raise RuntimeError("there is no future")


def _recv_anysource(group: Any, tensors: list[Tensor], tag: int, timeout_s: float | None = None) -> Any:
    tensor, source = tensors
    work = group.recv_anysource([tensor], tag)

    def wait(*timeout: timedelta) -> None:
        work.wait(*timeout)
        source.view(torch.int64).fill_(work._source_rank())

    return _Blocking(wait)


def _monitored_barrier(group: Any, tensors: list[Tensor], wait_all_ranks: bool, timeout_s: float | None = None) -> Any:
    timeout = group.options._timeout if timeout_s is None else timedelta(seconds=timeout_s)
    return _Blocking(lambda: group.monitored_barrier(timeout, wait_all_ranks))


# The tensors of a call stand in one list: outputs, then inputs; those of an in-place call once.
IN_PLACE = frozenset({"allreduce", "broadcast", "reduce"})
MESSAGES = frozenset({"recv", "recv_anysource", "send"})
# Gloo knows few dtypes. What only moves is bytes to it.
REDUCING = frozenset({"allreduce", "reduce", "reduce_scatter", "reduce_scatter_single"})
CALLS: dict[str, Callable[..., Any]] = {
    "allreduce": _allreduce,
    "allgather": _allgather,
    "allgather_single": _allgather_single,
    "alltoall": _alltoall,
    "alltoall_single": _alltoall_single,
    "broadcast": _broadcast,
    "gather": _gather,
    "monitored_barrier": _monitored_barrier,
    "recv": _recv,
    "recv_anysource": _recv_anysource,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_single": _reduce_scatter_single,
    "scatter": _scatter,
    "send": _send,
}


def main(args: dict[str, Any], fds: list[int]) -> int:
    """`args`: store ("host:port", or none yet), host (the address that peers reach this one by, or none: Gloo's
    choice), timeout_s, block (of the page). `fds`: the socket to the rank, the rank's pidfd, its page if it has one."""
    _let_ranks_compute()
    return run(lambda sock, block: Worker(sock, args, block), args, fds)


def run(make: Callable[[socket.socket, CommBlock], Worker], args: dict[str, Any], fds: list[int]) -> int:
    """Serve, until the rank is gone, with the worker that `make` makes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with its rank, not before
    sock = socket.socket(fileno=fds[0])
    page = StatusPage(fds[2]) if len(fds) > 2 else StatusPage()
    block = page.block(args.get("block") or 0)
    block.start()
    threading.Thread(target=_die_with, args=(fds[1], block), name="rank-watch", daemon=True).start()
    torch.set_num_threads(1)
    # torch looks up the name of whom it connects to, for its log: an answer that gets lost costs 5 s otherwise.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:2")
    # The rank closed or died, maybe before this was ready: the socket says so first.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        make(sock, block).serve()
    os._exit(0)  # no finalizer: Gloo's would wait for works that nobody will complete


def _let_ranks_compute() -> None:
    """A thread that is woken here takes no core from one that computes before that one's time is up: then it finds more
    bytes at once, at half of the switches and reads. On an idle core nothing changes. A policy that somebody chose
    stays."""
    if os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):  # not permitted here
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
    def __init__(self, sock: socket.socket, args: dict[str, Any], block: CommBlock) -> None:
        self._sock = sock
        self._block = block
        self._host: str | None = args["host"]
        self._timeout = timedelta(seconds=args["timeout_s"])
        self._buffer = bytearray(_MAX_MESSAGE)
        self._slabs: dict[int, Tensor] = {}
        self._groups: dict[str, Any] = {}
        self._prepared: dict[bytes, tuple[str, str, dict[str, Any], list[Tensor]]] = {}
        self._pool = ThreadPoolExecutor(_MAX_THREADS)  # each task may block, and keeps no other from its thread
        self._store: str | None = args["store"]
        # One client a group: on one client, a group that waits for a peer's key keeps another from setting its own.
        self._stores: list[TCPStore] = []
        if self._store is not None and _listens(self._store):
            with contextlib.suppress(RuntimeError):  # it may be away for a while: it is connected to when it is needed
                for _ in range(3):
                    self._stores.append(self._connect(self._store, _CONNECT_TIMEOUT))
        self._send({"ready": True})

    def serve(self) -> None:
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
                self._pool.submit(self._reply, self._add, command)  # works of other groups go on meanwhile
            elif kind == "close":
                self._reply(self._close, command)
            elif kind == "remove":
                self._pool.submit(self._groups.pop, command["name"], None)
            else:
                self._learn(command)

    def _learn(self, command: dict[str, Any]) -> None:
        """What only some kinds of worker are told."""
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
        assert self._store is not None
        while len(self._stores) < len(command["groups"]):
            self._stores.append(self._connect(self._store))
        started = {
            group["name"]: self._pool.submit(self._create_with, number, command, group)
            for number, group in enumerate(command["groups"])
        }
        self._groups = {name: future.result() for name, future in started.items()}

    def _create_with(self, number: int, command: dict[str, Any], group: dict[str, Any]) -> Any:
        """By a client that was made before: with a new one if that one's server has died. It never recovers."""
        prefix = command["prefix"]
        try:
            self._stores[number].check([prefix])
        except RuntimeError:
            assert self._store is not None
            self._stores[number] = self._connect(self._store)
        made = self._create(self._stores[number], prefix, group, self._timeout)
        if command["handshake"]:
            self._handshake(made)
        return made

    def _handshake(self, group: Any) -> None:
        """WORKER-4. A barrier of the group itself, not of the store, whose server may end with the first rank that is
        through. A rank that leaves the barrier has written all that its peers still read there."""
        if group.size() > 1:
            group.barrier().wait()

    def _add(self, command: dict[str, Any]) -> None:
        """One more group beside those that are configured."""
        (group,) = command["groups"]
        groups = self._groups
        store = command["store"] or self._store
        assert store is not None
        timeout = timedelta(seconds=command["timeout_s"])
        made = self._create(self._connect(store), command["prefix"], group, timeout)
        self._handshake(made)
        groups[group["name"]] = made

    def _connect(self, store: str, timeout: timedelta | None = None) -> TCPStore:
        host, _, port = store.rpartition(":")
        # A collective's deadline may be too short for this on a loaded machine; the rank's side has one of its own.
        timeout = timeout or max(self._timeout, _CONNECT_TIMEOUT)
        client = TCPStore(host.strip("[]"), int(port), is_master=False, wait_for_workers=False, timeout=timeout)
        client.set_timeout(self._timeout)
        return client

    def _create(self, client: TCPStore, prefix: str, group: dict[str, Any], timeout: timedelta) -> Any:
        options = _Gloo._Options()
        options._timeout = timeout
        device = _Gloo.create_default_device() if self._host is None else _Gloo.create_device(hostname=self._host)
        options._devices = [device]
        store = PrefixStore(f"{prefix}/{group['name']}", client)
        return _Gloo(store, group["rank"], group["size"], options)

    def _close(self, command: dict[str, Any]) -> None:
        """Let go of the groups. No work of theirs is pending (the rank kills this process otherwise), so that nothing
        of them can reach memory any more; tearing down their threads takes 40 ms, which nobody needs to wait for."""
        ended, self._groups = self._groups, {}
        if ended:
            self._pool.submit(ended.clear)

    def _map(self, slabs: list[tuple[int, int]], fds: list[int]) -> None:
        for (slab, size), fd in zip(slabs, fds, strict=True):
            self._slabs[slab] = map_memory(fd, size)
            os.close(fd)  # the mapping stays

    def _run(self, id: int, body: bytes) -> None:
        try:
            prepared = self._prepared.get(body) or self._prepare(body)
            group, call, options, tensors = prepared
            work = CALLS[call](self._groups[group], tensors, **options)
            future = self._future_of(work, options.get("timeout_s") if call in MESSAGES else None)
        except Exception as exc:
            self._end(id, exc)
            return
        # WORKER-2. The callback keeps the tensors until the work has ended.
        future.add_done_callback(lambda future: self._completed(id, future, prepared))

    def _prepare(self, body: bytes) -> tuple[str, str, dict[str, Any], list[Tensor]]:
        """What a body says; the same one comes again, since blocks do."""
        group, call, options, described = json.loads(body)
        tensors = [
            bytes_as(self._slabs[slab], torch.Size(shape), getattr(torch, dtype), offset)  # WORKER-3
            for slab, offset, shape, dtype in described
        ]
        if call not in REDUCING:
            tensors = [tensor.view(-1).view(torch.uint8) for tensor in tensors]
        if len(self._prepared) >= _MAX_PREPARED:
            self._prepared.clear()
        self._prepared[body] = prepared = (group, call, options, tensors)
        return prepared

    def _future_of(self, work: Any, timeout_s: float | None) -> Any:
        """`timeout_s`: of what has no options, but may be waited for so long."""
        try:
            return work.get_future()
        except RuntimeError:  # Gloo's reduce_scatter, send and recv give works without one, and so do those above
            return self._pool.submit(work.wait, *([] if timeout_s is None else [timedelta(seconds=timeout_s)]))

    def _completed(self, id: int, future: Any, prepared: tuple[str, str, dict[str, Any], list[Tensor]]) -> None:
        group, call, _, _ = prepared
        error = None
        try:
            future.wait() if hasattr(future, "wait") else future.result()
        except Exception as exc:
            error = exc
        self._block.completed(group, call in MESSAGES)
        self._end(id, error)

    def _end(self, id: int, error: Exception | None) -> None:
        text = "" if error is None else str(error) or type(error).__name__
        with contextlib.suppress(OSError):
            self._sock.send(RUN.pack(RUN_MARK, id) + text.encode()[:_MAX_TEXT])
