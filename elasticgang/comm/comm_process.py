"""The rank's side of its comm process.

COMM-1  One `CommProcess` is one subprocess. It is never reused after `abort`: the next generation takes the standby.
COMM-2  `kill` marks and signals the process without blocking. When `abort` returns, every work has ended, and neither
    the process nor this side writes to a caller's tensor. The process may not be gone yet: the kernel takes longer to
    free its memory (DEATH-5).
COMM-3  A work ends exactly once: completed, failed by its group, or failed by the abort.
COMM-4  A completed work has written its outputs before any waiter is released.
COMM-5  Callbacks of futures may block. They run on threads of the reply reader, which do not read or serve meanwhile
    (REPLY-4). Only the server reports errors and the death of the process.
COMM-6  A process that `kill` halts runs no code any more (STOP-1), but keeps its connections and its memory until it is
    killed: by `end_halted`, `close`, or after `HALTED_S`; with its parent, or with its rank's process group. Peers
    that have no other notice learn of the end only then. One that uses a device is not halted: the device goes on.
COMM-7  The process belongs to the process that started it. A forked child closes its copies of the descriptors. There,
    pending works have failed, calls that end the process do nothing, and others raise InvalidOperationError.
COMM-8  A work of one configuration is not sent once `close_groups` or the next `configure` has begun: any thread may
    start it meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import select
import signal
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from elasticgang.collectives.collective import Collective
from elasticgang.collectives.description import Description, describe
from elasticgang.collectives.dtypes import gloo_dtype
from elasticgang.collectives.table import TABLE
from elasticgang.comm.arena import Arena
from elasticgang.comm.reentry import check_reentry, here
from elasticgang.comm.reply_reader import ReplyReader
from elasticgang.comm.staging import Staging
from elasticgang.comm.work import CommWork
from elasticgang.comm.worker import MAX_FDS, RUN, RUN_MARK, encoded
from elasticgang.errors import (
    CollectiveTimeoutError,
    GangError,
    InvalidOperationError,
    OperationalError,
    PeerLostError,
    StaleGenerationError,
)
from elasticgang.process.death_watch import wait_writes_nothing
from elasticgang.process.forkserver import ForkServerClient
from elasticgang.process.status_page import CommBlock, StatusPage
from elasticgang.process.stop_fence import halt
from elasticgang.torch_private import has_modes, is_fake, without_modes

_REAP_TIMEOUT_S = 5.0
HALT_TIMEOUT_S = 0.1
HALTED_S = 0.25
_CALLBACKS_TIMEOUT_S = 5.0
_START_TIMEOUT_S = 60.0
_MAX_BODIES = 4096
# Timeouts in the error texts of Gloo, of the pairs that Gloo then closes, of the store, and of NCCL. Not those of TCP
# ("Connection timed out").
_TIMED_OUT = re.compile(
    r"Timed out waiting|Application timeout|Connect timeout|[Ww]ait timeout|timed out after|ran for \d+ milliseconds"
    r"|Ranks [\d, ]+ failed to pass monitoredBarrier"
)

log = logging.getLogger("elasticgang")


@dataclass(frozen=True)
class GroupSpec:
    """One group to configure: this process's `rank` in a group of `size`. `shown`: what a person is told that it is;
    "": `name`."""

    name: str
    rank: int
    size: int
    shown: str = ""


class CommProcess:
    """A comm process and its works. Thread-safe, except `configure` and `close_groups`, which one thread may call."""

    target = "elasticgang.comm.worker:main"
    uses_device = False  # its works may go on there until the process is gone
    _is_inherited = False  # COMM-7: this is a forked child

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
        page: StatusPage | None = None,
        agent: socket.socket | None = None,
    ) -> None:
        """Start the process; `wait_ready` waits for it.

        `timeout`: seconds for a collective. `store`: "host:port" of a `TCPStore` to connect to in advance. `agent`: a
        connection to the rank's agent, used in place of a store; the caller closes it. `host`: the address at which
        peers reach the process; None lets Gloo choose. `group`: the process group (as in `setpgid`) that it joins; 0
        for a new one. `name`: its name in `ps`. `page`: the rank's status page, in which both sides count collectives.

        Raises:
            OperationalError: the process could not be started.
        """
        self.timeout = timeout
        self._page = page
        self.block: CommBlock | None = None if page is None or page.fd is None else page.take_block()
        self._arena = arena
        self._staging = Staging.of(arena)
        self._num_discarded = len(arena.discarded)
        self._lock = threading.RLock()  # REPLY-7
        self._send_lock = threading.Lock()
        self._add_lock = threading.Lock()
        self._ended = self._is_fenced = self._has_died = self._has_slow_callback = False
        self._is_closed = self._is_reaped = self._is_gone = self._halts = False
        self._halted_end = threading.Event()
        self._abort_error: GangError | None = None
        self._works: dict[int, CommWork] = {}
        self._completed: dict[int, CommWork] = {}  # works that end at this moment
        self._next_id = 0
        self._number = 0  # of the configuration (COMM-8)
        self._ranks: dict[str, int] = {}  # by group
        self._bodies: dict[tuple[object, ...], bytes] = {}
        self._sent_slabs: set[int] = set()
        self._replies: list[dict[str, Any]] = []
        self._replied = threading.Condition(self._lock)
        self._found: deque[tuple[int, str]] = deque()  # errors of works that the server has not reported yet
        self._on_error: Callable[[GangError], None] = self.abort
        arguments = {
            "store": store,
            "host": host,
            "timeout_s": timeout,
            "block": None if self.block is None else self.block.index,
            "has_agent": agent is not None,
        }
        further = [] if agent is None else [agent.fileno()]
        with contextlib.ExitStack() as undo:
            undo.callback(self._give_back_block)
            try:
                self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                undo.enter_context(self._sock)
                with theirs:
                    self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
                    undo.callback(os.close, self._bell)
                    watch = os.pidfd_open(os.getpid())
                    try:
                        spawned = forkserver.spawn(
                            self.target,
                            {**arguments, **self._start_arguments()},
                            fds=[theirs.fileno(), watch, *self._page_fds(), *further],
                            stdio=_stdio(),
                            group=group,
                            name=name,
                        )
                    finally:
                        os.close(watch)
                self.pid, self._pidfd = spawned.pid, spawned.pidfd
                undo.callback(_kill, self._pidfd)
                self._reply_reader = ReplyReader(self._sock, self._pidfd, self._bell, self, f"comm-{self.pid}")
                self._reply_reader.start()
            except OSError as exc:  # no descriptor is left, for example
                raise OperationalError(f"a comm process could not be started: {exc}") from exc
            undo.pop_all()
        _all.add(self)

    def _disown(self) -> None:
        """COMM-7. Runs in a forked child, which has no other thread: one of the parent may hold a lock."""
        self._lock, self._send_lock, self._add_lock = threading.RLock(), threading.Lock(), threading.Lock()
        self._replied = threading.Condition(self._lock)
        self._is_inherited = self._ended = self._is_fenced = self._is_reaped = self._is_gone = True
        self._halts, self.block = False, None
        descriptors, self._pidfd, self._bell = [self._sock.detach(), self._pidfd, self._bell], -1, -1
        for descriptor in descriptors:
            with contextlib.suppress(OSError):  # -1: it was closed before the fork
                os.close(descriptor)
        for work in self._works.values():  # kept, with their tensors
            work.abandon(_not_own())

    def _page_fds(self) -> list[int]:
        return [] if self._page is None or self._page.fd is None or self.block is None else [self._page.fd]

    def _give_back_block(self) -> None:
        block, self.block = self.block, None
        if self._page is not None and block is not None:
            self._page.give_back(block)

    def _start_arguments(self) -> dict[str, Any]:
        """Further arguments for `target`."""
        return {}

    def fileno(self) -> int:
        """The descriptor of the socket to the process; -1 once it is closed."""
        return self._sock.fileno()

    def wait_ready(self, timeout: float = _START_TIMEOUT_S) -> None:
        """Block until the process is ready for `configure`. Raises GangError: it died, or is not ready in time."""
        self._reply("ready", timeout, "start")

    def configure(
        self,
        prefix: str,
        groups: Sequence[GroupSpec],
        on_error: Callable[[GangError], None],
        *,
        store: str | None = None,
        timeout: float | None = None,
        handshake: bool = False,
    ) -> int:
        """Replace all groups by `groups`. Blocks until this rank has connected to its peers. Returns the number of the
        configuration, for `submit`.

        `prefix`: of the keys in the store; no other generation may use it. `store`: None for the store or agent given
        at the start. `timeout`: seconds for this call and for each collective of the groups. `handshake`: return only
        when all peers have connected too. Any rank may then exit at once without a failure on its peers; otherwise
        they may have to configure again. `on_error`: called for each failed work, before that work ends, on the thread
        that learned of the failure.

        Raises:
            GangError: a peer did not connect, or the process was aborted. Abort it.
        """
        with self._lock:
            self._number += 1
            number = self._number
        self._on_error = on_error
        self._ranks = {spec.name: spec.rank for spec in groups}
        specs = [{"name": spec.name, "rank": spec.rank, "size": spec.size} for spec in groups]
        self.timeout = timeout or self.timeout
        message = {
            "kind": "configure",
            "prefix": prefix,
            "groups": specs,
            "store": store,
            "timeout_s": self.timeout,
            "handshake": handshake,
        }
        if self.block is not None:
            self.block.configure([spec.name for spec in groups], {spec.name: spec.shown for spec in groups})
        self._send(message)
        self._reply("configured", self.timeout, "configure", 5.0 if timeout is None else 0.0)
        return number

    def add_group(
        self, prefix: str, group: GroupSpec, *, store: str | None = None, timeout: float | None = None
    ) -> None:
        """Add a group to the configured ones, whose works continue. Returns when all peers have connected too. See
        `configure` for the arguments.

        Raises:
            GangError: a peer did not connect, or the process was aborted. Abort it.
        """
        spec = {"name": group.name, "rank": group.rank, "size": group.size}
        timeout = timeout or self.timeout
        self._ranks[group.name] = group.rank
        message = {"kind": "add", "prefix": prefix, "groups": [spec], "store": store, "timeout_s": timeout}
        with self._add_lock:  # replies do not name their group
            if self.block is not None:
                self.block.add(group.name, group.shown)
            self._send(message)
            self._reply("configured", timeout, "configure", 5.0)

    def remove_group(self, name: str) -> None:
        """Remove a group without pending works. Does nothing if the process has ended."""
        self._ranks.pop(name, None)
        with contextlib.suppress(PeerLostError, InvalidOperationError):
            self._send({"kind": "remove", "name": name})

    def close_groups(self, timeout: float) -> None:
        """Close all groups, and keep the process.

        Raises:
            GangError: it failed; or a work is pending, which only a kill can end; or a callback runs, which may start
                another work. Abort the process.
        """
        self._check_idle()
        if not self._reply_reader.wait_for_callbacks(timeout):
            raise StaleGenerationError("a callback of a collective has not returned")
        with self._lock:
            self._check_idle()
            self._number += 1  # COMM-8
        self._send({"kind": "close"})
        self._reply("configured", timeout, "close")

    def _check_idle(self) -> None:
        if self.num_works:
            raise StaleGenerationError(f"{self.num_works} works are under way")

    def submit(
        self,
        group: str,
        collective: Collective,
        timeout: float | None = None,
        fail: Callable[[GangError], None] | None = None,
        number: int | None = None,
    ) -> CommWork:
        """Start a checked collective on `group`. `timeout`: seconds, if the collective has none; None for the
        process's. `fail`: see `CommWork`. `number`: of its configuration; None for any. Never raises GangError: the
        returned work has failed instead.

        Raises:
            InvalidOperationError: this is a forked child (COMM-7), or see `check_reentry`.
        """
        if self._is_inherited:
            raise _not_own()
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):  # later calls reuse the tensors that this one makes
                return self.submit(group, collective, timeout, fail, number)
        if has_modes():  # STAGING-5
            with without_modes():
                return self.submit(group, collective, timeout, fail, number)
        check_reentry()
        try:
            here.is_inside = True  # REENTRY-2
            return self._submit(group, collective, timeout, fail, number)
        finally:
            here.is_inside = False

    def _submit(
        self,
        group: str,
        collective: Collective,
        timeout: float | None,
        fail: Callable[[GangError], None] | None,
        number: int | None,
    ) -> CommWork:
        call, kind, timeout = collective.call, TABLE[collective.call], collective.timeout_s or timeout
        limit_s = (timeout or self.timeout) + kind.grace_s
        work = CommWork(self._reply_reader, group, describe(collective), collective.outputs, limit_s, fail)
        tensors = collective.outputs if kind.is_in_place else (*collective.outputs, *collective.inputs)
        if any(is_fake(tensor) for tensor in tensors):  # STAGING-5
            self._end(work, None)
            return work
        first_input = 0 if kind.is_in_place else len(collective.outputs)
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:  # STAGING-3
            torch.cuda.current_stream(device).synchronize()
        try:
            for tensor in tensors:
                dtype = gloo_dtype(tensor.dtype) if kind.reduces else tensor.dtype  # STAGING-2
                work.staged.append(self._staging.stage(tensor, dtype))
        except OSError as exc:  # the peers wait for this rank, so the configuration is lost
            error = PeerLostError(f"there is no shared memory for {call}: {exc}")
            self._on_error(error)
            self._end(work, error)
            return work
        for staged_tensor in work.staged[first_input:]:
            staged_tensor.copy_in()
        if call == "broadcast" and collective.peer == self._ranks.get(group):
            for staged_tensor in work.staged:
                staged_tensor.is_written = False  # STAGING-4
        if not self._start(work, self._encoded(group, collective, timeout, work.staged), number):
            self._refuse(work)
        return work

    def _encoded(self, group: str, c: Collective, timeout: float | None, staged_tensors: Sequence[Any]) -> bytes:
        """The message of a collective, from a cache: calls recur, because blocks are reused."""
        described = [staged_tensor.described for staged_tensor in staged_tensors]
        key = (group, c.call, c.op, c.peer, c.tag, timeout, c.wait_all_ranks, c.messages, len(c.outputs), *described)
        body = self._bodies.get(key)
        if body is None:
            if len(self._bodies) >= _MAX_BODIES:
                self._bodies.clear()
            body = self._bodies[key] = json.dumps(encoded(group, c, timeout, described)).encode()
        return body

    def _start(self, work: CommWork, body: bytes, number: int | None) -> bool:
        """Register and send `work`. False: the process or the configuration has ended, and nothing was registered or
        sent."""
        with self._send_lock:  # `abort` does not take it: the kill ends a send that blocks
            with self._lock:
                if self._ended or (number is not None and number != self._number):  # COMM-1, COMM-8
                    return False
                self._next_id += 1
                id = self._next_id
                self._works[id] = work
            if (block := self.block) is not None:
                block.submitted(work.group, TABLE[work.name].is_message)
            try:
                self._introduce(work)
                work.is_sent = True  # before the send, because the reply may come first
                self._sock.send(RUN.pack(RUN_MARK, id) + body)
            except (BrokenPipeError, ConnectionResetError):
                work.is_sent = False  # the process is dead, and the reader fails all works
            except OSError as exc:  # the process lives but does not know the work, so only a kill ends it
                work.is_sent = False
                error = PeerLostError(f"could not send {work.name} to comm process {self.pid}: {exc}")
                threading.Thread(target=self._on_error, args=(error,), name="comm-abort", daemon=True).start()
        return True

    def _refuse(self, work: CommWork) -> None:
        """End a work for which `_start` has returned False."""
        why = f"the process group has ended: {self._abort_error}" if self._ended else "the group was configured anew"
        self._end(work, StaleGenerationError(f"{work.name}: {why}"))

    def _introduce(self, work: CommWork) -> None:
        """Let the process map new slabs and unmap discarded ones."""
        unknown = {
            slab.id: slab
            for staged_tensor in work.staged
            if (slab := staged_tensor.block.slab).id not in self._sent_slabs
        }
        discarded = self._arena.discarded
        if len(discarded) > self._num_discarded:
            gone, self._num_discarded = discarded[self._num_discarded :], len(discarded)
            for first in range(0, len(gone), MAX_FDS):
                self._sock.send(json.dumps({"kind": "unmap", "slabs": gone[first : first + MAX_FDS]}).encode())
        new = list(unknown.values())
        for first in range(0, len(new), MAX_FDS):
            part = new[first : first + MAX_FDS]
            message = {"kind": "map", "slabs": [(slab.id, slab.size) for slab in part]}
            socket.send_fds(self._sock, [json.dumps(message).encode()], [slab.fd for slab in part])
            self._sent_slabs.update(slab.id for slab in part)

    def kill(self, error: GangError, *, halt: bool = False) -> None:
        """Kill the process without waiting for its death. Then the reply reader's server fails every work with `error`.
        No further work is accepted. Idempotent; any thread may call it; never blocks. `halt`: stop it now, and kill it
        later (COMM-6)."""
        if self._is_inherited:
            return
        with self._replied:
            first, self._ended = not self._ended, True
            if first:
                self._halts = halt and not self.uses_device
                self._abort_error = error
                self._replied.notify_all()
            if self._pidfd >= 0:  # negative after `close`
                self._signal(signal.SIGSTOP if self._halts else signal.SIGKILL)
        if first:
            self._reply_reader.stop()

    def end_halted(self) -> None:
        """Kill the process if `kill` has halted it. Never blocks; idempotent."""
        self._halted_end.set()

    @property
    def halted_end(self) -> threading.Event | None:
        """What `end_halted` sets, for a holder that does not keep this object and its tensors; None: `kill` halts
        nothing."""
        return self._halted_end if self._halts else None

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def abort(self, error: GangError) -> None:
        """Kill the process, wait until it writes to no tensor, and fail every work with `error`. Idempotent; any thread
        may call it.

        Also waits for callbacks of works, up to `_CALLBACKS_TIMEOUT_S`; later ones continue to run. A callback that
        calls `abort` does not wait for other callbacks.

        Raises:
            OperationalError: the process has not ended in time. The rank must exit, because the process may still
                write to its memory (RULE-3).
        """
        if self._is_inherited:
            return
        self.kill(error)  # COMM-2
        if self._reply_reader.is_served_here:
            self.fence()
        else:  # the reply reader owns the pidfd, and after its end `close` does
            self._reply_reader.ring()
            self._reply_reader.wait_ended(2 * _REAP_TIMEOUT_S)
            self._wait_for_callbacks()
        if (block := self.block) is not None:
            block.clear()
        if not self._is_fenced:
            raise OperationalError(f"comm process {self.pid} was killed but has not ended within {_REAP_TIMEOUT_S:g} s")

    def _wait_for_callbacks(self) -> None:
        """Wait up to `_CALLBACKS_TIMEOUT_S`. After one timeout, later calls do not wait."""
        if not self._has_slow_callback and not self._reply_reader.wait_for_callbacks(_CALLBACKS_TIMEOUT_S):
            self._has_slow_callback = True
            log.warning(
                "a callback of a collective still runs %g s after its comm process %d was killed; not waiting for it",
                _CALLBACKS_TIMEOUT_S,
                self.pid,
            )

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def has_died(self) -> bool:
        """Whether the process died without an `abort`, also if the reply reader has not noticed it yet."""
        with self._lock:
            died = self._has_died or (not self._ended and self._pidfd >= 0 and _exited(self._pidfd, 0.0))
        return died

    def under_way(self) -> list[tuple[str, Description]]:
        """The works that have not ended, the oldest first, each with the name of its group. Never blocks."""
        with self._lock:
            return [(work.group, work.description) for work in self._works.values()]

    @property
    def num_works(self) -> int:
        """Collectives under way."""
        return len(self._works)

    def close(self, wait: bool = True) -> None:
        """Abort the process and close every descriptor. Idempotent. Raises as `abort`.

        `wait`: until the process and the threads that read from it are gone. Without it, one of these threads closes
        the last descriptor and gives the block of the status page back, once the process is gone."""
        self.abort(StaleGenerationError("the comm process was closed"))
        self._sock.close()
        with self._lock:
            self._is_closed, is_gone = True, self._is_gone
        if is_gone:
            self._finish_close()
        elif self._has_slow_callback:  # perhaps on the only thread that is left
            self.end_halted()
            self.reap()
        elif wait:
            self.end_halted()
            self._reply_reader.join(_REAP_TIMEOUT_S)

    def reap(self) -> None:
        with self._lock:
            is_reaped, self._is_reaped = self._is_reaped, True
        if is_reaped:
            return
        if self._halts:  # COMM-6
            self._halted_end.wait(HALTED_S)
            self._signal(signal.SIGKILL)
        _exited(self._pidfd, _REAP_TIMEOUT_S)
        with self._lock:
            self._is_gone, is_closed = True, self._is_closed
        if is_closed:
            self._finish_close()

    def _finish_close(self) -> None:
        """STATUS-3."""
        with self._lock:
            pidfd, self._pidfd = self._pidfd, -1
            bell, self._bell = self._bell, -1  # `descriptors` must not name one that has another file by then
        if pidfd >= 0:
            _reap(pidfd)
            os.close(bell)
            self._give_back_block()

    def descriptors(self) -> list[int]:
        """The descriptors that a forked child of the rank must close."""
        return [self._sock.fileno(), self._pidfd, self._bell]

    def _send(self, message: dict[str, Any]) -> None:
        if self._is_inherited:
            raise _not_own()
        try:
            self._sock.send(json.dumps(message).encode())
        except OSError as exc:
            with self._lock:
                self._has_died = self._has_died or not self._ended
            cause = "" if self._abort_error is None else f": {self._abort_error}"
            raise PeerLostError(f"comm process {self.pid} is gone{cause}") from exc

    def _reply(self, key: str, timeout: float, what: str, margin: float = 0.0) -> None:
        """`timeout`: seconds that the process has for it. `margin`: how much later it may say that it failed."""
        deadline = time.monotonic() + timeout + margin
        self._reply_reader.add_listeners(1)
        try:
            message = self._next_reply(key, timeout, what, deadline)
        finally:
            self._reply_reader.add_listeners(-1)
        if key == "configured" and message[key] is not None:
            error = translated(f"could not {what} the generation's groups", message[key])
            if isinstance(error, CollectiveTimeoutError):  # torch tells of it in many words
                raise CollectiveTimeoutError(f"{what} timed out after {timeout:g} seconds: {message[key]}")
            raise error

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

    # -- the reply reader's `ReplyReceiver`

    @property
    def has_works(self) -> bool:
        return bool(self._works)

    def replied(self, message: dict[str, Any]) -> None:
        with self._replied:
            self._replies.append(message)
            self._replied.notify_all()

    def finished(self, id: int, reason: str | None) -> None:
        if reason is not None:
            self._found.append((id, reason))
            self._reply_reader.ring()
            return
        with self._lock:
            if (work := self._works.get(id)) is not None:
                self._completed[id] = work
                del self._works[id]
        if (work := self._completed.get(id)) is not None:
            self._end(work, None)
            self._completed.pop(id, None)

    def _end(self, work: CommWork, error: GangError | None) -> None:
        if not work.done():
            work.end(error)
        self._give_back(work.staged)
        work.staged.clear()

    def _give_back(self, staged_tensors: list[Any]) -> None:
        """Release the memory of an ended work. Each tensor leaves the list before its release, so that it is released
        at most once (REPLY-6)."""
        while staged_tensors:
            self._staging.give_back(staged_tensors.pop())

    def maintain(self) -> None:
        self.end_found()
        self._tidy()

    def _tidy(self) -> None:
        """Regular maintenance, on the reply reader's server."""

    def end_found(self) -> None:
        """Report the errors of works. `on_error` aborts the process, which ends all works."""
        while self._found:
            id, reason = self._found.popleft()
            if id in self._works:
                self._on_error(translated(self._works[id].name, reason))

    def fence(self) -> None:
        if self._halts:
            self._signal(signal.SIGSTOP)
            self._is_fenced = self._is_fenced or halt(self.pid, self._pidfd, HALT_TIMEOUT_S)
            if self._is_fenced:
                return
        self._halts = False  # STOP-2
        self._signal(signal.SIGKILL)  # it may have closed its socket for another reason
        wait = _exited if self.uses_device else wait_writes_nothing
        self._is_fenced = wait(self._pidfd, _REAP_TIMEOUT_S)  # ARENA-2

    def process_ended(self) -> None:
        error: GangError = PeerLostError(f"comm process {self.pid} died")
        with self._replied:
            unexpected, self._ended = not self._ended, True
            self._has_died = self._has_died or unexpected
            self._abort_error = self._abort_error or error
            self._replied.notify_all()
        if unexpected:
            self._on_error(error)
        if (
            block := self.block
        ) is not None:  # the hang detector reads the block, and the caller of `kill` may not wait
            block.clear()
        error = self._abort_error
        self._on_death(error)
        with self._lock:
            works, self._works = self._works, {}  # COMM-3
        for work in works.values():
            self._end(work, error)

    def _on_death(self, error: GangError) -> None:
        """Called when the process is fenced, before its works fail with `error`."""


_all: weakref.WeakSet[CommProcess] = weakref.WeakSet()


def _disown_all() -> None:
    for comm in list(_all):
        comm._disown()
    _all.clear()


os.register_at_fork(after_in_child=_disown_all)


def _not_own() -> InvalidOperationError:
    return InvalidOperationError("the comm process belongs to the parent of this process; make another group here")


def translated(what: str, reason: str) -> GangError:
    """A GangError for an error text of torch: a CollectiveTimeoutError if it names a timeout."""
    if _TIMED_OUT.search(reason):
        return CollectiveTimeoutError(f"{what} timed out: {reason}")
    return PeerLostError(f"{what}: {reason}")


def _kill(pidfd: int) -> None:
    """And wait until the process is gone."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    _exited(pidfd, _REAP_TIMEOUT_S)
    _reap(pidfd)


def _reap(pidfd: int) -> None:
    """And close the descriptor."""
    with contextlib.suppress(ChildProcessError):  # it is a child only if this process owns the fork server
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOHANG)
    os.close(pidfd)


def _exited(pidfd: int, timeout: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


def _stdio() -> list[int]:
    """The stdout and stderr of this process, for torch's messages in the comm process."""
    try:
        os.fstat(1), os.fstat(2)
    except OSError:  # closed
        return []
    return [1, 2]
