"""The rank's side of its comm process.

P1  One `CommProcess` is one subprocess; it is never reused after `abort`. The next generation takes the standby.
P2  After `abort` returned, every work has ended, and neither the process nor this side touches a caller's tensor.
P3  A work ends exactly once: completed, failed by its group, or failed by the abort.
P4  A completed work has written its outputs before any waiter is released.
P5  One thread at a time reads the process's messages: the first of those that wait for works, so that no other has to
    wake it; or the reader thread, while a future or a reply is waited for, and else now and then. The reader alone ends
    what has a future (whose callbacks may do anything), reports errors, and notices the death.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from elasticgang.comm.arena import Arena
from elasticgang.comm.forkserver import ForkServerClient
from elasticgang.comm.page import CommBlock, Page
from elasticgang.comm.staging import Staging
from elasticgang.comm.worker import IN_PLACE, MAX_FDS, MESSAGES, REDUCING, RUN, RUN_MARK
from elasticgang.errors import CollectiveTimeoutError, GangError, OperationalError, PeerLostError, StaleGenerationError
from elasticgang.gang.dtypes import reduced_dtype

_MAX_MESSAGE = 1 << 17
_REAP_TIMEOUT_S = 5.0
_START_TIMEOUT_S = 60.0
_MAX_BODIES = 4096
_UNREAD_MS = 100  # at most, of a message that nobody waits for


@dataclass(frozen=True)
class GroupSpec:
    """One group to configure: this process's `rank` in a group of `size`."""

    name: str
    rank: int
    size: int


class CommWork:
    """One collective under way. `future` resolves to the output tensors, or to a `GangError`."""

    def __init__(self, comm: CommProcess, name: str, outputs: Sequence[Tensor], spans: Sequence[Any]) -> None:
        self.name = name
        self.error: GangError | None = None
        self._comm = comm
        self._outputs = list(outputs)
        self._spans = spans  # with the tensors, inputs too: their memory may be shared
        self._is_ended = False
        self._wake: threading.Event | None = None  # of a thread that waits while another reads
        self._future: torch.futures.Future[list[Tensor]] | None = None
        self._lock = threading.Lock()

    @property
    def future(self) -> torch.futures.Future[list[Tensor]]:
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self._is_ended:
                    self._resolve(self._future)
                else:
                    self._comm._add_listeners(1)
            return self._future

    def _end(self, error: GangError | None) -> None:
        """Once. P4: outputs first."""
        for span in self._spans[: len(self._outputs)]:
            if error is None:
                span.copy_out()
            else:
                span.discard()
        self.error = error
        self._spans = ()
        with self._lock:
            self._is_ended = True
            future = self._future
        if self._wake is not None:
            self._wake.set()
        if future is not None:
            self._comm._add_listeners(-1)
            self._resolve(future)

    def _resolve(self, future: torch.futures.Future[list[Tensor]]) -> None:
        if self.error is None:
            future.set_result(self._outputs)
        else:
            future.set_exception(self.error)  # type: ignore[arg-type]  # torch's annotation is wrong

    def done(self) -> bool:
        return self._is_ended

    def wait(self, timeout: float) -> None:
        """Block until the collective has ended, at most `timeout` seconds.

        Raises:
            CollectiveTimeoutError: it has not. It is still under way: abort before the tensors are used again.
            GangError: it failed. Its outputs are undefined.
        """
        if not self._is_ended and not self._comm._await(self, timeout):
            raise CollectiveTimeoutError(f"{self.name} timed out after {timeout:g} seconds")
        if self.error is not None:
            raise self.error


class CommProcess:
    """A comm process and the works given to it. Thread-safe but for `configure` and `close_groups` (one caller)."""

    target = "elasticgang.comm.worker:main"

    def __init__(
        self,
        forkserver: ForkServerClient,
        arena: Arena,
        *,
        timeout: float,
        store: str | None = None,
        host: str | None = None,
        group: int = 0,
        name: str = "eg-comm",
        page: Page | None = None,
    ) -> None:
        """Start the process. `timeout`: seconds for a collective. `store`: "host:port" of the one to connect to at
        once. `host`: the address that its peers reach it by; None is Gloo's choice. `group`: the process group that it
        joins, 0 for one of its own. `name`: its name for `ps`. `page`: the rank's, where both sides stamp how far
        they are."""
        self.timeout = timeout
        self._page = page
        self.block: CommBlock | None = None if page is None or page.fd is None else page.take_block()
        self._arena = arena
        self._staging = Staging.of(arena)
        self._num_discarded = len(arena.discarded)
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._add_lock = threading.Lock()
        self._ended = self._dead = self._is_over = False
        self._abort_error: GangError | None = None
        self._works: dict[int, tuple[CommWork, list[Any]]] = {}
        self._next_id = 0
        self._bodies: dict[tuple[object, ...], bytes] = {}
        self._sent_blocks: set[int] = set()
        self._replies: list[dict[str, Any]] = []
        self._replied = threading.Condition(self._lock)
        # P5
        self._turn = threading.Condition()
        self._is_read = False
        self._buffer = bytearray(_MAX_MESSAGE)
        self._num_listeners = 0
        self._waiting: dict[CommWork, None] = {}
        self._found: deque[tuple[int, str | None]] = deque()
        self._on_error: Callable[[GangError], None] = self.abort
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        watch = os.pidfd_open(os.getpid())
        try:
            with theirs:
                spawned = forkserver.spawn(
                    self.target,
                    {
                        "store": store,
                        "host": host,
                        "timeout_s": timeout,
                        "block": self.block and self.block.index,
                        **self._start_arguments(),
                    },
                    fds=[theirs.fileno(), watch, *self._page_fds()],
                    group=group,
                    name=name,
                )
        except OperationalError:
            self._sock.close()
            self._give_back_block()
            raise
        finally:
            os.close(watch)
        self.pid, self._pidfd = spawned.pid, spawned.pidfd
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # rings for the reader
        self._poll = select.poll()
        for fd in (self._sock.fileno(), self._pidfd):
            self._poll.register(fd, select.POLLIN)
        self._reader = threading.Thread(target=self._read, name=f"comm-{self.pid}", daemon=True)
        self._reader.start()

    def _page_fds(self) -> list[int]:
        return [] if self._page is None or self._page.fd is None or self.block is None else [self._page.fd]

    def _give_back_block(self) -> None:
        block, self.block = self.block, None
        if self._page is not None and block is not None:
            self._page.give_back(block)

    def _start_arguments(self) -> dict[str, Any]:
        """For `target`, beyond those of all."""
        return {}

    def wait_ready(self, timeout: float = _START_TIMEOUT_S) -> None:
        """Block until the process can be configured. Raises GangError when it died or is not ready in time."""
        self._reply("ready", timeout, "start")

    def configure(
        self,
        prefix: str,
        groups: Sequence[GroupSpec],
        on_error: Callable[[GangError], None],
        *,
        store: str | None = None,
        timeout: float | None = None,
    ) -> None:
        """Replace all groups by `groups`, under the `prefix`, which no other generation may use, of the store (None:
        the one it was started with). `timeout`: seconds for this and for each collective of the groups.

        `on_error` is called, once per failed work, from the thread that learned of it, before the work ends.

        Raises:
            GangError: a peer did not come, or the process was aborted meanwhile. Abort it.
        """
        self._on_error = on_error
        specs = [{"name": spec.name, "rank": spec.rank, "size": spec.size} for spec in groups]
        self.timeout = timeout or self.timeout
        message = {"kind": "configure", "prefix": prefix, "groups": specs, "store": store, "timeout_s": self.timeout}
        if self.block is not None:
            self.block.configure([spec.name for spec in groups])
        self._send(message)
        self._reply("configured", self.timeout + (5.0 if timeout is None else 0.0), "configure")

    def add_group(
        self, prefix: str, group: GroupSpec, *, store: str | None = None, timeout: float | None = None
    ) -> None:
        """One more group beside those that are configured, under the `prefix` of the store; works of those go on.

        Raises:
            GangError: a peer did not come, or the process was aborted meanwhile. Abort it.
        """
        spec = {"name": group.name, "rank": group.rank, "size": group.size}
        timeout = timeout or self.timeout
        message = {"kind": "add", "prefix": prefix, "groups": [spec], "store": store, "timeout_s": timeout}
        with self._add_lock:  # their replies come in the order in which the groups are made
            if self.block is not None:
                self.block.add(group.name)
            self._send(message)
            self._reply("configured", timeout + 5.0, "configure")

    def remove_group(self, name: str) -> None:
        """Let go of a group; none of its works may be under way. Nothing when the process has ended."""
        with contextlib.suppress(PeerLostError):
            self._send({"kind": "remove", "name": name})

    def close_groups(self, timeout: float) -> None:
        """End a generation without ending the process. Raises GangError when that fails, and when a work is under way,
        which only a kill can end: abort it."""
        if self.num_works:
            raise StaleGenerationError(f"{self.num_works} works are under way")
        self._send({"kind": "close"})
        self._reply("configured", timeout, "close")

    def submit(
        self, group: str, call: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], **options: object
    ) -> CommWork:
        """Start the collective `call` of the worker on `group`. `outputs` are written when it completes; a tensor that
        is input and output stands in both. Never raises a `GangError`: the work that is returned has failed.

        Raises:
            ValueError: the call reduces, and its dtype cannot be. Nothing was sent.
        """
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # what is made for this call is used for others
                return self.submit(group, call, outputs, inputs, **options)
        in_place = call in IN_PLACE
        tensors = list(outputs) if in_place else [*outputs, *inputs]
        dtypes = [tensor.dtype for tensor in tensors]
        if call in REDUCING:
            dtypes = [reduced_dtype(call, options.get("op"), dtype) for dtype in dtypes]
        with torch.no_grad():
            spans = [self._staging.span(tensor, dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
            for index, span in enumerate(spans):
                if in_place or index >= len(outputs):
                    span.copy_in()
        work = CommWork(self, call, outputs, spans)
        body = self._encoded(group, call, options, spans)
        if not self._start(work, spans, body, group):
            self._give_back(spans)
            work._end(StaleGenerationError(f"{call}: the comm process of this generation was aborted"))
        return work

    def _encoded(self, group: str, call: str, options: dict[str, object], spans: Sequence[Any]) -> bytes:
        """The same calls come again, since blocks do."""
        described = [span.described for span in spans]
        key = (group, call, *options.items(), *described)
        body = self._bodies.get(key)
        if body is None:
            if len(self._bodies) >= _MAX_BODIES:
                self._bodies.clear()
            body = self._bodies[key] = json.dumps([group, call, options, described]).encode()
        return body

    def _start(self, work: CommWork, spans: Sequence[Any], body: bytes, group: str) -> bool:
        """Register and send. False: the process had ended before, and nothing was registered or sent."""
        with self._send_lock:  # `abort` never takes it: a send that blocks is ended by the kill
            with self._lock:
                if self._ended:
                    return False
                self._next_id += 1
                id = self._next_id
                self._works[id] = (work, list(spans))
            if (block := self.block) is not None:
                block.submitted(group, work.name in MESSAGES)
            try:
                self._introduce(spans)
                self._sock.send(RUN.pack(RUN_MARK, id) + body)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the process is dead: the reader thread fails all works
            except OSError as exc:  # it lives and was not told (too long a message, say): the work ends by a kill alone
                error = PeerLostError(f"comm process {self.pid} could not be told of {work.name}: {exc}")
                threading.Thread(target=self.abort, args=(error,), name="comm-abort", daemon=True).start()
        return True

    def _introduce(self, spans: Sequence[Any]) -> None:
        """Let the process map the memory that it does not know yet, and unmap what is no more."""
        blocks = [span.block for span in spans if span.block.id not in self._sent_blocks]
        discarded = self._arena.discarded
        if len(discarded) > self._num_discarded:
            gone, self._num_discarded = discarded[self._num_discarded :], len(discarded)
            self._sock.send(json.dumps({"kind": "unmap", "blocks": gone}).encode())
        new = list({block.id: block for block in blocks}.values())
        for first in range(0, len(new), MAX_FDS):
            part = new[first : first + MAX_FDS]
            message = {"kind": "map", "blocks": [(block.id, block.size) for block in part]}
            socket.send_fds(self._sock, [json.dumps(message).encode()], [block.fd for block in part])
            self._sent_blocks.update(block.id for block in part)

    def abort(self, error: GangError) -> None:
        """Kill the process, wait until it is dead, and fail every work with `error`. Idempotent, from any thread.

        Raises:
            OperationalError: it could not be reaped in time; the rank must exit, since its memory is not fenced (R3).
        """
        with self._lock:
            first, self._ended = not self._ended, True
            if first:
                self._abort_error = error
            if self._pidfd >= 0:  # closed otherwise, which a notice may come after
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        if threading.current_thread() is self._reader:
            dead = _exited(self._pidfd, _REAP_TIMEOUT_S)
        else:  # the descriptor belongs to the reader, and after it to `close`
            self._reader.join(2 * _REAP_TIMEOUT_S)
            dead = self._dead
        if (block := self.block) is not None:
            block.clear()
        if not dead:
            raise OperationalError(f"comm process {self.pid} was killed but not dead within {_REAP_TIMEOUT_S:g} s")

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def num_works(self) -> int:
        """Collectives under way."""
        return len(self._works)

    def close(self) -> None:
        """Abort, and give every descriptor back."""
        self.abort(StaleGenerationError("the comm process was closed"))
        self._sock.close()
        with self._lock:
            pidfd, self._pidfd = self._pidfd, -1
        if pidfd >= 0:
            with contextlib.suppress(ChildProcessError):  # a child only where this process owns the fork server
                os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
            os.close(pidfd)
            os.close(self._bell)
            self._give_back_block()

    def descriptors(self) -> list[int]:
        """What a forked child of the rank must not keep open."""
        return [self._sock.fileno(), self._pidfd, self._bell]

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._sock.send(json.dumps(message).encode())
        except OSError as exc:
            raise PeerLostError(f"comm process {self.pid} is gone") from exc

    def _reply(self, key: str, timeout: float, what: str) -> None:
        deadline = time.monotonic() + timeout
        self._add_listeners(1)
        try:
            message = self._next_reply(key, timeout, what, deadline)
        finally:
            self._add_listeners(-1)
        if key == "configured" and message[key] is not None:
            raise PeerLostError(f"could not {what} the generation's groups: {message[key]}")

    def _next_reply(self, key: str, timeout: float, what: str, deadline: float) -> dict[str, Any]:
        with self._replied:
            while True:
                if self._ended:
                    raise PeerLostError(f"comm process {self.pid} ended during {what}")
                if self._replies and key in self._replies[0]:
                    break
                left = deadline - time.monotonic()
                if left <= 0 or not self._replied.wait(left):
                    raise CollectiveTimeoutError(
                        f"{what} timed out after {timeout:g} seconds (comm process {self.pid})"
                    )
            return self._replies.pop(0)

    # -- reading (P5)

    def _add_listeners(self, number: int) -> None:
        with self._turn:
            self._num_listeners += number
        if number > 0:
            self._ring()

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # closed: nobody is there to hear it
            os.eventfd_write(self._bell, 1)

    def _await(self, work: CommWork, timeout: float) -> bool:
        """Wait until `work` has ended, reading if nobody else does. False: it has not, in time."""
        deadline = time.monotonic() + timeout
        while not work._is_ended:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            with self._turn:
                reads = not self._is_read and not self._is_over  # the reader reads what is left
                if reads:
                    self._is_read = True
                else:
                    work._wake = work._wake or threading.Event()
                    work._wake.clear()
                    self._waiting[work] = None
            if reads:
                try:
                    self._read_until(lambda: work._is_ended, deadline)
                finally:
                    self._hand_over()
            elif not work._is_ended:  # it may have, before there was anything to wake
                assert work._wake is not None
                work._wake.wait(left)
            self._waiting.pop(work, None)
        return True

    def _hand_over(self) -> None:
        """Let the next one read: whoever waits for a work, or else the reader thread, for those that listen."""
        with self._turn:
            self._is_read = False
            self._turn.notify_all()
            following = next((work for work in self._waiting if not work._is_ended), None)
            if following is not None and following._wake is not None:
                following._wake.set()
            elif self._num_listeners:
                self._ring()

    def _read_until(self, is_over: Callable[[], bool], deadline: float | None = None) -> None:
        """Read messages until that, the deadline, or the process's end."""
        number = self._sock.fileno()
        while not is_over():
            left = None if deadline is None else (deadline - time.monotonic()) * 1000
            if left is not None and left <= 0:
                return
            ready = {fd for fd, _ in self._poll.poll(left)}
            if number in ready:
                if not self._read_one():
                    return
            elif ready:
                self._over()
                return

    def _over(self) -> None:
        """The process is dead, or as good as: the rest is the reader's."""
        self._is_over = True
        self._ring()

    def _read_one(self) -> bool:
        """False at the end of the messages, or when there is none."""
        try:
            length = self._sock.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
        except OSError:
            return False
        data = self._buffer[:length]
        if not data:
            self._over()
            return False
        if data[0] == RUN_MARK:
            _, id = RUN.unpack_from(data)
            self._finish(id, data[RUN.size :].decode() or None)
        else:
            with self._replied:
                self._replies.append(json.loads(data))
                self._replied.notify_all()
        return True

    def _finish(self, id: int, reason: str | None) -> None:
        work, spans = self._works[id]
        if reason is not None or work._future is not None:
            self._found.append((id, reason))
            self._ring()
            return
        with self._lock:
            del self._works[id]
        work._end(None)
        self._give_back(spans)

    def _give_back(self, spans: Sequence[Any]) -> None:
        """Their work has ended."""
        for span in spans:
            self._staging.give_back(span)

    def _tidy(self) -> None:
        """Now and then, by the reader."""

    def _bury(self, error: GangError) -> None:
        """The process is dead, and its works end by `error` next."""

    def _read(self) -> None:
        """The reader thread."""
        poll = select.poll()
        for fd in (self._bell, self._pidfd):
            poll.register(fd, select.POLLIN)
        try:
            while not self._is_over:
                ready = {fd for fd, _ in poll.poll(_UNREAD_MS)}
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
                self._end_found()
                self._tidy()
                if self._pidfd in ready:
                    return
                with self._turn:
                    if self._is_read or not (self._num_listeners or self._works):
                        continue  # whoever reads hands over
                    self._is_read = True
                try:
                    while self._read_one():  # works that nobody waits for hold memory and descriptors
                        pass
                    self._read_until(lambda: self._end_found() or not self._num_listeners)
                finally:
                    self._hand_over()
        finally:
            self._fail_all()

    def _end_found(self) -> bool:
        """End what was left to the reader. The error of one work is that of all: the abort it leads to ends them."""
        while self._found:
            id, reason = self._found.popleft()
            if id not in self._works:
                continue
            work, spans = self._works[id]
            if reason is not None:
                self._on_error(PeerLostError(f"{work.name}: {reason}"))
                continue
            with self._lock:
                del self._works[id]
            work._end(None)
            self._give_back(spans)
        return False

    def _fail_all(self) -> None:
        with self._turn:  # the process is dead, or has closed its socket: who reads notices, and ends soon
            self._turn.wait_for(lambda: not self._is_read, _REAP_TIMEOUT_S)
            self._is_read = True
        self._is_over = True
        while self._read_one():
            pass  # what had completed before
        self._end_found()
        error: GangError = PeerLostError(f"comm process {self.pid} died")
        with self._replied:
            unexpected, self._ended = not self._ended, True
            self._replied.notify_all()
        if unexpected:
            self._on_error(error)
        self._dead = _exited(self._pidfd, _REAP_TIMEOUT_S)  # M2: EOF may come before the last thread is gone
        error = self._abort_error or error
        self._bury(error)
        with self._lock:
            works, self._works = self._works, {}
        for work, spans in works.values():
            work._end(error)
            self._give_back(spans)


def _exited(pidfd: int, timeout: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout * 1000))
