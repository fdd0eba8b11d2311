"""Hang detector: finds a rank that may be alive but makes no progress while other ranks are blocked on it (RULE-8).

Pure: `hang_monitor.py` reads the ranks' status pages, and the agent executes the decisions.

HANG-1  A rank hangs only if others are blocked on it and it is not blocked itself. So never all ranks hang, and none
    does while all are equally slow. Once the job has finished, the agent itself waits for ranks that still take part.
HANG-2  In a collective that not all ranks have submitted, those that have are blocked on those that have not. A rank
    with a collective under way is blocked, however it waits.
HANG-3  Three times do not count: time in the runtime's own waits while the process is alive (its pulse grows), paused
    time, and time in which the agent itself did not run.
HANG-4  If a comm process makes no progress, and its rank is alive and needs it, it is killed alone. If the rank is not
    alive, the rank is killed.
HANG-5  If no member makes progress and none hangs by HANG-1, the agent reports the standstill and kills no rank: at the
    limit, and again whenever the standstill has lasted twice as long.
HANG-6  A member that goes on while its stack is read is not killed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

_FLOOR_MS = 30_000
_FIRST_STEPS_MS = 600_000
_NUM_STEPS_UNARMED = 2
_STEPS_PER_LIMIT = 10
_STRETCHES_PER_LIMIT = 2
_NUM_STEP_TIMES = 64
_MAX_LOOKS = 4


@dataclass(frozen=True)
class Reached:
    """How many collectives, and how many sends and receives, a member has submitted and completed in one group."""

    submitted: int
    completed: int
    messages_submitted: int = 0
    messages_completed: int = 0

    @property
    def is_under_way(self) -> bool:
        return self.submitted > self.completed or self.messages_submitted > self.messages_completed


@dataclass(frozen=True)
class Comm:
    """The comm process in use. `beats` grows while it runs. `groups`: by a key that is equal on all members."""

    pid: int
    beats: int
    groups: Mapping[int, Reached] = field(default_factory=dict)

    @property
    def is_under_way(self) -> bool:
        return any(reached.is_under_way for reached in self.groups.values())


@dataclass(frozen=True)
class Reading:
    """The contents of one member's status page.

    `beats`: counts the actions of the training thread. `pulses`: grows while the process runs. `steps`: computed steps.
    `is_waiting`: the training thread is in a wait of the runtime; `is_requesting`: in the wait for the next generation.
    `takes_part`: it has requested a record and has not left; `has_left`: it has left. `generation`: the last one it
    entered, 0 before the first.
    """

    member: str
    generation: int
    beats: int
    pulses: int
    steps: int
    is_waiting: bool = False
    is_requesting: bool = False
    paused: bool = False
    takes_part: bool = True
    has_left: bool = False
    comm: Comm | None = None


@dataclass(frozen=True)
class BlockedOn:
    """A wait-for edge, which agents send to each other: `member` waits for all members that are less far.

    `group` None: it has requested the generation after `generation`. Otherwise it has submitted `reached` collectives
    to the group; `reached` None: it waits for a message from any member.
    """

    member: str
    generation: int
    group: int | None = None
    reached: int | None = None


@dataclass(frozen=True)
class Hung:
    """Others are blocked on `member`, which has made no progress for `stalled_ms`."""

    member: str
    stalled_ms: int


@dataclass(frozen=True)
class CommHung:
    """The comm process `pid` of `member` has made no progress for `stalled_ms`, while its rank waits for it."""

    member: str
    pid: int
    stalled_ms: int


HangReport = Hung | CommHung


@dataclass(frozen=True)
class Standstill:
    """None of `members` has made progress for `stalled_ms` (HANG-5)."""

    members: tuple[str, ...]
    stalled_ms: int


@dataclass
class _Tracked:
    """One member over time. `*_ms`: the time of the last change. Time that does not count (HANG-3) advances `moved_ms`
    but not `progressed_ms`."""

    reading: Reading
    progressed_ms: int
    moved_ms: int
    pulsed_ms: int
    comm_ms: int
    step_ms: int
    awaited_ms: int | None = None
    needs_comm_ms: int | None = None
    reported_comm: int = 0


class HangDetector:
    """Watches the members of one agent. `detect` is the only method that changes state, besides `standstill`.

    `limit_ms`: None for an adaptive limit: the largest of `_FLOOR_MS`, ten times the median step, and twice the longest
    time after which a rank has made progress again by itself.
    """

    def __init__(self, limit_ms: int | None = None) -> None:
        self._given_ms = limit_ms
        self._tracked: dict[str, _Tracked] = {}
        self._finished = False
        self._clock_ms = 0
        self._detected_ms: int | None = None
        self._step_times_ms: deque[float] = deque(maxlen=_NUM_STEP_TIMES)
        self._longest_ms = 0
        self._reported_ms = 0  # the duration of the present standstill at its last report

    @property
    def interval_ms(self) -> int:
        """How often to call `detect`."""
        return min(250, max(20, (self._given_ms or _FLOOR_MS) // 40))

    @property
    def limit_ms(self) -> int:
        if self._given_ms is not None:
            return self._given_ms
        usual = median(self._step_times_ms) if self._step_times_ms else 0
        return max(_FLOOR_MS, int(_STEPS_PER_LIMIT * usual), _STRETCHES_PER_LIMIT * self._longest_ms)

    def detect(
        self, now_ms: int, readings: Sequence[Reading], peer_edges: Sequence[BlockedOn] = (), *, finished: bool = False
    ) -> list[HangReport]:
        """The members and comm processes that hang, by the pages and the edges of other agents. Each is reported once.
        `finished`: a member has done all steps."""
        self._advance(now_ms)
        self._finished = finished
        self._tracked = {reading.member: self._track(reading) for reading in readings}
        edges = [*self.blocked_on(), *peer_edges]
        reports = [report for tracked in self._tracked.values() if (report := self._check(tracked, edges)) is not None]
        for report in reports:
            if isinstance(report, Hung):
                del self._tracked[report.member]
        return reports

    def standstill(self) -> Standstill | None:
        """HANG-5, after `detect`. Members that have left do not count. At least one member must be stopped or in the
        script's own code: waits of the runtime have their own deadlines."""
        members = [tracked for tracked in self._tracked.values() if not tracked.reading.has_left]
        if not members:
            return None
        stalled_ms = self._clock_ms - max(tracked.progressed_ms for tracked in members)
        if stalled_ms < self._reported_ms:
            self._reported_ms = 0  # a member has made progress meanwhile
        limits = [self._limit_of(tracked) for tracked in members if not self._is_excused(tracked)]
        if not limits or any(tracked.reading.paused for tracked in members):
            return None
        if stalled_ms < max(*limits, self.limit_ms, 2 * self._reported_ms):
            return None
        self._reported_ms = stalled_ms
        return Standstill(tuple(tracked.reading.member for tracked in members), stalled_ms)

    def blocked_on(self) -> list[BlockedOn]:
        """The wait-for edges of the live members here (HANG-2)."""
        return [
            edge
            for tracked in self._tracked.values()
            if self._is_alive(tracked)
            for edge in _blocked_on(tracked.reading)
        ]

    def _advance(self, now_ms: int) -> None:
        """HANG-3: time in which the agent did not run does not count."""
        if self._detected_ms is not None:
            self._clock_ms += min(now_ms - self._detected_ms, _MAX_LOOKS * self.interval_ms)
        self._detected_ms = now_ms

    def _track(self, reading: Reading) -> _Tracked:
        now = self._clock_ms
        tracked = self._tracked.get(reading.member)
        if tracked is None:
            return _Tracked(reading, now, now, now, now, now)
        before, tracked.reading = tracked.reading, reading
        if reading.pulses != before.pulses:
            tracked.pulsed_ms = now
        if _comm_sign(reading) != _comm_sign(before):
            tracked.comm_ms = now
        if _sign(reading) != _sign(before):
            self._learn(tracked, before, reading)
            tracked.moved_ms = tracked.progressed_ms = now
        elif self._is_excused(tracked):
            tracked.moved_ms = max(tracked.moved_ms, min(tracked.pulsed_ms, now))
        if reading.paused:
            tracked.moved_ms = tracked.progressed_ms = now
        return tracked

    def _learn(self, tracked: _Tracked, before: Reading, reading: Reading) -> None:
        """Learn the step time, and how long a rank can be without progress and still not hang."""
        now = self._clock_ms
        is_usual = before.steps >= _NUM_STEPS_UNARMED
        if is_usual and not before.paused:
            self._longest_ms = max(self._longest_ms, now - tracked.moved_ms)
        if reading.steps > before.steps:
            if is_usual:
                self._step_times_ms.append((now - tracked.step_ms) / (reading.steps - before.steps))
            tracked.step_ms = now

    def _is_alive(self, tracked: _Tracked) -> bool:
        return self._clock_ms - tracked.pulsed_ms < self.limit_ms // 2

    def _is_comm_alive(self, tracked: _Tracked) -> bool:
        return self._clock_ms - tracked.comm_ms < self.limit_ms // 2

    def _is_excused(self, tracked: _Tracked) -> bool:
        """HANG-2, HANG-3: it is alive, and waits for others."""
        comm = tracked.reading.comm
        under_way = comm is not None and comm.is_under_way and self._is_comm_alive(tracked)
        return self._is_alive(tracked) and (tracked.reading.is_waiting or under_way)

    def _check(self, tracked: _Tracked, edges: Iterable[BlockedOn]) -> HangReport | None:
        now = self._clock_ms
        report = self._check_comm(tracked, self.limit_ms)
        if report is not None:
            return report
        reading = tracked.reading
        awaited = reading.takes_part and (self._finished or any(self._blocks(tracked, edge) for edge in edges))
        tracked.awaited_ms = (now if tracked.awaited_ms is None else tracked.awaited_ms) if awaited else None
        if tracked.awaited_ms is None or reading.paused:
            return None
        stalled_ms = now - tracked.moved_ms
        # Others have waited for as long: this separates a hung rank from ranks that are all slow.
        is_over = self._is_over(stalled_ms, now - tracked.awaited_ms, self._limit_of(tracked))
        return Hung(reading.member, stalled_ms) if is_over else None

    def _limit_of(self, tracked: _Tracked) -> int:
        """How long this member may be without progress."""
        if tracked.reading.is_waiting or tracked.reading.steps >= _NUM_STEPS_UNARMED:
            return self.limit_ms
        return max(self.limit_ms, _FIRST_STEPS_MS if self._is_alive(tracked) else _FLOOR_MS)

    def _check_comm(self, tracked: _Tracked, limit_ms: int) -> CommHung | None:
        """HANG-4."""
        now, reading = self._clock_ms, tracked.reading
        comm = reading.comm
        needed = comm is not None and (comm.is_under_way or reading.is_waiting)
        tracked.needs_comm_ms = (now if tracked.needs_comm_ms is None else tracked.needs_comm_ms) if needed else None
        if comm is None or tracked.needs_comm_ms is None or comm.pid in (0, tracked.reported_comm):
            return None
        stalled_ms = now - tracked.comm_ms
        if not (self._is_alive(tracked) and self._is_over(stalled_ms, now - tracked.needs_comm_ms, limit_ms)):
            return None
        tracked.reported_comm = comm.pid
        tracked.moved_ms = now  # once that process is killed, the rank's own time starts again
        return CommHung(reading.member, comm.pid, stalled_ms)

    def _is_over(self, stalled_ms: int, awaited_ms: int, limit_ms: int) -> bool:
        """Whether the next `detect` would be too late. Changes are up to one interval older than their detection."""
        return min(stalled_ms, 2 * awaited_ms) + 2 * self.interval_ms > limit_ms

    def _blocks(self, tracked: _Tracked, edge: BlockedOn) -> bool:
        """Whether the member of `edge` waits for this one (HANG-1)."""
        mine = tracked.reading
        if edge.member == mine.member:
            return False
        if edge.group is None:
            return True  # a requesting member waits for all others, newcomers too
        reached = mine.comm.groups.get(edge.group) if mine.comm is not None else None
        if reached is None or mine.generation != edge.generation:
            return False
        return edge.reached is None or reached.submitted < edge.reached or not self._is_comm_alive(tracked)


def _blocked_on(reading: Reading) -> list[BlockedOn]:
    if not reading.takes_part or reading.generation == 0:
        return []  # a newcomer waits until the others reach a step boundary
    if reading.is_requesting:
        return [BlockedOn(reading.member, reading.generation)]
    edges = []
    for group, reached in ({} if reading.comm is None else reading.comm.groups).items():
        if reached.submitted > reached.completed:
            edges.append(BlockedOn(reading.member, reading.generation, group, reached.submitted))
        elif reached.is_under_way:
            edges.append(BlockedOn(reading.member, reading.generation, group))
    return edges


def goes_on(before: Reading, now: Reading) -> bool:
    """HANG-6. Of one member."""
    return _sign(now) != _sign(before) or now.paused or not now.takes_part


def _sign(reading: Reading) -> tuple[int, int, int]:
    groups = () if reading.comm is None else tuple(reading.comm.groups.values())
    submitted = sum(reached.submitted + reached.messages_submitted for reached in groups)
    return reading.beats, reading.generation, submitted


def _comm_sign(reading: Reading) -> tuple[int, int]:
    return (0, 0) if reading.comm is None else (reading.comm.pid, reading.comm.beats)
