"""The fork server: a process with torch imported and no other thread, from which ready processes are forked.

Importing torch takes seconds; a fork of a process that has imported it takes milliseconds. Rank processes, comm
processes and the embedded coordinator all start here.

FORK-1  The server imports and forks, and does nothing else: no thread, no parallel operation, no CUDA. A process forked
    from one with live threads hangs later, and one forked from a process with CUDA cannot use it. The server refuses to
    start when it finds a second thread in itself, or CUDA; the error names the module whose import brought it.
FORK-2  The processes that it starts are children of its owner (double fork under the owner's subreaper flag). So the
    owner reaps them and gets their exit status, and they go on if the server dies.
FORK-3  When the owner dies, for whatever reason, the server kills every process group that it has started. It watches
    the owner's pidfd, which no other process can inherit by accident.
FORK-4  After a late answer or an error, a connection is closed and never used again: the next answer on it could belong
    to an earlier request.
FORK-5  The server moves its memory to huge pages before the first fork: afterwards its children would keep the former
    pages besides.
FORK-6  Before the first fork, the server fills the blocks that are free in its pages, Python's and malloc's: a fork
    would copy each page of which it takes one. It empties Python's cache of attributes: for each new entry a fork would
    copy the page of the name in the former one.
FORK-7  Before the first fork, the server calls the functions that its owner has named, and moves the code of what these
    call side by side (`code_layout.py`): forks that do the same find caches filled, and copy fewer pages. Such a
    function may fork, and reaps what it has forked. A server that has all modules at its start calls none: it is a fork
    of one that did.
FORK-8  A request that may not fit into a message, such as one with certificates or long arguments, is in a memory file.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from elasticgang.errors import OperationalError
from elasticgang.process import code_layout, huge_pages
from elasticgang.process.free_blocks import fill_free_blocks
from elasticgang.process.own_modules import command_of
from elasticgang.process.parent_death import signal_at_parent_death
from elasticgang.process.stop_signals import hold_stop_signals, release_stop_signals

# numpy's OpenBLAS would start its threads on import (FORK-1). torch's own threads start at the first parallel
# operation.
_SINGLE_THREADED = {"OPENBLAS_NUM_THREADS": "1"}

_MAX_MESSAGE = 1 << 17
_MAX_FDS = 16
_START_TIMEOUT_S = 120.0
_SPAWN_TIMEOUT_S = 6.0
_KILL_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Spawned:
    """A started process. The receiver owns `pidfd` and closes it."""

    pid: int
    pidfd: int


class ForkServerClient:
    """One connection to a fork server. Not thread-safe: its owner is one thread at a time."""

    def __init__(self, sock: socket.socket, *, spawn_timeout: float = _SPAWN_TIMEOUT_S) -> None:
        """`spawn_timeout`: seconds that an answer may take."""
        self._sock, self._spawn_timeout = sock, spawn_timeout
        sock.settimeout(spawn_timeout)

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def is_lost(self) -> bool:
        """Whether this side has closed the connection (FORK-4)."""
        return self._sock.fileno() < 0

    def spawn(
        self,
        target: str,
        args: dict[str, Any],
        *,
        fds: Sequence[int] = (),
        stdio: Sequence[int] = (),
        env: dict[str, str] | None = None,
        group: int = 0,
        name: str = "eg-child",
    ) -> Spawned:
        """Start a process that calls `target` ("module:function") with `args` and the list of its copies of `fds`.

        `stdio`: empty, or two descriptors for its stdout and stderr. `group`: the process group that it joins, 0 for a
        new one. `name`: the name that `ps -o comm` and `pgrep` show, at most 15 bytes.

        Raises:
            OperationalError: the server has died or could not fork. Either no process was started, or it exits by
                itself.
        """
        request = {
            "target": target,
            "args": args,
            "env": env or {},
            "stdio": len(stdio),
            "group": group,
            "name": name,
        }
        try:
            self._send(json.dumps(request).encode(), [*stdio, *fds])
            data, received, _, _ = socket.recv_fds(self._sock, _MAX_MESSAGE, _MAX_FDS)
        except OSError as exc:
            self._sock.close()
            raise OperationalError(f"the fork server did not start {target}: {exc}") from exc
        if not data:
            self._sock.close()
            raise OperationalError(f"the fork server has died; it did not start {target}")
        reply = json.loads(data)
        if "error" in reply:
            raise OperationalError(f"the fork server could not start {target}: {reply['error']}")
        if not received:  # the process exits by itself
            raise OperationalError(f"{target} was started, but this process has no descriptor left for it")
        return Spawned(reply["pid"], received[0])

    def _send(self, request: bytes, fds: Sequence[int]) -> None:
        """FORK-8. Raises OSError."""
        if len(request) <= _MAX_MESSAGE // 2:
            socket.send_fds(self._sock, [request], fds)
            return
        with os.fdopen(os.memfd_create("eg-request", os.MFD_CLOEXEC), "w+b") as file:
            file.write(request)
            file.flush()
            socket.send_fds(self._sock, [b'{"in_file": true}'], [file.fileno(), *fds])

    def close(self) -> None:
        self._sock.close()


class ForkServer(ForkServerClient):
    """The owner's side: starts the server, makes connections to it, and kills it."""

    def __init__(
        self,
        preload: Sequence[str],
        *,
        env: dict[str, str] | None = None,
        new_session: bool = True,
        spawn_timeout: float = _SPAWN_TIMEOUT_S,
    ) -> None:
        """`preload`: modules that the server imports before it forks, and functions ("module:function") that it then
        calls (FORK-7). `new_session`: only the owner gets a Ctrl-C of the terminal, and forwards it. Without it,
        started processes can join the owner's process group. `spawn_timeout`: seconds that an answer may take."""
        become_subreaper()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                command_of(__name__, str(theirs.fileno()), str(os.getpid()), *preload),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(env or {}), **_SINGLE_THREADED},
                start_new_session=new_session,
            )
        super().__init__(ours, spawn_timeout=spawn_timeout)

    def wait_ready(self, timeout: float = _START_TIMEOUT_S) -> None:
        """Block until the server has imported all modules. Raises OperationalError: it could not."""
        try:
            self._sock.settimeout(timeout)
            data = self._sock.recv(_MAX_MESSAGE)
        except OSError as exc:
            self._sock.close()
            raise OperationalError(f"the fork server was not ready within {timeout:.0f} s") from exc
        self._sock.settimeout(self._spawn_timeout)
        if not data:
            self._sock.close()
            raise OperationalError("the fork server exited while it was starting")
        reply = json.loads(data)
        if "error" in reply:
            self._sock.close()
            raise OperationalError(f"the fork server could not start: {reply['error']}")

    def connect(self) -> socket.socket:
        """A new connection, for a `ForkServerClient` in another process."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                socket.send_fds(self._sock, [b'{"connect": true}'], [theirs.fileno()])
                if not self._sock.recv(_MAX_MESSAGE):
                    raise ConnectionResetError("it has closed the connection")
            except OSError as exc:
                ours.close()
                self._sock.close()
                raise OperationalError(f"the fork server has died: {exc}") from exc
        return ours

    def close(self) -> None:
        """Kill the server and reap it. The processes that it has started go on."""
        super().close()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel, where it cannot fork
            self.process.wait(_KILL_TIMEOUT_S)


_libc = ctypes.CDLL(None, use_errno=True)  # here: it costs each fork half a megabyte


def _set_name(name: str) -> None:
    _libc.prctl(15, name.encode(), 0, 0, 0)  # PR_SET_NAME


def become_subreaper() -> None:
    """Orphans below this process become its children (prctl PR_SET_CHILD_SUBREAPER)."""
    if _libc.prctl(36, 1, 0, 0, 0) != 0:
        raise OperationalError(f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(ctypes.get_errno())}")


def main(argv: Sequence[str]) -> int:
    """The server process. Exits with its owner; returns only in the processes that it forks."""
    control_fd, owner_pid, preload = int(argv[1]), int(argv[2]), argv[3:]
    hold_stop_signals()  # STOP-ALL; for good: what it forks delivers its own
    _set_name("eg-forkserver")
    signal_at_parent_death(signal.SIGKILL)  # it does not watch the owner's pidfd while it imports
    if os.getppid() != owner_pid:
        return 1  # the owner died before that
    control = socket.socket(fileno=control_fd)
    try:
        owner = os.pidfd_open(owner_pid)
        _prepare(preload)
        threads = len(os.listdir("/proc/self/task"))
        if threads != 1:
            raise RuntimeError(f"{threads} threads are alive after the imports; a fork would inherit their locks")
        signal_at_parent_death(0)  # FORK-3: from here on it kills what it has started before it exits
    except Exception as exc:
        control.send(json.dumps({"error": f"{type(exc).__name__}: {exc}"}).encode())
        return 1
    control.send(b"{}")
    task = _Server(control, owner).serve()
    if task is None:
        os._exit(0)  # the finalizers of all imported modules take half a second
    return task()


_kept: list[object] = []  # for what it fills


def _prepare(preload: Sequence[str]) -> None:
    gc.disable()  # collections take a quarter of the time of these imports, and find next to nothing
    # FORK-5. A fork of a process that has imported them all has its memory in huge pages already.
    imported = all(each.partition(":")[0] in sys.modules for each in preload)
    with contextlib.nullcontext() if imported else huge_pages.collapsing():
        for each in preload:
            module = each.partition(":")[0]
            importlib.import_module(module)
            _refuse_cuda(module)
    if not imported:
        _kept.append(_lay_out(preload))
    gc.freeze()  # a garbage collection in a child then does not copy the shared pages
    gc.enable()


def _lay_out(preload: Sequence[str]) -> object:
    """FORK-6, FORK-7. Returns what the process keeps."""
    if sys.version_info < (3, 12):  # names are immortal since: nothing counts the references to them
        sys._clear_type_cache()
    calls = [each.partition(":") for each in preload if ":" in each]
    with code_layout.recording() as called:
        for module, _, function in calls:
            getattr(sys.modules[module], function)()
    if calls:
        huge_pages.collapse()  # FORK-5: such a function may have forked
    plan = code_layout.plan(called)
    del called, calls
    return fill_free_blocks(), code_layout.move(plan)


def _refuse_cuda(module: str) -> None:
    """FORK-1."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise RuntimeError(f"the import of {module} has initialized CUDA; a forked process could not use it")


class _Server:
    def __init__(self, control: socket.socket, owner: int) -> None:
        self._clients = {control.fileno(): control}
        self._owner = owner
        self._started: dict[int, int] = {}  # pidfd -> process group
        self._poll = select.poll()
        for fd in (control.fileno(), owner):
            self._poll.register(fd, select.POLLIN)

    def serve(self) -> Callable[[], int] | None:
        """Answer requests until the owner has exited. Returns a task in each forked process, None in the server."""
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._owner:
                    self._kill_all()
                    return None
                if fd in self._started:
                    self._forget(fd)
                elif fd in self._clients:
                    task = self._answer(self._clients[fd])
                    if task is not None:
                        return task

    def _answer(self, client: socket.socket) -> Callable[[], int] | None:
        try:
            data, fds, _, _ = socket.recv_fds(client, _MAX_MESSAGE, _MAX_FDS)
        except OSError:
            data, fds = b"", []
        if not data:
            self._drop(client)
            return None
        request = json.loads(data)
        if ("connect" in request or "in_file" in request) and not fds:  # no descriptor is left here
            self._drop(client)
            return None
        if "in_file" in request:
            request = _read_request(fds.pop(0))
        if "connect" in request:
            accepted = socket.socket(fileno=fds[0])
            self._clients[accepted.fileno()] = accepted
            self._poll.register(accepted.fileno(), select.POLLIN)
            _reply(client, {})
            return None
        try:
            return self._start(client, request, fds)
        finally:
            for fd in fds:
                with contextlib.suppress(OSError):
                    os.close(fd)

    def _drop(self, client: socket.socket) -> None:
        self._poll.unregister(client.fileno())
        del self._clients[client.fileno()]
        client.close()

    def _start(self, client: socket.socket, request: dict[str, Any], fds: list[int]) -> Callable[[], int] | None:
        pair: tuple[socket.socket, ...] = ()
        try:
            ours, theirs = pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            middle = os.fork()
        except OSError as exc:
            for sock in pair:
                sock.close()
            _reply(client, {"error": str(exc)})
            return None
        if middle == 0:
            pid = _fork_and_report(theirs, request["group"])
            if pid:
                os._exit(0)
            kept = [os.dup(fd) for fd in fds]  # `_answer` closes `fds`
            for sock in (ours, theirs, *self._clients.values()):
                sock.detach()  # `_prepare_child` closes it; its finalizer must not close a later file of that number
            return _prepare_child(request, kept)
        theirs.close()
        os.waitpid(middle, 0)
        data, pidfds, _, _ = socket.recv_fds(ours, 64, 1)
        ours.close()
        reply: dict[str, Any] = json.loads(data) if data else {"error": "the intermediate process died"}
        _reply(client, reply, pidfds)
        if pidfds:
            self._started[pidfds[0]] = request["group"] or reply["pid"]
            self._poll.register(pidfds[0], select.POLLIN)
        return None

    def _forget(self, pidfd: int) -> None:
        self._poll.unregister(pidfd)
        del self._started[pidfd]
        os.close(pidfd)

    def _kill_all(self) -> None:
        """FORK-3."""
        for group in set(self._started.values()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)


def _read_request(fd: int) -> dict[str, Any]:
    with os.fdopen(fd, "rb") as file:
        request: dict[str, Any] = json.loads(os.pread(fd, os.fstat(file.fileno()).st_size, 0))
    return request


def _reply(client: socket.socket, reply: dict[str, Any], fds: Sequence[int] = ()) -> None:
    with contextlib.suppress(OSError):  # the client may have died; a started process notices that by itself
        socket.send_fds(client, [json.dumps(reply).encode()], fds)


def _fork_and_report(report: socket.socket, group: int) -> int:
    """Fork in the intermediate process. Returns 0 in the child; in the parent the child's pid, after reporting it with
    its pidfd, or -1 after reporting an error. A child that leads a group does so when it is reported: another may join
    it at once. One that joins a group does it itself, once its owner is its parent: a group of which a member loses a
    parent in this session gets SIGHUP if a member is stopped."""
    middle = os.getpid()
    try:
        pid = os.fork()
        if pid:
            if not group:
                os.setpgid(pid, 0)
            socket.send_fds(report, [json.dumps({"pid": pid}).encode()], [os.pidfd_open(pid)])
        while not pid and os.getppid() == middle:  # FORK-2: until the owner is its parent
            time.sleep(0.0002)
        return pid
    except OSError as exc:
        report.send(json.dumps({"error": str(exc)}).encode())
        return -1


def _prepare_child(request: dict[str, Any], fds: list[int]) -> Callable[[], int]:
    """Detach the child from the server: process group, name, signals, descriptors and environment."""
    try:
        os.setpgid(0, request["group"])
    except PermissionError:
        os._exit(1)  # the group is gone; while a process of it is unreaped, this one joins it, and ends by WORKER-1
    _set_name(request["name"])
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would show the code before the task
    release_stop_signals()
    num_stdio = request["stdio"]
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for target, fd in zip((1, 2), fds[:num_stdio], strict=False):
        os.dup2(fd, target)
    kept = fds[num_stdio:]
    lowest = 3
    for fd in sorted(kept):
        os.closerange(lowest, fd)
        lowest = fd + 1
    os.closerange(lowest, max(lowest, os.sysconf("SC_OPEN_MAX")))
    os.environ.update(request["env"])
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    module, _, function = request["target"].partition(":")

    def task() -> int:
        return int(getattr(importlib.import_module(module), function)(request["args"], kept) or 0)

    return task


if __name__ == "__main__":
    sys.exit(main(sys.argv))
