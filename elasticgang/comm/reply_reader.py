"""Reads the replies of a comm process, and runs the callbacks of its works (leader-follower).

REPLY-1  One thread at a time reads. It is the first thread that waits for a work, so that no other thread has to wake
    it; or the server thread, while a future or a reply is awaited, and otherwise every `_UNREAD_MS`.
REPLY-2  Each waiter has its own wake-up event. A thread that stops reading wakes the next waiter, and so does a waiter
    that was woken to read but does not.
REPLY-3  When the process was killed, is dead or has closed its socket, the server reads the rest and ends. It reads the
    rest once the process runs no more (`fence`).
REPLY-4  Leader-follower: at most one thread is the server. It gives up this role before it runs a callback, which may
    block, and takes it again afterwards if no other thread has. If a server is needed while there is none, `ring` wakes
    the spare thread or starts one. There are no more threads than blocked callbacks, a server and a spare.
REPLY-5  Callbacks leave the queue in the order in which they were queued. Each may have a thread of its own.
REPLY-6  The exception of a signal's handler loses no message. A thread stops being the reader by one assignment, which
    no handler can interrupt. A received message stays in the inbox until it is processed, and the next reader processes
    it again, from where the exception interrupted it.
REPLY-7  A signal's handler that waits for a work while its thread is the reader reads in its place, into an inbox of
    its own. It cannot if its thread starts a collective or processes a message (REENTRY-1).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from elasticgang.comm.reentry import check_reentry, here
from elasticgang.comm.work import CommWork
from elasticgang.comm.worker import RUN, RUN_MARK
from elasticgang.errors import OperationalError
from elasticgang.process.late_signals import LONGEST_WAIT_S

_MAX_MESSAGE = 1 << 17
_UNREAD_MS = 100  # the longest time that a message without a waiter stays unread
_LONGEST_POLL_MS = LONGEST_WAIT_S * 1000
_LAST_READER_S = 5.0

log = logging.getLogger("elasticgang")


class _Here(threading.local):
    runs_callback = False  # this thread, of any process


_here = _Here()


class ReplyReceiver(Protocol):
    """Receives the messages. The reading thread calls `finished` and `replied`, the server the other methods."""

    @property
    def has_works(self) -> bool: ...

    def finished(self, id: int, reason: str | None) -> None:
        """Called again for the same work if a signal's handler has interrupted the call (REPLY-6)."""

    def replied(self, message: dict[str, Any]) -> None: ...

    def end_found(self) -> None:
        """Report the errors that `finished` has queued."""

    def maintain(self) -> None:
        """Call `end_found` and do other maintenance. Called repeatedly."""

    def fence(self) -> None:
        """Wait until the process runs no code any more. Called once, after `stop` or its end."""

    def process_ended(self) -> None:
        """The process runs no more, and all its messages have been read. Called once."""

    def reap(self) -> None:
        """Wait until the process is gone. Called by each thread that ends after `process_ended`."""


class _Inbox:
    """`lengths`: of the received message at the start of `buffer`, while there is one (REPLY-6). `poll`: waits for the
    next one, or the end of the process."""

    def __init__(self, sock: socket.socket, pidfd: int) -> None:
        self._sock = sock
        self.buffer = bytearray(_MAX_MESSAGE)
        self.lengths: list[int] = []
        self._flags = (socket.MSG_DONTWAIT,)
        self.poll = select.poll()
        for fd in (sock.fileno(), pidfd):
            self.poll.register(fd, select.POLLIN)

    def receive(self) -> None:
        """Receive a message, and note its length in the same call of the interpreter: a signal's handler runs before or
        after both. Raises OSError: there is none."""
        self.lengths.extend(map(self._sock.recv_into, (self.buffer,), (0,), self._flags))


class ReplyReader:
    """Reads the socket of one process. The caller owns the descriptors."""

    def __init__(self, sock: socket.socket, pidfd: int, bell: int, receiver: ReplyReceiver, name: str) -> None:
        """`bell`: an eventfd that wakes the server."""
        self._sock, self._pidfd, self._bell = sock, pidfd, bell
        self._receiver = receiver
        self._inbox = _Inbox(sock, pidfd)
        lock = threading.RLock()
        self._turn, self._spare_called = threading.Condition(lock), threading.Condition(lock)
        self._reader: int | None = None  # REPLY-1: its thread's identifier
        self._is_over = False
        self._num_listeners = 0
        self._waiting: dict[threading.Event, CommWork] = {}
        self._idle_poll = select.poll()
        for fd in (bell, pidfd):
            self._idle_poll.register(fd, select.POLLIN)
        self._name = name
        self._callbacks: deque[Callable[[], None]] = deque()
        self._num_running = 0  # callbacks
        self._is_ended = False  # `process_ended` has returned
        self._server: int | None = None  # REPLY-4: its thread's identifier
        self._is_called = self._has_spare = False
        self._threads: set[threading.Thread] = set()

    def start(self) -> None:
        """Start reading, once the receiver is ready. Raises OperationalError: no thread can be started."""
        with self._turn:
            self._call_server()
            if not self._is_called:
                raise OperationalError("a comm process could not be started: no thread is left for its replies")

    def add_listeners(self, number: int) -> None:
        """Change the number of futures and replies for which the server reads."""
        with self._turn:
            self._num_listeners += number
        if number > 0:
            self.ring()

    def ring(self) -> None:
        """Wake the server, or start one. The server itself checks all work before it waits."""
        with self._turn:
            if self._server is None:
                self._call_server()
            elif self._server != threading.get_ident() and not self._is_ended:
                os.eventfd_write(self._bell, 1)

    def stop(self) -> None:
        """The process was killed: end without waiting for the end of its socket, which comes after its memory is
        freed."""
        with contextlib.suppress(OSError):  # closed
            self._sock.shutdown(socket.SHUT_RD)  # wakes the present reader; what has arrived is still read
        self._over()

    def call_back(self, callback: Callable[[], None]) -> None:
        """Queue `callback`, which may block, for the server's threads (REPLY-5)."""
        with self._turn:
            self._callbacks.append(callback)
        self.ring()

    @property
    def is_served_here(self) -> bool:
        """Whether the calling thread is the server."""
        return self._server == threading.get_ident()

    def wait_ended(self, timeout: float) -> None:
        """Wait until every work has ended after the process's death. The server must not call it."""
        with self._turn:
            self._turn.wait_for(lambda: self._is_ended, timeout)

    def wait_for_callbacks(self, timeout: float) -> bool:
        """Wait until no callback runs or is queued. False: one has not returned in time. Returns at once inside a
        callback."""
        if _here.runs_callback:
            return True
        with self._turn:
            return self._turn.wait_for(lambda: not (self._callbacks or self._num_running), timeout)

    def join(self, timeout: float) -> None:
        """Wait for the threads, after the process has ended. Returns at once inside a callback."""
        if _here.runs_callback:
            return
        deadline = time.monotonic() + timeout
        with self._turn:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def wait_for(self, work: CommWork, timeout: float) -> bool:
        """Wait until `work` has ended, and read if no other thread does. False: it has not ended in time.

        Raises:
            InvalidOperationError: see `check_reentry`.
        """
        check_reentry()
        deadline = time.monotonic() + timeout
        while not work.done():
            left = deadline - time.monotonic()
            if left <= 0:
                with self._turn:  # REPLY-2
                    if self._reader is None:
                        self._wake_next()
                return False
            if not self._read_in_turn(lambda: self._read_until(work.done, deadline)):
                self._wait_beside(work, left)
        return True

    def _read_in_turn(self, read: Callable[[], None]) -> bool:
        """REPLY-1: become the reader, call `read`, and stop being it. False: another thread is the reader, or nothing
        is left to read."""
        this_thread = threading.get_ident()
        if self._reader == this_thread:
            if self._is_over:
                return False
            self._read_within(read)
            return True
        try:
            with self._turn:
                if self._reader is not None or self._is_over:
                    return False
                self._reader = this_thread
            read()
        finally:
            if self._reader == this_thread:
                self._reader = None  # REPLY-6
                self._pass_turn()
        return True

    def _read_within(self, read: Callable[[], None]) -> None:
        """REPLY-7"""
        inbox = self._inbox
        try:
            self._inbox = _Inbox(self._sock, self._pidfd)
            read()
        finally:
            self._inbox = inbox

    def _wait_beside(self, work: CommWork, seconds: float) -> None:
        """Wait until `work` has ended, or this thread is to read; or for `LONGEST_WAIT_S` (SIGNAL-LATE)."""
        wake = threading.Event()
        with self._turn:
            if self._reader is None and not self._is_over:
                return
            self._waiting[wake] = work
        goes_on = False
        try:
            work.wake_at_end(wake)
            wake.wait(min(seconds, LONGEST_WAIT_S))
            goes_on = True
        finally:
            work.forget_wake(wake)
            with self._turn:
                del self._waiting[wake]
                if not goes_on and self._reader is None:  # REPLY-2: a signal's handler has raised
                    self._wake_next()

    def _pass_turn(self) -> None:
        with self._turn:
            self._turn.notify_all()
            self._wake_next()

    def _wake_next(self) -> None:
        """Wake a waiter to read, or the server if there are only listeners."""
        following = self._next_waiter()
        if following is not None:
            following.set()
        elif self._num_listeners:
            self.ring()

    def _next_waiter(self) -> threading.Event | None:
        return next((wake for wake, work in list(self._waiting.items()) if not work.done()), None)

    def _read_until(self, is_over: Callable[[], bool], deadline: float | None = None) -> None:
        """Read messages until `is_over()`, the deadline, or the process's end. SIGNAL-LATE: with a deadline, the caller
        may be the first thread."""
        number, inbox = self._sock.fileno(), self._inbox
        if inbox.lengths:  # REPLY-6
            self._read_one()
        while not is_over():
            left = None if deadline is None else (deadline - time.monotonic()) * 1000
            if left is not None and left <= 0:
                return
            ready = {fd for fd, _ in inbox.poll.poll(None if left is None else min(left, _LONGEST_POLL_MS))}
            if number in ready:
                if not self._read_one():
                    return
            elif ready:
                self._over()
                return

    def _over(self) -> None:
        """REPLY-3."""
        self._is_over = True
        self.ring()

    def _read_one(self) -> bool:
        """Read one message. False: there is none, or the process has closed its socket."""
        inbox = self._inbox
        try:
            if not inbox.lengths:
                inbox.receive()
        except OSError:
            return False
        if not inbox.lengths[0]:
            inbox.lengths.clear()
            self._over()
            return False
        try:
            here.is_inside = True
            self._process(inbox)
        finally:
            here.is_inside = False
        return True

    def _process(self, inbox: _Inbox) -> None:
        data = inbox.buffer[: inbox.lengths[0]]
        if data[0] == RUN_MARK:
            _, id = RUN.unpack_from(data)
            self._receiver.finished(id, data[RUN.size :].decode() or None)
            inbox.lengths.clear()
        else:
            inbox.lengths.clear()
            self._receiver.replied(json.loads(data))

    # -- the threads

    def _call_server(self) -> None:
        """REPLY-4. The caller has the lock."""
        if self._is_called or (self._is_ended and not self._callbacks):
            return
        self._is_called = True
        if self._has_spare:
            self._spare_called.notify()
            return
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:  # no thread can be started: the first one that returns from a callback becomes the server
            self._threads.discard(thread)
            self._is_called = False

    def _run(self) -> None:
        try:
            while self._take_place():
                self._serve()
            if self._is_ended:
                self._receiver.reap()
        finally:
            with self._turn:
                self._threads.discard(threading.current_thread())

    def _take_place(self) -> bool:
        """Become the server, perhaps after a time as the spare. False: the thread is no longer needed."""
        with self._turn:
            while True:
                if self._server is None and (self._callbacks or not self._is_ended):
                    self._server, self._is_called = threading.get_ident(), False
                    return True
                if self._is_ended:
                    self._is_called = False
                    return False
                if self._has_spare:
                    return False
                self._has_spare = True
                self._spare_called.wait()
                self._has_spare = False

    def _serve(self) -> None:
        """Serve until another thread is the server, or no work is left."""
        try:
            while self._run_callbacks() and not self._is_ended:
                self._serve_once()
        finally:
            if self.is_served_here:
                if not self._is_ended:
                    self._end()
                with self._turn:
                    self._server = None

    def _run_callbacks(self) -> bool:
        """Run all queued callbacks. False: another thread is the server now."""
        while self._callbacks:
            with self._turn:
                callback = self._callbacks.popleft()
                self._num_running += 1
                self._server = None
                is_awaited = self._num_listeners > 0 and self._reader is None and self._next_waiter() is None
                if self._callbacks or is_awaited:
                    self._call_server()
            _here.runs_callback = True
            try:
                callback()
            except Exception:
                log.exception("a callback of a collective raised")
            finally:
                _here.runs_callback = False
                del callback  # with the tensors of its work
                with self._turn:
                    self._num_running -= 1
                    self._turn.notify_all()
            with self._turn:
                if self._server is not None:
                    return False
                self._server, self._is_called = threading.get_ident(), False
        return True

    def _serve_once(self) -> None:
        self._receiver.maintain()
        if self._is_over:
            self._end()
            return
        if self._num_listeners and self._read_in_turn(lambda: self._read_until(self._has_more_to_do)):
            return
        ready = {fd for fd, _ in self._idle_poll.poll(_UNREAD_MS)}
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        if self._pidfd in ready:
            self._is_over = True
        elif self._receiver.has_works:
            self._read_in_turn(self._read_all)  # works without a waiter keep memory and descriptors

    def _read_all(self) -> None:
        while self._read_one():
            pass

    def _has_more_to_do(self) -> bool:
        """Whether the server has other work than reading."""
        self._receiver.end_found()
        return bool(self._callbacks) or not self._num_listeners

    def _end(self) -> None:
        try:
            self._receiver.fence()
            self._read_the_rest()
            self._receiver.process_ended()
        finally:
            with self._turn:
                self._is_ended = True
                self._turn.notify_all()
                self._spare_called.notify_all()

    def _read_the_rest(self) -> None:
        """Read the messages that the process has sent."""
        with self._turn:  # the present reader notices the end of the process too, and stops soon
            self._turn.wait_for(lambda: self._reader is None, _LAST_READER_S)
            self._reader = threading.get_ident()
        self._is_over = True
        self._read_all()
        self._receiver.end_found()
