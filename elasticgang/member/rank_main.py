"""The main function of a rank process: runs the user's script, and reports its failure to the agent."""

from __future__ import annotations

import array
import atexit
import contextlib
import functools
import logging
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

from elasticgang import environment
from elasticgang.errors import DamagedStateError, GangError, MismatchError, UnhealedError
from elasticgang.member.drain import Drain
from elasticgang.member.rank_context import RankContext, inherit
from elasticgang.process import death_watch, framing, memory_files, stacks, status_page, sum_block
from elasticgang.process import lease as lease_module
from elasticgang.process.lease import Lease
from elasticgang.process.memory_group import FirstToDie
from elasticgang.process.status_page import PULSE_MS, StatusPage
from elasticgang.protocol.device_errors import DEVICE_FAULT_STATUS, device_fault
from elasticgang.session.credentials import credentials_from_json
from elasticgang.session.tls_watch import watch_tls

log = logging.getLogger("elasticgang")

_MAX_TRACEBACK = 1 << 16
_MAX_ERROR = 200
_HOLD_S = 1.0
_MAX_NAMED = 4
_MAX_PATH = 80  # the path of a socket may have 107 bytes, and each of these has a name of 18
_NUMPY_WORDS = 624  # of the state of its generator
ENDS_S = 5.0
_SHARED = frozenset({status_page.FILE_NAME, lease_module.FILE_NAME, sum_block.FILE_NAME})


def main(args: dict[str, Any], fds: list[int]) -> int:
    link, forks, page_fd, lease, stack_file, door = fds
    for name in environment.OF_A_RANK:  # the agent's own environment does not describe this job
        os.environ.pop(name, None)
    stacks.serve(stack_file)
    page = StatusPage(page_fd)
    drain = Drain(page)
    notices = socket.socket(fileno=os.dup(link))  # reports the script's failure, also if it never joins
    credentials = credentials_from_json(args["credentials"])
    inherit(
        RankContext(
            member=args["member"],
            local_rank=args["local_rank"],
            num_ranks=args["num_ranks"],
            job=args["job"],
            host=args["host"],
            collective_timeout=args["collective_timeout"],
            process_group=args["process_group"],
            compare_state=args["compare_state"],
            credentials=credentials,
            link=link,
            door=door,
            forks=forks,
            page=page_fd,
            lease=lease,
            drain=drain,
            optimizer_bytes=args.get("optimizer_bytes", 0),
            has_trained=args.get("has_trained", False),
            got_state=FirstToDie().end,
        )
    )
    os.register_at_fork(after_in_child=notices.close)
    os.register_at_fork(after_in_child=functools.partial(memory_files.detach, _SHARED))
    _watch_agent(args["agent_pid"], notices.fileno(), page, Lease(lease))
    watch_tls(credentials.tls, lambda news: log.debug("%s", news.text))  # the agent tells the same of the same files
    drain.install()
    _seed_numpy()
    _use_directory(args.get("left_files", ""))
    return _end(_run(args["command"], notices), notices)


def _seed_numpy() -> None:
    """Its generator is a copy of the fork server's, as those of all ranks are. `random` seeds itself after a fork. (And
    `numpy.random.seed` costs a rank half a megabyte of memory that it shares with others.)"""
    if (generator := sys.modules.get("numpy.random")) is not None:
        words = array.array("I", os.urandom(4 * _NUMPY_WORDS))
        generator.set_state(("MT19937", words, _NUMPY_WORDS))


def _use_directory(path: str) -> None:
    """LEFT-1. Of the agent, "" for none: for the sockets of `multiprocessing`, in its children too."""
    own = os.path.join(path, str(os.getpid()))
    if path and len(own) <= _MAX_PATH:
        with contextlib.suppress(OSError):
            os.mkdir(own, 0o700)
            multiprocessing.current_process()._config["tempdir"] = own  # type: ignore[attr-defined]


def _run(command: dict[str, Any], notices: socket.socket) -> int:
    """Run the script. Returns its exit code, or -N after signal N."""
    sys.argv = [command["script"], *command["args"]]
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # until here a Ctrl-C shows no traceback
        if command["module"]:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(command["script"], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(command["script"])))
            runpy.run_path(command["script"], run_name="__main__")
    except KeyboardInterrupt:
        return -signal.SIGINT
    except SystemExit as exc:
        code = _exit_code(exc)
        if code and notices.fileno() >= 0:  # before its exit, which may take long: the others may go on meanwhile
            with contextlib.suppress(OSError):
                notices.sendall(framing.pack("exits", code=code))
        return code
    except BaseException as exc:
        fault = device_fault(exc)
        if notices.fileno() < 0:  # in a child that the script has forked
            sys.stderr.write(_traceback_of(exc))
            return 1
        _send_failure(notices, exc, fault)
        return 1 if fault is None else DEVICE_FAULT_STATUS
    return 0


def _end(code: int, notices: socket.socket) -> NoReturn:
    """Exit like the interpreter, but without the finalizers of imported modules: they take half a second of a core, on
    every rank at once. After a fault of the device neither wait for threads nor call the script's `atexit` functions:
    both may use the device, and never return."""
    if code != DEVICE_FAULT_STATUS:
        hook = sys.unraisablehook

        def show_unless_interrupt(error: sys.UnraisableHookArgs) -> None:  # Python 3.13 brings it here from the wait
            nonlocal code
            if issubclass(error.exc_type, KeyboardInterrupt):
                code = -signal.SIGINT
            else:
                hook(error)

        sys.unraisablehook = show_unless_interrupt
        if notices.fileno() >= 0:  # else it is a child that the script has forked
            with contextlib.suppress(RuntimeError):  # no thread is left
                threading.Thread(target=_tell_if_it_goes_on, name="rank-end", daemon=True).start()
        for wind_up in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]  # waits for threads
            try:
                wind_up()
            except KeyboardInterrupt:
                code = -signal.SIGINT
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the script may have put anything there, or None
            stream.flush()
    if code < 0:  # die by the signal, so that the agent sees it in the exit status
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _tell_if_it_goes_on() -> None:
    """The script has ended. Say why its process has not, once that takes long: the job waits for it."""
    time.sleep(ENDS_S)
    from elasticgang.member.stopped_at import script_line

    waiting = [
        f"{thread.name!r} ({script_line(thread) or 'not in Python code'})"
        for thread in threading.enumerate()
        if not (thread.daemon or thread is threading.main_thread())
    ]
    what = (
        f"its threads {', '.join(waiting[:_MAX_NAMED])}, which are no daemon threads"
        if waiting
        else f"functions of `atexit` ({script_line() or 'not in Python code'})"
    )
    log.warning("the script ended %g s ago, but its process goes on: it waits for %s", ENDS_S, what)


def _watch_agent(pid: int, link: int, page: StatusPage, lease: Lease) -> None:
    """Kill this process group when the agent has died, has closed the link (it has started another process instead), or
    when the host's lease expires; also before the script joins. Until then increment the pulse on the status page, and
    hold its mutex (DEATH-1)."""
    import select

    try:
        agent = os.pidfd_open(pid)
    except ProcessLookupError:
        os.killpg(0, signal.SIGKILL)
        return

    held = threading.Event()

    def watch() -> None:
        with contextlib.suppress(OSError):  # DEATH-4
            death_watch.hold(page.mutex)
        held.set()
        poll = select.poll()
        poll.register(agent, select.POLLIN)
        poll.register(link, 0)  # only POLLHUP, which is always reported
        while not poll.poll(PULSE_MS) and not lease.is_expired:
            page.pulse()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="agent-watch", daemon=True).start()
    held.wait(_HOLD_S)


def _exit_code(exc: SystemExit) -> int:
    if exc.code is None:
        return 0
    if isinstance(exc.code, int):
        return exc.code & 0xFF  # as the kernel takes it; `_end` would take a negative one for a signal
    print(exc.code, file=sys.stderr)
    return 1


def _send_failure(notices: socket.socket, exc: BaseException, fault: str | None) -> None:
    """Send the traceback to the agent, which prints it. `fault`: of the device."""
    blameless = fault is None and isinstance(exc, GangError)
    text = _traceback_of(exc)
    if (num_more := len(text) - _MAX_TRACEBACK) > 0:  # where it was raised, and the end of what it says
        half = _MAX_TRACEBACK // 2
        text = f"{text[:half]}\n[{num_more} characters are left out]\n{text[-half:]}"
    fields = {"traceback": text, "error": _error_line(exc), "blameless": blameless, "device_fault": fault}
    fields["differs"] = isinstance(exc, MismatchError)
    fields["heals"] = isinstance(exc, UnhealedError) or (isinstance(exc, DamagedStateError) and exc.heals)
    with contextlib.suppress(OSError):
        notices.sendall(framing.pack("failed", **fields))


def _traceback_of(exc: BaseException) -> str:
    """From the script's first frame on: there is none where its text is no Python."""
    own = exc.__traceback__
    while own is not None and (
        "runpy" in own.tb_frame.f_code.co_filename or own.tb_frame.f_code.co_filename == __file__
    ):
        own = own.tb_next
    return "".join(traceback.format_exception(type(exc), exc, own))


def _error_line(exc: BaseException) -> str:
    """`ValueError: boom`: the first line of the message. Lone surrogates, which no log can write, are escaped."""
    lines = "".join(traceback.format_exception_only(type(exc), exc)).splitlines()
    line = next((line for line in lines if line and not line.startswith(" ")), type(exc).__name__)
    return line[:_MAX_ERROR].encode("utf-8", "backslashreplace").decode()
