"""What an agent does about its ranks: events in, instructions out.

Pure: `agent.py` performs the instructions and brings the events.

A1  The lighthouse is asked only when every live member of the present generation has asked, so that the proposal is
    the barrier behind which nothing of that generation runs (R3). One question is outstanding at a time.
A2  A member that dies, or that asks because of an error, ends its generation for all others at once.
A3  A newcomer ends no generation: the others are told, and come at their next step boundary.
A4  Before the first generation, ranks that are still starting are waited for, until `StartExpired`.
A5  Once a member has finished its steps, nobody is restarted.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Iterable
from dataclasses import dataclass, field

from elasticgang.layout import ParallelLayout
from elasticgang.quorum.commit import Attempt
from elasticgang.quorum.decide import SPARE, Lost, MemberReport, Record, Report, Void

_RETRY_VOID_S = 0.05
_MAX_BACKOFF_S = 10.0
_FREE_DEATHS = 5

# The signals by which a process is ended from outside; any other signal is the script's own crash.
_KILLS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


@dataclass(frozen=True)
class Started:
    member: str
    local_rank: int


@dataclass(frozen=True)
class Asked:
    """`broken`: because a collective failed, not because the generation ended in order."""

    member: str
    report: MemberReport
    layout: ParallelLayout
    broken: bool


@dataclass(frozen=True)
class Committed:
    member: str
    attempt: Attempt


@dataclass(frozen=True)
class Left:
    """The member takes part no more. `finished`: it has done all steps."""

    member: str
    finished: bool


@dataclass(frozen=True)
class Exited:
    """The process is gone. `status`: as of `subprocess`, negative for a signal. `blameless`: it ended with an error
    that a lost peer caused."""

    member: str
    status: int
    blameless: bool = False


@dataclass(frozen=True)
class StartExpired:
    pass


@dataclass(frozen=True)
class Answered:
    """The outcome of the last `Ask`."""

    answer: Record | Void | Lost


Event = Started | Asked | Committed | Left | Exited | StartExpired | Answered


@dataclass(frozen=True)
class Abort:
    """End `generation` for `members`."""

    members: tuple[str, ...]
    generation: int
    reason: str


@dataclass(frozen=True)
class NoticeJoin:
    """Tell `members` of `generation` that somebody waits to join."""

    members: tuple[str, ...]
    generation: int


@dataclass(frozen=True)
class Ask:
    """Ask the lighthouse with the present `report()`, after `delay_s`."""

    delay_s: float = 0.0


@dataclass(frozen=True)
class Deliver:
    members: tuple[str, ...]
    record: Record


@dataclass(frozen=True)
class Restart:
    local_rank: int
    delay_s: float


@dataclass(frozen=True)
class Dismiss:
    """The job is over for `members`, which hold no state: end them."""

    members: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class Fail:
    """The job has failed: end everything and exit with `code`."""

    code: int
    reason: str


Instruction = Abort | NoticeJoin | Ask | Deliver | Restart | Dismiss | Fail


class _Phase(enum.Enum):
    STARTING = "starting"
    ASKING = "asking"
    SEATED = "seated"
    LEFT = "left"


@dataclass
class _Rank:
    local_rank: int
    phase: _Phase = _Phase.STARTING
    report: MemberReport | None = None
    entered_any: bool = False
    finished: bool = False


@dataclass
class Roster:
    """The ranks of one agent. `handle` is the only way in."""

    agent: str
    host: str
    job: str
    coordinator: str
    max_restarts: int
    num_ranks: int
    record: Record | None = None
    known: Attempt | None = None
    finished: bool = False
    failures: int = 0
    _layout: ParallelLayout | None = None
    _ranks: dict[str, _Rank] = field(default_factory=dict)
    _asking: bool = False
    _num_started: int = 0
    _waits_for_start: bool = True
    _early_deaths: dict[int, int] = field(default_factory=dict)

    def handle(self, event: Event) -> list[Instruction]:
        match event:
            case Started(member, local_rank):
                self._ranks[member] = _Rank(local_rank)
                self._num_started += 1
                return []
            case Asked():
                return self._asked(event)
            case Committed(_, attempt):
                self._hear(attempt)
                return []
            case Left(member, finished):
                return self._left(member, finished)
            case Exited():
                return self._exited(event)
            case StartExpired():
                self._waits_for_start = False
                return self._ask_if_ready()
            case Answered(answer):
                return self._answered(answer)

    def report(self) -> Report:
        """What to bring to the lighthouse now."""
        assert self._layout is not None
        seats = () if self.record is None else self.record.seats
        live = {member for member, rank in self._ranks.items() if rank.phase is not _Phase.LEFT}
        return Report(
            agent=self.agent,
            host=self.host,
            job=self.job,
            coordinator=self.coordinator,
            layout=self._layout,
            seen=0 if self.record is None else self.record.generation,
            members=tuple(rank.report for rank in self._in(_Phase.ASKING).values() if rank.report is not None),
            known=self.known,
            gone=tuple(seat.member for seat in seats if seat.agent == self.agent and seat.member not in live),
        )

    def live(self) -> tuple[str, ...]:
        return tuple(self._ranks)

    def _in(self, phase: _Phase) -> dict[str, _Rank]:
        return {member: rank for member, rank in self._ranks.items() if rank.phase is phase}

    def _hear(self, attempt: Attempt | None) -> None:
        if attempt is not None and attempt.step > 0 and (self.known is None or attempt > self.known):
            self.known = attempt

    def _asked(self, event: Asked) -> list[Instruction]:
        rank = self._ranks.get(event.member)
        if rank is None:
            return []
        if self._layout is not None and event.layout != self._layout:
            return [Fail(2, f"rank {rank.local_rank} declares {event.layout}, but the other ranks {self._layout}")]
        self._layout = event.layout
        newcomer = rank.phase is _Phase.STARTING
        rank.phase, rank.report = _Phase.ASKING, event.report
        self._hear(event.report.tip)
        if self.finished and not self._can_finish(rank):
            return [Dismiss((event.member,), "the job has finished")]
        instructions = self._ask_if_ready()
        if instructions:
            return instructions
        if newcomer:
            return self._notice_join()
        if event.broken:
            return self._abort(f"rank {rank.local_rank} lost a peer")
        return []

    def _notice_join(self) -> list[Instruction]:
        seated = tuple(self._in(_Phase.SEATED))
        return [NoticeJoin(seated, self.record.generation)] if seated and self.record is not None else []

    def _abort(self, reason: str) -> list[Instruction]:
        seated = tuple(self._in(_Phase.SEATED))
        return [Abort(seated, self.record.generation, reason)] if seated and self.record is not None else []

    def _ask_if_ready(self, delay_s: float = 0.0) -> list[Instruction]:
        if self._asking or not self._in(_Phase.ASKING) or self._in(_Phase.SEATED):
            return []
        if self.record is None and self._waits_for_start and self._is_starting():
            return []
        if self.finished and not any(map(self._can_finish, self._in(_Phase.ASKING).values())):
            return []
        self._asking = True
        return [Ask(delay_s)]

    def _is_starting(self) -> bool:
        return self._num_started < self.num_ranks or bool(self._in(_Phase.STARTING))

    def _left(self, member: str, finished: bool) -> list[Instruction]:
        rank = self._ranks.get(member)
        if rank is None:
            return []
        rank.phase, rank.finished = _Phase.LEFT, finished
        self.finished = self.finished or finished
        instructions = self._abort(f"rank {rank.local_rank} left") if not finished else []
        if self.finished:
            instructions += self._dismiss_the_rest()
        return instructions + self._ask_if_ready()

    def _dismiss_the_rest(self) -> list[Instruction]:
        """Those that have no part in what is finished: they are without state, or, as spares, with that of before."""
        rest = tuple(
            member
            for member, rank in {**self._in(_Phase.ASKING), **self._in(_Phase.STARTING)}.items()
            if not self._can_finish(rank)
        )
        return [Dismiss(rest, "the job has finished")] if rest else []

    def _can_finish(self, rank: _Rank) -> bool:
        """It has done the last step, or is in doubt about it."""
        report = rank.report
        held = [] if report is None else [attempt for attempt in (report.tip, report.pending) if attempt is not None]
        return bool(held) and (self.known is None or max(held) >= self.known)

    def _exited(self, event: Exited) -> list[Instruction]:
        rank = self._ranks.pop(event.member, None)
        if rank is None:
            return []
        instructions: list[Instruction] = []
        if rank.phase is _Phase.SEATED:
            instructions += self._abort(f"rank {rank.local_rank} {describe_exit(event.status)}")
        instructions += self._ask_if_ready()
        by_kill = event.blameless or -event.status in _KILLS
        if event.status == 0 or (self.finished and by_kill):
            return instructions
        if not by_kill:
            self.failures += 1
            if rank.finished or self.failures > self.max_restarts:
                code = event.status if event.status > 0 else 128 - event.status
                allowed = f"; --max-restarts is {self.max_restarts}" if self.max_restarts else ""
                return [Fail(code, f"rank {rank.local_rank} {describe_exit(event.status)}{allowed}")]
            if self.finished:  # it failed before the others finished, and took longer to exit
                return instructions
        return [*instructions, Restart(rank.local_rank, self._backoff(rank))]

    def _backoff(self, rank: _Rank) -> float:
        """Seconds before a restart: none, but for a rank that dies again and again before it takes part."""
        deaths = 0 if rank.entered_any else self._early_deaths.get(rank.local_rank, 0) + 1
        self._early_deaths[rank.local_rank] = deaths
        return 0.0 if deaths <= _FREE_DEATHS else float(min(2 ** (deaths - _FREE_DEATHS - 1), _MAX_BACKOFF_S))

    def _answered(self, answer: Record | Void | Lost) -> list[Instruction]:
        self._asking = False
        if isinstance(answer, Lost):
            return [Fail(1, f"the job's state is lost: {answer.reason}")]
        if isinstance(answer, Void):
            why = dict(answer.refused).get(self.agent)
            return self._ask_if_ready(_RETRY_VOID_S) if why is None else [Fail(2, f"the job refused this host: {why}")]
        self.record = answer
        if answer.rolled_forward:
            self._hear(answer.committed)
        return self._deliver(answer)

    def _deliver(self, record: Record) -> list[Instruction]:
        seated = []
        for member, rank in self._in(_Phase.ASKING).items():
            seat = record.seat(member)
            if seat is not None:
                # A spare runs nothing: it goes on asking, in the name of its last report.
                rank.phase = _Phase.ASKING if seat.status == SPARE else _Phase.SEATED
                rank.entered_any = True
                seated.append(member)
        instructions: list[Instruction] = [Deliver(tuple(seated), record)]
        dead = [seat for seat in record.seats if seat.agent == self.agent and seat.member not in self._ranks]
        if dead:
            ranks = ", ".join(str(seat.local_rank) for seat in dead)
            return instructions + self._abort(f"rank {ranks} died before the generation began")
        waiting = [member for member in self._in(_Phase.ASKING) if record.seat(member) is None]
        return instructions + (self._notice_join() if waiting else [])


def describe_exit(status: int) -> str:
    """In words: "was killed by SIGKILL", "exited with code 3"."""
    if status >= 0:
        return f"exited with code {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def infeasible(layout: ParallelLayout, num_ranks: int) -> str | None:
    """Why `num_ranks` ranks can never fill `layout`; None when they can."""
    needed = layout.unit * layout.min_replicas
    if num_ranks >= needed:
        return None
    return (
        f"the layout needs {needed} ranks (min_replicas {layout.min_replicas} x pp {layout.pp} x sdp {layout.sdp} "
        f"x tp {layout.tp}), but the job has {num_ranks}"
    )


def seated_ranks(record: Record, members: Iterable[str]) -> list[int]:
    return [record.plan.ranks[member] for member in members if member in record.plan.ranks]
