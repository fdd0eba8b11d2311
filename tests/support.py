"""Real jobs for tests: start one, wait for what it does, find its processes, and see that none is left.

Every process of a job is found by a variable in the environment that the agent was started with: forks keep showing
the environment of the process that was executed, so that neither a new parent nor a new session hides one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import psutil

from scripts.demo_job.driver import Tail
from tests.preloaded import CONTAINED, IN_NAMESPACE, MARK, NOHUP, PreloadedProcess

REPOSITORY = Path(__file__).resolve().parents[1]
DEADLINE_S = 180.0  # a guard against a hang; no test waits for it to pass
PROMPT_S = 10.0  # for what takes milliseconds: the machine may stand still for seconds

PROGRAM = ("-m", "elasticgang")

_T = TypeVar("_T")
_C = TypeVar("_C", bound="Command")


def wait_until(condition: Callable[[], _T | None], what: str, deadline_s: float = DEADLINE_S) -> _T:
    """The first result of `condition` that is true. It is asked less often once it has lasted a second."""
    began = time.monotonic()
    deadline = began + deadline_s
    while True:
        result = condition()
        if result:
            return result
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {deadline_s:g} s")
        time.sleep(0.005 if time.monotonic() < began + 1.0 else 0.03)


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that is dead and not yet reaped does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def without_network() -> list[str]:
    """What runs a command where no network interface is up, not even loopback; empty: this user may not do that."""
    prefix = ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], capture_output=True).returncode:
        return []
    return prefix


def wait_dead(pidfds: Sequence[int], deadline_s: float) -> list[int]:
    """Wait until the processes are dead, at most so long; the descriptors of those that still live."""
    deadline = time.monotonic() + deadline_s
    alive = list(pidfds)
    for pidfd in pidfds:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            alive.remove(pidfd)
    return alive


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    """One core taken away, for tests that must not depend on speed."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """A port that nobody else gets meanwhile. Nobody listens there, until somebody does who names it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # which servers set too
        held.bind(("", 0))
        yield held.getsockname()[1]


def environment(added: dict[str, str] | None = None) -> dict[str, str]:
    """Of a command: this process's, so that it finds the repository, with a mark of its own."""
    return {**os.environ, "PYTHONPATH": str(REPOSITORY), **(added or {}), MARK: uuid.uuid4().hex}


def _environment_of(pid: int) -> list[bytes]:
    """Of a process; empty where it has ended, or is another user's."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


class Command:
    """One command as a subprocess, its output in files. As a context manager, ends everything it has started."""

    def __init__(
        self,
        directory: Path,
        command: Sequence[str],
        *,
        env: dict[str, str] | None = None,
        stdout: int | None = None,
        preloaded: bool = False,
        imports: Sequence[str] = (),
        ends_at_once: bool = False,
    ) -> None:
        """`preloaded`: a Python command that imports torch, or runs an agent; it starts as `PreloadedProcess` does.
        `imports` and `ends_at_once`: see there."""
        self.directory = directory
        self.mark = uuid.uuid4().hex
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "stdout").open("wb") as out, (directory / "stderr").open("wb") as err:
            forked = functools.partial(PreloadedProcess, imports=imports, ends_at_once=ends_at_once)
            start = forked if preloaded else subprocess.Popen
            self.process = start(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out if stdout is None else stdout,
                stderr=err,
                env={**environment(env), MARK: self.mark},
                cwd=directory,
            )

    @property
    def stdout(self) -> str:
        return (self.directory / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.directory / "stderr").read_text()

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """The exit code."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            tree = "\n".join(f"{found.pid} {found.status()} {found.name()}" for found in self.processes())
            raise AssertionError(
                f"the command did not end within {deadline_s:g} s; it runs\n{tree}\nand wrote\n{self.stderr[-4000:]}"
            ) from None

    def processes(self) -> list[psutil.Process]:
        """All live processes of the command, orphans too."""
        found = []
        mark = f"{MARK}={self.mark}".encode()
        for pid in psutil.pids():  # psutil.process_iter remembers processes whose ids others have now
            with contextlib.suppress(psutil.Error):
                # Few are the command's: a `psutil.Process` of each takes seven times as long as this.
                if mark in _environment_of(pid) and (process := psutil.Process(pid)).status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def assert_nothing_left(self, deadline_s: float = PROMPT_S) -> None:
        """All processes are gone within the deadline."""
        deadline = time.monotonic() + deadline_s
        while left := self.processes():
            if time.monotonic() > deadline:
                described = []
                for process in left:
                    with contextlib.suppress(psutil.Error):
                        described.append(f"{process.pid} (parent {process.ppid()}, group {os.getpgid(process.pid)})")
                raise AssertionError(f"still there after {deadline_s:g} s: {', '.join(described)}")
            time.sleep(0.005)

    def __enter__(self: _C) -> _C:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            print(f"{self.directory.name} wrote\n{self.stderr[-4000:]}", file=sys.stderr)
        self.process.kill()
        self.process.wait()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()
        wait_until(lambda: not self.processes(), "the end of all processes")


def run_preloaded(
    command: Sequence[str],
    *,
    env: dict[str, str] | None = None,
    timeout: float = DEADLINE_S,
    ends_at_once: bool = False,
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of a Python command that imports torch, in the repository. `env`: in addition. `ends_at_once`:
    see `PreloadedProcess`."""
    with PreloadedProcess(
        command,
        ends_at_once=ends_at_once,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(env),
        cwd=REPOSITORY,
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def can_be_forked(prefix: Sequence[str], program: Sequence[str]) -> bool:
    """Whether `PreloadedProcess` starts it as Python would."""
    words = tuple(prefix)
    for outer in (IN_NAMESPACE, CONTAINED):
        if words[: len(outer)] == outer:
            words = words[len(outer) + 1 :]  # and the name that follows
    return program[0] == "-m" and words in ((), (NOHUP,))


class Job(Command):
    """`elasticgang run`."""

    def __init__(
        self,
        directory: Path,
        script: Path | str,
        *args: str,
        ranks: int = 2,
        options: Sequence[str] = (),
        env: dict[str, str] | None = None,
        stdout: int | None = None,
        program: Sequence[str] = PROGRAM,
        prefix: Sequence[str] = (),
        fresh: bool = False,
        imports: Sequence[str] = (),
    ) -> None:
        """`program`: Python's arguments for the command line; `prefix`: a command that runs it. `fresh`: its fork
        server imports torch, as a user's does. `imports`: what the ranks of one that is not import too."""
        run = [*prefix, sys.executable, *program, "run", "--nproc-per-node", str(ranks), "--log-dir", str(directory)]
        preloaded = not fresh and can_be_forked(prefix, program)
        command = [*run, *options, str(script), *args]
        super().__init__(directory, command, env=env, stdout=stdout, preloaded=preloaded, imports=imports)

    def events(self) -> list[dict[str, Any]]:
        """What has happened until now."""
        return list(Tail(self.directory / "events.jsonl").read())

    def expect(self, event: str, *, count: int = 1, **fields: Any) -> dict[str, Any]:
        """Wait for the `count`-th event of that name and with those fields."""

        def found() -> dict[str, Any] | None:
            has_ended = self._has_ended()
            matching = [
                seen
                for seen in self.events()
                if seen["event"] == event and all(seen.get(name) == value for name, value in fields.items())
            ]
            if len(matching) >= count:
                return matching[count - 1]
            if has_ended:
                raise AssertionError(f"the job ended with {self.process.returncode} before {event}: {self.stderr}")
            return None

        return wait_until(found, f"event {event} {fields}")

    def expect_line(self, text: str) -> None:
        """Wait until it is on stderr."""

        def found() -> bool:
            has_ended, stderr = self._has_ended(), self.stderr
            if text not in stderr and has_ended:
                raise AssertionError(f"the job ended with {self.process.returncode} before {text!r}: {stderr}")
            return text in stderr

        wait_until(found, f"{text!r} on stderr")

    def expect_file(self, path: Path) -> str:
        """Wait for a file that the script writes, whole: its last character is a newline."""

        def found() -> str | None:
            if self._has_ended() and not path.exists():
                raise AssertionError(f"the job ended with {self.process.returncode} before {path.name}: {self.stderr}")
            text = path.read_text() if path.exists() else ""
            return text if text.endswith("\n") else None

        return wait_until(found, str(path))

    def _has_ended(self) -> bool:
        """Asked before one looks: a job may do what is waited for, and end, between a look and this question."""
        return self.process.poll() is not None

    def rank_pid(self, local_rank: int) -> int:
        """Of the newest process of that rank. It may run before its event is written, by a thread of the agent."""
        self.expect("spawned", local_rank=local_rank)
        return int([seen["pid"] for seen in self.events() if self._spawned(seen, local_rank)][-1])

    @staticmethod
    def _spawned(seen: dict[str, Any], local_rank: int) -> bool:
        return bool(seen["event"] == "spawned" and seen["local_rank"] == local_rank)

    def fork_server(self) -> psutil.Process:
        return self._child("eg-forkserver")

    def coordinator(self, former: int = 0) -> psutil.Process:
        """The job's own. `former`: the id of one that it takes the place of, which may not be gone yet."""
        return self._child("eg-coordinator", former)

    def page_server(self) -> psutil.Process:
        """What serves the page, the metrics and the traces."""

        def found() -> psutil.Process | None:
            for process in self.processes():
                with contextlib.suppress(psutil.Error):  # it has just ended
                    if "elasticgang.watch.server" in process.cmdline():
                        return process
            return None

        return wait_until(found, "the page's server")

    def _child(self, name: str, former: int = 0) -> psutil.Process:
        """The agent's child of that name, once there is one that lives; another child may end meanwhile."""

        def found() -> psutil.Process | None:
            assert not self._has_ended(), f"the job ended with {self.process.returncode}: {self.stderr}"
            for child in psutil.Process(self.process.pid).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    if child.name() == name and child.status() != psutil.STATUS_ZOMBIE and child.pid != former:
                        return child
            return None

        return wait_until(found, name)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
