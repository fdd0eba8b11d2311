"""An agent's dealings with the coordinator and the other agents: questions, notices, and who is lost.

O1  A question is asked anew whenever the contact in which it was asked is lost, until somebody answers or the
    coordinator has been away for too long. Nothing goes on without an answer.
O2  What ends a generation is told once by each agent, by two ways: connections between agents, and the store. All of
    them hear the store, at a time when they have better to do: while all connections are up it is told only if the next
    generation does not come soon.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from elasticgang.errors import OperationalError
from elasticgang.quorum.contact import Contact, has_newcomer
from elasticgang.quorum.coordinator import Endpoint
from elasticgang.quorum.decide import Lost, Record, Report, Void
from elasticgang.quorum.happenings import (
    Answered,
    CoordinatorReturned,
    CoordinatorTimedOut,
    Event,
    Finished,
    HostLost,
    LeaseExpired,
    Noticed,
    PeerFailed,
)
from elasticgang.quorum.lease import Lease
from elasticgang.quorum.line import Hooks, Line, Others, in_daemon
from elasticgang.quorum.roster import Roster
from elasticgang.quorum.tripwires import Tripwires

_VOID_PATIENCE_S = 3.0
_ANNOUNCE_FIRST_S = 0.02
_ANNOUNCE_S = 0.2
_LEFT_BEHIND_S = 1.0
_LATE_S = 0.5
_STUCK_S = 2.0  # for a coordinator of this agent's own that does not answer, before it is ended
_RETRY_S = 0.05
_POST_S = 0.2
_PART_S = 0.5
_HEIRS_S = 0.5


class Inside(Protocol):
    """The agent itself."""

    @property
    def roster(self) -> Roster: ...

    def handle(self, event: Event | LeaseExpired | CoordinatorTimedOut) -> None: ...

    def run_aside(self, coroutine: Coroutine[Any, Any, None]) -> object:
        """As a task that ends with the agent, and with which the agent fails."""

    def hear_waits(self, agent: str, waits: list[list[Any]]) -> None:
        """Of the members of another agent. Raises TypeError or ValueError when that is not what it is."""

    def hear_heirs(self) -> None:
        """`Outside.num_heirs` may have changed."""

    def end_coordinator(self) -> None:
        """It does not answer. If it is the agent's own, and there, it is killed, and started again."""

    def say(self, line: str) -> None: ...

    def log(self, event: str, **fields: Any) -> None: ...


@dataclass(frozen=True)
class Limits:
    """In seconds: for the coordinator to answer, and for it to come back when it is away."""

    connect: float
    away: float


class Outside:
    def __init__(self, inside: Inside, endpoint: Endpoint, job: str, limits: Limits, lease: Lease | None) -> None:
        self._inside, self._endpoint = inside, endpoint
        self.incarnation = endpoint.incarnation  # of the coordinator, by the newest contact
        self._job, self._limits = job, limits
        hooks = Hooks(self._heard, self._away, self._back, lambda: inside.handle(LeaseExpired()))
        self._line = Line(endpoint.address, job, limits.connect, lease, hooks)
        self._tripwires: Tripwires | None = None
        self._num_asked = 0  # the last question counts
        self._num_open = 0
        self._open_since = 0.0
        self._void_since = 0.0
        self._told_void = ""
        self._told_over = self._told_join = 0
        self._told_finished = False
        self._found_lost: set[str] = set()
        self._refused: set[tuple[str, str]] = set()
        self._was_away = False
        self._awaited: tuple[str, ...] = ()  # that must come, or be found lost
        self._heirs: dict[str, int] = {}  # by agent
        self._told_heirs, self._told_heirs_at = 0, 0.0

    @property
    def agent(self) -> str:
        return self._inside.roster.agent

    async def open(self) -> str:
        """As `become`. Raises OperationalError: the coordinator does not answer."""
        await self._line.open(self._endpoint, self.agent)
        address = await self.become(self._endpoint)
        self._inside.run_aside(self._line.keep(lambda: self.agent, lambda: self._inside.roster.record))
        self._inside.run_aside(self._line.watch())
        self._inside.run_aside(self._line.watch_others(self._others, self._miss))
        return address

    async def become(self, endpoint: Endpoint) -> str:
        """The agent has an id, for the first time or a new one. Returns where it listens for other agents."""
        self.leave()
        self._endpoint = endpoint
        self._tripwires = Tripwires(self._job, self.agent, self._told)
        self._told_over = self._told_join = 0
        try:
            address = await self._tripwires.listen(self._endpoint.host)
        except OSError as exc:
            raise OperationalError(f"cannot listen on {self._endpoint.host}: {exc}") from exc
        # Last: who was found lost until now was told to an agent that decided nothing.
        self._found_lost, self._awaited = set(), ()
        return address

    async def come_back(self) -> Endpoint | None:
        """Under the agent's new id: the coordinator, once it answers, with a new lease. None: the agent has failed."""
        self._line.hang_up("this agent has ended its members")
        self._num_asked = 0
        contact = await self._line.next_contact(self._limits.away)
        if contact is None:
            where = f"the coordinator at {self._endpoint.address}"
            self._inside.handle(CoordinatorTimedOut(f"{where} has not answered for {self._limits.away:g} s"))
            return None
        self._line.begin_lease()
        return contact.endpoint

    async def part(self, report: Report | None) -> None:
        """`leave`, in the midst of the job. The lighthouse waits for an agent as long as its last heartbeat counts, but
        for one that has asked, with `report`: it is let know whom to go on without."""
        if report is not None and self._line.contact is not None:
            await asyncio.wait([in_daemon(self._line.contact.agree, report)], timeout=_PART_S)
        self.leave()

    def leave(self) -> None:
        """All members of the agent have ended, and it does not come back under this id."""
        if self._tripwires is not None:
            self._tripwires.tell("gone")
            self._tripwires.close()
            self._tripwires = None

    @property
    def gone(self) -> set[str]:
        """Agents of the present generation whose process is known not to be there."""
        return set() if self._tripwires is None else self._tripwires.gone | self._found_lost

    # -- what is told

    def tell_over(self, generation: int, reason: str) -> None:
        if generation > self._told_over:
            self._told_over = generation
            self._tell("over", generation=generation, reason=reason)

    def tell_join(self, generation: int) -> None:
        if generation > self._told_join:
            self._told_join = generation
            self._tell("join", generation=generation)

    def tell_finished(self) -> None:
        if not self._told_finished:
            self._told_finished = True
            self._tell("finished", to_all=True)

    def tell_failed(self, member: str, local_rank: int, step: int) -> None:
        self._tell("failed", agent=self.agent, member=member, local_rank=local_rank, step=step)

    def tell_waits(self, waits: list[list[Any]]) -> None:
        """To the other agents themselves: without a connection to them, the host is lost sooner than it hangs."""
        record = self._inside.roster.record
        if self._tripwires is not None and record is not None and len(record.agents) > 1:
            self._tripwires.tell("waits", waits=waits)

    def tell_heirs(self, num: int, *, again: bool) -> None:
        """How many are here, when that has changed; `again`: or, now and then, if there are any, for connections that
        are new."""
        now = time.monotonic()
        is_due = again and num > 0 and now - self._told_heirs_at > _HEIRS_S
        if self._tripwires is not None and (num != self._told_heirs or is_due):
            self._told_heirs, self._told_heirs_at = num, now
            self._tripwires.tell("heirs", num=num)

    def _tell(self, kind: str, to_all: bool = False, **fields: Any) -> None:
        record = self._inside.roster.record
        if self._tripwires is None or not (to_all or (record is not None and len(record.agents) > 1)):
            return
        self._tripwires.tell(kind, **fields)
        others = () if to_all or record is None else [agent for agent in record.agents if agent != self.agent]
        if others and all(map(self._tripwires.is_up, others)):
            asyncio.get_running_loop().call_later(_POST_S, self._post, {"kind": kind, **fields}, record)
        else:
            self._post({"kind": kind, **fields}, record)

    def _post(self, notice: dict[str, Any], record: Record | None) -> None:
        """Tell the store, unless another record has followed."""
        if self._line.contact is not None and self._inside.roster.record is record:
            self._line.contact.post(notice)

    def follow(self, record: Record) -> None:
        if self._tripwires is not None:
            self._tripwires.follow(dict(zip(record.agents, record.addresses, strict=False)))

    # -- what is heard

    @property
    def num_heirs(self) -> int:
        """Of the other agents that there is a connection to."""
        wires = self._tripwires
        return 0 if wires is None else sum(num for agent, num in self._heirs.items() if wires.is_up(agent))

    def _told(self, agent: str, message: dict[str, Any]) -> None:
        """By another agent itself."""
        if message["kind"] == "gone":
            self._lose([agent], "agent gone")
        elif message["kind"] == "waits":
            self._inside.hear_waits(agent, message["waits"])
        elif message["kind"] == "heirs":
            self._heirs[agent] = max(0, int(message["num"]))
            self._inside.hear_heirs()
        else:
            self._hear(message)

    def _heard(self, notice: dict[str, Any], is_old: bool) -> None:
        try:
            self._hear(notice, is_old)
        except (KeyError, TypeError, ValueError) as exc:
            self._inside.log("bad notice", notice=repr(notice), error=repr(exc))

    def _hear(self, notice: dict[str, Any], is_old: bool = False) -> None:
        match notice["kind"]:
            case "over":
                generation = int(notice["generation"])
                if self._is_near(generation):
                    self._told_over = max(self._told_over, generation)
                self._inside.handle(Noticed(generation, over=True, reason=str(notice["reason"])))
            case "join":
                generation = int(notice["generation"])
                if self._is_near(generation):
                    self._told_join = max(self._told_join, generation)
                self._inside.log("join noticed", generation=generation)
                self._inside.handle(Noticed(generation, over=False))
            case "finished":
                if self._inside.roster.record is None:
                    self._inside.say(f"elasticgang: job {self._job} has finished already: nothing is done here")
                self._told_finished = True
                self._inside.handle(Finished())
            case "failed":
                if (agent := str(notice["agent"])) != self.agent:
                    local_rank, step = int(notice["local_rank"]), int(notice["step"])
                    self._inside.handle(PeerFailed(agent, str(notice["member"]), local_rank, step))
            case "refused":
                self._hear_refused(str(notice["agent"]), str(notice["reason"]), is_old)
            case kind:
                raise ValueError(f"unknown kind {kind!r}")

    def _hear_refused(self, agent: str, reason: str, is_old: bool) -> None:
        """Said once, though each contact reads it; not of the time before this agent's."""
        is_known = (agent, reason) in self._refused or (is_old and not self._was_away)
        self._refused.add((agent, reason))
        if not is_known and agent != self.agent:
            self._inside.say(f"elasticgang: agent {agent} is refused: {reason}")

    def _is_near(self, generation: int) -> bool:
        """At most the next one: of one further on it is not believed that all the others know (A7 of the roster)."""
        record = self._inside.roster.record
        return record is not None and generation <= record.generation + 1

    def _away(self, reason: str) -> None:
        self._was_away = True
        self._inside.log("coordinator away", reason=reason)
        self._inside.run_aside(self._end_stuck())

    async def _end_stuck(self) -> None:
        await asyncio.sleep(_STUCK_S)
        if self._line.contact is None:
            self._inside.end_coordinator()

    def _back(self, contact: Contact) -> None:
        self._inside.log("coordinator back", incarnation=contact.endpoint.incarnation)
        contact.beats = self._num_asked > 0
        self.incarnation = contact.endpoint.incarnation
        self._inside.handle(CoordinatorReturned(contact.endpoint.incarnation))

    # -- who is lost

    def _others(self) -> Others:
        """Agents that take part, or have, and are neither here nor known to be lost."""
        record, wires = self._inside.roster.record, self._tripwires
        if wires is None:
            return Others((), (), False)
        named = () if record is None else (*record.agents, *record.away)
        names = sorted({*named, *self._awaited} - {self.agent} - self._found_lost)
        gone = [agent for agent in names if agent in wires.gone]
        is_late = self._num_open > 0 and time.monotonic() - self._open_since > _LATE_S
        return Others(names, gone, is_late or not all(map(wires.is_up, names)))

    def _miss(self, agents: list[str]) -> None:
        self._lose(agents, "host lost")

    def _lose(self, agents: list[str], event: str) -> None:
        for agent in agents:
            if agent in self._found_lost:
                continue
            self._found_lost.add(agent)
            self._inside.log(event, agent=agent)
            self._inside.handle(HostLost(agent))

    # -- questions

    def ask(self, delay_s: float) -> None:
        self._num_asked += 1
        self._inside.run_aside(self._ask(self._num_asked, delay_s))

    async def _ask(self, number: int, delay_s: float) -> None:
        if delay_s:
            await asyncio.sleep(delay_s)
        if not self._num_open:
            self._open_since = time.monotonic()
        self._num_open += 1
        if not delay_s:  # else once more
            self._inside.log("asked", question=number)
        try:
            answer = await self._answer(number)
        finally:
            self._num_open -= 1
        if answer is not None:
            self._awaited = answer.absent if isinstance(answer, Void) else ()
            self._tell_of_void(answer)
            self._inside.handle(Answered(answer, is_newest=number == self._num_asked))

    async def _answer(self, number: int) -> Record | Void | Lost | None:
        """None: the question needs no answer any more."""
        failing_since = 0.0
        while number == self._num_asked and self._inside.roster.may_ask():
            contact = self._line.contact
            if contact is None:
                away_since, error = max(self._line.away_since, self._open_since), "it is away"  # since it is needed
            else:
                contact.beats = True
                report = self._inside.roster.report()
                asking = in_daemon(contact.agree, report)
                try:
                    if await self._announcing(asking, contact, report) and asking.result() is not None:
                        answer: Record | Void | Lost = asking.result()
                        return answer
                    failing_since = 0.0
                    continue
                except OperationalError as exc:
                    away_since = failing_since = failing_since or time.monotonic()
                    error = str(exc)
            if time.monotonic() - away_since > self._limits.away:
                address = self._endpoint.address
                why = f"no generation can be agreed without the coordinator at {address}: {error}"
                self._inside.handle(CoordinatorTimedOut(why))
                return None
            await asyncio.sleep(_RETRY_S)
        return None

    async def _announcing(self, asking: asyncio.Future[Any], contact: Contact, report: Report) -> bool:
        """Wait for an answer, and let the job know who waits to join it: newcomers soon, and who finds itself left
        behind by the store's record, which is not read in the midst of a change. False: the contact was lost."""
        wait_s, again_s = _LEFT_BEHIND_S, _LEFT_BEHIND_S
        if self._has_newcomer(report):
            wait_s, again_s = _ANNOUNCE_FIRST_S, _ANNOUNCE_S
        losing = asyncio.ensure_future(self._line.until_lost(asking))
        announcing: asyncio.Future[Any] | None = None  # one at a time: a slow coordinator gets no heap of them
        try:
            while not losing.done():
                await asyncio.wait([losing], timeout=wait_s)
                if not losing.done() and (announcing is None or announcing.done()):
                    announcing = in_daemon(contact.announce, report)
                wait_s = again_s
            return losing.result()
        finally:
            losing.cancel()

    def _has_newcomer(self, report: Report) -> bool:
        record = self._inside.roster.record
        return record is None or has_newcomer(record, report)

    def _tell_of_void(self, answer: Record | Void | Lost) -> None:
        """Say once why no generation is agreed, when that goes on; and at once who is refused."""
        if not isinstance(answer, Void):
            self._void_since = 0.0
            return
        self._void_since = self._void_since or time.monotonic()
        is_others = any(agent != self.agent for agent, _ in answer.refused)
        if (is_others or time.monotonic() - self._void_since > _VOID_PATIENCE_S) and answer.reason != self._told_void:
            self._told_void = answer.reason
            self._inside.say(f"elasticgang: no generation can be agreed yet: {answer.reason}")
