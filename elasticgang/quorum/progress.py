"""Which rank is behind: alive, perhaps, but without progress while others wait for it (R8).

Pure: `watch.py` reads the ranks' pages and performs what is decided here.

H1  Only one that others wait for is hung, and nobody who waits is: so never all, and nobody while all are slow alike.
    Once the job has finished, the agent waits for those that still take part.
H2  A collective that not all have come to is waited for by those that have, and held up by those that have not. Who has
    one under way waits for it, in whatever way.
H3  Time in the runtime's own waits does not count while the process lives (its pulse), nor does paused time, nor time
    in which the agent itself did not run.
H4  A comm process that stands still, while its rank lives and needs it, is ended by itself. Without its rank, the rank.
H5  When no member makes progress, and H1 finds nobody, that is reported, and nobody is killed: at the limit, and again
    whenever it has lasted twice as long.
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
    """How far a member has come in one group's collectives, and in its sends and receives."""

    submitted: int
    completed: int
    messages_submitted: int = 0
    messages_completed: int = 0

    @property
    def is_under_way(self) -> bool:
        return self.submitted > self.completed or self.messages_submitted > self.messages_completed


@dataclass(frozen=True)
class Comm:
    """The comm process in use. `beats` grow while it runs. `groups`: by a key that is the same on all members."""

    pid: int
    beats: int
    groups: Mapping[int, Reached] = field(default_factory=dict)

    @property
    def is_under_way(self) -> bool:
        return any(reached.is_under_way for reached in self.groups.values())


@dataclass(frozen=True)
class Reading:
    """What one member's page says. `beats` count what its training thread does, `pulses` grow while the process runs.

    `steps`: those that it has computed. `waits`: the training thread is in a wait of the runtime; `asks`: in that for
    the next generation. `takes_part`: it has asked before, and not left; `has_left`: it has. `generation`: the one
    entered last, 0 before the first.
    """

    member: str
    generation: int
    beats: int
    pulses: int
    steps: int
    waits: bool = False
    asks: bool = False
    paused: bool = False
    takes_part: bool = True
    has_left: bool = False
    comm: Comm | None = None


@dataclass(frozen=True)
class Wait:
    """`member` waits for those that have not come as far: agents can tell each other.

    `group` None: it has asked for what follows `generation`. Otherwise it has submitted `reached` collectives there;
    `reached` None: it waits for a message, from whomever.
    """

    member: str
    generation: int
    group: int | None = None
    reached: int | None = None


@dataclass(frozen=True)
class Hung:
    """`member` holds the others up, and has stood still for `stalled_ms`."""

    member: str
    stalled_ms: int


@dataclass(frozen=True)
class CommHung:
    """The comm process `pid` of `member` has stood still for `stalled_ms`, while its rank waits for it."""

    member: str
    pid: int
    stalled_ms: int


Verdict = Hung | CommHung


@dataclass(frozen=True)
class Standstill:
    """None of `members` has made progress for `stalled_ms` (H5)."""

    members: tuple[str, ...]
    stalled_ms: int


@dataclass
class _Seen:
    """One member over time. `*_ms`: when that last changed. `moved_ms` moves on with time that does not count (H3);
    `progressed_ms` does not."""

    reading: Reading
    progressed_ms: int
    moved_ms: int
    pulsed_ms: int
    comm_ms: int
    step_ms: int
    awaited_ms: int | None = None
    needs_comm_ms: int | None = None
    judged_comm: int = 0


class Progress:
    """Of the members of one agent. `look` is the only way in.

    `limit_ms` None: adaptive. It is then the largest of a floor, ten times the usual step, and twice the longest time
    that a rank has stood still and got on by itself.
    """

    def __init__(self, limit_ms: int | None = None) -> None:
        self._given_ms = limit_ms
        self._seen: dict[str, _Seen] = {}
        self._finished = False
        self._clock_ms = 0
        self._looked_ms: int | None = None
        self._step_times_ms: deque[float] = deque(maxlen=_NUM_STEP_TIMES)
        self._longest_ms = 0
        self._reported_ms = 0  # of the present standstill

    @property
    def interval_ms(self) -> int:
        """How often to look."""
        return min(250, max(20, (self._given_ms or _FLOOR_MS) // 40))

    @property
    def limit_ms(self) -> int:
        if self._given_ms is not None:
            return self._given_ms
        usual = median(self._step_times_ms) if self._step_times_ms else 0
        return max(_FLOOR_MS, int(_STEPS_PER_LIMIT * usual), _STRETCHES_PER_LIMIT * self._longest_ms)

    def look(
        self, now_ms: int, readings: Sequence[Reading], told: Sequence[Wait] = (), *, finished: bool = False
    ) -> list[Verdict]:
        """Who is hung, by the pages as they are now and what other agents have told. Each member is judged once, but
        for its comm processes, each of which is. `finished`: a member has done all steps."""
        self._advance(now_ms)
        self._finished = finished
        self._seen = {reading.member: self._see(reading) for reading in readings}
        waits = [*self.waits(), *told]
        verdicts = [verdict for seen in self._seen.values() if (verdict := self._judge(seen, waits)) is not None]
        for verdict in verdicts:
            if isinstance(verdict, Hung):
                del self._seen[verdict.member]
        return verdicts

    def standstill(self) -> Standstill | None:
        """H5, after a `look`. Members that have left do not count. One member at least is stopped, or in the script's
        own code: waits of the runtime alone have deadlines of their own."""
        members = [seen for seen in self._seen.values() if not seen.reading.has_left]
        if not members:
            return None
        stalled_ms = self._clock_ms - max(seen.progressed_ms for seen in members)
        if stalled_ms < self._reported_ms:
            self._reported_ms = 0  # somebody got on meanwhile
        limits = [self._limit_of(seen) for seen in members if not self._is_excused(seen)]
        if not limits or any(seen.reading.paused for seen in members):
            return None
        if stalled_ms < max(*limits, self.limit_ms, 2 * self._reported_ms):
            return None
        self._reported_ms = stalled_ms
        return Standstill(tuple(seen.reading.member for seen in members), stalled_ms)

    def waits(self) -> list[Wait]:
        """Whom the members here that are alive wait for."""
        return [wait for seen in self._seen.values() if self._is_alive(seen) for wait in _waits_of(seen.reading)]

    def _advance(self, now_ms: int) -> None:
        """H3: an agent that did not run itself has not seen anybody stand still."""
        if self._looked_ms is not None:
            self._clock_ms += min(now_ms - self._looked_ms, _MAX_LOOKS * self.interval_ms)
        self._looked_ms = now_ms

    def _see(self, reading: Reading) -> _Seen:
        now = self._clock_ms
        seen = self._seen.get(reading.member)
        if seen is None:
            return _Seen(reading, now, now, now, now, now)
        before, seen.reading = seen.reading, reading
        if reading.pulses != before.pulses:
            seen.pulsed_ms = now
        if _comm_sign(reading) != _comm_sign(before):
            seen.comm_ms = now
        if _sign(reading) != _sign(before):
            self._learn(seen, before, reading)
            seen.moved_ms = seen.progressed_ms = now
        elif self._is_excused(seen):
            seen.moved_ms = max(seen.moved_ms, min(seen.pulsed_ms, now))
        if reading.paused:
            seen.moved_ms = seen.progressed_ms = now
        return seen

    def _learn(self, seen: _Seen, before: Reading, reading: Reading) -> None:
        """What a step takes here, and for how long a rank may stand still that is not hung."""
        now = self._clock_ms
        is_usual = before.steps >= _NUM_STEPS_UNARMED
        if is_usual and not before.paused:
            self._longest_ms = max(self._longest_ms, now - seen.moved_ms)
        if reading.steps > before.steps:
            if is_usual:
                self._step_times_ms.append((now - seen.step_ms) / (reading.steps - before.steps))
            seen.step_ms = now

    def _is_alive(self, seen: _Seen) -> bool:
        return self._clock_ms - seen.pulsed_ms < self.limit_ms // 2

    def _is_comm_alive(self, seen: _Seen) -> bool:
        return self._clock_ms - seen.comm_ms < self.limit_ms // 2

    def _is_excused(self, seen: _Seen) -> bool:
        """H2, H3: it waits, for others, and lives."""
        comm = seen.reading.comm
        under_way = comm is not None and comm.is_under_way and self._is_comm_alive(seen)
        return self._is_alive(seen) and (seen.reading.waits or under_way)

    def _judge(self, seen: _Seen, waits: Iterable[Wait]) -> Verdict | None:
        now = self._clock_ms
        verdict = self._judge_comm(seen, self.limit_ms)
        if verdict is not None:
            return verdict
        reading = seen.reading
        awaited = reading.takes_part and (self._finished or any(self._holds_up(seen, wait) for wait in waits))
        seen.awaited_ms = (now if seen.awaited_ms is None else seen.awaited_ms) if awaited else None
        if seen.awaited_ms is None or reading.paused:
            return None
        stalled_ms = now - seen.moved_ms
        # That others have waited too, and not just come, tells one that hangs from all being slow.
        is_over = self._is_over(stalled_ms, now - seen.awaited_ms, self._limit_of(seen))
        return Hung(reading.member, stalled_ms) if is_over else None

    def _limit_of(self, seen: _Seen) -> int:
        """For how long this member may stand still."""
        if seen.reading.waits or seen.reading.steps >= _NUM_STEPS_UNARMED:
            return self.limit_ms
        return max(self.limit_ms, _FIRST_STEPS_MS if self._is_alive(seen) else _FLOOR_MS)

    def _judge_comm(self, seen: _Seen, limit_ms: int) -> CommHung | None:
        """H4."""
        now, reading = self._clock_ms, seen.reading
        comm = reading.comm
        needed = comm is not None and (comm.is_under_way or reading.waits)
        seen.needs_comm_ms = (now if seen.needs_comm_ms is None else seen.needs_comm_ms) if needed else None
        if comm is None or seen.needs_comm_ms is None or comm.pid in (0, seen.judged_comm):
            return None
        stalled_ms = now - seen.comm_ms
        if not (self._is_alive(seen) and self._is_over(stalled_ms, now - seen.needs_comm_ms, limit_ms)):
            return None
        seen.judged_comm = comm.pid
        seen.moved_ms = now  # what it does when that process is gone is another matter
        return CommHung(reading.member, comm.pid, stalled_ms)

    def _is_over(self, stalled_ms: int, awaited_ms: int, limit_ms: int) -> bool:
        """At the next look it would be too late; and what is seen at one look came before it."""
        return min(stalled_ms, 2 * awaited_ms) + 2 * self.interval_ms > limit_ms

    def _holds_up(self, seen: _Seen, wait: Wait) -> bool:
        """Whether `wait` is for this member."""
        mine = seen.reading
        if wait.member == mine.member:
            return False
        if wait.group is None:
            return True  # who asks waits for all, newcomers too: they are to come along
        reached = mine.comm.groups.get(wait.group) if mine.comm is not None else None
        if reached is None or mine.generation != wait.generation:
            return False
        return wait.reached is None or reached.submitted < wait.reached or not self._is_comm_alive(seen)


def _waits_of(reading: Reading) -> list[Wait]:
    if not reading.takes_part or reading.generation == 0:
        return []  # a newcomer comes when the others have time
    if reading.asks:
        return [Wait(reading.member, reading.generation)]
    waits = []
    for group, reached in ({} if reading.comm is None else reading.comm.groups).items():
        if reached.submitted > reached.completed:
            waits.append(Wait(reading.member, reading.generation, group, reached.submitted))
        elif reached.is_under_way:
            waits.append(Wait(reading.member, reading.generation, group))
    return waits


def _sign(reading: Reading) -> tuple[int, int, int]:
    groups = () if reading.comm is None else tuple(reading.comm.groups.values())
    submitted = sum(reached.submitted + reached.messages_submitted for reached in groups)
    return reading.beats, reading.generation, submitted


def _comm_sign(reading: Reading) -> tuple[int, int]:
    return (0, 0) if reading.comm is None else (reading.comm.pid, reading.comm.beats)
