"""Translates the messages and exits of ranks to events of the agent's lifecycle, and writes what a reader needs.

FAILURES-1  A traceback is written in full, and when it comes again as one line. The newest `MAX_SHOWN` are known: their
    texts may have steps and times, so that a job of weeks has new ones without end.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from elasticgang.agent.change_log import ChangeLog
from elasticgang.agent.job import Events, Output
from elasticgang.agent.late_collectives import LateCollectives
from elasticgang.agent.rank_processes import RankProcess
from elasticgang.errors import WireError
from elasticgang.observe.event_names import DATA_WORKER_LOSSES
from elasticgang.process.lease import Lease
from elasticgang.process.memory_group import MemoryGroups
from elasticgang.protocol.agent_events import (
    AgentInstruction,
    Committed,
    ExitBegan,
    Exited,
    MemberLeft,
    RankEntered,
    RecordRequested,
    ScriptRaised,
    StateDiffers,
)
from elasticgang.protocol.agent_lifecycle import AgentLifecycle
from elasticgang.protocol.agent_state import LEFT_STEP, describe_exit, tells_exit
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.device_errors import DEVICE_FAULT_STATUS, fault_in_output
from elasticgang.protocol.record import checkpoint_from_json, layout_from_json, member_from_json

MAX_SHOWN = 64


class RankEvents:
    """`handle` takes the events, and may get a function that it calls with the instructions, before they are carried
    out. `late`: what is known of collectives that have timed out. `stopping` is set once the agent kills all of its
    ranks. `take_errors`: see `GpuMonitor`. `lease`: of the host."""

    def __init__(
        self,
        lifecycle: AgentLifecycle,
        handle: Callable[..., None],
        changes: ChangeLog,
        events: Events,
        output: Output,
        stopping: threading.Event,
        take_errors: Callable[[int], str],
        lease: Lease,
    ) -> None:
        self._lifecycle, self._handle, self._changes = lifecycle, handle, changes
        self._events, self._output, self._stopping = events, output, stopping
        self._take_errors, self._lease = take_errors, lease
        self._memory = MemoryGroups()
        self._shown: dict[str, int] = {}  # FAILURES-1: by traceback, the first rank that failed with it
        self._difference = 0, 0  # the generation and the step of the last one of states that is in the events
        self.late = LateCollectives(events, output)
        self.unsaved_step = 0  # of the job's final state, if it was to be saved and is in no checkpoint

    def on_message(self, rank: RankProcess, message: dict[str, Any]) -> None:
        """Raises WireError, KeyError, TypeError or ValueError: the message is invalid."""
        reporter = self._changes.reporter
        match message["kind"]:
            case "request":
                layout = layout_from_json(message["layout"])
                report = member_from_json(message["report"])
                reporter.requested(rank.member, report.pending)
                if report.draining and not message["broken"]:
                    cause = f"rank {rank.local_rank} drains, and a spare may replace it"
                    reporter.caused(cause, "drain", time.monotonic())
                left_step = bool(message["left_step"])
                if left_step and self._has_seat(rank.member):  # a peer may have noticed its end, and requested before
                    reporter.caused(f"rank {rank.local_rank} {LEFT_STEP}", "abort", time.monotonic(), is_root=True)
                checkpoint = checkpoint_from_json(message["checkpoint"])
                settings = tuple((str(name), str(value)) for name, value in message["settings"].items() if value)
                self.late.stopped(rank.local_rank, rank.page.step, str(message["stopped_at"]))
                self._handle(
                    RecordRequested(
                        *(rank.member, report, layout, message["broken"], message["timed_out"]),
                        checkpoint=checkpoint,
                        settings=settings,
                        left_step=left_step,
                        connected=bool(message["connected"]),
                        lacks=str(message["lacks"]),
                    )
                )
            case "committed":
                attempt = Attempt(message["step"], message["generation"])
                self._changes.pace.read(rank.page.commit_times())
                self._changes.write(reporter.committed(rank.member, attempt, time.monotonic()))
                self._handle(Committed(rank.member, attempt))
            case "healed":
                reporter.healed(rank.member, message["generation"], time.monotonic())
                _, num_bytes = rank.page.healing
                self._events.write(
                    "healed",
                    member=rank.member,
                    local_rank=rank.local_rank,
                    generation=message["generation"],
                    bytes=num_bytes,
                )
            case "saved":
                told = {name: message[name] for name in ("step", "generation", "digest", "path", "bytes", "duration_s")}
                self._events.write("saved", member=rank.member, local_rank=rank.local_rank, **told)
            case "entered":
                phases = message["phases"]
                reporter.entered(rank.member, phases["generation"], phases)
                self._events.write("entered", member=rank.member, local_rank=rank.local_rank, **phases)
                self._handle(RankEntered())
            case "data_worker_lost":
                loss = {name: message["loss"][name] for name in ("worker", "pid", "kind", "reason", "step", "slot")}
                if loss["kind"] not in DATA_WORKER_LOSSES:
                    raise ValueError(f"unknown kind of loss {loss['kind']!r}")
                self._events.write("data_worker_lost", member=rank.member, local_rank=rank.local_rank, **loss)
            case "state_differs":
                told = {name: message[name] for name in ("step", "generation", "text")}
                if (found := (told["generation"], told["step"])) != self._difference:  # AGENT-13
                    self._difference = found
                    self._events.write("state_differs", member=rank.member, local_rank=rank.local_rank, **told)
                if self._has_seat(rank.member):
                    reporter.caused("the states of ranks differ", "failed", time.monotonic(), is_root=True)
                self._handle(StateDiffers(**told, ends_job=message["ends_job"]))
            case "spare":
                self._events.write(
                    "spare",
                    member=rank.member,
                    local_rank=rank.local_rank,
                    generation=message["generation"],
                    reason=message["reason"],
                )
            case "left":
                finished, in_order, unsaved = message["finished"], message["in_order"], message["unsaved"]
                if unsaved is not None:
                    self.unsaved_step = int(unsaved)
                    self._events.write("unsaved", member=rank.member, local_rank=rank.local_rank, step=unsaved)
                rank.has_left = finished or in_order
                if not finished and (in_order or self._has_seat(rank.member)):
                    did, kind = ("leaves", "left") if in_order else ("left before the last step", "failed")
                    cause = f"rank {rank.local_rank} {did}"
                    reporter.caused(cause, kind, time.monotonic(), leaver=None if in_order else rank.member)
                how = message["by_script"], message["num_steps"], message["raised"]
                self._handle(MemberLeft(rank.member, finished, in_order, *how))
            case "failed":
                rank.failure = message
                if not message["blameless"]:
                    self._note_failure(rank, _describe_failure(rank), exiting=rank.member)
                self._handle(ScriptRaised(rank.member))
            case "exits":
                self._note_failure(rank, describe_exit(int(message["code"])), exiting=None)
            case kind:
                raise WireError(f"unknown kind {kind!r}")

    def _note_failure(self, rank: RankProcess, what: str, exiting: str | None) -> None:
        """Whichever comes first: that the script has failed, or that the rank has left its loop because of it.
        `exiting`: see `ChangeReporter`."""
        cause, reporter = f"rank {rank.local_rank} {what}", self._changes.reporter
        if self._has_seat(rank.member):
            reporter.caused(cause, "failed", time.monotonic(), is_root=True, exiting=exiting)
        else:
            reporter.failed(rank.member, cause, exiting)

    def on_exit_began(self, rank: RankProcess, began_at: float) -> None:
        if not self._lifecycle.state.takes_part(rank.member):
            return
        rank.lower_priority()
        self._events.write("exit_began", member=rank.member, local_rank=rank.local_rank, monotonic=began_at)
        if self._lease.is_expired:
            self._changes.reporter.cut_off(began_at)
        elif self._has_seat(rank.member):
            cause = f"rank {rank.local_rank} died"
            self._changes.reporter.caused(cause, "killed", began_at, is_root=True, exiting=rank.member)
        self._handle(ExitBegan(rank.member))

    def on_exit(self, rank: RankProcess, died_at: float) -> None:
        assert rank.status is not None
        status, failure = rank.status, rank.failure
        is_retired = self._lifecycle.is_retired(rank.member)
        self._events.write(
            "exited",
            member=rank.member,
            local_rank=rank.local_rank,
            pid=rank.pid,
            status=status,
            monotonic=died_at,
            committed=list(rank.committed),
            newest_commit=self._changes.pace.newest,
        )
        if failure is not None:
            self._show_failure(rank.local_rank, failure["traceback"])
        is_shown = status == 0 or failure is not None or self._stopping.is_set() or is_retired
        is_cut_off = status == -signal.SIGKILL and self._lease.is_expired
        if is_cut_off:
            self._changes.reporter.cut_off(died_at)
        is_shown = is_shown or is_cut_off or (status == -signal.SIGKILL and rank.is_told)
        is_early = status == 0 and not (rank.has_left or is_retired or rank.page.draining)
        cause = f"rank {rank.local_rank} {_describe_failure(rank) or describe_exit(status, is_early=is_early)}"
        self._changes.incidents.exited(rank)
        kind = "killed" if status < 0 and failure is None else "failed"
        if self._has_seat(rank.member) and not (rank.has_left and status == 0):  # the next record may come later
            self._changes.reporter.caused(cause, kind, died_at, is_root=True)
        self._changes.write(self._changes.reporter.exited(rank.member, cause, kind))
        blameless = bool(failure and failure["blameless"])

        def show(instructions: Sequence[AgentInstruction]) -> None:
            if not (is_shown or tells_exit(instructions, rank.local_rank, status)):
                self._output.write_line(f"elasticgang: rank {rank.local_rank} (pid {rank.pid}) {describe_exit(status)}")

        is_unexplained = status == -signal.SIGKILL and not (rank.is_told or self._stopping.is_set())
        num_killed = self._memory.take_killed() if is_unexplained else 0
        self._handle(
            Exited(
                rank.member,
                status,
                blameless,
                draining=rank.page.draining,
                joined=rank.has_joined,
                raised=failure is not None and not blameless,
                step=rank.page.step,
                at_s=died_at,
                device_fault=self._device_fault(rank),
                taken=rank.taken,
                differs=bool(failure and failure["differs"]),
                heals=bool(failure and failure["heals"]),
            ),
            show,
        )
        if num_killed > 0:  # GROUP-2
            text = f"for want of memory the kernel has killed {num_killed} process{'es' * (num_killed > 1)} here"
            self._output.write_line(f"elasticgang: {text} (oom_kill), rank {rank.local_rank} maybe")

    def _device_fault(self, rank: RankProcess) -> str | None:
        """How the rank's device has failed, with what the driver knows about it; None: it has not."""
        fault = None if rank.failure is None else rank.failure["device_fault"]
        if fault is None and rank.status == DEVICE_FAULT_STATUS:
            fault = f"the script exited with code {rank.status}"
        if fault is None and rank.status == -signal.SIGABRT:
            fault = fault_in_output(rank.tail())
        device = self._lifecycle.device_of(rank.local_rank)
        known = ""
        if fault is not None and device is not None and not rank.taken.is_chosen:
            known = self._take_errors(device)
        return f"{fault}; the driver reports {known}" if known else fault

    def _has_seat(self, member: str) -> bool:
        record = self._lifecycle.state.record
        return record is not None and record.seat(member) is not None

    def _show_failure(self, local_rank: int, traceback: str) -> None:
        """FAILURES-1."""
        first = self._shown.get(traceback)
        if first is None:
            self._shown[traceback] = local_rank
            if len(self._shown) > MAX_SHOWN:
                del self._shown[next(iter(self._shown))]
            self._output.write_line(f"elasticgang: rank {local_rank} failed:\n{traceback.rstrip()}")
        elif not self._stopping.is_set():  # else the reason why the job ends has been told
            self._output.write_line(f"elasticgang: rank {local_rank} failed with the traceback of rank {first}")


def _describe_failure(rank: RankProcess) -> str:
    """What the rank's script has raised. Empty: nothing."""
    return "" if rank.failure is None else f"raised {rank.failure['error']}"
