"""The agent: starts the rank processes of one host, reaps them, and speaks for them.

It performs what `roster.py` decides. One asyncio loop owns all state; three threads do what blocks: one forks, one
talks to the coordinator, one sends heartbeats.

On every way out, whatever was started here is killed and reaped before `run` returns; if the agent itself is killed,
the fork server does it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import psutil
from torchft.coordination import LighthouseClient

from elasticgang.comm.forkserver import ForkServer, Spawned
from elasticgang.errors import OperationalError, WireError
from elasticgang.quorum import wire
from elasticgang.quorum.commit import Attempt
from elasticgang.quorum.coordinator import Endpoint, reach
from elasticgang.quorum.decide import (
    Lost,
    Record,
    Report,
    Void,
    canonical,
    layout_from_json,
    member_from_json,
    next_record,
    report_from_json,
    report_to_json,
)
from elasticgang.quorum.roster import (
    Abort,
    Answered,
    Ask,
    Asked,
    Committed,
    Deliver,
    Dismiss,
    Event,
    Exited,
    Fail,
    Instruction,
    Left,
    NoticeJoin,
    Restart,
    Roster,
    Started,
    StartExpired,
    describe_exit,
    infeasible,
)

_QUORUM_TIMEOUT_S = 60.0
_HEARTBEAT_INTERVAL_S = 0.1
_START_TIMEOUT_S = 60.0
_SETTLE_TIMEOUT_S = 0.5
_VOID_PATIENCE_S = 3.0


class Output(Protocol):
    """Where the ranks' output goes."""

    def open(self, local_rank: int) -> tuple[int, int]:
        """Two descriptors for the stdout and stderr of a new process of this rank; the caller closes them."""

    def step(self, local_rank: int, step: int) -> None: ...

    def say(self, line: str) -> None: ...


class Events(Protocol):
    def write(self, event: str, **fields: Any) -> None: ...


@dataclass(frozen=True)
class Job:
    """What to run. `coordinator`: "host:port", or None for one of the job's own. `command`: the child's arguments."""

    command: dict[str, Any]
    num_ranks: int
    job_id: str
    coordinator: str | None = None
    connect_timeout: float = 10.0
    max_restarts: int = 0
    grace_period: float = 1.0
    collective_timeout: float = 60.0
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class _RankProcess:
    member: str
    local_rank: int
    pid: int
    pidfd: int
    writer: asyncio.StreamWriter
    status: int | None = None
    failure: dict[str, Any] | None = None
    is_dismissed: bool = False


class Agent:
    """Runs one job's ranks on this host. `run` blocks until the job is over and returns its exit code."""

    def __init__(self, job: Job, output: Output, events: Events) -> None:
        self._job = job
        self._output = output
        self._events = events
        self._id = f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"
        self._ranks: dict[str, _RankProcess] = {}
        self._local_pids: dict[int, str] = {}
        self._exit: asyncio.Future[int] | None = None
        self._forker = ThreadPoolExecutor(1, "fork")
        self._asker = ThreadPoolExecutor(1, "ask")
        self._stopping = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._shown: dict[str, int] = {}
        self._coordinator_pid = 0
        self._num_starting = 0
        self._num_forking = 0
        self._signal = 0
        self._away_since = 0.0
        self._void_since = 0.0
        self._told_void = ""
        self._entered = asyncio.Event()
        self._over = asyncio.Event()  # nobody is started any more
        self._code_when_empty = 0
        self._shown_whole: set[str] = set()

    def run(self) -> int:
        """Raises OperationalError when the job could not be started; nothing is left running then."""
        return asyncio.run(self._run())

    # -- life of the job

    async def _run(self) -> int:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_bug)
        self._exit = self._loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._on_signal, number)
        try:
            if self._job.coordinator is not None:
                reaching = self._in_daemon(reach, self._job.coordinator, self._job.connect_timeout)
                if not await self._unless_ended(reaching):
                    self._stop_threads()
                    return self._exit.result()
                self._endpoint = reaching.result()
            self._forkserver = self._new_forkserver()
        except BaseException:
            self._stop_threads()
            raise
        try:
            return await self._serve()
        finally:
            await self._end_everything()

    def _new_forkserver(self) -> ForkServer:
        return ForkServer(env={"RUST_LOG": "error", "TORCH_CPP_LOG_LEVEL": "ERROR", **self._job.env})

    async def _serve(self) -> int:
        assert self._exit is not None
        starting = asyncio.ensure_future(self._start())
        if not await self._unless_ended(starting):  # a signal while the fork server imports
            self._forkserver.process.kill()
            with contextlib.suppress(OperationalError):
                await starting
            return self._exit.result()
        starting.result()
        return await self._exit

    async def _unless_ended(self, future: asyncio.Future[Any]) -> bool:
        """Wait for `future`. False: the job has ended before."""
        assert self._exit is not None
        either: list[asyncio.Future[Any]] = [future, self._exit]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return future.done()

    async def _start(self) -> None:
        await self._off_loop(self._forker, self._forkserver.wait_ready)
        if self._job.coordinator is None:
            address = await self._off_loop(self._forker, self._start_coordinator)
            self._endpoint = await self._off_loop(self._asker, reach, address, self._job.connect_timeout)
        self._roster = Roster(
            agent=self._id,
            host=self._endpoint.host,
            job=self._job.job_id,
            coordinator=self._endpoint.incarnation,
            max_restarts=self._job.max_restarts,
            num_ranks=self._job.num_ranks,
        )
        self._lighthouse = await self._off_loop(self._asker, self._connect_lighthouse)
        threading.Thread(target=self._heartbeat, name="heartbeat", daemon=True).start()
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap_orphans)
        self._events.write("started", agent=self._id, coordinator=self._endpoint.address, ranks=self._job.num_ranks)
        self._num_starting = self._job.num_ranks
        for local_rank in range(self._job.num_ranks):
            await self._spawn(local_rank)
        self._loop.call_later(_START_TIMEOUT_S, lambda: self._handle(StartExpired()))

    def _start_coordinator(self) -> str:
        reader, writer = os.pipe()
        owner = os.pidfd_open(os.getpid())
        try:
            spawned = self._forkserver.spawn(
                "elasticgang.quorum.coordinator:main",
                {"host": "127.0.0.1", "port": 0},
                fds=[writer, owner],
                name="eg-coordinator",
            )
        finally:
            os.close(writer)
            os.close(owner)
        os.close(spawned.pidfd)
        self._coordinator_pid = spawned.pid
        with os.fdopen(reader) as announced:
            told = json.loads(announced.read() or '{"error": "the coordinator ended while it was starting"}')
        if "error" in told:
            raise OperationalError(told["error"])
        return str(told["address"])

    def _connect_lighthouse(self) -> LighthouseClient:
        try:
            return LighthouseClient(self._endpoint.lighthouse, timedelta(seconds=self._job.connect_timeout))
        except RuntimeError as exc:
            raise OperationalError(f"cannot reach the lighthouse at {self._endpoint.lighthouse}: {exc}") from exc

    def _on_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception that nobody handles ends the job: half an agent is worse than none."""
        error = context.get("exception")
        self._fail(1, f"internal error in the agent: {context['message']}: {error!r}")

    def _on_signal(self, number: int) -> None:
        for rank in self._ranks.values():
            _kill(rank.pid, number)
        if self._exit is not None and not self._exit.done():
            self._events.write("signal", signal=signal.Signals(number).name)
            self._stopping.set()  # no restarts from here on
            self._over.set()
            self._signal, self._code_when_empty = number, 128 + number
            self._loop.call_later(self._job.grace_period, self._finish, 128 + number)
            self._finish_when_empty()

    def _finish(self, code: int) -> None:
        assert self._exit is not None
        if not self._exit.done():
            self._exit.set_result(code)

    def _finish_when_empty(self) -> None:
        if not self._ranks and not self._num_starting:
            self._finish(self._code_when_empty)

    async def _end_everything(self) -> None:
        self._stopping.set()
        for task in self._tasks:
            task.cancel()
        for rank in self._ranks.values():
            _kill_group(rank.pid)
        if self._coordinator_pid:
            _kill_group(self._coordinator_pid)
        self._stop_threads()
        self._forkserver.close()
        deadline = time.monotonic() + 2.0
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < deadline:
                if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG) is None:
                    for child in psutil.Process().children():  # orphans too: this process is their subreaper
                        _kill(child.pid, signal.SIGKILL)
                    await asyncio.sleep(0.002)

    def _stop_threads(self) -> None:
        self._stopping.set()
        self._forker.shutdown(wait=False, cancel_futures=True)
        self._asker.shutdown(wait=False, cancel_futures=True)

    def _in_daemon(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """In a thread that the end of this process does not wait for."""
        ended = self._loop.create_future()

        def settle(result: Any, error: Exception | None) -> None:
            if not ended.done():
                ended.set_result(result) if error is None else ended.set_exception(error)

        def run() -> None:
            result, error = None, None
            try:
                result = function(*args)
            except Exception as exc:
                error = exc
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(settle, result, error)

        threading.Thread(target=run, name=function.__name__, daemon=True).start()
        return ended

    def _off_loop(self, thread: ThreadPoolExecutor, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        return self._loop.run_in_executor(thread, function, *args)

    def _background(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._background_done)

    def _background_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._stopping.is_set():
            self._fail(1, f"{type(error).__name__}: {error}")

    # -- events and instructions

    def _handle(self, event: Event) -> None:
        if self._stopping.is_set():
            return
        for instruction in self._roster.handle(event):
            self._perform(instruction)
        if self._roster.finished:
            self._over.set()

    def _perform(self, instruction: Instruction) -> None:
        match instruction:
            case Abort(members, generation, reason):
                self._entered.clear()
                self._send(members, "abort", generation=generation, reason=reason)
            case NoticeJoin(members, generation):
                self._send(members, "join", generation=generation)
            case Deliver(members, record):
                self._send(members, "record", record=record.to_json())
                self._announce(record)
            case Ask(delay_s):
                self._background(self._ask(delay_s))
            case Restart(local_rank, delay_s):
                self._num_starting += 1  # an empty host is not the end while somebody comes
                self._background(self._restart(local_rank, delay_s))
            case Dismiss(members, reason):
                for member in members:
                    if member in self._ranks:
                        self._events.write("dismissed", member=member, reason=reason)
                        self._ranks[member].is_dismissed = True
                        _kill_group(self._ranks[member].pid)
            case Fail(code, reason):
                self._fail(code, reason)

    def _fail(self, code: int, reason: str) -> None:
        if self._exit is not None and self._exit.done():
            return  # what comes after the first failure comes from it
        self._events.write("failed", code=code, reason=reason)
        self._output.say(f"elasticgang: error: {reason}")
        self._finish(code)

    def _announce(self, record: Record) -> None:
        counts = {status: len(record.members(status)) for status in ("active", "learner", "spare")}
        self._events.write(
            "generation",
            generation=record.generation,
            digest=record.digest,
            committed=list(record.committed),
            rolled_forward=record.rolled_forward,
            ranks=sorted(seat.local_rank for seat in record.seats),
            **counts,
        )

    def _send(self, members: Sequence[str], kind: str, **fields: Any) -> None:
        message = wire.pack(kind, **fields)
        for member in members:
            if member in self._ranks:
                self._ranks[member].writer.write(message)

    # -- ranks

    async def _restart(self, local_rank: int, delay_s: float) -> None:
        """Start the rank again, once those that are left are on their way: starting takes the cores they need."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._entered.wait(), _SETTLE_TIMEOUT_S)
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._over.wait(), delay_s)
        await self._spawn(local_rank)

    async def _spawn(self, local_rank: int) -> None:
        """Start one of those that `_num_starting` counts, unless the job is being ended or has finished."""
        if self._over.is_set():
            self._num_starting -= 1
            self._finish_when_empty()
            return
        member = f"{self._id}/{local_rank}/{uuid.uuid4().hex[:8]}"
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._num_forking += 1  # one that dies before its pid is known here must not be reaped as an orphan
        try:
            with theirs:
                spawned = await self._off_loop(self._forker, self._fork_rank, member, local_rank, theirs)
            self._local_pids[spawned.pid] = member
        finally:
            self._num_forking -= 1
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        rank = _RankProcess(member, local_rank, spawned.pid, spawned.pidfd, writer)
        self._ranks[member] = rank
        self._num_starting -= 1
        if self._signal:  # it came while this one was forked
            _kill(rank.pid, self._signal)
        self._events.write("spawned", member=member, local_rank=local_rank, pid=spawned.pid)
        self._handle(Started(member, local_rank))
        rank_done = self._loop.create_task(self._listen(rank, reader))
        self._tasks.add(rank_done)
        rank_done.add_done_callback(self._background_done)
        self._loop.add_reader(spawned.pidfd, self._on_death, rank, rank_done)
        self._reap_orphans()

    def _fork_rank(self, member: str, local_rank: int, link: socket.socket) -> Spawned:
        try:
            return self._try_fork_rank(member, local_rank, link)
        except OperationalError:
            self._replace_forkserver()
            return self._try_fork_rank(member, local_rank, link)

    def _try_fork_rank(self, member: str, local_rank: int, link: socket.socket) -> Spawned:
        forks = self._forkserver.connect()
        stdio = self._output.open(local_rank)
        try:
            return self._forkserver.spawn(
                "elasticgang.launch.child:main",
                {
                    "command": self._job.command,
                    "member": member,
                    "agent_pid": os.getpid(),
                    "local_rank": local_rank,
                    "num_ranks": self._job.num_ranks,
                    "store": self._endpoint.address,
                    "host": self._endpoint.host,
                    "job": self._job.job_id,
                    "collective_timeout": self._job.collective_timeout,
                },
                fds=[link.fileno(), forks.fileno()],
                stdio=stdio,
                name=f"eg-rank-{local_rank}",
                env={"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(self._job.num_ranks)},
            )
        finally:
            forks.close()
            for fd in stdio:
                os.close(fd)

    async def _listen(self, rank: _RankProcess, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                header = await reader.readexactly(wire.HEADER_BYTES)
                message = wire.unpack(await reader.readexactly(wire.body_size(header)))
                self._on_message(rank, message)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        except (WireError, KeyError, TypeError, ValueError) as exc:
            self._output.say(
                f"elasticgang: rank {rank.local_rank} sent what is no message of ours ({exc}); it is ended"
            )
            _kill_group(rank.pid)

    def _on_message(self, rank: _RankProcess, message: dict[str, Any]) -> None:
        match message["kind"]:
            case "ask":
                layout = layout_from_json(message["layout"])
                if (reason := infeasible(layout, self._job.num_ranks)) is not None:
                    self._fail(2, reason)
                    return
                self._handle(Asked(rank.member, member_from_json(message["report"]), layout, message["broken"]))
            case "committed":
                self._output.step(rank.local_rank, message["step"])
                self._handle(Committed(rank.member, Attempt(message["step"], message["generation"])))
            case "entered":
                self._entered.set()
                self._events.write("entered", member=rank.member, local_rank=rank.local_rank, **message["phases"])
            case "left":
                self._handle(Left(rank.member, message["finished"]))
            case "failed":
                rank.failure = message
            case kind:
                raise WireError(f"unknown kind {kind!r}")

    def _on_death(self, rank: _RankProcess, listener: asyncio.Task[None]) -> None:
        """The pidfd is readable. The process group is killed before the reaping frees its id for others."""
        self._loop.remove_reader(rank.pidfd)
        _kill_group(rank.pid)
        with contextlib.suppress(ChildProcessError):
            found = os.waitid(os.P_PIDFD, rank.pidfd, os.WEXITED)
            if found is not None:
                rank.status = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
        os.close(rank.pidfd)
        self._local_pids.pop(rank.pid, None)
        died_at = time.monotonic()
        self._reap_orphans()
        self._background(self._bury(rank, listener, died_at))

    async def _bury(self, rank: _RankProcess, listener: asyncio.Task[None], died_at: float) -> None:
        """Tell of the death, after the last messages of the dead one have been read (they are in the socket)."""
        await asyncio.wait([listener], timeout=0.5)
        listener.cancel()
        rank.writer.close()
        del self._ranks[rank.member]
        status = 1 if rank.status is None else rank.status
        failure = rank.failure
        self._events.write(
            "exited", member=rank.member, local_rank=rank.local_rank, pid=rank.pid, status=status, monotonic=died_at
        )
        if failure is not None:
            self._show(rank.local_rank, failure["traceback"])
        elif status and not self._stopping.is_set() and not rank.is_dismissed:
            self._output.say(f"elasticgang: rank {rank.local_rank} (pid {rank.pid}) {describe_exit(status)}")
        self._handle(Exited(rank.member, status, blameless=bool(failure and failure["blameless"])))
        self._finish_when_empty()

    def _show(self, local_rank: int, traceback: str) -> None:
        """A traceback whole, once; a repetition in one line."""
        first = self._shown.setdefault(traceback, local_rank)
        if first == local_rank and traceback not in self._shown_whole:
            self._shown_whole.add(traceback)
            self._output.say(f"elasticgang: rank {local_rank} failed:\n{traceback.rstrip()}")
        else:
            self._output.say(f"elasticgang: rank {local_rank} failed as rank {first} did")

    def _reap_orphans(self) -> None:
        """Comm processes and the ranks' own children are reparented to the agent; nobody else waits for them."""
        if self._num_forking:
            return  # `_spawn` looks here again
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if found.si_pid in self._local_pids:
                    return  # its own reader reaps it, and then looks here again
                if found.si_pid == self._forkserver.process.pid:
                    self._forkserver.process.wait()
                    self._background(self._off_loop(self._forker, self._replace_forkserver))
                    continue
                os.waitid(os.P_PID, found.si_pid, os.WEXITED)

    def _replace_forkserver(self) -> None:
        """On the forking thread, where restarts queue behind it. What runs goes on; the ranks notice by themselves."""
        if not self._stopping.is_set() and self._forkserver.process.poll() is not None:
            self._forkserver.close()
            self._forkserver = self._new_forkserver()
            self._forkserver.wait_ready()

    # -- coordinator

    def _heartbeat(self) -> None:
        client = self._connect_lighthouse()
        while not self._stopping.wait(_HEARTBEAT_INTERVAL_S):
            with contextlib.suppress(RuntimeError, TimeoutError):  # a lighthouse that is away is asked again
                client.heartbeat(self._id)

    async def _ask(self, delay_s: float) -> None:
        if delay_s:
            await asyncio.sleep(delay_s)
        report = self._roster.report()
        try:
            answer = await self._off_loop(self._asker, self._agree, report)
        except OperationalError as exc:
            self._away_since = self._away_since or time.monotonic()
            if time.monotonic() - self._away_since > self._job.connect_timeout:
                self._fail(1, f"no generation can be agreed without the coordinator at {self._endpoint.address}: {exc}")
                return
            answer = Void(str(exc))
        else:
            self._away_since = 0.0
        self._tell_of_void(answer)
        self._handle(Answered(answer))

    def _tell_of_void(self, answer: Record | Void | Lost) -> None:
        """Say once why no generation is agreed, when that goes on."""
        if not isinstance(answer, Void):
            self._void_since = 0.0
            return
        self._void_since = self._void_since or time.monotonic()
        if time.monotonic() - self._void_since > _VOID_PATIENCE_S and answer.reason != self._told_void:
            self._told_void = answer.reason
            self._output.say(f"elasticgang: no generation can be agreed yet: {answer.reason}")

    def _agree(self, report: Report) -> Record | Void | Lost:
        """Ask the lighthouse and write the record that follows, on the asking thread. Raises OperationalError when the
        coordinator does not answer."""
        try:
            quorum = self._lighthouse.quorum(
                replica_id=report.agent,
                timeout=timedelta(seconds=_QUORUM_TIMEOUT_S),
                address="",
                store_address="",
                step=0,
                world_size=1,
                shrink_only=False,
                data=report_to_json(report),
            )
            proposal = [report_from_json(participant.data) for participant in quorum.participants]
            return publish(self._endpoint, report, proposal)
        except (RuntimeError, TimeoutError) as exc:
            raise OperationalError(str(exc).partition("\n")[0].partition(", details")[0]) from exc
        except (KeyError, TypeError, ValueError) as exc:
            return Void(f"a participant's report is not one: {exc!r}")


def publish(endpoint: Endpoint, mine: Report, proposal: Sequence[Report]) -> Record | Void | Lost:
    """Compare-and-set the record that follows from `proposal`; an agent that comes second finds itself in the first
    one's and takes that."""
    key = f"elasticgang/record/{mine.job}"
    store = endpoint.store
    present = store.get(key).decode() if store.check([key]) else ""
    parent = Record.from_json(json.loads(present)) if present else None
    if parent is not None and _is_for(parent, mine):
        return parent
    answer = next_record(parent, proposal)
    if not isinstance(answer, Record):
        return answer
    wanted = canonical(answer.to_json())
    written = store.compare_set(key, present, wanted).decode()
    if written == wanted:
        return answer
    winner = Record.from_json(json.loads(written))
    return winner if _is_for(winner, mine) else Void(f"generation {winner.generation} was agreed without this agent")


def _is_for(record: Record, mine: Report) -> bool:
    """Whether `record` was agreed with `mine` in it: it is news to this agent and seats all of its members."""
    seated = {seat.member for seat in record.seats}
    return mine.seen < record.generation and all(member.id in seated for member in mine.members)


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
