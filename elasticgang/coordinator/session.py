"""An agent's session with one incarnation of the coordinator: requests, the record, notices, heartbeats.

SESSION-1  A session ends once, when the first of its threads loses its connection. A new session replaces it: clients
    that have lost their connection never recover.
SESSION-2  Other agents hold an agent to be alive while its counter in the store grows. The counter is incremented
    apart from the heartbeats to the lighthouse, and starts before them. Heartbeats start with the first request:
    before it, the lighthouse would make the others wait for an agent that cannot request yet.
SESSION-3  Notices are a log in the store, appended by compare-and-set: an agent that dies leaves no gap. Reading a
    notice twice does no harm.
SESSION-4  Among the agents that got the same answer, one computes the record. The others wait for it; after
    `_WAIT_FOR_RECORD_S` each, they compute it themselves, one after the other. Any of them may win the compare-and-set.
SESSION-5  The agent's loop makes no blocking call. Callbacks run on the session's threads.
SESSION-6  A client of the store makes one call at a time. Those that wait for a key (the watcher; a request that waits
    for another agent's record) and those that must not be held up (the agent's own counter, the failure detector) have
    a client each. Requests and announcements share the endpoint's, on which no call waits.
SESSION-7  Requests and announcements run on several threads at once. `_lock` guards what they learn of the record; no
    thread holds it during a call to the coordinator.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError
from torchft.coordination import LighthouseClient, QuorumMember

from elasticgang.coordinator.endpoint import CURRENT_KEY, JOBS_KEY, OPEN_KEY, Endpoint, connect, record_key
from elasticgang.errors import OperationalError
from elasticgang.protocol.next_record import follow, is_for
from elasticgang.protocol.record import (
    NO_RECORD,
    PROTOCOL,
    Record,
    Report,
    Undecided,
    Unrecoverable,
    canonical_json,
    report_from_json,
    report_to_json,
)

_QUORUM_TIMEOUT_S = 5.0
_HEARTBEAT_INTERVAL_S = 0.1
_COUNT_INTERVAL_S = 0.4
_MANY = 16  # agents: beyond, they beat half as often, for the sake of the coordinator's cores
_HEARTBEAT_TIMEOUT_S = 1.0
_WAIT_S = 60.0
_WAIT_FOR_RECORD_S = 0.25  # for each of those whose turn comes first
_MAX_TURNS = 4
_OPEN_POLL_S = 0.02
_OLD_NOTICES = 100  # read again by a new session

_UNREACHABLE = (RuntimeError, TimeoutError)


@dataclass(frozen=True)
class SessionCallbacks:
    """What a session calls back, from its own threads. `beat`: with the time at which an answered beat was begun;
    `notice`: with whether it was there before the session."""

    beat: Callable[[float], None]
    notice: Callable[[dict[str, Any], bool], None]
    lost: Callable[[str], None]


class CoordinatorSession:
    """`sends_heartbeats`: whether heartbeats go to the lighthouse."""

    def __init__(self, endpoint: Endpoint, job: str, agent: str, record: Record | None, timeout: float) -> None:
        """Blocks until the lighthouse is reached, and the store has a record no older than `record`.

        Raises:
            OperationalError: the coordinator does not answer.
        """
        self.endpoint = endpoint
        self.sends_heartbeats = False
        self._job, self.agent = job, agent
        self._closed = threading.Event()
        self._outgoing: queue.SimpleQueue[tuple[str, dict[str, Any]] | None] = queue.SimpleQueue()
        self._newest: dict[str, int] = {}  # of the posting thread
        self._lock = threading.Lock()  # SESSION-7: of the five that follow
        self._announced = ("", 0)
        self._is_open = False
        self._read: tuple[str, Record | None] = ("", None)  # last, of the store's record
        self._newest_agreed = record  # the newest that is known to have been agreed
        self._requested = NO_RECORD
        try:
            self._lighthouse = LighthouseClient(endpoint.lighthouse, timedelta(seconds=timeout))
            self._heartbeat_client = LighthouseClient(endpoint.lighthouse, timedelta(seconds=timeout))
            self._counter_store, self._detecting, self._notice_store, self._awaiting, self._post_store = (
                connect(endpoint.address, timeout) for _ in range(5)
            )
            self._register_job()
            if record is not None:
                restore_record(endpoint.store, record)
            self._newest_old = _newest_notice(endpoint.store, job)
        except _UNREACHABLE as exc:
            raise OperationalError(f"cannot reach the coordinator at {endpoint.address}: {first_line(exc)}") from exc

    def start(self, callbacks: SessionCallbacks) -> None:
        self._callbacks = callbacks
        for function in (self._send_heartbeats, self._watch, self._post_all):
            threading.Thread(target=self._until_lost, args=(function,), name=function.__name__, daemon=True).start()

    def close(self) -> None:
        """Use it no more. A thread that is in a call to a silent coordinator is left behind."""
        self._closed.set()
        self._outgoing.put(None)

    def _until_lost(self, function: Callable[[], None]) -> None:
        try:
            function()
        except _UNREACHABLE as exc:
            if not self._closed.is_set():
                self._callbacks.lost(first_line(exc))

    def _register_job(self) -> None:
        """The coordinator keeps the records of the jobs that it knows of."""
        store = self.endpoint.store
        present = store.get(JOBS_KEY).decode()
        while self._job not in (jobs := json.loads(present)):
            present = store.compare_set(JOBS_KEY, present, json.dumps(sorted([*jobs, self._job]))).decode()

    # -- questions

    def request_record(self, report: Report) -> Record | Undecided | Unrecoverable | None:
        """Ask the lighthouse and write the record that follows. None: others are waited for.

        A newer question takes the place of this one at the lighthouse, but both get the answer.

        Raises:
            OperationalError: the coordinator does not answer.
        """
        try:
            self._wait_until_open()
            is_first = self._is_first(report)
            text, agreed = self._last_read() if is_first else self._restored(report.job)
            if agreed is not None and is_for(agreed, report):
                return agreed  # by a call that had timed out here
            is_member = agreed is not None and report.agent in agreed.agents
            if not is_first and self.endpoint.store.check([_finished_key(report.job)]):
                self._callbacks.notice({"kind": "finished"}, False)
                if not is_member:
                    return Undecided("the job has finished")
            if text and not is_member and (why := self._mismatch(agreed, report)) is not None:
                return self._refuse_self(why)
            told = self._propose(report)
            if told is None:
                return None
            protocols = {each.replica_id: each.step for each in told}
            if (undecided := other_versions(protocols, report.protocol if is_member else None)) is not None:
                return undecided
            if (record := self._written_by_peer(report, agreed, protocols)) is not None:
                return record
            proposal = [report_from_json(json.loads(each.store_address)) for each in told]
            return self._publish(report, proposal)
        except _UNREACHABLE as exc:
            raise OperationalError(first_line(exc)) from exc
        except (KeyError, TypeError, ValueError) as exc:
            return Undecided(f"a participant's report is not one: {exc!r}")

    def _is_first(self, report: Report) -> bool:
        """Whether it is the first question after the record that was read last, which was agreed with this agent:
        nothing has been agreed with it since."""
        with self._lock:
            record, before = self._read[1], self._requested
            self._requested = report.newest_record
        return record is not None and record.ref == report.newest_record != before and report.agent in record.agents

    def _mismatch(self, record: Record | None, report: Report) -> str | None:
        """What about `report` is not as the job is."""
        protocol = _protocol_of(self.endpoint.store, report.job) or str(report.protocol)
        if protocol != str(report.protocol):
            return f"its protocol is {report.protocol}, but the job's is {protocol}"
        if record is None:
            return "the job's record in the store cannot be read"
        if record.layout != report.layout:
            return f"its layout is {report.layout!r}, but the job's is {record.layout!r}"
        return None

    def _refuse_self(self, why: str) -> Undecided:
        """What the job would say: it need not be asked, and is told."""
        self.post({"kind": "refused", "agent": self.agent, "reason": why})
        return Undecided(f"refused {self.agent}: {why}", refused=((self.agent, why),))

    def _wait_until_open(self) -> None:
        """COORDINATOR-2 of `server.py`."""
        with self._lock:
            is_open = self._is_open
        while not is_open and not self.endpoint.store.check([OPEN_KEY]):
            if self._closed.wait(_OPEN_POLL_S):
                raise TimeoutError("the session has ended")
        with self._lock:
            self._is_open = True

    def _propose(self, report: Report) -> list[QuorumMember] | None:
        """The proposal's agents. What they tell is where it costs those nothing that do not read it: every agent gets
        the reports of all, and `data` is parsed for everyone."""
        try:
            quorum = self._lighthouse.quorum(
                replica_id=report.agent,
                timeout=timedelta(seconds=_QUORUM_TIMEOUT_S),
                address="",
                store_address=canonical_json(report_to_json(report)),
                step=report.protocol,
                world_size=1,
                shrink_only=False,
            )
        except TimeoutError:
            self.endpoint.store.check([record_key(report.job)])  # raises when the coordinator is gone
            return None
        participants: list[QuorumMember] = quorum.participants
        return participants

    def _written_by_peer(self, report: Report, present: Record | None, told: Iterable[str]) -> Record | None:
        """SESSION-4. The record that one of the proposal's agents before this one has written; None: this one is to do
        it."""
        members = () if present is None else present.agents

        def turn(agent: str) -> tuple[bool, str]:
            return agent not in members, agent

        before = sum(turn(agent) < turn(report.agent) for agent in told)
        if not before:
            return None
        store, generation = self.endpoint.store, 1 if present is None else present.generation + 1
        wait_s = min(before, _MAX_TURNS) * _WAIT_FOR_RECORD_S
        try:
            self._awaiting.wait([_written_key(report.job, generation)], timedelta(seconds=wait_s))
        except DistStoreError:
            return None
        _, record = self._remember(store.get(record_key(report.job)).decode())
        return record if record is not None and is_for(record, report) else None

    def _publish(self, report: Report, proposal: Sequence[Report]) -> Record | Undecided | Unrecoverable:
        """Write the record that follows, unless another one has been written by now."""
        present, parent = self._last_read()
        if present and parent is None:
            return Undecided("the job's record in the store cannot be read")
        answer = follow(parent, report, proposal)
        if not isinstance(answer, Record) or answer is parent:
            return answer
        store = self.endpoint.store
        written = store.compare_set(record_key(report.job), present, answer.text).decode()
        if written == answer.text:
            self._remember(written, answer)
            _announce_record(store, answer)
            return answer
        _, winner = self._remember(written)
        if winner is not None and is_for(winner, report):
            return winner
        return Undecided("a generation was agreed without this agent")

    def _present(self, job: str) -> tuple[str, Record | None]:
        """As `present_record`, without reading the same text twice."""
        return self._remember(_text_of(self.endpoint.store, record_key(job)))

    def _restored(self, job: str) -> tuple[str, Record | None]:
        """As `_present`, once the store has a record no older than the one that is held here: somebody may have written
        over it."""
        text, record = self._present(job)
        with self._lock:
            held = self._newest_agreed
        if held is None or (record is not None and record.generation >= held.generation):
            return text, record
        restore_record(self.endpoint.store, held)
        return self._present(job)

    def _remember(self, text: str, record: Record | None = None) -> tuple[str, Record | None]:
        """`record`: as which `text` reads, if that is known."""
        last = self._last_read()
        if text == last[0]:
            return last
        record = record or read_record(text)
        with self._lock:
            self._read = (text, record)
            if record is not None and (
                self._newest_agreed is None or record.generation > self._newest_agreed.generation
            ):
                self._newest_agreed = record
        return text, record

    def _last_read(self) -> tuple[str, Record | None]:
        with self._lock:
            return self._read

    # -- notices

    def announce_join(self, report: Report) -> None:
        """Tell the job that runs here that a member of `report` waits to join it; once in a generation. A job of
        another name is told too: it refuses whom it finds, when it next asks."""
        with contextlib.suppress(*_UNREACHABLE, ValueError, KeyError, TypeError):
            store = self.endpoint.store
            job = _text_of(store, CURRENT_KEY) or report.job
            _, record = self._present(job) if job == self._job else present_record(store, job)
            if record is None or not (job != report.job or has_newcomer(record, report)):
                return
            with self._lock:
                is_known, self._announced = self._announced == (job, record.generation), (job, record.generation)
            if not is_known:
                self.post({"kind": "join", "generation": record.generation}, job)

    def post(self, notice: dict[str, Any], job: str | None = None) -> None:
        """Tell all agents of the job, soon; nobody when the session is lost before."""
        self._outgoing.put((job or self._job, notice))

    def _post_all(self) -> None:
        store = self._post_store
        while (item := self._outgoing.get()) is not None:
            job, notice = item
            if notice["kind"] == "finished":
                store.set(_finished_key(job), "1")
            text = canonical_json(notice)
            number = max(self._newest.get(job, 0), _newest_notice(store, job))
            while store.compare_set(_notice_key(job, number + 1), "", text).decode() != text:
                number += 1
            self._newest[job] = number + 1
            store.set(_newest_key(job), str(number + 1))

    def _watch(self) -> None:
        store = self._notice_store
        number = max(1, self._newest_old - _OLD_NOTICES)
        while not self._closed.is_set():
            key = _notice_key(self._job, number)
            try:
                store.wait([key], timedelta(seconds=_WAIT_S))
            except DistStoreError:
                continue  # it has waited so long
            self._callbacks.notice(json.loads(store.get(key)), number <= self._newest_old)
            number += 1

    # -- life

    def _send_heartbeats(self) -> None:
        counted_at = 0.0
        while not self._closed.is_set():
            record, now = self._last_read()[1], time.monotonic()
            many = record is not None and len(record.agents) > _MANY
            interval = _HEARTBEAT_INTERVAL_S * 2 if many else _HEARTBEAT_INTERVAL_S
            if now - counted_at > _COUNT_INTERVAL_S - interval / 2:
                counted_at = now
                self._counter_store.add(_count_key(self._job, self.agent), 1)
                self._callbacks.beat(now)
            if self.sends_heartbeats:
                with contextlib.suppress(*_UNREACHABLE):  # the store says whether the coordinator is away
                    self._heartbeat_client.heartbeat(self.agent, timedelta(seconds=_HEARTBEAT_TIMEOUT_S))
            self._closed.wait(interval)

    def heartbeat_counts(self, agents: Iterable[str]) -> dict[str, int]:
        """How often each agent has shown itself to this incarnation: for the failure detector, which has a client of
        its own (SESSION-6). Raises OperationalError when the coordinator is away."""
        store = self._detecting
        keys = {agent: _count_key(self._job, agent) for agent in agents}
        try:
            if store.check(list(keys.values())):  # else one of them is waited for
                return dict(zip(keys, map(int, store.multi_get(list(keys.values()))), strict=True))
            return {agent: store.add(key, 0) for agent, key in keys.items()}
        except _UNREACHABLE as exc:
            raise OperationalError(first_line(exc)) from exc


def has_newcomer(record: Record, report: Report) -> bool:
    seated = {seat.member for seat in record.seats_of(report.agent)}
    return any(member.id not in seated for member in report.members)


def restore_record(store: Store, record: Record) -> None:
    """Let the store have `record`, unless it has one that does not come before it on one chain, or is of another
    protocol."""
    while True:
        present, there = present_record(store, record.job)
        if there is not None and (there.generation >= record.generation or not record.builds_on(there.ref)):
            return
        if present and there is None and _protocol_of(store, record.job) not in ("", str(PROTOCOL)):
            return
        if store.compare_set(record_key(record.job), present, record.text).decode() == record.text:
            _announce_record(store, record)
            return


def _protocol_of(store: Store, job: str) -> str:
    """ "": nothing was agreed since the coordinator's start."""
    return _text_of(store, _protocol_key(job))


def _announce_record(store: Store, record: Record) -> None:
    store.set(_written_key(record.job, record.generation), "1")
    store.set(_protocol_key(record.job), str(PROTOCOL))
    store.set(CURRENT_KEY, record.job)


def present_record(store: Store, job: str) -> tuple[str, Record | None]:
    """The record in the store, as it stands there, "" when there is none, and as it reads; None when it does not."""
    text = _text_of(store, record_key(job))
    return text, read_record(text)


def _text_of(store: Store, key: str) -> str:
    """What stands there; "" when nothing does. Never waits for it."""
    return str(store.get(key).decode()) if store.check([key]) else ""


def read_record(text: str) -> Record | None:
    """None when `text`, which `publish` or `restore_record` wrote, is not of this version."""
    try:
        return Record.from_text(text) if text else None
    except (KeyError, TypeError, ValueError):
        return None


def other_versions(protocols: Mapping[str, int], right: int | None) -> Undecided | None:
    """Reports of another protocol than PROTOCOL cannot be read. Who has not the `right` one is refused; None: that of
    most of them."""
    if set(protocols.values()) == {PROTOCOL}:
        return None
    votes = list(protocols.values())
    right = right or max(set(votes), key=lambda protocol: (votes.count(protocol), str(protocol)))
    refused = tuple(
        (agent, f"its protocol is {protocol!r}, but the job's is {right!r}")
        for agent, protocol in sorted(protocols.items())
        if protocol != right
    )
    return Undecided("refused " + "; ".join(f"{agent}: {why}" for agent, why in refused), refused)


def first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0].partition(", details")[0] or type(error).__name__


def _newest_notice(store: Store, job: str) -> int:
    """All notices up to this one are there; further ones may be."""
    return int(_text_of(store, _newest_key(job)) or 0)


def _written_key(job: str, generation: int) -> str:
    """Told after the record, which alone counts."""
    return f"elasticgang/written/{job}/{generation}"


def _finished_key(job: str) -> str:
    return f"elasticgang/finished/{job}"


def _protocol_key(job: str) -> str:
    return f"elasticgang/protocol/{job}"


def _newest_key(job: str) -> str:
    return f"elasticgang/notices/{job}/newest"


def _notice_key(job: str, number: int) -> str:
    return f"elasticgang/notices/{job}/{number}"


def _count_key(job: str, agent: str) -> str:
    return f"elasticgang/alive/{job}/{agent}"
