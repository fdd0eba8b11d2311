"""The agent's side of the coordinator: one session after the other, requests, notices, and the lease of its ranks.

`AgentSession` decides what a session means, and `AgentClient` carries it. This module translates between them and the
agent's state machine.

CONTROL-1  A request is sent again in each session until a record follows. When no coordinator leads the job for
    `reconnect` seconds while a request is open, the agent fails.
CONTROL-2  Facts are sent when they have changed. `AgentSession` sends them again where that is needed.
CONTROL-3  An agent's process listens at its address while it lives: once the address refuses connections, the
    coordinator may declare the agent dead.
CONTROL-4  The agent is told of nothing before `begin`.
CONTROL-5  An agent whose ranks have finished the job exits only once the coordinator knows so, or after `FINISHED_S`:
    otherwise the coordinator would declare it dead, and the state that its ranks held lost.
CONTROL-6  A new session may find that the host has lost its address, for example because its network was away. The
    agent then kills its ranks, which listen there, and rejoins at the address that it has now.
CONTROL-7  An agent that has waited for a coordinator for `SILENT_S` while a request is open says so, once for each
    request.
CONTROL-8  A coordinator that refuses an agent before it has welcomed it, for example because it cannot read its state,
    ends one that starts. One that takes part already waits for a coordinator that leads the job (CONTROL-1): its ranks
    may train on.
CONTROL-9  Which agents were lost, and which have left, is kept until a record is without them: a job of weeks has
    thousands of ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import time
from collections.abc import Collection, Coroutine
from dataclasses import dataclass, replace
from typing import Any, Protocol

from elasticgang.agent.reach import answer
from elasticgang.errors import OperationalError
from elasticgang.observe.event_names import EventName
from elasticgang.process.lease import Lease
from elasticgang.protocol.agent_events import (
    CoordinatorTimedOut,
    Event,
    Finished,
    LeaseExpired,
    PeerFailed,
    PeerNotice,
    RecordAnswered,
)
from elasticgang.protocol.agent_session import AgentSession
from elasticgang.protocol.agent_state import AgentState
from elasticgang.protocol.coordinator_messages import (
    EndGeneration,
    Goodbye,
    JobFailed,
    JoinRequest,
    Notice,
    Notify,
    Timeouts,
    Welcome,
)
from elasticgang.protocol.coordinator_messages import Finished as JobFinished
from elasticgang.protocol.end_cause import EndCause
from elasticgang.protocol.job_facts import (
    MAX_FAILURES,
    AgentFacts,
    JobFacts,
    KnownSuccessors,
    ScriptFailure,
    Wait,
)
from elasticgang.protocol.record import Record, Report, Undecided
from elasticgang.protocol.rendezvous_keys import RendezvousKeys
from elasticgang.session.addresses import family_of, host_and_port, is_address_here
from elasticgang.session.agent_client import AgentClient
from elasticgang.session.credentials import Credentials

FINISHED_S = 10.0  # CONTROL-5
_CHECK_S = 0.1
_STUCK_S = 2.0  # for a coordinator of this agent's own that does not answer, before it is killed
SILENT_S = 5.0  # CONTROL-7
_MAX_QUEUED = 4096  # connections: all agents of a large job try at once whether they reach this one (REACH-1)
_MAX_ACCEPTED = 64  # in one turn of the event loop
_ANYWHERE = ("192.0.2.1", 9)  # an address for examples, beyond the default route
_ANYWHERE_6 = ("2001:db8::1", 9)


class ControlPlaneCallbacks(Protocol):
    """The agent itself."""

    @property
    def state(self) -> AgentState: ...

    def handle(self, event: Event | LeaseExpired | CoordinatorTimedOut) -> None: ...

    def spawn_task(self, coroutine: Coroutine[Any, Any, None]) -> object:
        """As a task that ends with the agent, and with which the agent fails."""

    def on_facts_changed(self) -> None:
        """`ControlPlane.facts`"""

    def on_session_renewed(self) -> None:
        """A coordinator in office is told of this generation's rendezvous keys again."""

    def on_rendezvous_keys(self, message: RendezvousKeys) -> None:
        """Of the other agents. Raises WireError."""

    def kill_coordinator(self) -> None:
        """It does not answer. If it is the agent's own, and there, it is killed, and started again."""

    def write_line(self, line: str) -> None: ...

    def log(self, event: EventName, **fields: Any) -> None: ...


@dataclass(frozen=True)
class Limits:
    """In seconds: for the coordinator to answer, and for it to come back when it is away."""

    connect: float
    reconnect: float


class ControlPlane:
    """`host`: this machine's address as other agents reach it. `address`: where this agent listens (CONTROL-3). Both
    are known once a coordinator has answered. `facts`: of the job, as of the present session; none without one."""

    def __init__(
        self,
        callbacks: ControlPlaneCallbacks,
        coordinator: str,
        job: str,
        credentials: Credentials,
        limits: Limits,
        timeouts: Timeouts,
        lease: Lease,
    ) -> None:
        self.coordinator, self.host, self.address = coordinator, "", ""
        self.facts = JobFacts()
        self._successors = KnownSuccessors()
        self._callbacks, self._job, self._credentials = callbacks, job, credentials
        self._limits, self._timeouts, self._lease = limits, timeouts, lease
        self._incarnation = secrets.token_hex(8)  # of this process
        self._listener: asyncio.Server | None = None
        self._begun = False
        self._early: list[Any] = []  # CONTROL-4
        self._is_connected = False
        self._unled_s: float | None = time.monotonic()  # since when no coordinator leads the job
        self._requested_s = self._warned_s = 0.0
        self._newest_over, self._newest_join = (0, False), 0
        self._lost_agents: set[str] = set()
        self._left_agents: set[str] = set()
        self._finish_known = asyncio.Event()
        self._new_session(AgentSession(self.agent, self._incarnation, self._timeouts))

    def _new_session(self, session: AgentSession) -> None:
        host, port = host_and_port(self.coordinator)
        self._session = session
        self._client = AgentClient(self._session, self, (host, int(port)), self._job, self._credentials)
        self._welcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reason = self._refusal = ""  # CONTROL-8

    @property
    def agent(self) -> str:
        return self._callbacks.state.agent

    # -- life

    async def open(self) -> None:
        """Raises OperationalError: the coordinator does not answer, or refuses this agent."""
        self._client.start()
        try:
            await asyncio.wait_for(asyncio.shield(self._welcome), self._limits.connect)
        except asyncio.TimeoutError:
            raise OperationalError(self._why_unreached()) from None
        await self._listen()
        self._callbacks.spawn_task(self._watch())

    async def _listen(self) -> None:
        """CONTROL-3. Raises OperationalError."""
        self._credentials.check_address(
            self.host,
            f"the ranks of this host serve their state to peers on loopback only, not at {self.host}, where the "
            f"coordinator at {self.coordinator} lets peers connect",
        )
        try:
            # asyncio goes on to accept as often in a turn even where no descriptor is free.
            self._listener = await asyncio.start_server(answer, self.host, 0, backlog=_MAX_ACCEPTED)
            for listening in self._listener.sockets:
                with socket.fromfd(listening.fileno(), listening.family, listening.type) as same:
                    same.listen(_MAX_QUEUED)
        except OSError as exc:
            raise OperationalError(f"cannot listen on {self.host}: {exc}") from exc
        self.address = f"{self.host}:{self._listener.sockets[0].getsockname()[1]}"

    def begin(self) -> None:
        """CONTROL-4."""
        self._begun = True
        facts, self.facts = self.facts, JobFacts()
        self._take(facts)
        early, self._early = self._early, []
        for event in early:
            self.inform(event)

    async def rejoin(self, former: str) -> bool:
        """Under the agent's new id, once all ranks of `former` have exited. False: the agent has failed."""
        await self._client.stop()
        former_host, self.host = self.host, ""  # CONTROL-6
        self._begun, self._newest_over, self._newest_join = False, (0, False), 0
        self._early.clear()
        self._lost_agents.clear()
        self._left_agents.clear()
        self.facts, self._successors = JobFacts(), KnownSuccessors()
        self._lease.until = float("inf")  # UNBOUND
        self._new_session(self._session.under(self.agent))
        self._client.start()
        try:
            await asyncio.wait_for(asyncio.shield(self._welcome), self._limits.reconnect)
            if self.host != former_host:
                self._stop_listening()
                await self._listen()
        except asyncio.TimeoutError:
            limit_s = self._limits.reconnect
            why = f"the coordinator at {self.coordinator} has not answered for {limit_s:g} s"
            self._callbacks.handle(CoordinatorTimedOut(why))
            return False
        except OperationalError as exc:
            self._callbacks.handle(CoordinatorTimedOut(str(exc)))
            return False
        return True

    def end(self) -> None:
        """The agent exits: it is told of nothing more."""
        self._begun = False

    async def confirm_finished(self) -> None:
        """CONTROL-5."""
        try:
            await asyncio.wait_for(self._finish_known.wait(), FINISHED_S)
        except asyncio.TimeoutError:
            self._callbacks.write_line(
                f"elasticgang: warning: the coordinator at {self.coordinator} could not be told within "
                f"{FINISHED_S:g} s that job {self._job} has finished: {self._reason or 'it does not answer'}"
            )

    async def leave(self, reason: str) -> None:
        """All members of the agent have exited, and it does not come back."""
        self.end()
        self._client.notify(Notify(Goodbye(reason)))
        await self._client.stop()
        self._stop_listening()

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def _why_unreached(self) -> str:
        why = f": {self._reason}" if self._reason else ""
        if self._client.has_connected and not self._client.was_answered:
            return (
                f"what listens at {self.coordinator} has not answered for {self._limits.connect:g} s: it is no "
                f"coordinator of elasticgang, or its host is overloaded{why}"
            )
        if self._client.has_connected and self._client.is_explained:
            return f"cannot open a session with the coordinator at {self.coordinator}{why}"
        if self._client.has_connected:
            what = f"what answers at {self.coordinator} is not a coordinator of elasticgang"
            if missing := self._credentials.missing:
                return f"{what} that takes agents without a secret: does it need {missing}? ({self._reason})"
            return f"{what} with the same secret{why}"
        return f"cannot reach the coordinator at {self.coordinator} within {self._limits.connect:g} s{why}"

    async def _watch(self) -> None:
        """CONTROL-1, and a coordinator of this agent's own that stands still."""
        killed_s = 0.0
        while True:
            await asyncio.sleep(_CHECK_S)
            now_s = time.monotonic()
            if self._session.is_led:
                self._unled_s = None
                continue
            unled_s = self._unled_s = now_s if self._unled_s is None else self._unled_s
            if now_s - max(unled_s, killed_s) > _STUCK_S and not self._session.is_welcome:
                killed_s = now_s
                self._callbacks.kill_coordinator()
            is_needed = self._begun and self._requested_s > 0 and self._callbacks.state.may_request()
            waited_s = now_s - max(unled_s, self._requested_s) if is_needed else 0.0
            if waited_s > SILENT_S and self._requested_s > self._warned_s:
                self._warn_silent()
            if waited_s > self._limits.reconnect:
                why = f"no generation can be agreed without the coordinator at {self.coordinator}: "
                self._requested_s = 0.0
                self._callbacks.handle(CoordinatorTimedOut(why + (self._reason or "it does not lead the job")))

    def _warn_silent(self) -> None:
        """CONTROL-7."""
        self._warned_s = time.monotonic()
        what = "does not lead the job" if self._session.is_welcome else "does not answer"
        limit_s = self._limits.reconnect
        self._callbacks.write_line(
            f"elasticgang: the coordinator at {self.coordinator} {what}; waiting up to {limit_s:g} s"
        )

    # -- what is told

    def broadcast_over(self, generation: int, cause: EndCause) -> None:
        if (generation, cause.timed_out) > self._newest_over:
            self._newest_over = generation, cause.timed_out
            self._client.notify(Notify(EndGeneration(generation, cause)))

    def broadcast_join(self, generation: int) -> None:
        if generation > self._newest_join:
            self._newest_join = generation
            self._client.notify(Notify(JoinRequest(generation)))

    def broadcast_finished(self, generation: int) -> None:
        self._client.notify(Notify(JobFinished(generation)))

    def broadcast_job_failed(self, step: int, generation: int, text: str) -> None:
        self._client.notify(Notify(JobFailed(step, generation, text)))

    def tell_failure(self, member: str, local_rank: int, step: int) -> None:
        failures = (*self._session.facts.failures, ScriptFailure(member, local_rank, step))
        self._tell(replace(self._session.facts, failures=failures[-MAX_FAILURES:]))

    def tell(self, *, has_successors: bool, is_stopping: bool) -> None:
        self._tell(replace(self._session.facts, has_successors=has_successors, is_stopping=is_stopping))

    def tell_unreached(self, agents: tuple[str, ...]) -> None:
        self._tell(replace(self._session.facts, unreached=agents))

    def tell_waits(self, waits: tuple[Wait, ...]) -> None:
        self._tell(replace(self._session.facts, waits=waits))

    def _tell(self, facts: AgentFacts) -> None:
        """CONTROL-2"""
        if facts != self._session.facts:
            self._client.notify(Notify(facts))

    def request(self) -> None:
        """The ranks may be ready."""
        self._requested_s = self._requested_s or time.monotonic()
        self._client.request_report()

    def send_keys(self, message: RendezvousKeys) -> None:
        self._client.send_keys(message)

    # -- of its client

    def receive_keys(self, message: RendezvousKeys) -> None:
        self._callbacks.on_rendezvous_keys(message)

    def set_lease(self, until_s: float) -> None:
        self._lease.until = until_s

    def kill_ranks(self, reason: str) -> None:
        then = f"they restart once the coordinator at {self.coordinator} can be reached"
        self._callbacks.handle(LeaseExpired(f"{reason}: killing the ranks of this host; {then}"))

    def collect_report(self) -> Report | None:
        state = self._callbacks.state
        return state.report() if self._begun and state.may_request() else None

    def welcomed(self, welcome: Welcome, host: str) -> None:
        host = _seen_from_outside(host) if welcome.everywhere else host
        self.host = self.host or host
        if self._begun and not is_address_here(self.host):
            self._client.lose_address(f"this host no longer has the address {self.host}, and is now at {host}")
            return
        if welcome.in_office:
            self._callbacks.on_session_renewed()
        if welcome.in_office and not self._is_connected:
            self._is_connected = True
            if self._begun:
                self._callbacks.log("coordinator reachable", incarnation=welcome.term.name)
        if not self._welcome.done():
            self._welcome.set_result(None)

    def disconnected(self, reason: str) -> None:
        self._reason, self._refusal = self._refusal or reason, ""
        if self._is_connected:
            self._is_connected = False
            if self._begun:
                self._callbacks.log("coordinator unreachable", reason=reason)
        self._successors.lose_session(time.monotonic())
        self._take(JobFacts())

    def inform(self, event: Any) -> None:
        if isinstance(event, Finished):
            self._finish_known.set()
        answer = event.answer if isinstance(event, RecordAnswered) else None
        if isinstance(answer, Undecided) and answer.refused and not self._session.is_welcome:
            self._refused(answer.refused[0][1])
        elif isinstance(event, JobFacts):
            self._successors.hear(event.have_successors)
            self._take(event)
        elif not self._begun:
            self._early.append(event)
        elif isinstance(event, Notice):
            self._on_notice(event)
        else:
            self._on_event(event)

    def _refused(self, why: str) -> None:
        """CONTROL-8."""
        self._refusal = f"the coordinator at {self.coordinator} refuses this host: {why}"
        if not self._welcome.done():
            self._welcome.set_exception(OperationalError(f"the job refused this host: {why}"))

    def _on_event(self, event: Event) -> None:
        if isinstance(event, RecordAnswered) and isinstance(event.answer, Record):
            self._requested_s = 0.0
        elif isinstance(event, PeerNotice) and not event.over:
            self._callbacks.log("join noticed", generation=event.generation)
        elif isinstance(event, Finished) and self._callbacks.state.record is None:
            self._callbacks.write_line(f"elasticgang: job {self._job} has already finished; exiting")
        self._callbacks.handle(event)

    def _take(self, facts: JobFacts) -> None:
        known, self.facts = self.facts, facts
        if not self._begun or facts == known:
            return
        self._callbacks.on_facts_changed()
        for failure in facts.failures:
            if failure not in known.failures and failure.agent != self.agent:
                event = PeerFailed(failure.agent, failure.member, failure.local_rank, failure.step)
                self._callbacks.handle(event)

    def _on_notice(self, notice: Notice) -> None:
        match notice.topic:
            case "undecided" | "waiting":
                self._callbacks.write_line(f"elasticgang: no generation can be agreed yet: {notice.reason}")
            case "refused":
                self._callbacks.write_line(f"elasticgang: agent {', '.join(notice.agents)} is refused: {notice.reason}")
            case "lost" | "left":
                (self._lost_agents if notice.topic == "lost" else self._left_agents).update(notice.agents)
                for agent in notice.agents:
                    self._callbacks.log("host lost" if notice.topic == "lost" else "host left", agent=agent)

    # -- what the agent reads

    @property
    def others_have_successors(self) -> bool:
        """FACTS-RECENT."""
        return self._successors.any(time.monotonic())

    def take_gone(self, agents: Collection[str]) -> tuple[set[str], set[str]]:
        """CONTROL-9. A record of `agents` is agreed: those that were declared lost, without them, and those that have
        told the coordinator that they end."""
        lost, left = self._lost_agents.difference(agents), set(self._left_agents)
        self._lost_agents.intersection_update(agents)
        self._left_agents.intersection_update(agents)
        return lost, left


def _seen_from_outside(host: str) -> str:
    """Where others reach this machine, which has reached from `host` a coordinator that listens on all addresses. There
    may be agents of other machines, to which a loopback address means themselves."""
    if host.startswith("127.") or host == "::1":
        with contextlib.suppress(OSError), socket.socket(family_of(host), socket.SOCK_DGRAM) as probe:
            probe.connect(_ANYWHERE_6 if ":" in host else _ANYWHERE)  # sends nothing
            return str(probe.getsockname()[0])
    return host
