"""Starts Python commands without the seconds in which an interpreter imports torch.

One process has imported what all of them need: a fork server of this pytest process. A `PreloadedProcess` is forked
from it. For its own fork server it gets a copy of that process, forked beforehand, which then runs the whole of
`elasticgang.process.forkserver.main`: only the modules are there already. In an agent (`-m elasticgang`) no module of
torch is there, nor another that an agent does not import: what it imports besides, it imports anew.

An agent that a preloaded command starts (`scripts/demo` does) is forked from that command's fork server, and so needs
no import of torch either. It ends with its parent, as `scripts.demo_job.processes` has it, in a process group instead
of a session of its own. Python scripts and modules that it starts (`torch.distributed.run` does) are forked from there
too, and end with it.

What starts while modules are imported, and what an agent takes, is tested with `Job(..., fresh=True)`.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, NoReturn

from elasticgang.launch import cli
from elasticgang.launch.run import PRELOAD, REHEARSAL
from elasticgang.process import forkserver
from elasticgang.process.parent_death import signal_at_parent_death
from scripts.demo_job.processes import ELASTICGANG

MARK = "ELASTICGANG_TEST_JOB"  # the environment variable by which all processes of a command are found
IN_NAMESPACE = ("ip", "netns", "exec")  # and its name: before a command that runs in that network namespace
NOHUP = "nohup"  # before a command that ignores SIGHUP
# And the host name that it gets: before a command that is process 1 of a container.
CONTAINED = (
    *("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--ipc", "--uts"),
    *("sh", "-c", 'mount -t tmpfs shm /dev/shm && hostname "$0" && exec "$@"'),
)
_NO_MARK = "0" * 32
_NAMESPACES = "/run/netns"
_CLONE_NEWNET = 0x40000000
_CONTAINED_FLAGS = 0x20000000 | 0x20000 | 0x8000000 | 0x4000000  # CLONE_NEWPID, CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUTS
_MS_REC, _MS_PRIVATE, _MS_OF_PROC = 0x4000, 0x40000, 0x2 | 0x4 | 0x8  # no set-uid bits, devices, programs
_MAX_MESSAGE = 1 << 17
_GUARD_S = 60.0  # as `support.DEADLINE_S`
_EXTRA = (
    *("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.utils.data", "elasticgang.gang"),
    *("tests.chaos.job", "tests.chaos.reshaped_job"),  # and with them what most jobs of tests import
)
_HIDDEN = ("elasticgang", "pynvml", "torch", "torchft")
# As the agent sets them for its fork server: torch reads them when it is imported.
_ENVIRONMENT = {"RUST_LOG": "error", "TORCH_CPP_LOG_LEVEL": "ERROR", MARK: _NO_MARK}

_getenv = ctypes.CDLL(None).getenv
_getenv.restype = ctypes.c_void_p
_imported: list[str] = []  # by this process, for all that is forked from it
_inherited: dict[str, Any] = {}  # what the Python programs that this one starts are asked for too
_mark_address: int | None = _getenv(MARK.encode())  # before anything changes the environment
_of_an_agent = frozenset(sys.modules)  # where this module is imported before torch
_hidden: list[ModuleType] = []


_servers: dict[int, forkserver.ForkServer] = {}  # of the process with that id


def _server() -> forkserver.ForkServer:
    pid = os.getpid()
    if pid in _servers and _servers[pid].is_lost:  # FORK-4
        _servers.pop(pid).close()
    if pid not in _servers:
        modules = (__name__, *PRELOAD, REHEARSAL, *_EXTRA)
        server = forkserver.ForkServer(modules, env=_ENVIRONMENT, spawn_timeout=_GUARD_S)
        server.wait_ready()
        atexit.register(server.close)
        _servers[pid] = server
    return _servers[pid]


_derived: dict[tuple[int, tuple[str, ...]], forkserver.ForkServerClient] = {}  # of the process with that id


def _server_with(imports: tuple[str, ...]) -> forkserver.ForkServerClient:
    """A fork of the server that has imported these modules too. It ends with this process."""
    if not imports:
        return _server()
    key = os.getpid(), imports
    if key in _derived and _derived[key].is_lost:  # FORK-4
        _derived.pop(key)
    if key not in _derived:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            request = {"owner": os.getpid(), "imports": list(imports)}
            spawned = _server().spawn(f"{__name__}:serve", request, fds=[theirs.fileno()], name="eg-forkserver")
        os.close(spawned.pidfd)
        ours.settimeout(_GUARD_S)
        answer = ours.recv(_MAX_MESSAGE)
        assert answer == b"{}", f"no fork server with {', '.join(imports)}: {answer.decode()}"
        _derived[key] = forkserver.ForkServerClient(ours, spawn_timeout=_GUARD_S)
    return _derived[key]


def serve(request: dict[str, Any], fds: list[int]) -> int:
    """The forked process: becomes a fork server."""
    for module in request["imports"]:
        importlib.import_module(module)
    return forkserver.main([forkserver.__name__, str(fds[0]), str(request["owner"]), *request["imports"]])


class PreloadedProcess(subprocess.Popen[Any]):
    """`python ...` with an environment that has `MARK`, forked from a process that has imported torch."""

    _lock = threading.Lock()

    def __init__(
        self, args: Sequence[str], *, imports: Sequence[str] = (), ends_at_once: bool = False, **options: Any
    ) -> None:
        """`imports`: modules that it finds imported, as do all processes that its own fork server starts; once for all
        commands of this process with the same ones. `ends_at_once`: behind its exit functions, as a rank of a job does,
        without the finalizers of its modules, which take 0.3 s."""
        self._imports, self._ends_at_once = imports, ends_at_once
        super().__init__(args, **options)

    def _execute_child(self, args: Sequence[str], *given: Any) -> None:
        with self._lock:
            imports = list(self._imports)
            _start(self, args, given, tuple(imports), imports=imports, ends_at_once=self._ends_at_once)


def _start(
    process: Any, command: Sequence[str], given: Sequence[Any], forked_with: tuple[str, ...] = (), **request: Any
) -> None:
    """`given`: what `Popen` hands to `_execute_child` behind the arguments. `forked_with`: modules of a server."""
    _, _, _, _, cwd, env, _, _, _, *files = given
    stdin, _, _, stdout, _, stderr = files[:6]
    request |= {"command": list(command), "cwd": str(cwd or os.getcwd()), "env": dict(env or os.environ)}
    with _as_subreaper():
        name = "python" if _is_agent(command[1:]) else "eg-test"
        own = [given if given >= 0 else number for number, given in enumerate((stdin, stdout, stderr))]
        spawned = _server_with(forked_with).spawn(f"{__name__}:run", request, fds=own[:1], stdio=own[1:], name=name)
    os.close(spawned.pidfd)
    _created(process, spawned.pid, files)


def _created(process: Any, pid: int, files: Sequence[int]) -> None:
    """What `Popen` does once there is a process."""
    process.pid = pid
    process._child_created = True
    process._close_pipe_fds(*files[:6])


class _as_subreaper:
    """Meanwhile what a fork server starts becomes a child of this process; afterwards orphans do not."""

    def __enter__(self) -> None:
        before = ctypes.c_int()
        ctypes.CDLL(None).prctl(37, ctypes.byref(before), 0, 0, 0)  # PR_GET_CHILD_SUBREAPER
        self._before = before.value
        forkserver.become_subreaper()

    def __exit__(self, *_: object) -> None:
        ctypes.CDLL(None).prctl(36, self._before, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER


def run(request: dict[str, Any], fds: list[int]) -> int:
    """The forked process: becomes the command."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as Python does at its start
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    os.dup2(fds[0], 0)
    os.close(fds[0])
    if (number := request.get("parent_death")) is not None:
        signal_at_parent_death(signal.Signals(number))
    env: dict[str, str] = request["env"]
    words: list[str] = request["command"]
    assert _mark_address is not None
    ctypes.memmove(_mark_address, env[MARK].encode(), len(_NO_MARK))  # where /proc shows it, of forks too
    if tuple(words[:3]) == IN_NAMESPACE:
        _enter_namespace(words[3])
        words = words[4:]
    if tuple(words[: len(CONTAINED)]) == CONTAINED:
        name, *words = words[len(CONTAINED) :]
        _enter_container(name)
    if words[0] == NOHUP:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        words = words[1:]
    _, *command = words
    _set_environment(env)
    tempfile.tempdir = None  # looked up again, in this environment
    os.chdir(request["cwd"])
    for module in request["imports"]:
        importlib.import_module(module)
    _imported.extend(request["imports"])
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False  # torch's own: they take a tenth of the time of a short rank
    if "triton" in sys.modules:
        atexit.register(gc.unfreeze)  # it would call each of its objects a leak, on stderr
    offer_fork_server()
    if _is_agent(command):
        _run_agent(command[2:])
    if request.get("ends_at_once"):
        _inherited["ends_at_once"] = True
        _end_at_once(lambda: _run_program(command))
    _run_program(command)
    return 0


def _run_program(command: Sequence[str]) -> None:
    is_module = command[0] == "-m"
    sys.argv = list(command[is_module:])
    if is_module:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")


def _is_agent(command: Sequence[str]) -> bool:
    return list(command[:2]) == ["-m", "elasticgang"]


def _python_program(args: object) -> list[str] | None:
    """The command `args` without `-u`; None unless it is Python and a script, or `-m` and a module."""
    words = [os.fspath(word) for word in args] if isinstance(args, (list, tuple)) else []
    if words[1:2] == ["-u"]:
        del words[1]
    is_program = len(words) > 1 and words[0] == sys.executable and (words[1] == "-m" or words[1].endswith(".py"))
    return words if is_program else None


def _can_fork(given: Sequence[Any]) -> bool:
    """Whether this process has a fork server with torch, or was offered one, and `Popen` was asked for no more than
    `_start` does."""
    _, preexec_fn, _, pass_fds, _, env, *_ = given
    has_server = os.getpid() in _offered or os.getpid() in _servers
    return has_server and "torch" in sys.modules and MARK in (env or os.environ) and not (preexec_fn or pass_fds)


def _run_agent(arguments: list[str]) -> NoReturn:
    """As `python -m`, but without the finalizers of the modules that it has not imported: they take a quarter of a
    second."""
    hide_modules()
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    sys.stdout.reconfigure(line_buffering=sys.stdout.isatty())  # type: ignore[union-attr]
    _end_at_once(lambda: cli.main(arguments))


def _end_at_once(function: Callable[[], object]) -> NoReturn:
    """Call it, and exit as Python would, but without the finalizers of modules. What it raises is raised."""
    code: object
    try:
        code = function()
    except SystemExit as exc:
        code = exc.code
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code or 0)


def hide_modules() -> None:
    """Of torch, of what it looks for, and of the project, all that an agent has not imported when it begins."""
    for name in [name for name in sys.modules if name.partition(".")[0] in _HIDDEN]:
        if name not in _of_an_agent:
            module = sys.modules.pop(name)
            _hidden.append(module)  # it stays alive
            parent, _, own = name.rpartition(".")
            if parent in _of_an_agent and getattr(sys.modules[parent], own, None) is module:
                delattr(sys.modules[parent], own)


def _enter_namespace(name: str) -> None:
    with open(f"{_NAMESPACES}/{name}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"the network namespace {name} cannot be entered")


def _enter_container(name: str) -> None:
    """As `CONTAINED` does: returns in a child, which is process 1 there. This process waits for it, and ends as it
    does."""
    libc = ctypes.CDLL(None, use_errno=True)

    def check(failed: int) -> None:
        if failed:
            raise OSError(ctypes.get_errno(), f"no container for {name}")

    check(libc.unshare(_CONTAINED_FLAGS))
    if pid := os.fork():
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code < 0:
            os.kill(os.getpid(), -code)
        os._exit(code)
    signal_at_parent_death(signal.SIGKILL)
    check(libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None))
    check(libc.mount(b"proc", b"/proc", b"proc", _MS_OF_PROC, None))
    check(libc.mount(b"shm", b"/dev/shm", b"tmpfs", 0, None))
    socket.sethostname(name)


def _set_environment(env: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(env)


# -- a fork server that has imported already

_offered: dict[int, tuple[socket.socket, int]] = {}  # of the process with that id: its child, which waits


def offer_fork_server() -> None:
    """The first fork server of this process, which has one thread, is a fork of it. It ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        ours.close()
        _become_fork_server(theirs)
    theirs.close()
    _offer(ours, pid)


def _offer(sock: socket.socket, pid: int) -> None:
    _offered.clear()  # what a parent was offered
    _offered[os.getpid()] = sock, pid
    subprocess.Popen = _OfferedProcess  # type: ignore[misc]


def _become_fork_server(sock: socket.socket) -> None:
    owner = os.getppid()
    data, fds, _, _ = socket.recv_fds(sock, _MAX_MESSAGE, 1)
    if not data:  # the owner has ended, and needed none
        os._exit(0)
    request = json.loads(data)
    if request["new_session"]:
        os.setsid()
    sock.close()
    _set_environment(request["env"])
    sys.exit(forkserver.main([forkserver.__name__, str(fds[0]), str(owner), *request["preload"]]))


class _OfferedProcess(subprocess.Popen[Any]):
    """`Popen`; the first fork server is the one that was offered, and from it agents are forked."""

    def __init__(self, args: Any, *given: Any, start_new_session: bool = False, **options: Any) -> None:
        self._is_session_leader = start_new_session
        super().__init__(args, *given, start_new_session=start_new_session, **options)

    def _execute_child(self, args: Any, *given: Any) -> None:
        if isinstance(args, list) and args[0] == str(ELASTICGANG) and args[1] == "run" and "torch" in sys.modules:
            command = [sys.executable, "-m", "elasticgang", *args[1:]]
            _start(self, command, given, imports=_imported, parent_death=signal.SIGTERM)
            return
        if (program := _python_program(args)) is not None and _can_fork(given):
            _start(self, program, given, imports=_imported, **_inherited)
            return
        offered = (
            _offered.pop(os.getpid(), None) if isinstance(args, list) and forkserver.__name__ in args[3:4] else None
        )
        if offered is None:
            execute: Callable[..., None] = getattr(super(), "_execute_child")  # noqa: B009  # typeshed has it not
            execute(args, *given)
            return
        _, _, _, pass_fds, _, env, _, _, _, *files = given
        sock, pid = offered
        _, _, _, _, _, _, *preload = args  # python -c code module descriptor owner
        request = {"env": dict(env), "preload": preload, "new_session": self._is_session_leader}
        with sock:
            sock.settimeout(_GUARD_S)
            socket.send_fds(sock, [json.dumps(request).encode()], list(pass_fds))
            sock.recv(1)  # as after `Popen`, it is in its session
        _created(self, pid, files)
