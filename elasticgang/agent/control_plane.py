"""The agent's side of the coordinator and the other agents: requests, notices, and which agents are dead.

CONTROL-1  A request is repeated whenever its session is lost, until it is answered or the coordinator has been
    unreachable for too long. No generation begins without an answer.
CONTROL-2  Each agent sends the notice that a generation is over once, by two ways: the peer mesh, and the store. Store
    notices wake every agent during recovery, so they are delayed `_POST_S` while all connections of the mesh are up,
    and dropped if the next generation comes first.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from elasticgang.agent.peer_mesh import PeerMesh
from elasticgang.coordinator.client import ClientCallbacks, CoordinatorClient, WatchedAgents, in_daemon_thread
from elasticgang.coordinator.endpoint import Endpoint
from elasticgang.coordinator.session import CoordinatorSession, has_newcomer
from elasticgang.errors import OperationalError
from elasticgang.process.lease import Lease
from elasticgang.protocol.agent_events import (
    CoordinatorReturned,
    CoordinatorTimedOut,
    Event,
    Finished,
    HostLost,
    LeaseExpired,
    PeerFailed,
    PeerNotice,
    QuorumAnswered,
)
from elasticgang.protocol.agent_state import AgentState
from elasticgang.protocol.record import Record, Report, Undecided, Unrecoverable

_UNDECIDED_PATIENCE_S = 3.0
_ANNOUNCE_FIRST_S = 0.02
_ANNOUNCE_S = 0.2
_LEFT_BEHIND_S = 1.0
_LATE_S = 0.5
_STUCK_S = 2.0  # for a coordinator of this agent's own that does not answer, before it is ended
_RETRY_S = 0.05
_POST_S = 0.2
_LEAVE_S = 0.5
_SUCCESSORS_S = 0.5


class ControlPlaneCallbacks(Protocol):
    """The agent itself."""

    @property
    def state(self) -> AgentState: ...

    def handle(self, event: Event | LeaseExpired | CoordinatorTimedOut) -> None: ...

    def spawn_task(self, coroutine: Coroutine[Any, Any, None]) -> object:
        """As a task that ends with the agent, and with which the agent fails."""

    def on_peer_blocked(self, agent: str, waits: list[list[Any]]) -> None:
        """Of the members of another agent. Raises TypeError or ValueError when that is not what it is."""

    def on_successors_changed(self) -> None:
        """`ControlPlane.num_heirs` may have changed."""

    def kill_coordinator(self) -> None:
        """It does not answer. If it is the agent's own, and there, it is killed, and started again."""

    def write_line(self, line: str) -> None: ...

    def log(self, event: str, **fields: Any) -> None: ...


@dataclass(frozen=True)
class Limits:
    """In seconds: for the coordinator to answer, and for it to come back when it is away."""

    connect: float
    reconnect: float


class ControlPlane:
    def __init__(
        self, callbacks: ControlPlaneCallbacks, endpoint: Endpoint, job: str, limits: Limits, lease: Lease | None
    ) -> None:
        self._callbacks, self._endpoint = callbacks, endpoint
        self.incarnation = endpoint.incarnation  # of the coordinator, by the newest session
        self._job, self._limits = job, limits
        client_callbacks = ClientCallbacks(
            self._on_notice, self._on_disconnected, self._on_reconnected, lambda: callbacks.handle(LeaseExpired())
        )
        self._client = CoordinatorClient(endpoint.address, job, limits.connect, lease, client_callbacks)
        self._peers: PeerMesh | None = None
        self._num_requested = 0  # the last question counts
        self._num_open = 0
        self._open_since = 0.0
        self._undecided_since = 0.0
        self._reported_undecided = ""
        self._newest_over = self._newest_join = 0
        self._knows_finished = False
        self._dead_agents: set[str] = set()
        self._refused: set[tuple[str, str]] = set()
        self._was_disconnected = False
        self._awaited: tuple[str, ...] = ()  # that must come, or be found lost
        self._successors: dict[str, int] = {}  # by agent
        self._sent_successors, self._sent_successors_at = 0, 0.0

    @property
    def agent(self) -> str:
        return self._callbacks.state.agent

    async def open(self) -> str:
        """As `adopt_endpoint`. Raises OperationalError: the coordinator does not answer."""
        await self._client.open(self._endpoint, self.agent)
        address = await self.adopt_endpoint(self._endpoint)
        self._callbacks.spawn_task(
            self._client.keep_connected(lambda: self.agent, lambda: self._callbacks.state.record)
        )
        self._callbacks.spawn_task(self._client.watch_coordinator())
        self._callbacks.spawn_task(self._client.watch_agents(self._watched_agents, self._on_lost))
        return address

    async def adopt_endpoint(self, endpoint: Endpoint) -> str:
        """The agent has an id, for the first time or a new one. Returns where it listens for other agents."""
        self.leave()
        self._endpoint = endpoint
        self._peers = PeerMesh(self._job, self.agent, self._on_peer_message)
        self._newest_over = self._newest_join = 0
        try:
            address = await self._peers.listen(self._endpoint.host)
        except OSError as exc:
            raise OperationalError(f"cannot listen on {self._endpoint.host}: {exc}") from exc
        # Last: who was found lost until now was told to an agent that decided nothing.
        self._dead_agents, self._awaited = set(), ()
        return address

    async def reconnect(self) -> Endpoint | None:
        """Under the agent's new id: the coordinator, once it answers, with a new lease. None: the agent has failed."""
        self._client.disconnect("this agent has ended its members")
        self._num_requested = 0
        session = await self._client.next_session(self._limits.reconnect)
        if session is None:
            where = f"the coordinator at {self._endpoint.address}"
            self._callbacks.handle(CoordinatorTimedOut(f"{where} has not answered for {self._limits.reconnect:g} s"))
            return None
        self._client.begin_lease()
        return session.endpoint

    async def leave_job(self, report: Report | None) -> None:
        """`leave`, in the midst of the job. The lighthouse waits for an agent as long as its last heartbeat counts, but
        for one that has asked, with `report`: it is let know whom to go on without."""
        if report is not None and self._client.session is not None:
            await asyncio.wait([in_daemon_thread(self._client.session.request_record, report)], timeout=_LEAVE_S)
        self.leave()

    def leave(self) -> None:
        """All members of the agent have ended, and it does not come back under this id."""
        if self._peers is not None:
            self._peers.broadcast("exited")
            self._peers.close()
            self._peers = None

    @property
    def exited_agents(self) -> set[str]:
        """Agents of the present generation whose process is known not to be there."""
        return set() if self._peers is None else self._peers.exited | self._dead_agents

    # -- what is told

    def broadcast_over(self, generation: int, reason: str) -> None:
        if generation > self._newest_over:
            self._newest_over = generation
            self._broadcast("over", generation=generation, reason=reason)

    def broadcast_join(self, generation: int) -> None:
        if generation > self._newest_join:
            self._newest_join = generation
            self._broadcast("join", generation=generation)

    def broadcast_finished(self) -> None:
        if not self._knows_finished:
            self._knows_finished = True
            self._broadcast("finished", to_all=True)

    def broadcast_failed(self, member: str, local_rank: int, step: int) -> None:
        self._broadcast("failed", agent=self.agent, member=member, local_rank=local_rank, step=step)

    def broadcast_blocked_on(self, waits: list[list[Any]]) -> None:
        """To the other agents themselves: without a connection to them, the host is lost sooner than it hangs."""
        record = self._callbacks.state.record
        if self._peers is not None and record is not None and len(record.agents) > 1:
            self._peers.broadcast("blocked_on", blocked_on=waits)

    def broadcast_successors(self, num: int, *, again: bool) -> None:
        """How many are here, when that has changed; `again`: or, now and then, if there are any, for connections that
        are new."""
        now = time.monotonic()
        is_due = again and num > 0 and now - self._sent_successors_at > _SUCCESSORS_S
        if self._peers is not None and (num != self._sent_successors or is_due):
            self._sent_successors, self._sent_successors_at = num, now
            self._peers.broadcast("successors", num=num)

    def _broadcast(self, kind: str, to_all: bool = False, **fields: Any) -> None:
        record = self._callbacks.state.record
        if self._peers is None or not (to_all or (record is not None and len(record.agents) > 1)):
            return
        self._peers.broadcast(kind, **fields)
        others = () if to_all or record is None else [agent for agent in record.agents if agent != self.agent]
        if others and all(map(self._peers.is_up, others)):
            asyncio.get_running_loop().call_later(_POST_S, self._post, {"kind": kind, **fields}, record)
        else:
            self._post({"kind": kind, **fields}, record)

    def _post(self, notice: dict[str, Any], record: Record | None) -> None:
        """Tell the store, unless another record has followed."""
        if self._client.session is not None and self._callbacks.state.record is record:
            self._client.session.post(notice)

    def follow(self, record: Record) -> None:
        if self._peers is not None:
            self._peers.follow(dict(zip(record.agents, record.addresses, strict=False)))

    # -- what is heard

    @property
    def num_successors(self) -> int:
        """Of the other agents that there is a connection to."""
        peers = self._peers
        return 0 if peers is None else sum(num for agent, num in self._successors.items() if peers.is_up(agent))

    def _on_peer_message(self, agent: str, message: dict[str, Any]) -> None:
        """By another agent itself."""
        if message["kind"] == "exited":
            self._mark_dead([agent], "agent exited")
        elif message["kind"] == "blocked_on":
            self._callbacks.on_peer_blocked(agent, message["blocked_on"])
        elif message["kind"] == "successors":
            self._successors[agent] = max(0, int(message["num"]))
            self._callbacks.on_successors_changed()
        else:
            self._handle_notice(message)

    def _on_notice(self, notice: dict[str, Any], is_old: bool) -> None:
        try:
            self._handle_notice(notice, is_old)
        except (KeyError, TypeError, ValueError) as exc:
            self._callbacks.log("bad notice", notice=repr(notice), error=repr(exc))

    def _handle_notice(self, notice: dict[str, Any], is_old: bool = False) -> None:
        match notice["kind"]:
            case "over":
                generation = int(notice["generation"])
                if self._is_present_or_next(generation):
                    self._newest_over = max(self._newest_over, generation)
                self._callbacks.handle(PeerNotice(generation, over=True, reason=str(notice["reason"])))
            case "join":
                generation = int(notice["generation"])
                if self._is_present_or_next(generation):
                    self._newest_join = max(self._newest_join, generation)
                self._callbacks.log("join noticed", generation=generation)
                self._callbacks.handle(PeerNotice(generation, over=False))
            case "finished":
                if self._callbacks.state.record is None:
                    self._callbacks.write_line(f"elasticgang: job {self._job} has already finished; exiting")
                self._knows_finished = True
                self._callbacks.handle(Finished())
            case "failed":
                if (agent := str(notice["agent"])) != self.agent:
                    local_rank, step = int(notice["local_rank"]), int(notice["step"])
                    self._callbacks.handle(PeerFailed(agent, str(notice["member"]), local_rank, step))
            case "refused":
                self._on_refused(str(notice["agent"]), str(notice["reason"]), is_old)
            case kind:
                raise ValueError(f"unknown kind {kind!r}")

    def _on_refused(self, agent: str, reason: str, is_old: bool) -> None:
        """Said once, though each session reads it; not of the time before this agent's."""
        is_known = (agent, reason) in self._refused or (is_old and not self._was_disconnected)
        self._refused.add((agent, reason))
        if not is_known and agent != self.agent:
            self._callbacks.write_line(f"elasticgang: agent {agent} is refused: {reason}")

    def _is_present_or_next(self, generation: int) -> bool:
        """At most the next one: of one further on it is not believed that all the others know (AGENT-7 of the agent's
        state)."""
        record = self._callbacks.state.record
        return record is not None and generation <= record.generation + 1

    def _on_disconnected(self, reason: str) -> None:
        self._was_disconnected = True
        self._callbacks.log("coordinator unreachable", reason=reason)
        self._callbacks.spawn_task(self._kill_stuck())

    async def _kill_stuck(self) -> None:
        await asyncio.sleep(_STUCK_S)
        if self._client.session is None:
            self._callbacks.kill_coordinator()

    def _on_reconnected(self, session: CoordinatorSession) -> None:
        self._callbacks.log("coordinator reachable", incarnation=session.endpoint.incarnation)
        session.sends_heartbeats = self._num_requested > 0
        self.incarnation = session.endpoint.incarnation
        self._newest_over = 0  # AGENT-8
        self._callbacks.handle(CoordinatorReturned(session.endpoint.incarnation))

    # -- who is lost

    def _watched_agents(self) -> WatchedAgents:
        """Agents that take part, or have, and are neither here nor known to be lost."""
        record, peers = self._callbacks.state.record, self._peers
        if peers is None:
            return WatchedAgents((), (), False)
        named = () if record is None else (*record.agents, *record.absent_agents)
        names = sorted({*named, *self._awaited} - {self.agent} - self._dead_agents)
        gone = [agent for agent in names if agent in peers.exited]
        is_late = self._num_open > 0 and time.monotonic() - self._open_since > _LATE_S
        return WatchedAgents(names, gone, is_late or not all(map(peers.is_up, names)))

    def _on_lost(self, agents: list[str]) -> None:
        self._mark_dead(agents, "host lost")

    def _mark_dead(self, agents: list[str], event: str) -> None:
        for agent in agents:
            if agent in self._dead_agents:
                continue
            self._dead_agents.add(agent)
            self._callbacks.log(event, agent=agent)
            self._callbacks.handle(HostLost(agent))

    # -- questions

    def request(self, delay_s: float) -> None:
        self._num_requested += 1
        self._callbacks.spawn_task(self._request(self._num_requested, delay_s))

    async def _request(self, number: int, delay_s: float) -> None:
        if delay_s:
            await asyncio.sleep(delay_s)
        if not self._num_open:
            self._open_since = time.monotonic()
        self._num_open += 1
        if not delay_s:  # else once more
            self._callbacks.log("requested", request=number)
        try:
            answer = await self._await_answer(number)
        finally:
            self._num_open -= 1
        if answer is not None:
            self._awaited = answer.absent_agents if isinstance(answer, Undecided) else ()
            self._report_undecided(answer)
            self._callbacks.handle(QuorumAnswered(answer, is_newest=number == self._num_requested))

    async def _await_answer(self, number: int) -> Record | Undecided | Unrecoverable | None:
        """None: the question needs no answer any more."""
        failing_since = 0.0
        while number == self._num_requested and self._callbacks.state.may_request():
            session = self._client.session
            if session is None:
                away_since, error = (
                    max(self._client.disconnected_since, self._open_since),
                    "it is away",
                )  # since it is needed
            else:
                session.sends_heartbeats = True
                report = self._callbacks.state.report()
                asking = in_daemon_thread(session.request_record, report)
                try:
                    if await self._announcing(asking, session, report) and asking.result() is not None:
                        answer: Record | Undecided | Unrecoverable = asking.result()
                        return answer
                    failing_since = 0.0
                    continue
                except OperationalError as exc:
                    away_since = failing_since = failing_since or time.monotonic()
                    error = str(exc)
            if time.monotonic() - away_since > self._limits.reconnect:
                address = self._endpoint.address
                why = f"no generation can be agreed without the coordinator at {address}: {error}"
                self._callbacks.handle(CoordinatorTimedOut(why))
                return None
            await asyncio.sleep(_RETRY_S)
        return None

    async def _announcing(self, asking: asyncio.Future[Any], session: CoordinatorSession, report: Report) -> bool:
        """Wait for an answer, and let the job know who waits to join it: newcomers soon, and who finds itself left
        behind by the store's record, which is not read in the midst of a change. False: the session was lost."""
        wait_s, again_s = _LEFT_BEHIND_S, _LEFT_BEHIND_S
        if self._has_newcomer(report):
            wait_s, again_s = _ANNOUNCE_FIRST_S, _ANNOUNCE_S
        losing = asyncio.ensure_future(self._client.until_lost(asking))
        announcing: asyncio.Future[Any] | None = None  # one at a time: a slow coordinator gets no heap of them
        try:
            while not losing.done():
                await asyncio.wait([losing], timeout=wait_s)
                if not losing.done() and (announcing is None or announcing.done()):
                    announcing = in_daemon_thread(session.announce_join, report)
                wait_s = again_s
            return losing.result()
        finally:
            losing.cancel()

    def _has_newcomer(self, report: Report) -> bool:
        record = self._callbacks.state.record
        return record is None or has_newcomer(record, report)

    def _report_undecided(self, answer: Record | Undecided | Unrecoverable) -> None:
        """Say once why no generation is agreed, when that goes on; and at once who is refused."""
        if not isinstance(answer, Undecided):
            self._undecided_since = 0.0
            return
        self._undecided_since = self._undecided_since or time.monotonic()
        is_others = any(agent != self.agent for agent, _ in answer.refused)
        if (
            is_others or time.monotonic() - self._undecided_since > _UNDECIDED_PATIENCE_S
        ) and answer.reason != self._reported_undecided:
            self._reported_undecided = answer.reason
            self._callbacks.write_line(f"elasticgang: no generation can be agreed yet: {answer.reason}")
