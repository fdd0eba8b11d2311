"""What a rank process runs after its fork: the user's script, with its ending told to the agent."""

from __future__ import annotations

import atexit
import contextlib
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from typing import Any, NoReturn

from elasticgang import environment
from elasticgang.errors import GangError
from elasticgang.member.drain import Drain
from elasticgang.member.rank_context import RankContext, inherit
from elasticgang.process import framing, stacks
from elasticgang.process.lease import Lease
from elasticgang.process.status_page import PULSE_MS, StatusPage

_MAX_TRACEBACK = 1 << 16


def main(args: dict[str, Any], fds: list[int]) -> int:
    link, forks, page_fd, lease, stack_file = fds
    for name in environment.OF_A_RANK:  # what the agent was started with says nothing of this job
        os.environ.pop(name, None)
    stacks.serve(stack_file)
    page = StatusPage(page_fd)
    drain = Drain(page)
    notices = socket.socket(fileno=os.dup(link))  # the script's ending is told here, joined or not
    inherit(
        RankContext(
            member=args["member"],
            local_rank=args["local_rank"],
            num_ranks=args["num_ranks"],
            job=args["job"],
            store=args["store"],
            host=args["host"],
            collective_timeout=args["collective_timeout"],
            process_group=args["process_group"],
            link=link,
            forks=forks,
            page=page_fd,
            lease=lease,
            drain=drain,
        )
    )
    os.register_at_fork(after_in_child=notices.close)
    _watch_agent(args["agent_pid"], notices.fileno(), page, Lease(lease))
    drain.install()
    return _end(_run(args["command"], notices))


def _run(command: dict[str, Any], told: socket.socket) -> int:
    """The script, to its exit code; -N for an end by signal N."""
    sys.argv = [command["script"], *command["args"]]
    try:
        if command["module"]:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(command["script"], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(os.path.abspath(command["script"])))
            runpy.run_path(command["script"], run_name="__main__")
    except KeyboardInterrupt:
        return -signal.SIGINT
    except SystemExit as exc:
        return _exit_code(exc)
    except BaseException as exc:
        _send_failure(told, exc)
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """End as the interpreter does, but for the finalizers of all that was imported: they take half a second of a core,
    of every rank at once."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the script's threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if code < 0:  # as if nobody had caught it, so that the agent sees what it was
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _watch_agent(pid: int, link: int, page: StatusPage, lease: Lease) -> None:
    """End this process group when the agent is gone or has closed the link, for it started another in this one's place,
    or the host's lease is over; also before the script joins and when it never does. Meanwhile tell the agent that this
    process runs."""
    import select

    try:
        agent = os.pidfd_open(pid)
    except ProcessLookupError:
        os.killpg(0, signal.SIGKILL)
        return

    def watch() -> None:
        poll = select.poll()
        poll.register(agent, select.POLLIN)
        poll.register(link, 0)  # its end alone, which is always told
        while not poll.poll(PULSE_MS) and not lease.is_expired:
            page.pulse()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="agent-watch", daemon=True).start()


def _exit_code(exc: SystemExit) -> int:
    if exc.code is None:
        return 0
    if isinstance(exc.code, int):
        return exc.code
    print(exc.code, file=sys.stderr)
    return 1


def _send_failure(told: socket.socket, exc: BaseException) -> None:
    """Send the traceback from the script's own frames on; the agent shows it."""
    frame = exc.__traceback__
    own = frame
    while own is not None and (
        "runpy" in own.tb_frame.f_code.co_filename or own.tb_frame.f_code.co_filename == __file__
    ):
        own = own.tb_next
    text = "".join(traceback.format_exception(type(exc), exc, own or frame))[-_MAX_TRACEBACK:]
    with contextlib.suppress(OSError):
        told.sendall(framing.pack("failed", traceback=text, blameless=isinstance(exc, GangError)))
