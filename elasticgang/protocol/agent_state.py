"""The ranks of an agent under one id, as a state machine: events in, instructions out.

Pure. `agent_lifecycle.py` passes the events in, and executes the instructions or passes them on.

AGENT-1  The agent requests a record only after every live member of the present generation has requested one. The
    proposal is therefore a barrier: nothing of that generation runs behind it (RULE-3). A newer request replaces an
    open one.
AGENT-2  A member that dies, or that requests because of an error, ends its generation for all others at once.
AGENT-3  A newcomer ends no generation. The agent notifies the others, which regroup at their next step boundary.
AGENT-4  Before the first generation, the agent waits for ranks that are still starting, until `StartExpired`.
AGENT-5  Once a member has finished its steps, no rank is restarted. An agent that waits for the fate of the last step
    then fails when the coordinator notifies it that no record can be decided, unless ranks of this host have finished
    with the same parts of the model: they are retired. So are spares, at once: what they hold is older than the last
    step, or others have it too.
AGENT-6  A participating agent with no running rank still keeps a request open: the next record waits for every agent
    of the present one.
AGENT-7  A peer's notice is about the present generation or ignored. The session repeats one that came before its
    record.
AGENT-8  A member that begins to exit is killed, and is treated as dead: its generation ends, and the next one may
    begin. The agent notifies the other members first, because the end of its processes takes a core from them, and
    requests a record only after the kill. The member is restarted only once it is gone, with all its memory.
AGENT-9  With fallback layouts, a report says how many ranks are being started, so that the layout in force waits for
    them; after `StartExpired` it says none, and after `StartsStopped` none that is yet to be forked. A member whose
    loop an exception has left counts from then on: it is restarted once it has exited, which takes longer than the next
    record.
AGENT-10  A member that has finished its steps and is killed from outside has not done all that its script does after
    them, such as saving the model. The others go on to their end, but the job does not end with exit code 0.
AGENT-11  If the job's state is lost while members run that have left their loop, such as by `break`, these go on to
    their end: what they do there may save it. The other members are retired, none is restarted, and then the agent
    fails.
AGENT-12  A rank that comes to a job which has committed a step, and differs from the others, is refused: it is not
    restarted, because its script or its environment would have to change, and the others go on without it. It differs
    if it requests with another layout, number of steps or process group, or raises that its training state is of
    another form (ALIKE-1), or its global batch another one (POSITION-3). Where the job starts, or goes back to a
    checkpoint, such a rank ends it as any failure of its script does.
AGENT-13  Ranks that have found a difference of their states tell the agent, so that a rank that dies then does not take
    the news with it, and a script that catches the error does not hide it. The first one is told. If nobody can say who
    is right, the agent fails at once, and so do the others, whose ranks may not know it.
AGENT-14  A rank that dies again and again before one of its processes commits a step is restarted later and later. One
    that is killed for memory in each heal would otherwise cost the others two generations a second. Deaths of more than
    `WINDOW_S` ago do not count: a spare never commits.
AGENT-15  A generation in which ranks of this host have not connected counts towards the question about a firewall only
    if nothing else has ended it, such as the death of a rank, or a rank without a comm process.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from elasticgang.layout import ParallelLayout
from elasticgang.protocol.agent_events import (
    Abort,
    AnnounceJoin,
    BroadcastFailure,
    BroadcastJobFailed,
    Committed,
    DeliverRecord,
    End,
    Event,
    ExitBegan,
    Exited,
    Fail,
    Finished,
    HostsTried,
    Instruction,
    KillRanks,
    MemberLeft,
    NotStarted,
    PeerFailed,
    PeerFailedJob,
    PeerNotice,
    RecordAnswered,
    RecordRequested,
    ReportDeviceFault,
    RequestRecord,
    Restart,
    RetireMembers,
    RetryDue,
    Started,
    StartExpired,
    StartsStopped,
    StateDiffers,
    TellUnreached,
    TryHosts,
    Warn,
)
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.devices import Devices, Fault
from elasticgang.protocol.end_cause import EndCause
from elasticgang.protocol.next_record import infeasible
from elasticgang.protocol.reach import Reach
from elasticgang.protocol.record import (
    NO_RECORD,
    SPARE,
    CheckpointRef,
    MemberReport,
    Model,
    Record,
    Report,
    Undecided,
    Unrecoverable,
)
from elasticgang.protocol.restarts import WINDOW_S, Failure, Restarts
from elasticgang.protocol.shortened import shortened

_MAX_BACKOFF_S = 10.0
_FREE_DEATHS = 5
_MAX_NOT_STARTED = 12  # about a minute and a half
_NUM_UNCONNECTED = 3  # generations, after which a word is said about ports
_MAX_NAMED = 4  # hosts, in a message

_ALIKE = {  # by setting, what a rank does that differs from the others (AGENT-12)
    "number of steps": "loops over {} steps, but the other ranks over {}",
    "process group": "has the process group {}, but the other ranks {}",
    "--compare-state": "has the --compare-state {}, but the other ranks {}",
}
LEFT_STEP = "left a step by an exception, and goes on"  # of a rank, in messages

# The signals by which a process is ended from outside; any other signal is the script's own crash.
_KILLS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


class _Phase(enum.Enum):
    STARTING = "starting"
    REQUESTING = "requesting"
    SEATED = "seated"
    LEFT = "left"
    EXITING = "exiting"


_WAITING = (_Phase.STARTING, _Phase.REQUESTING)


@dataclass
class _Rank:
    local_rank: int
    phase: _Phase = _Phase.STARTING
    report: MemberReport | None = None
    checkpoint: CheckpointRef | None = None
    has_committed: bool = False  # AGENT-14
    generation: int = 0  # the newest in which it had a seat; 0: it had none
    finished: bool = False
    by_script: bool = False
    raised: bool = False
    comes_late: bool | None = None  # AGENT-12: its first seat was in a job with a committed step, and no checkpoint
    is_refused: bool = False

    @property
    def restarts(self) -> bool:
        """It takes no further step, and is restarted once its process is gone, as a rule."""
        return self.phase is _Phase.EXITING or (self.phase is _Phase.LEFT and self.raised)


@dataclass
class AgentState:
    """The ranks of one agent. `handle` is the only method that changes state."""

    agent: str
    host: str
    job: str
    restarts: Restarts
    num_ranks: int
    num_spares: int = 0
    devices: Devices = field(default_factory=Devices)
    address: str = ""
    min_agents: int = 1
    max_agents: int = 0
    record: Record | None = None
    newest_commit: Attempt | None = None
    finished: bool = False
    exit_code: int = 0  # unless a signal or a failure decides about it (AGENT-10)
    lost: str = ""  # why the agent fails once no member runs (AGENT-11)
    finished_in: int = 0  # the newest generation in which a member here has finished
    reach: Reach = field(default_factory=Reach)
    _layout: ParallelLayout | None = None
    _settings: tuple[tuple[str, str], ...] = ()
    _ranks: dict[str, _Rank] = field(default_factory=dict)
    _difference: tuple[int, int] = 0, 0  # the generation and the step of the last one that was found
    _over: int = 0  # the newest generation of whose end this agent has sent or received a notice
    _timed_out: int = 0  # the newest one in which it knows that a collective has timed out; AGENT-2 may tell less
    _num_started: int = 0
    _num_never_started: int = 0  # ranks that had no device when this state began (DEVICE-2)
    _num_restarts: int = 0
    _waits_for_start: bool = True
    _starts_are_late: bool = False
    _has_stopped_starts: bool = False
    _early_deaths: dict[int, list[float]] = field(default_factory=dict)  # when; AGENT-14
    _num_not_started: int = 0  # in a row
    _num_steps: int = 0
    _all_by_script: bool = True  # whether every rank that has left called `manager.leave()`
    _has_warned_unjoined: bool = False
    _finished_parts: set[Model] = field(default_factory=set)
    _num_tries: int = 0  # to reach other hosts
    _awaited_try: int = 0  # REACH-1: the number of the one that the report waits for; 0: none
    _tried_in: int = 0  # the newest generation for which all were tried
    _unconnected_in: int = 0  # the newest generation to which a rank here has not connected
    _num_unconnected: int = 0  # of these, since the last commit
    _explained_in: int = 0  # the newest of which something else is known to have ended it (AGENT-15)

    def __post_init__(self) -> None:
        self._num_never_started = self.devices.num_without

    def handle(self, event: Event) -> list[Instruction]:
        before = self.num_starting
        instructions = self._handle(event)
        num_starting = self.num_starting
        if num_starting > before:
            self._starts_are_late = False
        if num_starting != before and RequestRecord() not in instructions:  # AGENT-9
            instructions += self._request_if_ready()
        return instructions

    def _handle(self, event: Event) -> list[Instruction]:
        match event:
            case Started(member, local_rank):
                self._ranks[member] = _Rank(local_rank)
                self._num_started += 1
                self._num_not_started = 0
                return []
            case NotStarted(local_rank, reason):
                return self._not_started(local_rank, reason)
            case RecordRequested():
                return self._record_requested(event)
            case Committed(member, attempt):
                self._note_commit(attempt)
                self._num_unconnected = 0
                if member in self._ranks and attempt.step > 0:
                    self.restarts.committed(self._ranks[member].local_rank)
                    self._ranks[member].has_committed = True
                return []
            case MemberLeft(member, finished, in_order, by_script, num_steps, raised):
                if (rank := self._ranks.get(member)) is not None:
                    rank.by_script, rank.raised, self._num_steps = by_script, raised, num_steps
                return self._member_left(member, finished, in_order)
            case ExitBegan(member):
                return self._exit_began(member)
            case Exited():
                return self._exited(event)
            case StartExpired():
                self._waits_for_start, self._starts_are_late = False, True
                return self._request_if_ready()
            case StartsStopped():
                self._has_stopped_starts = True
                return []
            case PeerNotice():
                return self._peer_noticed(event)
            case PeerFailed(agent, member, local_rank, step):
                why = self.restarts.failed_elsewhere(member, f"rank {local_rank} of agent {agent}", step)
                return [] if why is None else [Fail(1, why)]
            case StateDiffers():
                return self._state_differs(event)
            case PeerFailedJob(reason):
                return [Fail(1, reason)]
            case Finished():
                self.finished = True
                return self._retire_the_rest() + self._request_if_ready()
            case RecordAnswered():
                return self._record_answered(event.answer)
            case HostsTried():
                return self._hosts_tried(event)
            case RetryDue():
                self.reach.next_try_s = None
                return self._try_hosts(self.reach.unreached)

    def report(self) -> Report:
        """The report to send with a request now."""
        assert self._layout is not None
        own = () if self.record is None else self.record.seats_of(self.agent)
        live = self._live()
        requesting = self._in(_Phase.REQUESTING).values()
        return Report(
            agent=self.agent,
            host=self.host,
            job=self.job,
            layout=self._layout,
            newest_record=NO_RECORD if self.record is None else self.record.ref,
            members=tuple(rank.report for rank in requesting if rank.report is not None),
            newest_commit=self.newest_commit,
            exited=tuple(seat.member for seat in own if seat.member not in live),
            checkpoint=max((rank.checkpoint for rank in requesting if rank.checkpoint is not None), default=None),
            num_ranks=self.num_ranks,
            num_starting=0 if self._starts_are_late else self.num_starting,
            num_seats=self.num_ranks if self.num_spares else None,
            address=self.address,
            min_agents=self.min_agents,
            max_agents=self.max_agents,
            settings=self._settings,
        )

    def ended_generation(self) -> int | None:
        """The generation that ends for the other agents if all members here exit now; None: none does."""
        record = self.record
        if self.finished or record is None or not self.is_awaited() or not self._in(_Phase.SEATED):
            return None
        return None if self._over >= record.generation else record.generation

    def num_successors(self, draining: Collection[str]) -> int:
        """How many ranks without a seat could get one: those that start, restart or wait, or exit and restart then,
        except `draining`. None once no rank starts any more (LIFE-1): the last holders of a part would wait for it."""
        if self.finished or self.lost or self._has_stopped_starts:
            return 0
        waiting = [rank for member, rank in self._ranks.items() if member not in draining]
        return self._num_to_start + sum([rank.phase in _WAITING or rank.restarts for rank in waiting])

    @property
    def num_starting(self) -> int:
        """AGENT-9: how many ranks the layout in force may wait for, whether or not they are late."""
        layout = self._layout
        if layout is None or not layout.fallback or self.finished:
            return 0
        restart = not self._has_stopped_starts
        ranks = self._ranks.values()
        return self._num_to_start + sum(
            [rank.phase is _Phase.STARTING or (restart and rank.restarts) for rank in ranks]
        )

    @property
    def _num_to_start(self) -> int:
        """Starts and restarts still to come."""
        return 0 if self._has_stopped_starts else max(0, self._num_processes + self._num_restarts - self._num_started)

    @property
    def _num_processes(self) -> int:
        """Ranks and spares that the lifecycle starts by itself."""
        return self.num_ranks + self.num_spares - self._num_never_started

    def live(self) -> tuple[str, ...]:
        return tuple(self._ranks)

    def local_ranks(self, members: Iterable[str]) -> list[int]:
        """The numbers on this host of those `members` that run, sorted."""
        return sorted(self._ranks[member].local_rank for member in members if member in self._ranks)

    def _live(self) -> set[str]:
        return {member for member, rank in self._ranks.items() if rank.phase not in (_Phase.LEFT, _Phase.EXITING)}

    def _in(self, *phases: _Phase) -> dict[str, _Rank]:
        return {member: rank for member, rank in self._ranks.items() if rank.phase in phases}

    def _note_commit(self, attempt: Attempt | None) -> None:
        if attempt is not None and attempt.step > 0 and (self.newest_commit is None or attempt > self.newest_commit):
            self.newest_commit = attempt

    def _record_requested(self, event: RecordRequested) -> list[Instruction]:
        rank = self._ranks.get(event.member)
        if rank is None or rank.phase is _Phase.EXITING:
            return []
        if (what := self._unlike(event)) is not None:
            return self._refuse(event.member, rank, what)
        is_alone = self.max_agents == 1  # otherwise other hosts may have the ranks that are missing
        if is_alone and (lack := infeasible(event.layout, self.num_ranks)) is not None:
            return [Fail(2, lack)]
        self._layout, self._settings = event.layout, self._settings or event.settings
        newcomer, was_seated = rank.phase is _Phase.STARTING, rank.phase is _Phase.SEATED
        rank.phase, rank.report, rank.checkpoint = _Phase.REQUESTING, event.report, event.checkpoint
        self._note_commit(event.report.tip)
        if self.lost:
            return [RetireMembers((event.member,), self.lost)]
        if self.finished and not self._can_finish(rank):
            return [RetireMembers((event.member,), "the job has finished")]
        instructions: list[Instruction] = []
        if event.broken and not newcomer:
            lack = f"has no {event.lacks}" if event.lacks else ""
            own = LEFT_STEP if event.left_step else lack or self._unloaded(event)
            what = own or ("timed out in a collective" if event.timed_out else "lost a peer")
            late = event.timed_out and not own
            instructions = self._abort(what, rank.local_rank, is_effect=not own, timed_out=late)
        if was_seated and not event.connected:
            instructions += self._unconnected()
        elif was_seated and event.timed_out:
            instructions += self._try_all_hosts()
        instructions += self._request_if_ready()
        return self._notice_join() if newcomer and not instructions else instructions

    def _unlike(self, event: RecordRequested) -> str | None:
        """What of the member's script is not as that of the other ranks. None: nothing."""
        if self._layout is not None and event.layout != self._layout:
            return f"declares {event.layout}, but the other ranks {self._layout}"
        own, wanted = dict(event.settings), dict(self._settings)
        for name, words in _ALIKE.items():
            if name in own and name in wanted and own[name] != wanted[name]:
                return words.format(own[name], wanted[name])
        return None

    def _refuse(self, member: str, rank: _Rank, what: str) -> list[Instruction]:
        """AGENT-12."""
        has_committed = self.record is not None and self.newest_commit is not None
        if not has_committed or rank.phase is not _Phase.STARTING:
            return [Fail(2, f"rank {rank.local_rank} {what}")]
        rank.phase, rank.is_refused = _Phase.EXITING, True
        return [Warn(f"rank {rank.local_rank} {what}: it is refused, and not restarted"), KillRanks((member,))]

    def _unloaded(self, event: RecordRequested) -> str:
        """That the member cannot use the checkpoint which its generation began with: it has not loaded it, and
        names an older one, or none. Empty: something else ended the generation."""
        record, other, tip = self.record, event.checkpoint, event.report.tip
        if record is None or not record.checkpoint or (tip is not None and tip >= record.committed):
            return ""
        is_usable = other is not None and other.attempt >= record.committed
        return "" if is_usable else f"could not load the checkpoint of step {record.committed.step}"

    def _peer_noticed(self, event: PeerNotice) -> list[Instruction]:
        if self.record is None or event.generation != self.record.generation:  # AGENT-7
            return []
        if not event.over:
            return self._notice_join()
        self._note_cause(event.cause)
        if self._over >= event.generation and not event.cause.timed_out:
            return []
        self._over = max(self._over, event.generation)
        return self._abort_seated(event.cause) + (self._try_all_hosts() if event.cause.timed_out else [])

    def _notice_join(self) -> list[Instruction]:
        seated = tuple(self._in(_Phase.SEATED))
        return [AnnounceJoin(seated, self.record.generation)] if seated and self.record is not None else []

    def _abort(self, what: str, *ranks: int, is_effect: bool = False, timed_out: bool = False) -> list[Instruction]:
        """AGENT-2: end the generation for the members here, and once for the other agents, because of `what` the local
        `ranks` did."""
        record, cause = self.record, EndCause(what, (self.agent,), ranks, is_effect, timed_out)
        self._note_cause(cause)
        if record is None or self._over >= record.generation or not self.is_awaited():
            return self._abort_seated(cause)
        self._over = record.generation
        self._timed_out = record.generation if timed_out else self._timed_out
        return [Abort(tuple(self._in(_Phase.SEATED)), record.generation, cause)]

    def _abort_seated(self, cause: EndCause) -> list[Instruction]:
        """Also without such a member, if it is new that a collective has timed out: a peer that has only lost its
        connection by that is mostly quicker to say so."""
        seated = tuple(self._in(_Phase.SEATED))
        record = self.record
        if record is None or not (seated or (cause.timed_out and self._timed_out < record.generation)):
            return []
        self._timed_out = record.generation if cause.timed_out else self._timed_out
        return [Abort(seated, record.generation, cause)]

    # -- which hosts it reaches

    def _unconnected(self) -> list[Instruction]:
        assert self.record is not None
        if self._unconnected_in < self.record.generation:
            self._unconnected_in = self.record.generation
            self._num_unconnected += self._explained_in < self.record.generation
        return self._try_all_hosts()

    def _note_cause(self, cause: EndCause) -> None:
        """`cause` has ended the present generation (AGENT-15)."""
        if self.record is not None and cause.explains:
            self._explained_in = self.record.generation

    def _try_all_hosts(self) -> list[Instruction]:
        """REACH-1."""
        record = self.record
        if record is None or not self.is_awaited() or self.finished or self._tried_in >= record.generation:
            return []
        self._tried_in = record.generation
        own = record.agents.index(self.agent)
        instructions = self._try_hosts((*record.agents[own + 1 :], *record.agents[:own]))
        self._awaited_try = self._num_tries
        return instructions

    def _try_hosts(self, agents: Iterable[str]) -> list[Instruction]:
        addresses = self._addresses()
        self._num_tries += 1
        others = tuple((agent, address) for agent in agents if (address := addresses.get(agent)))
        return [TryHosts(self.agent, self._num_tries, others)]

    def _addresses(self) -> dict[str, str]:
        return {} if self.record is None else self.record.addresses_by_agent

    def _hosts_tried(self, event: HostsTried) -> list[Instruction]:
        if event.agent != self.agent:
            return []
        was_awaited = event.number == self._awaited_try
        before, present = self.reach.unreached, self._addresses()
        unreached = {agent: why for agent, why in event.unreached if agent in present}
        self.reach.tried(event.reached, unreached, event.at_s)
        instructions = self._tell_unreached(before)
        if new := {agent: why for agent, why in unreached.items() if agent not in before}:
            instructions.append(Warn(f"this host does not reach {self._hosts(new)}"))
        if not was_awaited:
            return instructions
        self._awaited_try = 0
        if self._num_unconnected == _NUM_UNCONNECTED and not self.reach.unreached:
            instructions.append(
                Warn(
                    f"ranks of this host have not connected in {_NUM_UNCONNECTED} generations, although it reaches the "
                    "other hosts: does a firewall close the ports of the ranks?"
                )
            )
        return instructions + self._request_if_ready()

    def _tell_unreached(self, before: tuple[str, ...]) -> list[Instruction]:
        unreached = self.reach.unreached
        return [] if unreached == before else [TellUnreached(unreached)]

    def _hosts(self, unreached: Mapping[str, str]) -> str:
        addresses = self._addresses()
        hosts = sorted((addresses[agent].rpartition(":")[0] or agent, why) for agent, why in unreached.items())
        return shortened([f"{host} ({why})" for host, why in hosts], _MAX_NAMED)

    def _request_if_ready(self) -> list[Instruction]:
        return [RequestRecord()] if self.may_request() else []

    def may_request(self) -> bool:
        """AGENT-1. Check it again when a `RequestRecord` is carried out: an answer may have arrived in between."""
        asking = self._in(_Phase.REQUESTING)
        if not (asking or self.is_awaited()) or self._in(_Phase.SEATED):
            return False
        if self.waits_for_start or self.lost or self._awaited_try:
            return False
        return not self.finished or any(map(self._can_finish, asking.values()))

    def takes_part(self, member: str) -> bool:
        """Whether `member` has a seat or has requested a record, and has neither left nor begun to exit."""
        return member in self._in(_Phase.SEATED, _Phase.REQUESTING)

    def is_awaited(self) -> bool:
        """Whether other agents take part, which cannot go on before this one sends a request (AGENT-6)."""
        return self.record is not None and len(self.record.agents) > 1

    @property
    def waits_for_start(self) -> bool:
        """AGENT-4."""
        return self.record is None and self._waits_for_start and self._is_starting()

    def _is_starting(self) -> bool:
        if self._num_started < self._num_processes:
            return True
        return _Phase.STARTING in [rank.phase for rank in self._ranks.values()]

    def _member_left(self, member: str, finished: bool, in_order: bool) -> list[Instruction]:
        rank = self._ranks.get(member)
        if rank is None or rank.phase is _Phase.EXITING:
            return []
        is_missed = rank.phase is _Phase.SEATED and not in_order  # a requesting rank or a spare is in no generation
        rank.phase, rank.finished = _Phase.LEFT, finished
        self.finished = self.finished or finished
        self.finished_in = max(self.finished_in, rank.generation if finished else 0)
        if finished and (part := self._part_of(member)) is not None:
            self._finished_parts.add(part)
        instructions = self._abort("left before the last step", rank.local_rank) if is_missed and not finished else []
        if self.finished:
            instructions += self._retire_the_rest()
        return instructions + self._request_if_ready()

    def _retire_the_rest(self) -> list[Instruction]:
        """Retire members that do not hold the final state: ranks without state, and spares with an older one."""
        rest = tuple(
            member
            for member, rank in {**self._in(_Phase.REQUESTING), **self._in(_Phase.STARTING)}.items()
            if not self._can_finish(rank)
        )
        return [RetireMembers(rest, "the job has finished")] if rest else []

    def _part_of(self, member: str) -> Model | None:
        """The part of the model in the member's seat."""
        seat = None if self.record is None else self.record.seat(member)
        return None if self.record is None or seat is None else self.record.part_of(seat)

    def _can_finish(self, rank: _Rank) -> bool:
        """Whether the rank may have applied or prepared the last step."""
        report, record = rank.report, self.record
        if report is None:
            return False
        if record is not None and (seat := record.seat(report.id)) is not None and seat.status == SPARE:
            return False
        held = [attempt for attempt in (report.tip, report.pending) if attempt is not None]
        return bool(held) and (self.newest_commit is None or max(held) >= self.newest_commit)

    def _exit_began(self, member: str) -> list[Instruction]:
        """AGENT-8, DEATH-3."""
        if not self.takes_part(member):
            return []
        rank = self._ranks[member]
        had_seat, rank.phase = rank.phase is _Phase.SEATED, _Phase.EXITING
        aborts = self._abort("died", rank.local_rank) if had_seat else []
        return [*aborts, KillRanks((member,)), *self._request_if_ready()]

    def _exited(self, event: Exited) -> list[Instruction]:
        rank = self._ranks.pop(event.member, None)
        if rank is None:
            return []
        instructions: list[Instruction] = []
        is_early = event.status == 0 and not event.draining
        if rank.phase is _Phase.SEATED:
            instructions += self._abort(describe_exit(event.status, is_early=is_early), rank.local_rank)
        is_known = rank.phase in (_Phase.LEFT, _Phase.EXITING)
        if not is_known and (self.record is None or rank.phase is not _Phase.STARTING):
            instructions += self._request_if_ready()
        by_kill = event.blameless or (-event.status in _KILLS and not event.raised)
        self._all_by_script = self._all_by_script and (rank.by_script or not event.draining)
        if self.lost:  # AGENT-11
            return []
        if event.device_fault is not None and not rank.finished:
            faulted = self._device_faulted(rank, event, event.device_fault)
            if faulted is not None:
                return [*instructions, *faulted]
        if rank.is_refused or (event.differs and rank.comes_late):  # AGENT-12
            why = f"rank {rank.local_rank} differs from the others: it is refused, and not restarted"
            return instructions + self._go_on_without(2, why, is_known=rank.is_refused)
        if event.draining and (event.status == 0 or by_kill):
            return instructions + self._end_if_too_few()
        if event.status == 0:
            return instructions + self._warn_if_early(rank, event.joined)
        if self.finished and by_kill:  # AGENT-5
            return instructions + self._killed_at_end(rank, event)
        if not (by_kill or self.finished) and self.restarts.gives_up(_failure_of(rank, event)):  # RESTART-3
            status = _script_status(event)
            why = f"rank {rank.local_rank} {describe_exit(status)} before it began a step, again: it is not restarted"
            return instructions + self._go_on_without(_exit_code(status), why)
        if not by_kill:
            failed = self._failed(rank, event)
            if self.finished or isinstance(failed[-1], Fail):  # the others finished before it had exited
                return failed if isinstance(failed[-1], Fail) else instructions
            instructions = [*failed, *instructions]
        if event.draining:
            return instructions + self._end_if_too_few()
        self._num_restarts += 1
        return [*instructions, Restart(rank.local_rank, self._backoff(rank, event.at_s))]

    def _go_on_without(self, code: int, why: str, *, is_known: bool = False) -> list[Instruction]:
        """AGENT-12, RESTART-3. `why`: the rank is not restarted. `code`: of the agent's exit, if no rank is left.
        `is_known`: the user was told."""
        notices: list[Instruction] = [] if is_known else [Warn(why)]
        if self.finished:  # AGENT-5
            return notices
        if self._num_staying == 0:
            return [*notices, Fail(code, f"no rank of this host is left; {why}")]
        return notices + self._end_if_too_few()

    def _killed_at_end(self, rank: _Rank, event: Exited) -> list[Instruction]:
        """AGENT-10."""
        if not rank.finished or event.status >= 0:
            return []
        self.exit_code = 128 - event.status
        what = f"rank {rank.local_rank} {describe_exit(event.status)}"
        return [Warn(f"{what} after its last step, before its script had ended: exit code {self.exit_code}")]

    def _device_faulted(self, rank: _Rank, event: Exited, reason: str) -> list[Instruction] | None:
        """The device of the rank has failed. None: the script is at fault (DEVICE-3)."""
        restarts = not (self.finished or event.draining)
        fault = Fault(rank.local_rank, event.step, rank.generation, reason, event.at_s, restarts, event.taken)
        outcome = self.devices.faulted(fault)
        if outcome is None:
            return None
        device, moved = outcome.device, outcome.next_device
        uuid, is_chosen = outcome.uuid, event.taken.is_chosen and outcome.uuid != ""
        report = ReportDeviceFault(
            device, rank.local_rank, reason, outcome.number, outcome.is_quarantined, moved, uuid, is_chosen
        )
        name = uuid if is_chosen else f"{device} ({uuid})" if uuid else str(device)
        what = f"device {name} of rank {rank.local_rank} has failed ({reason})"
        if outcome.is_quarantined:
            then = "the rank is not restarted" if moved is None else f"the rank continues on device {moved}"
            if is_chosen:
                then += ", because its script would choose the device again"
            what = f"{what} and is quarantined: {then}"
        elif restarts:
            what = f"{what}: restart {outcome.number} of {self.devices.max_faults} on it within an hour"
        notices: list[Instruction] = [report, Warn(what)]
        if self.finished:  # AGENT-5
            return notices
        if event.draining:
            return notices + self._end_if_too_few()
        if moved is None:
            self._all_by_script = False
            if self._num_staying == 0:
                return [*notices, Fail(1, f"no rank of this host is left; the last one lost its device: {reason}")]
            return notices + self._end_if_too_few()
        self._num_restarts += 1
        return [*notices, Restart(rank.local_rank, self._backoff(rank, event.at_s))]

    def _failed(self, rank: _Rank, event: Exited) -> list[Instruction]:
        """The script has failed. The last instruction is Fail, unless the rank may be restarted."""
        status = _script_status(event)
        what, code = f"rank {rank.local_rank} {describe_exit(status)}", _exit_code(status)
        if rank.finished:
            return [Fail(code, what)]
        reason = self.restarts.failed(_failure_of(rank, event))
        if event.differs and event.step is not None:  # AGENT-12: its successor would be the one that comes late
            reason = reason or f" in step {event.step}, because it differs from the others"
        notices: list[Instruction] = []
        if event.step is not None and not event.heals and self.is_awaited():
            notices = [BroadcastFailure(event.member, rank.local_rank, event.step)]
        if reason is not None:
            return [*notices, Fail(code, what + reason)]
        where = "before it began a step" if event.step is None else f"in step {event.step}"
        number, allowed = self.restarts.num_recent(rank.local_rank), self.restarts.max_restarts
        rest = "" if self.finished or event.draining else f": restart {number} of {allowed} within an hour"
        return [*notices, Warn(f"{what} {where}{rest}")]

    def _warn_if_early(self, rank: _Rank, joined: bool) -> list[Instruction]:
        """The script has ended with exit code 0."""
        has_seat = rank.phase is not _Phase.STARTING
        if not (joined or has_seat):
            return self._warn_unjoined(rank)
        if rank.finished or self.finished:
            return []
        others = has_seat and (self._live() or self.is_awaited())
        cost = "; the other ranks lose the step under way (`manager.leave()` costs them none)" if others else ""
        return [Warn(f"rank {rank.local_rank} {describe_exit(0, is_early=True)}: not restarting it{cost}")]

    def _warn_unjoined(self, rank: _Rank) -> list[Instruction]:
        """Warn once: the other ranks run the same script."""
        if self._has_warned_unjoined or self.finished:
            return []
        self._has_warned_unjoined = True
        return [
            Warn(
                f"rank {rank.local_rank} exited with code 0 and never called `elasticgang.join`: it took no part in "
                "this job; not restarting it. A script for `elasticgang run` calls `manager = elasticgang.join()`, "
                "loops over `manager.steps(...)`, and uses `manager.gangs`"
            )
        ]

    def _state_differs(self, event: StateDiffers) -> list[Instruction]:
        """AGENT-13."""
        found = event.generation, event.step
        if found == self._difference:
            return []
        self._difference = found
        if not event.ends_job:
            return [Warn(event.text)]
        return [BroadcastJobFailed(event.step, event.generation, event.text), Fail(1, event.text)]

    def _not_started(self, local_rank: int, reason: str) -> list[Instruction]:
        if self._has_stopped_starts:
            return []
        self._num_not_started += 1
        if not self._ranks and self._num_not_started > _MAX_NOT_STARTED:
            return [Fail(1, f"rank {local_rank} cannot be started: {reason}")]
        delay_s = float(min(2 ** (self._num_not_started - 1), _MAX_BACKOFF_S))
        warning = f"rank {local_rank} could not be started; trying again in {delay_s:g} s: {reason}"
        return [Warn(warning), Restart(local_rank, delay_s)]

    def _end_if_too_few(self) -> list[Instruction]:
        """End the job if ranks have left early, the remaining ones cannot go on, and no other agent takes part."""
        num_staying = self._num_staying
        if self.finished or (num_staying == 0 and self._ranks):
            return []
        step = 0 if self.newest_commit is None else self.newest_commit.step
        if num_staying == 0 and (self._all_by_script or self.is_awaited()):
            where = " of this host" if self.is_awaited() else ""
            done = f"{step} of {self._num_steps}" if self._num_steps else f"{step}"
            return [End(f"all ranks{where} have left: {done} steps are committed")]
        if self.is_awaited():
            return []
        if num_staying == 0:
            return [Fail(1, f"all ranks have left; the last committed step is {step}")]
        lack = None if self._layout is None or self.max_agents != 1 else infeasible(self._layout, num_staying)
        return [] if lack is None else [Fail(1, f"{lack}: the others have left; the last committed step is {step}")]

    @property
    def _num_staying(self) -> int:
        """Ranks that take part, begin to exit, or are still to start."""
        return len(self._live()) + len(self._in(_Phase.EXITING)) + self._num_to_start

    def _backoff(self, rank: _Rank, now_s: float) -> float:
        """Seconds before a restart (AGENT-14)."""
        before = [] if rank.has_committed else self._early_deaths.get(rank.local_rank, [])
        early = [] if rank.has_committed else [*(at_s for at_s in before if at_s > now_s - WINDOW_S), now_s]
        self._early_deaths[rank.local_rank] = early
        return 0.0 if len(early) <= _FREE_DEATHS else float(min(2 ** (len(early) - _FREE_DEATHS - 1), _MAX_BACKOFF_S))

    def _record_answered(self, answer: Record | Undecided | Unrecoverable) -> list[Instruction]:
        if isinstance(answer, Record):
            if self.record is not None and answer.generation <= self.record.generation:
                return []
            self.record, self._awaited_try = answer, 0
            self.newest_commit = None  # earlier commits are in the record, or it has rolled them back
            self._note_commit(answer.committed)
            return self._deliver(answer)
        if isinstance(answer, Unrecoverable):
            in_doubt = [member for member, rank in self._in(_Phase.REQUESTING).items() if self._can_finish(rank)]
            if self.finished and not in_doubt:
                return []  # the holders of the state have finished and ended; who has none is retired already
            if self.finished and all(self._part_of(member) in self._finished_parts for member in in_doubt):  # AGENT-5
                return [RetireMembers(tuple(in_doubt), "the job has finished")]
            return self._lose_state(f"the job's state is lost: {answer.reason}{self._last_to_die()}")
        why = dict(answer.refused).get(self.agent)
        if why is not None:
            return [Fail(2, f"the job refused this host: {why}")]
        if self.finished and self.may_request():  # AGENT-5
            return [Fail(1, f"others have finished, but here the last step is in doubt: {answer.reason}")]
        return []

    def _last_to_die(self) -> str:
        """Ranks whose exits nothing has told, because they go on."""
        dying = [str(rank.local_rank) for rank in self._in(_Phase.EXITING).values()]
        return f"; rank {', '.join(dying)} died last" if dying else ""

    def _lose_state(self, reason: str) -> list[Instruction]:
        """AGENT-11."""
        if not self._in(_Phase.LEFT):
            return [Fail(1, reason)]
        self.lost = reason
        rest = tuple(self._in(_Phase.REQUESTING, _Phase.STARTING))
        return [Warn(f"{reason}; the ranks that have left their loop run to their end"), RetireMembers(rest, reason)]

    def _deliver(self, record: Record) -> list[Instruction]:
        own = {seat.member: seat for seat in record.seats_of(self.agent)}
        seated = []
        for member, rank in self._in(_Phase.REQUESTING).items():
            if (seat := own.get(member)) is not None:
                # A spare runs nothing: its last report stays an open request.
                rank.phase = _Phase.REQUESTING if seat.status == SPARE else _Phase.SEATED
                if rank.comes_late is None and rank.phase is _Phase.SEATED:
                    rank.comes_late = record.committed.step > 0 and not record.checkpoint
                rank.generation = record.generation
                seated.append(member)
        before = self.reach.unreached
        self.reach.keep(record.agents)
        instructions: list[Instruction] = [DeliverRecord(tuple(seated), record), *self._tell_unreached(before)]
        live = self._live()
        dead = [seat.local_rank for seat in own.values() if seat.status != SPARE and seat.member not in live]
        if dead:
            instructions += self._abort("died before the generation began", *dead)
        elif any(member not in own for member in self._in(_Phase.REQUESTING)):  # AGENT-3
            instructions += self._notice_join()
        return instructions + self._request_if_ready()


def describe_exit(status: int, *, is_early: bool = False) -> str:
    """For messages: "was killed by SIGKILL", "exited with code 3". `is_early`: before its loop had ended."""
    if status >= 0:
        return f"exited with code {status}" + (" before its loop had ended" if is_early else "")
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def tells_exit(instructions: Iterable[object], local_rank: int, status: int) -> bool:
    """Whether the user reads of the exit of the rank in what `instructions` write."""
    exit_of_rank = f"rank {local_rank} {describe_exit(status)}"
    for instruction in instructions:
        match instruction:
            case Warn(text) | Fail(_, text):
                if text.startswith(exit_of_rank):
                    return True
            case ReportDeviceFault():
                return True
    return False


def _failure_of(rank: _Rank, event: Exited) -> Failure:
    return Failure(event.member, rank.local_rank, event.step, event.at_s, event.heals)


def _script_status(event: Exited) -> int:
    """1 where the script had raised before it was killed."""
    return 1 if event.raised and event.status <= 0 else event.status


def _exit_code(status: int) -> int:
    """Of the agent, after a failure of a rank's script."""
    return status if status > 0 else 128 - status
