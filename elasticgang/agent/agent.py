"""The agent: starts the rank processes of one host, reaps them, and represents them in the job.

It decides nothing: it passes events to `agent_lifecycle.py` and executes the instructions that this returns.
`control_plane.py` talks to the coordinator and the other agents. One asyncio loop owns all state; blocking calls run on
threads.

`run` kills and reaps every process that the agent started before it returns or raises. If the agent itself is killed,
the fork server kills them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from elasticgang import environment
from elasticgang.agent.change_log import ChangeLog
from elasticgang.agent.control_plane import ControlPlane, Limits
from elasticgang.agent.device_memory import MEMORY_TIMEOUT_S, DeviceMemory, Memory
from elasticgang.agent.embedded_coordinator import EmbeddedCoordinator
from elasticgang.agent.gpu_monitor import GpuMonitor
from elasticgang.agent.hang_monitor import HangMonitor
from elasticgang.agent.hang_response import HangResponse
from elasticgang.agent.job import Events, Job, Output
from elasticgang.agent.left_files import LeftFiles
from elasticgang.agent.number_log import NumberLog
from elasticgang.agent.process_supervisor import ProcessSupervisor
from elasticgang.agent.rank_events import RankEvents
from elasticgang.agent.rank_launch import RankLaunch
from elasticgang.agent.rank_processes import RankProcess, RankProcesses
from elasticgang.agent.rank_rendezvous import RankRendezvous
from elasticgang.agent.reach import try_hosts
from elasticgang.errors import OperationalError
from elasticgang.observe.change_report import WAITS_TO_JOIN
from elasticgang.process.lease import Lease
from elasticgang.process.priority import raise_priority
from elasticgang.process.stop_signals import handle_stop_signals
from elasticgang.progress import LongWork
from elasticgang.protocol.agent_events import (
    Abort,
    AgentEvent,
    AgentInstruction,
    AnnounceJoin,
    BroadcastFailure,
    BroadcastJobFailed,
    Committed,
    CoordinatorConnected,
    DeliverRecord,
    DeviceUsed,
    End,
    Exit,
    Fail,
    Fence,
    HostsTried,
    InternalError,
    KillRanks,
    NotifyFinished,
    NotifyOver,
    NotStarted,
    Rejoin,
    ReportDeviceFault,
    RequestRecord,
    RetireMembers,
    SignalRanks,
    SignalReceived,
    Started,
    StartRank,
    StopHelpers,
    TellUnreached,
    TimePassed,
    TryHosts,
    Warn,
)
from elasticgang.protocol.agent_lifecycle import AgentLifecycle, AgentOptions
from elasticgang.protocol.agent_state import AgentState
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.coordinator_messages import EMBEDDED_TIMEOUTS, JOB_TIMEOUTS
from elasticgang.protocol.devices import Taken
from elasticgang.protocol.record import Record
from elasticgang.protocol.rendezvous_keys import RendezvousKeys
from elasticgang.session.listener import EXHAUSTED
from elasticgang.session.tls_rotation import News, Renewed
from elasticgang.session.tls_watch import TlsWatch, watch_tls

log = logging.getLogger("elasticgang")

_ACCEPT_TOLD_S = 60.0
_UNSAVED = 1  # the exit code


class Agent:
    """Runs one job's ranks on this host. `run` blocks until the job is over and returns the exit code."""

    def __init__(self, job: Job, output: Output, events: Events) -> None:
        self._job = job
        self._output = output
        self._events = events
        self._lifecycle = AgentLifecycle(_new_id(), _options_of(job))
        self._timer: asyncio.TimerHandle | None = None
        self._exit: asyncio.Future[int] | None = None
        self._tells_accept_s = 0.0  # when the next event about that is due
        self._is_unsaved = False  # the job has finished without its final state in a checkpoint
        self._stopping = threading.Event()
        self._supervisor = ProcessSupervisor(job.env, job.preload, self._stopping, self._spawn_task, job.num_ranks)
        self._rendezvous = RankRendezvous(self._send_keys, self._spawn_task, output.write_line)
        self._began_at = time.monotonic()
        self._changes = ChangeLog(events, self._began_at)
        self._numbers = NumberLog(events)
        self._gpus = GpuMonitor(job.devices)
        self._device_memory = DeviceMemory(self._gpus.users)
        self._lease = Lease.create()
        own = self._lifecycle, self._handle, self._changes, events, output
        self._rank_events = RankEvents(*own, self._stopping, self._gpus.take_errors, self._lease)
        self._ranks = RankProcesses(self._supervisor, output, _AgentCallbacks(self))
        self._tasks: set[asyncio.Task[None]] = set()
        self._coordinator: EmbeddedCoordinator | None = None  # None: the job uses one that the user runs
        self._left_files = LeftFiles()
        self._tls_watch: TlsWatch | None = None
        self._control: ControlPlane | None = None
        self._hang_monitor = HangMonitor(job.hang_timeout)
        self._long_work = LongWork("heals"), LongWork("saves")
        self._hang_response = HangResponse(self._ranks, self._changes, events, output)
        self._confirming: asyncio.Future[None] | None = None  # that the coordinator knows the end of the job

    def run(self) -> int:
        """Raises OperationalError: the job could not be started. No process is left running."""
        code: int | None = None

        async def run() -> None:
            nonlocal code
            code = await self._run()

        try:
            asyncio.run(run())
        except RuntimeError:  # no thread is left, in which asyncio waits for those of `run_in_executor`
            if code is None:
                raise
        assert code is not None
        return code

    # -- life of the job

    async def _run(self) -> int:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_bug)
        self._exit = self._loop.create_future()
        self._loop.add_signal_handler(signal.SIGCHLD, self._supervisor.reap)  # from now on any signal wakes the loop
        handle_stop_signals(lambda number: self._loop.call_soon_threadsafe(self._on_signal, number))
        raise_priority()
        self._tls_watch = watch_tls(self._job.credentials.tls, self._on_tls_looked)
        self._supervisor.open()  # it imports torch while the agent connects
        self._left_files.open()
        self._gpus.start()
        try:
            return await self._serve()
        finally:
            await self._kill_everything()
            handle_stop_signals(lambda number: None)  # STOP-LATE

    async def _serve(self) -> int:
        assert self._exit is not None
        if self._job.coordinator is not None:
            opening = asyncio.ensure_future(self._open_control(self._job.coordinator))
            if not await self._unless_exiting(opening):
                opening.cancel()
                return self._exit.result()
            opening.result()
        starting = asyncio.ensure_future(self._start())
        if not await self._unless_exiting(starting):  # a signal while the fork server imports
            self._supervisor.kill()
            with contextlib.suppress(OperationalError):
                await starting
            return self._exit.result()
        starting.result()
        code = await self._exit
        is_over = code == 0 or self._is_unsaved  # not after a signal
        if is_over and self._lifecycle.state.finished and self._coordinator is None:
            self._confirming = asyncio.ensure_future(self._control_plane.confirm_finished())
            await asyncio.wait([self._confirming])
        return code

    async def _unless_exiting(self, future: asyncio.Future[Any]) -> bool:
        """Wait for `future`. False: the agent exits before it is done."""
        assert self._exit is not None
        either: list[asyncio.Future[Any]] = [future, self._exit]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return future.done()

    async def _start(self) -> None:
        await self._supervisor.ready()
        if self._job.coordinator is None:
            self._coordinator = EmbeddedCoordinator(
                self._supervisor, self._stopping, _AgentCallbacks(self), self._job.credentials
            )
            await self._coordinator.start()
            await self._open_control(self._coordinator.address)
        self._spawn_task(self._watch_ranks())
        self._connected()

    async def _open_control(self, coordinator: str) -> None:
        """Raises OperationalError."""
        job = self._job
        limits = Limits(job.connect_timeout, job.coordinator_timeout)
        timeouts = JOB_TIMEOUTS if self._coordinator is None else EMBEDDED_TIMEOUTS
        callbacks = _AgentCallbacks(self)
        self._control = ControlPlane(callbacks, coordinator, job.job_id, job.credentials, limits, timeouts, self._lease)
        await self._control.open()

    async def _close_control(self) -> None:
        if self._control is not None:
            await self._control.leave("the agent ends")

    def _connected(self) -> None:
        agent, control = self._lifecycle.agent, self._control_plane
        self._events.write(
            "started",
            agent=agent,
            coordinator=control.coordinator,
            ranks=self._job.num_processes,
            job=self._job.job_id,
            host=control.host,
            pid=os.getpid(),
            monotonic=self._began_at,
        )
        self._handle(CoordinatorConnected(control.host, control.address))
        control.begin()

    def _send_keys(self, message: RendezvousKeys) -> None:
        self._control_plane.send_keys(message)

    def _kill_coordinator(self) -> None:
        if self._coordinator is not None:
            self._coordinator.kill()

    def _on_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An unhandled exception ends the job: an agent with a dead task could block the others for ever."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in EXHAUSTED and "accept" in context["message"]:
            if (now_s := time.monotonic()) >= self._tells_accept_s:  # asyncio tries again each second
                self._tells_accept_s = now_s + _ACCEPT_TOLD_S
                self._events.write("accept failed", error=str(error))
            return
        try:
            self._handle(InternalError(f"internal error in the agent: {context['message']}: {error!r}"))
        finally:
            if self._exit is not None and not self._exit.done():  # the error is in `_handle` itself
                self._exit.set_result(1)

    def _on_signal(self, number: int) -> None:
        self._events.write("signal", signal=signal.Signals(number).name)
        if self._confirming is not None:
            self._confirming.cancel()
        self._handle(SignalReceived(signal.SIGTERM if number == signal.SIGHUP else number))  # STOP-HUP

    async def _kill_everything(self) -> None:
        self._stopping.set()
        self._gpus.stop()
        if self._tls_watch is not None:
            self._tls_watch.stop()
        if self._control is not None:
            self._control.end()
        self._collect_commits()
        self._changes.ended()
        code = self._exit.result() if self._exit is not None and self._exit.done() else None
        if code is not None or self._lifecycle.state.record is not None:  # else there was no job
            self._numbers.write()
            self._events.write("exiting", code=code, step=self._changes.pace.step)
        for task in self._tasks:
            task.cancel()
        self._ranks.kill()
        if self._coordinator is not None:
            self._coordinator.close()
        await self._supervisor.close()
        self._left_files.close()
        if self._control is not None:
            await self._close_control()

    def _spawn_task(self, coroutine: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._stopping.is_set():
            self._handle(InternalError(f"{type(error).__name__}: {error}"))

    # -- events and instructions

    def _handle(
        self, event: AgentEvent, on_decided: Callable[[Sequence[AgentInstruction]], None] | None = None
    ) -> None:
        """`on_decided`: called with the instructions, before they are carried out."""
        self._collect_commits()
        instructions = self._lifecycle.handle(event, time.monotonic())
        if on_decided is not None:
            on_decided(instructions)
        if self._control is not None:
            self._stamp_successors()  # before anybody votes in a generation that is begun now
        for instruction in instructions:
            self._carry_out(instruction)
        if self._control is not None:
            self._tell_own_facts()  # after what ranks wait for
        self._set_timer()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        deadline_s = self._lifecycle.deadline_s  # of the loop's own clock
        self._timer = None if deadline_s is None else self._loop.call_at(deadline_s, self._handle, TimePassed())

    def _collect_commits(self) -> None:
        """Read the status pages before any decision: a rank stamps a commit before it sends a message about it."""
        for rank in self._ranks.all():
            self._collect_commit(rank)

    def _collect_commit(self, rank: RankProcess) -> None:
        attempt = Attempt(*rank.page.committed)
        if attempt != rank.committed:
            rank.committed = attempt
            self._changes.pace.read(rank.page.commit_times())
            self._lifecycle.handle(Committed(rank.member, attempt), time.monotonic())

    def _num_successors(self) -> int:
        """Ranks of this host that could replace a draining one."""
        return self._lifecycle.state.num_successors([r.member for r in self._ranks.all() if r.page.draining])

    def _stamp_successors(self) -> None:
        num = self._num_successors() + self._control_plane.others_have_successors
        for rank in self._ranks.all():
            rank.page.set_successors(num)

    def _tell_own_facts(self) -> None:
        is_stopping = self._lifecycle.is_stopping
        self._control_plane.tell(has_successors=self._num_successors() > 0, is_stopping=is_stopping)

    @property
    def _control_plane(self) -> ControlPlane:
        assert self._control is not None
        return self._control

    def _carry_out(self, instruction: AgentInstruction) -> None:
        match instruction:
            case Abort(members, generation, cause):
                self._changes.incidents.ending(generation, self._ranks.all())  # INCIDENT-1
                reason = cause.text(self._lifecycle.agent)
                self._changes.reporter.caused(
                    reason, "abort", time.monotonic(), is_effect=cause.is_effect, agents=cause.ended_agents
                )
                self._ranks.abort(members, generation, cause, self._lifecycle.agent)
                self._control_plane.broadcast_over(generation, cause)
                if cause.timed_out:
                    self._rank_events.late.timed_out()
                elif cause.is_effect:
                    self._rank_events.late.failed()
                self._rendezvous.end(generation)
            case AnnounceJoin(members, generation):
                self._changes.reporter.caused(*WAITS_TO_JOIN, time.monotonic())
                self._ranks.send(members, "join", generation=generation)
                self._control_plane.broadcast_join(generation)
            case DeliverRecord(members, record):
                self._rendezvous.begin(record, self._lifecycle.agent)
                self._ranks.send(members, "record", text=record.text)
                self._rank_events.late.agreed(record.generation, record.committed.step, record.plan.ranks.keys())
                self._changes.agreed(record, self._lifecycle.agent, *self._control_plane.take_gone(record.agents))
            case RequestRecord():
                self._control_plane.request()
                self._events.write("requested", newest_commit=self._changes.pace.newest)
            case BroadcastFailure(member, local_rank, step):
                self._control_plane.tell_failure(member, local_rank, step)
            case BroadcastJobFailed(step, generation, text):
                self._control_plane.broadcast_job_failed(step, generation, text)
            case NotifyOver(generation, cause):
                self._control_plane.broadcast_over(generation, cause)
            case NotifyFinished(generation):
                self._control_plane.broadcast_finished(generation)
            case TryHosts():
                self._spawn_task(self._try_hosts(instruction))
            case TellUnreached(agents):
                self._control_plane.tell_unreached(agents)
            case ReportDeviceFault():
                self._events.write("device_fault", **asdict(instruction))
            case Warn(text):
                self._warn(text)
            case End(reason):
                self._events.write("ended", reason=reason)
                self._output.write_line(f"elasticgang: {reason}")
            case Fail(code, reason):
                self._changes.ended()
                self._events.write("failed", code=code, reason=reason)
                self._output.write_line(f"elasticgang: error: {reason}")
            case _:
                self._carry_out_on_processes(instruction)

    def _carry_out_on_processes(self, instruction: AgentInstruction) -> None:
        match instruction:
            case StartRank(local_rank):
                self._spawn_task(self._spawn(local_rank))
            case KillRanks(members):
                for rank in self._ranks.of(members):
                    rank.kill()
            case SignalRanks(members, number, drains):
                if drains and members:
                    when = f"at a step boundary, within {self._lifecycle.grace_s:g} s (--grace-period)"
                    self._output.write_line(f"elasticgang: {signal.Signals(number).name}: the ranks leave {when}")
                for rank in self._ranks.of(members):
                    rank.page.mark_draining() if drains else rank.page.mark_job_ending()
                    rank.send(number)
            case RetireMembers(members, reason):
                for rank in self._ranks.of(members):
                    self._events.write("retired", member=rank.member, reason=reason)
                self._ranks.send(members, "over")
            case Fence(members, reason):
                self._events.write("fenced", agent=self._lifecycle.agent, reason=reason)
                self._changes.reporter.cut_off(time.monotonic())
                self._output.write_line(f"elasticgang: {reason}")
                for rank in self._ranks.of(members):
                    rank.is_told = True
                    rank.kill()
            case Rejoin(_, former):
                self._spawn_task(self._rejoin(former))
            case StopHelpers():
                self._stopping.set()
            case Exit(code):
                assert self._exit is not None
                self._exit.set_result(code or self._fail_unsaved())

    def _fail_unsaved(self) -> int:
        """The exit code of a job that has finished. Whoever starts it again has its last steps trained and saved."""
        step = self._rank_events.unsaved_step
        if not step:
            return 0
        reason = (
            f"the job has finished, but its state after the last step, {step}, is not saved: mend what the "
            "warnings name, and start it again, under another --job-id if its coordinator goes on; it continues at the "
            "newest checkpoint"
        )
        self._is_unsaved = True
        self._carry_out(Fail(_UNSAVED, reason))
        return _UNSAVED

    def _warn(self, text: str) -> None:
        self._events.write("warned", text=text)
        log.warning("%s", text)

    def _on_tls_looked(self, news: News) -> None:
        """Any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the agent exits
            self._loop.call_soon_threadsafe(self._tell_tls, news)

    def _tell_tls(self, news: News) -> None:
        if not isinstance(news, Renewed):
            self._warn(news.text)
            return
        self._events.write("tls_renewed", what=news.life.what, until=news.life.end)
        log.info("%s", news.text)

    # -- ranks

    async def _spawn(self, local_rank: int) -> None:
        device = self._lifecycle.device_of(local_rank)
        memory = Memory.FREE if device is None else await self._device_memory.look(device)
        if memory is Memory.USED:
            self._handle(DeviceUsed(local_rank))
            return
        if memory is Memory.OVERDUE:
            self._warn(
                f"rank {local_rank} starts although the former one on device {device}, or a process of its group, has "
                f"not freed its memory within {MEMORY_TIMEOUT_S:g} s"
            )
        try:
            rank = await self._ranks.fork(self._rank_launch(local_rank))
        except OperationalError as exc:
            self._handle(NotStarted(local_rank, str(exc)))
            return
        self._rendezvous.add_rank(rank.member, rank.door)
        self._events.write("spawned", member=rank.member, local_rank=local_rank, pid=rank.pid)
        self._handle(Started(rank.member, local_rank))
        self._ranks.follow(rank)

    def _rank_launch(self, local_rank: int) -> RankLaunch:
        return RankLaunch(
            agent=self._lifecycle.agent,
            local_rank=local_rank,
            target=self._job.rank_target,
            args={
                "command": self._job.command,
                "agent_pid": os.getpid(),
                "num_ranks": self._job.num_processes,
                "host": self._control_plane.host,
                "job": self._job.job_id,
                "collective_timeout": self._job.collective_timeout,
                "process_group": self._job.process_group,
                "compare_state": self._job.compare_state,
                "credentials": self._job.credentials.to_json(),
                "optimizer_bytes": self._ranks.optimizer_bytes,
                "has_trained": self._changes.pace.step > 0,
                "left_files": self._left_files.path,
            },
            env={
                environment.JOB_ID: self._job.job_id,
                environment.DEVICE: str(self._lifecycle.device_of(local_rank)),
                "LOCAL_WORLD_SIZE": str(self._job.num_processes),
            },
            lease=self._lease.fd,
        )

    def _on_message(self, rank: RankProcess, message: dict[str, Any]) -> None:
        if message["kind"] == "joined":
            rank.has_joined = True
            rank.taken = Taken(str(message["device_uuid"]), bool(message["has_chosen_device"]))
            self._ranks.watch(rank)
        else:
            self._rank_events.on_message(rank, message)

    def _on_exit(self, rank: RankProcess, died_at: float) -> None:
        self._rendezvous.remove_rank(rank.member)
        self._collect_commit(rank)
        self._numbers.read(rank.member, rank.page)
        device = self._lifecycle.device_of(rank.local_rank)
        if device is not None and self._job.devices:
            self._device_memory.left(device, rank.pid)
        self._rank_events.on_exit(rank, died_at)
        # Once the others know: it starts a thread, in which a disk may not answer.
        with contextlib.suppress(RuntimeError):  # no thread is left: `close` removes them
            self._loop.run_in_executor(None, self._left_files.remove, rank.pid)

    async def _watch_ranks(self) -> None:
        """RULE-8, HANG-5."""
        while True:
            await asyncio.sleep(self._hang_monitor.interval_s)
            now, pages = time.monotonic(), self._ranks.pages()
            heals, saves = self._long_work
            healing = heals.lines(now, {member: page.healing for member, page in pages.items()})
            saving = saves.lines(now, {member: page.saving for member, page in pages.items()})
            for line in (*healing, *saving):
                log.info("%s", line)
            self._numbers.look(now, pages)
            self._stamp_successors()
            self._tell_own_facts()
            waits = [wait for wait in self._control_plane.facts.waits if wait.agent != self._lifecycle.agent]
            for report in self._hang_monitor.detect(now, pages, waits, finished=self._lifecycle.state.finished):
                self._spawn_task(self._hang_response.kill(report))
            self._control_plane.tell_waits(self._hang_monitor.lasting_waits(now))
            if (standstill := self._hang_monitor.standstill()) is not None and not self._hang_response.is_reporting:
                self._spawn_task(self._hang_response.report(standstill))

    async def _try_hosts(self, wanted: TryHosts) -> None:
        reached, unreached = await try_hosts(dict(wanted.others))
        self._handle(HostsTried(wanted.agent, wanted.number, reached, unreached, time.monotonic()))

    # -- rejoining

    async def _rejoin(self, former: str) -> None:
        """Connect under the new id, with new members, once the coordinator answers."""
        self._rank_events.unsaved_step = 0  # of the former members
        if await self._control_plane.rejoin(former):
            self._connected()


class _AgentCallbacks:
    """The agent, as `control_plane.py`, `rank_processes.py` and `embedded_coordinator.py` see it."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.handle = agent._handle
        self.spawn_task = agent._spawn_task
        self.on_facts_changed = agent._stamp_successors
        self.on_session_renewed = agent._rendezvous.renew
        self.on_rendezvous_keys = agent._rendezvous.receive
        self.kill_coordinator = agent._kill_coordinator
        self.write_line = agent._output.write_line
        self.log = agent._events.write
        self.warn = agent._warn
        self.on_message = agent._on_message
        self.on_exit = agent._on_exit
        self.on_exit_began = agent._rank_events.on_exit_began

    @property
    def state(self) -> AgentState:
        return self._agent._lifecycle.state

    @property
    def record(self) -> Record | None:
        return self._agent._lifecycle.state.record


def _new_id() -> str:
    return f"{socket.gethostname()}-{uuid.uuid4().hex[:8]}"


def _options_of(job: Job) -> AgentOptions:
    return AgentOptions(
        job=job.job_id,
        num_ranks=job.num_ranks,
        num_spares=job.num_spares,
        min_agents=job.min_agents,
        max_agents=job.max_agents,
        max_restarts=job.max_restarts,
        devices=job.devices,
        max_device_faults=job.max_device_faults,
        grace_period_s=job.grace_period,
    )
