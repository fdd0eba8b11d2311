"""The coordinator: one `CoordinatorState` for each job, driven by the sessions of its agents, the clock and the disk.

SERVE-ORDER    The instructions of one event are executed before the next event of that job is handled.
SERVE-PERSIST  A decision is written and fsynced, off the event loop, before the state machine gets `Persisted`.
SERVE-APART    Jobs share nothing but the process.
SERVE-FOUND    Without a state directory, an unknown job counts as new only `founds_after_s` after the start: the agents
               of a running job reconnect within that time.
SERVE-EXITED   An agent without a session counts as exited, with every process that it started, once its host has
               refused connections to its address for `EXITED_S`. Within that time the agent's fork server has killed
               these processes.
SERVE-FORGET   An abandoned job (ABANDON) is removed from memory at once if the state directory has its state, or if the
               server knows no record of it. Without a directory, the server remembers only the outcome of the last
               `MAX_ENDED` jobs that have finished or are lost, and removes other abandoned jobs once it leads
               `MAX_JOBS`.
SERVE-NEW      The state directory has no file of a job before its first decision: whoever holds the secret may name
               any number of jobs, and each file costs two fsyncs. For a job that has a file, the new term is on disk
               before an agent learns it. Both are read and written off the event loop; what agents send meanwhile, up
               to `_MAX_EARLY` messages each, is handled then.
SERVE-BEGIN    A connection is closed if its session has not begun `HANDSHAKE_S` after it was authenticated: the agent
               has not sent its hello, or the decision that this names. One of an operator is closed then in any case.
               Until then an agent may know a record, and an operator's word is refused.
SERVE-LIMIT    An agent whose record is over the limit of a message (a state directory may hold one; NEXT-9) is refused,
               and so exits with the reason. Without a word it would open session after session.
SERVE-LOG      Why a session of a job was closed is logged once for each host and reason.
SERVE-STOP     The process ends when the state machine raises or a write fails. The state directory and the agents have
               all of its state.
SERVE-LEAVE    After SIGTERM the process ends once no agent that was signalled too has a session: the ranks that hold
               the last copy of the state may need a record before they can save it and leave. It waits `REPEATED_S` for
               those that are signalled a moment later, or open another session, and while a decision is written,
               because it hears them behind that. SIGINT, or a second SIGTERM that is no repetition (REPEAT-1), ends it
               at once.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from elasticgang.coordinator.job_keys import JobKeys
from elasticgang.coordinator.push_payloads import PushPayloads
from elasticgang.coordinator.state_directory import Kept, StateDirectory
from elasticgang.errors import OperationalError, WireError
from elasticgang.protocol.coordinator_messages import (
    JOB_TIMEOUTS,
    AgentExited,
    CloseSession,
    CoordinatorEvent,
    CoordinatorInstruction,
    CoordinatorMessage,
    Granted,
    Hello,
    Notice,
    OfficeGranted,
    Persist,
    Persisted,
    Push,
    Received,
    Refused,
    Send,
    SessionClosed,
    Term,
    Ticked,
    Timeouts,
)
from elasticgang.protocol.coordinator_state import CoordinatorState
from elasticgang.protocol.record import PROTOCOL, Record
from elasticgang.protocol.rendezvous_keys import RendezvousKeys
from elasticgang.protocol.stop_request import REPEATED_S
from elasticgang.session.connection import HANDSHAKE_S, Connection
from elasticgang.session.credentials import Credentials
from elasticgang.session.frames import Payload
from elasticgang.session.handshake import AGENT, OPERATOR
from elasticgang.session.incidents import Incidents
from elasticgang.session.listener import Listener
from elasticgang.session.messages import decode_from_agent, decode_from_operator, encode

EXITED_S = 1.2
_TICK_S = 0.2
_LEAVE_POLL_S = 0.02
_PROBE_S = 1.0
MAX_JOBS = 1024
MAX_ENDED = 16384
_MAX_EARLY = 64
_ALL_ADDRESSES = ("", "0.0.0.0", "::")


@dataclass
class _Job:
    name: str
    state: CoordinatorState
    closings: Incidents  # SERVE-LOG
    connections: dict[int, Connection] = field(default_factory=dict)
    known: dict[int, Record] = field(default_factory=dict)  # by session: the newest record that was sent to the agent
    pushes: PushPayloads = field(default_factory=PushPayloads)
    events: deque[CoordinatorEvent] = field(default_factory=deque)
    is_busy: bool = False
    num_writes: int = 0
    refused_s: dict[str, float] = field(default_factory=dict)  # by agent: when its host began to refuse (SERVE-EXITED)
    probes: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    awaited: str = ""  # why it waits for the operator's word: logged once
    keys: JobKeys = field(init=False)

    def __post_init__(self) -> None:
        self.keys = JobKeys(self.state, self._send_keys)

    def _send_keys(self, session: int, message: RendezvousKeys) -> None:
        connection = self.connections.get(session)
        if connection is not None:
            connection.send(encode(message))


@dataclass(frozen=True)
class ServerOptions:
    """`founds`: whether an unknown job counts as new, without a state directory (SERVE-FOUND). `advertise`: HOST:PORT,
    where agents reach this coordinator, and one after it on another machine (MOVED). Empty: this machine's name."""

    credentials: Credentials = field(default_factory=Credentials)
    directory: StateDirectory | None = None
    founds: bool = False
    founds_after_s: float = 0.0
    timeouts: Timeouts = JOB_TIMEOUTS
    advertise: str = ""


class CoordinatorServer:
    """Leads jobs. Runs on the event loop; not thread-safe. `fail` is called once, with the error, after which the
    server handles no event (SERVE-STOP)."""

    def __init__(
        self,
        options: ServerOptions,
        log: Callable[[str], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._options, self._log, self._fail = options, log, fail
        self._jobs: dict[str, _Job] = {}
        self._opening: dict[str, dict[Connection, list[bytes]]] = {}  # SERVE-NEW: by job, what came meanwhile
        self._ended: dict[str, tuple[bool, str]] = {}  # finished, or why it is lost (SERVE-FORGET)
        self._session_of: dict[Connection, tuple[_Job, int]] = {}
        self._begins_by_s: dict[Connection, float] = {}  # SERVE-BEGIN
        self._num_sessions = 0
        self._writer = ThreadPoolExecutor(1, "state-directory")
        self._writes: set[asyncio.Task[None]] = set()
        self._probes: set[asyncio.Task[None]] = set()  # of all jobs, and of those that were forgotten
        self._order = asyncio.Lock()
        self._ticker: asyncio.TimerHandle | None = None
        self._founds_at_s = time.monotonic() + options.founds_after_s
        self._has_failed = self._is_everywhere = False
        self._address = ""
        credentials = options.credentials
        self.listener = Listener(self, lambda job: credentials.key, log, (AGENT, OPERATOR), tls=credentials.tls)

    @property
    def num_bytes_sent(self) -> int:
        return sum(connection.num_bytes_sent for connection in self._session_of)

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port. Raises OperationalError (CRED-LOCAL), or OSError: it cannot listen there."""
        self._options.credentials.check_address(host, f"the coordinator listens on loopback only, not on {host!r}")
        self._is_everywhere = host in _ALL_ADDRESSES
        await self.listener.start(host, port)
        self._address = self._options.advertise or f"{socket.gethostname()}:{self.listener.port}"
        self._tick()
        return self.listener.port

    async def stop(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        for probe in self._probes:
            probe.cancel()
        await self.listener.stop()
        await asyncio.gather(*self._writes, *self._probes, return_exceptions=True)
        self._writer.shutdown()

    async def until_left(self) -> None:
        """SERVE-LEAVE"""
        has_sessions = any(job.connections for job in self._jobs.values())
        waits_until_s, told = time.monotonic() + REPEATED_S * has_sessions, False
        while True:
            states = [job.state for job in self._jobs.values()]
            is_needed = any(state.stopping_agents for state in states)
            if is_needed or any(state.is_deciding for state in states):
                waits_until_s = time.monotonic() + REPEATED_S
            elif time.monotonic() >= waits_until_s:
                return
            if is_needed and not told:
                told = True
                self._log("agents are stopping too: the coordinator ends after them")
            await asyncio.sleep(_LEAVE_POLL_S)

    def grant(self, job: str) -> Granted | Refused:
        """Grant this coordinator office over `job`, by the word of an operator (see OFFICE). Refused unless the job
        waits for it."""
        found = self._jobs.get(job)
        if self._opening.get(job):
            return Refused(f"an agent of job {job} is connecting: try again")
        if found is None or not found.connections:
            return Refused(f"no agent of job {job} has a session with this coordinator: start the agents first")
        state = found.state
        if any(number not in state.sessions.begun for number in found.connections):  # it may know a record
            return Refused(f"an agent of job {job} is connecting: try again")
        why = state.word_awaited
        if not why:
            return Refused(
                f"job {job} needs no word: this coordinator leads it ({state.next_decision.reason or 'it is running'})"
            )
        self._log(f"job {job}: an operator grants office: {why}")
        self._handle(found, OfficeGranted())
        record = state.record
        origin = "founds it" if record is None else f"leads it on from generation {record.generation}"
        if not state.in_office:
            again = f"if it has exited, repeat the grant after {state.timeouts.lease_s / 2:g} s"
            return Granted(f"job {job}: this coordinator {origin}, but not yet: {state.word_awaited} ({again})")
        absent = ", ".join(state.absent_agents())
        without = f", without agent {absent} once its silence has lasted" if absent else ""
        return Granted(f"job {job}: this coordinator {origin}{without}")

    @property
    def num_jobs(self) -> int:
        """The number of jobs in memory (SERVE-FORGET)."""
        return len(self._jobs)

    def state_of(self, job: str) -> CoordinatorState | None:
        found = self._jobs.get(job)
        return None if found is None else found.state

    # -- the listener's `SessionUser`

    def opened(self, connection: Connection) -> None:
        identity = connection.identity
        assert identity is not None
        if identity.protocol != PROTOCOL:
            self._refuse(connection, identity.job, f"its protocol is {identity.protocol}, but the job's is {PROTOCOL}")
            return
        self._begins_by_s[connection] = time.monotonic() + HANDSHAKE_S
        if identity.role == OPERATOR:
            return
        name, directory = identity.job, self._options.directory
        if name not in self._jobs and name not in self._opening:
            try:
                self._make_room()
            except OperationalError as error:
                self._refuse(connection, name, str(error))
                return
            if directory is None:
                self._jobs[name] = self._new_job(name, secrets.token_hex(8), Kept())
            else:
                self._opening[name] = {}
                self._keep(self._open(name, directory))
        if name in self._opening:
            self._opening[name][connection] = []
        else:
            self._join(connection, self._jobs[name])

    def _join(self, connection: Connection, job: _Job) -> None:
        self._num_sessions += 1
        job.connections[self._num_sessions] = connection
        self._session_of[connection] = job, self._num_sessions

    def _refuse(self, connection: Connection, job: str, why: str) -> None:
        self.listener.incidents.note(connection.peer.rsplit(":", 1)[0], why)
        connection.send(encode(Refused(why)))
        connection.close()
        if job in self._jobs:
            notice = Payload(encode(Notice("refused", why, (f"at {connection.peer}",))))
            for other in self._jobs[job].connections.values():
                other.send(notice)

    def received(self, connection: Connection, payload: bytes) -> None:
        identity = connection.identity
        if identity is not None and identity.role == OPERATOR:
            decode_from_operator(payload)
            connection.send(encode(self.grant(identity.job)))
            return
        found = self._session_of.get(connection)
        if found is None:
            self._receive_early(connection, payload)
            return
        job, number = found
        message = decode_from_agent(payload)
        if isinstance(message, RendezvousKeys):
            job.keys.exchange_keys(number, message)
            return
        if isinstance(message, Hello):
            known = job.state.record
            if known is not None and message.decision is not None and message.decision.digest == known.digest:
                job.known[number] = known
        self._handle(job, Received(number, message))

    def _receive_early(self, connection: Connection, payload: bytes) -> None:
        """SERVE-NEW"""
        identity = connection.identity
        early = None if identity is None else self._opening.get(identity.job, {}).get(connection)
        if early is None:
            return
        if len(early) >= _MAX_EARLY:
            raise WireError(f"it sends more than {_MAX_EARLY} messages before it is welcomed")
        early.append(payload)

    def closed(self, connection: Connection, reason: str) -> None:
        if connection.identity is not None:
            self._opening.get(connection.identity.job, {}).pop(connection, None)
        found = self._session_of.pop(connection, None)
        self._begins_by_s.pop(connection, None)
        if reason:
            self.listener.incidents.note(connection.peer.rsplit(":", 1)[0], reason)
        if found is not None:
            job, number = found
            job.connections.pop(number, None)
            job.known.pop(number, None)
            job.keys.leave(number)
            self._handle(job, SessionClosed(number))

    # -- the state machines

    async def _open(self, name: str, directory: StateDirectory) -> None:
        """SERVE-NEW"""
        coordinator = secrets.token_hex(8)  # per job: a job that comes back after it was forgotten gets another term
        try:
            async with self._order:
                loop = asyncio.get_running_loop()
                kept = await loop.run_in_executor(self._writer, _take_term, directory, name, coordinator, self._address)
        except OperationalError as error:
            for connection in self._opening.pop(name):
                self._refuse(connection, name, str(error))
            return
        except Exception as error:  # SERVE-STOP
            self._stop_for(error)
            return
        waiting, job = self._opening.pop(name), self._new_job(name, coordinator, kept)
        self._jobs[name] = job
        for connection in waiting:
            self._join(connection, job)
        for connection, early in waiting.items():
            for payload in early:
                try:
                    self.received(connection, payload)
                except WireError as error:
                    connection.abort(str(error))

    def _new_job(self, name: str, coordinator: str, kept: Kept) -> _Job:
        has_directory = self._options.directory is not None
        state = CoordinatorState(
            coordinator,
            number=kept.term.number + 1,
            has_directory=has_directory,
            decision=kept.decision,
            own=kept.own,
            address=self._address,
            addresses=kept.addresses,
            finished=kept.finished,
            granted=kept.decision is None and self._options.founds and time.monotonic() >= self._founds_at_s,
            timeouts=self._options.timeouts,
            everywhere=self._is_everywhere,
        )
        if name in self._ended:
            state.newest.finished, state.unrecoverable = self._ended.pop(name)
        return _Job(name, state, Incidents(lambda line: self._log(f"job {name}: {line}")))

    def _tick(self) -> None:
        self._ticker = asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        self._close_silent(time.monotonic())
        is_founding_due = self._options.founds and time.monotonic() >= self._founds_at_s
        for job in list(self._jobs.values()):
            self._handle(job, Ticked())
            if is_founding_due and not job.state.in_office and job.state.newest.decision is None:
                self._handle(job, OfficeGranted())
            self._probe_absent(job)
            state = job.state
            why = state.next_decision.reason if state.next_decision.awaits_word else state.overdue_office
            if why and why != job.awaited:
                self._log(f"job {job.name}: {why} (`elasticgang grant`)")
            job.awaited = why
            is_kept = self._options.directory is not None or state.newest.decision is None
            if (is_kept or state.newest.finished or state.unrecoverable) and self._is_abandoned(job):
                self._forget(job)

    def _close_silent(self, now_s: float) -> None:
        """SERVE-BEGIN"""
        for connection, begins_by_s in list(self._begins_by_s.items()):
            found = self._session_of.get(connection)
            if found is not None and found[1] in found[0].state.sessions.begun:
                del self._begins_by_s[connection]
            elif now_s > begins_by_s:
                connection.abort(f"its session had not begun after {HANDSHAKE_S:g} s")

    def _is_abandoned(self, job: _Job) -> bool:
        if job.connections or job.num_writes or job.events or job.state.is_deciding:
            return False
        return job.state.is_abandoned or (job.state.newest.finished and self._options.directory is not None)

    def _forget(self, job: _Job) -> None:
        """SERVE-FORGET"""
        for probe in job.probes.values():
            probe.cancel()
        del self._jobs[job.name]
        state = job.state
        if self._options.directory is None and (state.newest.finished or state.newest.decision is not None):
            lost = "every agent of the job has gone, and its coordinator has no state directory"
            self._ended[job.name] = state.newest.finished, "" if state.newest.finished else state.unrecoverable or lost
            if len(self._ended) > MAX_ENDED:
                del self._ended[next(iter(self._ended))]

    def _make_room(self) -> None:
        """For one more job. Raises OperationalError."""
        if len(self._jobs) + len(self._opening) < MAX_JOBS:
            return
        for job in self._jobs.values():
            if self._is_abandoned(job):
                return self._forget(job)
        raise OperationalError(f"the coordinator leads {MAX_JOBS} jobs already: start another one at another port")

    def _probe_absent(self, job: _Job) -> None:
        """SERVE-EXITED."""
        absent = job.state.absent_agents()
        job.refused_s = {agent: at_s for agent, at_s in job.refused_s.items() if agent in absent}
        for agent, address in absent.items():
            if address and agent not in job.probes:
                probe = self._probe(job, agent, address)
                task = job.probes[agent] = asyncio.create_task(probe, name=f"probe of agent {agent}")
                self._probes.add(task)
                task.add_done_callback(functools.partial(self._probed, job, agent))

    def _probed(self, job: _Job, agent: str, task: asyncio.Task[None]) -> None:
        self._probes.discard(task)
        job.probes.pop(agent, None)

    async def _probe(self, job: _Job, agent: str, address: str) -> None:
        host, _, port = address.rpartition(":")
        began_s = time.monotonic()
        try:
            _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), _PROBE_S)
        except ConnectionRefusedError:
            if agent not in job.state.absent_agents():
                return
            if began_s - job.refused_s.setdefault(agent, began_s) >= EXITED_S:
                self._handle(job, AgentExited(agent))
        except (OSError, ValueError, asyncio.TimeoutError):
            job.refused_s.pop(agent, None)
        else:
            job.refused_s.pop(agent, None)
            writer.close()

    def _handle(self, job: _Job, event: CoordinatorEvent) -> None:
        """Handle `event`. An event that arises while an instruction is executed is queued (SERVE-ORDER)."""
        job.events.append(event)
        if not job.is_busy:
            self._work(job)

    def _work(self, job: _Job) -> None:
        job.is_busy = True
        try:
            while job.events and not self._has_failed:
                self._carry_out(job, job.state.handle(job.events.popleft(), time.monotonic()))
            job.keys.drop_former()
        except Exception as error:  # SERVE-STOP
            self._stop_for(error)
        finally:
            job.is_busy = False

    def _stop_for(self, error: BaseException) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._fail(error)

    def _carry_out(self, job: _Job, instructions: list[CoordinatorInstruction]) -> None:
        payloads: dict[int, Payload] = {}  # a message to several sessions is encoded and hashed once
        for instruction in instructions:
            match instruction:
                case Send(number, message):
                    self._send(job, number, message, payloads)
                case Persist():
                    job.num_writes += 1
                    self._keep(self._persist(job, instruction))
                case CloseSession(number, reason):
                    connection = job.connections.get(number)
                    if connection is not None:
                        job.closings.note(connection.peer.rsplit(":", 1)[0], reason)
                        connection.close()

    def _send(self, job: _Job, number: int, message: CoordinatorMessage, payloads: dict[int, Payload]) -> None:
        """`payloads`: of messages that the caller holds, by their ids."""
        connection = job.connections.get(number)
        if connection is None:
            return
        try:
            if isinstance(message, Push):
                payload = job.pushes.payload(message, job.known.get(number))
            elif id(message) in payloads:
                payload = payloads[id(message)]
            else:
                payload = payloads[id(message)] = Payload(encode(message))
            connection.send(payload)
        except WireError as error:
            self._close_over_limit(job, connection, message, str(error))
            return
        if isinstance(message, Push):
            job.known[number] = message.decision.record

    def _keep(self, write: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(write)
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)

    @staticmethod
    def _close_over_limit(job: _Job, connection: Connection, message: CoordinatorMessage, why: str) -> None:
        """SERVE-LIMIT"""
        if not isinstance(message, Push):
            connection.abort(why)
            return
        reason = f"the record of {len(message.decision.record.agents)} agents cannot be sent: {why}"
        job.closings.note(connection.peer.rsplit(":", 1)[0], reason)
        connection.send(encode(Refused(reason)))
        connection.close()

    async def _persist(self, job: _Job, persist: Persist) -> None:
        directory = self._options.directory
        assert directory is not None
        kept = Kept(persist.term, persist.decision, persist.finished, persist.addresses, persist.own)
        try:
            async with self._order:
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._writer, directory.write, job.name, kept)
        except Exception as error:  # SERVE-STOP
            self._stop_for(error)
            return
        finally:
            job.num_writes -= 1
        if persist.decision is not None:
            self._handle(job, Persisted(persist.decision.record.digest))


def _take_term(directory: StateDirectory, name: str, coordinator: str, address: str) -> Kept:
    """SERVE-NEW: what the directory had. Raises OperationalError, as of `read`, or OSError."""
    kept = directory.read(name)
    if kept != Kept():
        term, addresses = Term(kept.term.number + 1, coordinator), kept.addresses | {address}
        directory.write(name, kept._replace(term=term, addresses=addresses))
    return kept
