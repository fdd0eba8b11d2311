"""The agent as a state machine: it starts ranks, supervises them, drains, fences, rejoins and exits.

Pure: events in, instructions out, the time an argument. `agent_state.py` decides what the ranks do under one id of the
agent; this module decides when a rank is started or killed, and when the agent changes its id or exits. The driver
executes every instruction, and hands in `TimePassed` at `deadline_s`.

LIFE-1  Ranks are forked one at a time. No fork begins after the job has finished on this host or a signal has arrived.
LIFE-2  If a fork of the first start fails, the agent exits. It repeats later ones, within the agent state's budget.
LIFE-3  A restart waits until a survivor has entered the next generation, `ENTER_TIMEOUT_S` at most, and then until the
        first commit there, `COMMIT_TIMEOUT_S` at most: a start takes the cores that the survivors need. Then it waits
        for the delay of the agent state.
LIFE-4  The agent kills a retired member that has not exited after `RETIRE_TIMEOUT_S`, at once if it never requested a
        record; and a member whose script has raised and that has not exited after `EXIT_TIMEOUT_S`.
LIFE-5  The first SIGTERM drains, once there is a record. Another signal, or a second one that is no repetition
        (REPEAT-1), stops the ranks. The agent exits a grace period after each signal at the latest: `LEAVE_S` where the
        ranks drain, which takes a step and perhaps a save, and `END_S` where they stop, unless the user says how long.
LIFE-6  When the lease expires, the agent kills all ranks and decides nothing else until every one has exited and no
        fork is under way. Then it rejoins under a new id; its `Hello` says that the old one has ended.
LIFE-7  The agent exits once no rank runs, starts or waits for its restart. The code is 128 + N after signal N, else
        the failure's, else 128 + N after signal N to a rank that had finished (AGENT-10), else 0. It exits once.
LIFE-8  A rank whose device is still used by the former one gives its turn up, and is tried again after `DEVICE_POLL_S`:
        one device holds up no other start.
LIFE-9  One line tells of ranks that drain and have not exited when the grace period ends. If one still trains, its
        script mostly handles SIGTERM itself, and the steps after the newest checkpoint are lost.
"""

from __future__ import annotations

import enum
import signal
from collections import deque
from dataclasses import dataclass

from elasticgang.protocol.agent_events import (
    Abort,
    AgentEvent,
    AgentInstruction,
    Committed,
    CoordinatorConnected,
    CoordinatorTimedOut,
    DeviceUsed,
    End,
    Event,
    Exit,
    Exited,
    Fail,
    Fence,
    Finished,
    InternalError,
    KillRanks,
    LeaseExpired,
    NotifyFinished,
    NotifyOver,
    NotStarted,
    RankEntered,
    RecordRequested,
    Rejoin,
    Restart,
    RetireMembers,
    RetryDue,
    ScriptRaised,
    SignalRanks,
    SignalReceived,
    Started,
    StartExpired,
    StartRank,
    StartsStopped,
    StopHelpers,
    TimePassed,
    Warn,
)
from elasticgang.protocol.agent_state import AgentState
from elasticgang.protocol.devices import Devices
from elasticgang.protocol.end_cause import EndCause
from elasticgang.protocol.restarts import Restarts
from elasticgang.protocol.stop_request import is_repeated

START_TIMEOUT_S = 60.0
ENTER_TIMEOUT_S = 0.5
COMMIT_TIMEOUT_S = 0.05
DEVICE_POLL_S = 0.05
RETIRE_TIMEOUT_S = 10.0
EXIT_TIMEOUT_S = 10.0  # after an exception
LEAVE_S = 30.0
END_S = 1.0


@dataclass(frozen=True)
class AgentOptions:
    """`num_spares`: processes beyond `num_ranks`. `max_agents`: 0 for no limit. `devices`: see `Devices`.
    `max_device_faults`: of each device in an hour, after which its rank is restarted on it. `grace_period_s`: of any
    signal (LIFE-5)."""

    job: str
    num_ranks: int
    num_spares: int = 0
    min_agents: int = 1
    max_agents: int = 0
    max_restarts: int = 3
    devices: tuple[int, ...] = ()
    max_device_faults: int = 2
    grace_period_s: float | None = None


class _Phase(enum.Enum):
    CONNECTING = "connecting"
    SERVING = "serving"  # also while it drains
    ENDING = "ending"  # the ranks have been signalled to exit
    FENCED = "fenced"  # the ranks are killed, but some have not exited yet
    EXITED = "exited"


@dataclass
class _Delayed:
    """A restart at `at_s`, which comes nearer when a survivor enters, and when it commits (LIFE-3). `delay_s`: after
    it has waited for survivors."""

    at_s: float
    delay_s: float
    waits_for_survivor: bool


class AgentLifecycle:
    """`handle` is the only method that changes state. `state`: the agent state under the present id, for reading
    only."""

    def __init__(self, agent: str, options: AgentOptions) -> None:
        self._options = options
        self._first_id = agent
        self._incarnation = 1
        self._restarts = Restarts(options.max_restarts)
        self._num_processes = options.num_ranks + options.num_spares
        self._devices = Devices(options.devices, self._num_processes, options.max_device_faults)
        self.state = self._new_state(agent)
        self._phase = _Phase.CONNECTING
        self._is_fenced = False  # stays True until the agent has connected under the next id
        self._now_s = 0.0
        self._members: dict[str, bool] = {}  # running members, and whether each has requested a record
        self._retired: set[str] = set()
        self._forking: int | None = None
        self._to_start: deque[int] = deque()
        self._delayed: dict[int, _Delayed] = {}
        self._has_entered = False  # whether a survivor has entered since the last abort
        self._has_committed = False  # and has committed a step
        self._has_started_all = False  # whether the first start of all ranks is complete
        self._start_expires_s: float | None = None
        self._kill_at_s: dict[str, float] = {}
        self.grace_s = 0.0  # of the signal that ends the agent first
        self._grace_ends_s: float | None = None
        self._signal = 0
        self._signalled_s = 0.0
        self._has_finished = False

    def _new_state(self, agent: str) -> AgentState:
        options = self._options
        return AgentState(
            agent=agent,
            host="",
            job=options.job,
            restarts=self._restarts,
            num_ranks=options.num_ranks,
            num_spares=options.num_spares,
            devices=self._devices,
            min_agents=options.min_agents,
            max_agents=options.max_agents,
        )

    # -- what the driver reads

    @property
    def agent(self) -> str:
        return self.state.agent

    @property
    def deadline_s(self) -> float | None:
        """When to pass `TimePassed` to `handle`. None: no timer runs."""
        timers = self.timers()
        return min(timers.values()) if timers else None

    def timers(self) -> dict[str, float]:
        """By name: when each timer expires."""
        timers: dict[str, float] = {}
        if self._phase is _Phase.EXITED:
            return timers
        if self._delayed:
            timers.update({f"restart {local_rank}": delayed.at_s for local_rank, delayed in self._delayed.items()})
        if self._kill_at_s:
            timers.update({f"exit {member}": at_s for member, at_s in self._kill_at_s.items()})
        if self._start_expires_s is not None and (self.state.waits_for_start or self._awaits_starts):
            timers["start"] = self._start_expires_s
        if self._grace_ends_s is not None:
            timers["grace period"] = self._grace_ends_s
        if self._phase is _Phase.SERVING and (try_s := self.state.reach.next_try_s) is not None:
            timers["reach"] = try_s
        return timers

    @property
    def _awaits_starts(self) -> bool:
        """AGENT-9: whether a layout is kept for ranks that are being started."""
        return self.state.record is not None and self.state.num_starting > 0

    @property
    def num_coming(self) -> int:
        """Ranks that are starting or scheduled to start."""
        return (self._forking is not None) + len(self._to_start) + len(self._delayed)

    def device_of(self, local_rank: int) -> int | None:
        """The device on which the rank starts next. None: it starts no more (DEVICE-2)."""
        return self._devices.of(local_rank)

    @property
    def is_stopping(self) -> bool:
        """A signal has asked the agent to end."""
        return bool(self._signal)

    def is_retired(self, member: str) -> bool:
        return member in self._retired

    # -- events

    def handle(self, event: AgentEvent, now_s: float) -> list[AgentInstruction]:
        self._now_s = now_s
        if isinstance(event, Committed):
            if self._is_fenced:
                return []
            self._survivor_committed(event)
            return list(self.state.handle(event))
        if self._phase is _Phase.EXITED:
            return []
        done = self._on(event)
        if self._is_over:
            self._to_start.clear()
            self._delayed.clear()
        if not self._has_exited:
            done += self._notify_finished(event)
            done += self._start_next()
            done += self._when_empty()
        return done

    @property
    def _has_exited(self) -> bool:
        return self._phase is _Phase.EXITED

    @property
    def _is_over(self) -> bool:
        """Whether no further rank may start."""
        return self._signal != 0 or self.state.finished or self.state.lost != ""

    def _on(self, event: AgentEvent) -> list[AgentInstruction]:
        match event:
            case CoordinatorConnected():
                return self._connected(event)
            case Started():
                return self._started(event)
            case NotStarted():
                return self._not_started(event)
            case DeviceUsed(local_rank):
                return self._device_used(local_rank)
            case Exited():
                return self._exited(event)
            case SignalReceived(number):
                return self._signalled(number)
            case LeaseExpired(reason):
                return self._fence(reason)
            case CoordinatorTimedOut(reason) | InternalError(reason):
                return self._fail(1, reason)
            case TimePassed():
                return self._time_passed()
            case RankEntered():
                self._survivor_entered()
                return []
            case ScriptRaised(member):
                if self._phase is _Phase.SERVING and member in self._members:
                    self._kill_at_s.setdefault(member, self._now_s + EXIT_TIMEOUT_S)
                return []
            case RecordRequested(member) if member in self._members:
                self._members[member] = True
        return self._decide(event)

    def _decide(self, event: Event) -> list[AgentInstruction]:
        """Let the agent state decide, while the agent is serving."""
        if self._phase is not _Phase.SERVING:
            return []
        done: list[AgentInstruction] = []
        num_starting = self.state.num_starting
        instructions = self.state.handle(event)
        if self._awaits_starts and self.state.num_starting > num_starting:
            self._start_expires_s = self._now_s + START_TIMEOUT_S
        for instruction in instructions:
            match instruction:
                case Restart(local_rank, delay_s):
                    self._delayed[local_rank] = _Delayed(
                        self._now_s + self._settle_s + delay_s, delay_s, not self._has_committed
                    )
                case RetireMembers(members, reason):
                    done += self._retire(members, reason)
                case Fail(code, reason):
                    return [*done, *self._fail(code, reason)]
                case End():
                    return [*done, instruction, *self._exit(self._code)]
                case _:
                    if isinstance(instruction, Abort):
                        self._has_entered = self._has_committed = False
                    done.append(instruction)
        return done

    def _time_passed(self) -> list[AgentInstruction]:
        if self._grace_ends_s is not None and self._grace_ends_s <= self._now_s:
            why = f": {len(self._members)} of its ranks had not left within {self.grace_s:g} s"
            return self._say_late() + self._exit(self._code, why if self._members else "")
        done: list[AgentInstruction] = []
        if self._start_expires_s is not None and self._start_expires_s <= self._now_s:
            self._start_expires_s = None
            done += self._decide(StartExpired())
        if (try_s := self.state.reach.next_try_s) is not None and try_s <= self._now_s:
            done += self._decide(RetryDue())
        late = tuple(member for member, at_s in self._kill_at_s.items() if at_s <= self._now_s)
        for member in late:
            del self._kill_at_s[member]
        if late:
            done.append(KillRanks(late))
        for local_rank in [rank for rank, delayed in self._delayed.items() if delayed.at_s <= self._now_s]:
            del self._delayed[local_rank]
            self._to_start.append(local_rank)
        return done

    def _say_late(self) -> list[AgentInstruction]:
        """LIFE-9."""
        if not self._members or self._phase is not _Phase.SERVING:
            return []
        ranks = ", ".join(str(local_rank) for local_rank in self.state.local_ranks(self._members))
        text = f"rank {ranks} did not exit within {self.grace_s:g} s of SIGTERM (--grace-period): killing what is left"
        if any(self.state.takes_part(member) for member in self._members):
            text += "; a script that handles or ignores SIGTERM itself has to call `manager.leave()`, "
            text += "and a last checkpoint that takes longer needs a longer --grace-period"
        return [Warn(text)]

    # -- starts

    def _connected(self, event: CoordinatorConnected) -> list[AgentInstruction]:
        if self._phase is not _Phase.CONNECTING:
            return []
        self._phase, self._is_fenced = _Phase.SERVING, False
        agent_state = self.state
        agent_state.host, agent_state.address = event.host, event.address
        self._start_expires_s = self._now_s + START_TIMEOUT_S
        self._to_start.extend(rank for rank in range(self._num_processes) if self.device_of(rank) is not None)
        return []

    def _start_next(self) -> list[AgentInstruction]:
        """LIFE-1."""
        if self._forking is not None or not self._to_start:
            return []
        self._forking = self._to_start.popleft()
        return [StartRank(self._forking)]

    def _started(self, event: Started) -> list[AgentInstruction]:
        self._forking = None
        self._has_started_all = self._has_started_all or not self._to_start
        self._members[event.member] = False
        if self._phase is _Phase.FENCED:  # LIFE-6
            return [KillRanks((event.member,))]
        passed: list[AgentInstruction] = (
            [SignalRanks((event.member,), self._signal, drains=False)] if self._signal else []
        )
        return passed + self._decide(event)

    def _not_started(self, event: NotStarted) -> list[AgentInstruction]:
        self._forking = None
        if not self._has_started_all and self._phase is _Phase.SERVING and not self._is_over:  # LIFE-2
            return self._fail(2, f"rank {event.local_rank} cannot be started: {event.reason}")
        return self._decide(event)

    def _device_used(self, local_rank: int) -> list[AgentInstruction]:
        """LIFE-8."""
        self._forking = None
        if self._phase is _Phase.SERVING and not self._is_over:
            self._delayed[local_rank] = _Delayed(self._now_s + DEVICE_POLL_S, 0.0, waits_for_survivor=False)
        return []

    @property
    def _settle_s(self) -> float:
        """How long a restart that is decided now waits for survivors (LIFE-3)."""
        if self._has_committed:
            return 0.0
        return COMMIT_TIMEOUT_S if self._has_entered else ENTER_TIMEOUT_S

    def _survivor_entered(self) -> None:
        if not self._has_entered:
            self._has_entered = True
            self._hasten()

    def _survivor_committed(self, event: Committed) -> None:
        """Commits of the generation that has ended may still be read."""
        record = self.state.record
        if self._has_entered and record is not None and event.attempt.generation == record.generation:
            self._has_committed = True
            self._hasten()

    def _hasten(self) -> None:
        for delayed in self._delayed.values():
            if delayed.waits_for_survivor:
                delayed.waits_for_survivor = not self._has_committed
                delayed.at_s = min(delayed.at_s, self._now_s + self._settle_s + delayed.delay_s)

    # -- ends

    def _exited(self, event: Exited) -> list[AgentInstruction]:
        self._members.pop(event.member, None)
        self._kill_at_s.pop(event.member, None)
        self._retired.discard(event.member)
        return self._decide(event)

    def _retire(self, members: tuple[str, ...], reason: str) -> list[AgentInstruction]:
        """LIFE-4."""
        new = tuple(member for member in members if member in self._members and member not in self._retired)
        if not new:
            return []
        self._retired.update(new)
        asking = [member for member in new if self._members[member]]
        for member in asking:
            self._kill_at_s.setdefault(member, self._now_s + RETIRE_TIMEOUT_S)
        others = tuple(member for member in new if member not in asking)
        return [RetireMembers(new, reason), *([KillRanks(others)] if others else [])]

    def _signalled(self, number: int) -> list[AgentInstruction]:
        """LIFE-5."""
        is_serving = self._phase is _Phase.SERVING
        if number == self._signal == signal.SIGTERM and is_serving and is_repeated(self._now_s - self._signalled_s):
            return []
        drains = number == signal.SIGTERM and not self._signal and is_serving and self.state.record is not None
        how = f"exits on {signal.Signals(number).name}"
        done: list[AgentInstruction] = [] if drains else [*self._notify_over(how), StopHelpers()]
        if is_serving and not drains:
            self._phase = _Phase.ENDING
        self._signal, self._signalled_s = number, self._now_s
        grace_s = self._options.grace_period_s or (LEAVE_S if drains else END_S)
        if self._grace_ends_s is None or self._now_s + grace_s < self._grace_ends_s:
            self.grace_s, self._grace_ends_s = grace_s, self._now_s + grace_s
        stopped = self.state.handle(StartsStopped())
        return [*done, SignalRanks(tuple(self._members), number, drains), *(stopped if drains else [])]

    def _notify_over(self, how: str) -> list[AgentInstruction]:
        """Notify the other agents before their ranks' connections to the ranks here break."""
        generation = None if self._is_fenced else self.state.ended_generation()
        return [] if generation is None else [NotifyOver(generation, EndCause(how, (self.agent,)))]

    def _notify_finished(self, event: AgentEvent) -> list[AgentInstruction]:
        if self._has_finished or not self.state.finished:
            return []
        self._has_finished = True
        return [] if isinstance(event, Finished) else [NotifyFinished(self.state.finished_in)]

    @property
    def _code(self) -> int:
        """The exit code without a failure."""
        return 128 + self._signal if self._signal else self.state.exit_code

    def _fail(self, code: int, reason: str) -> list[AgentInstruction]:
        return [Fail(code, reason), *self._exit(self._code if self._signal else code)]

    def _exit(self, code: int, why: str = "") -> list[AgentInstruction]:
        """LIFE-7. `why`: for the other agents."""
        how = f"exits on {signal.Signals(self._signal).name}" if self._signal else "exits"
        notices = self._notify_over(how + why)
        self._phase = _Phase.EXITED
        return [*notices, StopHelpers(), Exit(code)]

    def _when_empty(self) -> list[AgentInstruction]:
        if self._members or self.num_coming:
            return []
        if self._phase is _Phase.CONNECTING and not self._signal:
            return []
        if self._phase is _Phase.FENCED and not self._is_over:
            return self._rejoin()
        return self._fail(1, self.state.lost) if self.state.lost else self._exit(self._code)  # AGENT-11

    # -- fencing

    def _fence(self, reason: str) -> list[AgentInstruction]:
        """LIFE-6."""
        if self._phase is not _Phase.SERVING:
            return []
        self._phase, self._is_fenced = _Phase.FENCED, True
        self._to_start.clear()
        self._delayed.clear()
        self._kill_at_s.clear()
        self._start_expires_s = None
        return [Fence(tuple(self._members), reason)]

    def _rejoin(self) -> list[AgentInstruction]:
        self._phase = _Phase.CONNECTING
        former = self.agent
        self._incarnation += 1
        self._has_entered = self._has_committed = False
        self.state = self._new_state(f"{self._first_id}.{self._incarnation}")
        return [Rejoin(self.agent, former)]
