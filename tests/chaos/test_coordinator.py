"""The coordinator and an agent's session with it, in one process: records that are kept, brought and told."""

from __future__ import annotations

import json
import queue
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticgang.coordinator.endpoint import OPEN_KEY, SilentError, reach, record_key, refuses
from elasticgang.coordinator.server import Coordinator, ReservedPort
from elasticgang.coordinator.session import CoordinatorSession, SessionCallbacks, present_record, restore_record
from elasticgang.errors import OperationalError
from elasticgang.layout import Member, ParallelLayout, plan
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.record import ACTIVE, Record, Seat
from tests.support import wait_until

TIMEOUT_S = 20.0


def record(generation: int, parent: Record | None = None, job: str = "job") -> Record:
    seat = Seat("m", "a", "host", 0, "127.0.0.1:1", ACTIVE)
    planned = plan([Member("m", "host")], ParallelLayout())
    before = ("", ()) if parent is None else (parent.digest, parent.ancestor_digests())
    return Record(
        job, generation, before[0], ParallelLayout(), planned, (seat,), ("a",), Attempt(0, 1), ancestors=before[1]
    )


FIRST = record(1)
SECOND = record(2, FIRST)
THIRD = record(3, SECOND)
STRANGE = record(2)  # of another chain


@pytest.fixture
def coordinator() -> Iterator[Coordinator]:
    made = Coordinator("127.0.0.1", 0, grace_s=0.0)
    yield made
    made.close()


def open_session(
    coordinator: Coordinator, agent: str, newest: Record | None = None, job: str = "job"
) -> CoordinatorSession:
    return CoordinatorSession(reach(coordinator.address, TIMEOUT_S), job, agent, newest, TIMEOUT_S)


class Listener:
    def __init__(self, session: CoordinatorSession) -> None:
        self.notices: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        session.start(
            SessionCallbacks(beat=lambda _: None, notice=lambda notice, _: self.notices.put(notice), lost=self.lost.put)
        )


@pytest.mark.parametrize(
    ("there", "brought", "left"),
    [
        (None, FIRST, FIRST),
        (FIRST, SECOND, SECOND),
        (FIRST, THIRD, THIRD),
        (THIRD, SECOND, THIRD),
        (SECOND, SECOND, SECOND),
        (STRANGE, THIRD, STRANGE),
    ],
)
def test_the_newest_record_of_one_chain_wins(
    coordinator: Coordinator, there: Record | None, brought: Record, left: Record
) -> None:
    store = reach(coordinator.address, TIMEOUT_S).store
    if there is not None:
        store.set(record_key("job"), there.text)
    restore_record(store, brought)
    text, read = present_record(store, "job")
    assert (text, read) == (left.text, left)
    assert read is not None
    assert read.digest == left.digest


def test_a_record_that_somebody_has_written_over_is_brought_again(coordinator: Coordinator) -> None:
    store = reach(coordinator.address, TIMEOUT_S).store
    store.set(record_key("job"), "{}")
    restore_record(store, THIRD)
    assert present_record(store, "job") == (THIRD.text, THIRD)


@pytest.mark.parametrize("job", ["job", "a job/../with ü"])
def test_records_are_kept_in_the_state_folder(tmp_path: Path, job: str) -> None:
    newest = record(1, job=job)
    former = Coordinator("127.0.0.1", 0, state_dir=str(tmp_path), grace_s=0.0)
    open_session(former, "a", newest, job)
    wait_until(lambda: list(tmp_path.glob("*.record")), "the file")
    former.close()
    again = Coordinator("127.0.0.1", 0, state_dir=str(tmp_path), grace_s=0.0)
    assert present_record(reach(again.address, TIMEOUT_S).store, job)[1] == newest
    again.close()


# COORDINATOR-3
def test_half_a_file_is_none(tmp_path: Path) -> None:
    (tmp_path / "am9i.partial").write_text("{")
    made = Coordinator("127.0.0.1", 0, state_dir=str(tmp_path), grace_s=0.0)
    assert present_record(reach(made.address, TIMEOUT_S).store, "job") == ("", None)
    made.close()


def test_a_folder_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OperationalError, match="cannot keep records in"):
        Coordinator("127.0.0.1", 0, state_dir=str(tmp_path / "file"))


# SESSION-3
def test_all_agents_hear_every_notice_in_one_order(coordinator: Coordinator) -> None:
    agents = [open_session(coordinator, f"agent-{number}") for number in range(3)]
    listener = [Listener(agent) for agent in agents]
    for number in range(5):
        for which, agent in enumerate(agents):
            agent.post({"kind": "over", "generation": number, "reason": f"by {which}"})
    heard = [[each.notices.get(timeout=TIMEOUT_S) for _ in range(15)] for each in listener]
    assert heard[0] == heard[1] == heard[2]
    assert {(notice["generation"], notice["reason"]) for notice in heard[0]} == {
        (number, f"by {which}") for number in range(5) for which in range(3)
    }
    late = Listener(open_session(coordinator, "late"))
    assert late.notices.get(timeout=TIMEOUT_S) == heard[0][0]
    for agent in agents:
        agent.close()


# SESSION-2
def test_counts_grow_for_those_who_live(coordinator: Coordinator) -> None:
    one, other = open_session(coordinator, "one"), open_session(coordinator, "other")
    Listener(one)
    wait_until(lambda: one.heartbeat_counts(["one"])["one"] > 2, "beats")
    one.close()
    assert other.heartbeat_counts(["other", "nobody", "one"]) == {
        "other": 0,
        "nobody": 0,
        "one": other.heartbeat_counts(["one"])["one"],
    }


# SESSION-1
def test_a_lost_connection_is_told_once_for_each_thread_and_is_no_notice() -> None:
    made = Coordinator("127.0.0.1", 0, grace_s=0.0)
    listener = Listener(open_session(made, "one"))
    made.close()
    assert listener.lost.get(timeout=TIMEOUT_S)
    assert listener.notices.empty()


# COORDINATOR-2
def test_nobody_asks_before_the_grace_period_is_over() -> None:
    made = Coordinator("127.0.0.1", 0, grace_s=0.3)
    store = reach(made.address, TIMEOUT_S).store
    assert not store.check([OPEN_KEY])
    wait_until(lambda: store.check([OPEN_KEY]), "the end of the grace period")
    made.close()


def test_a_reserved_port_refuses_until_a_coordinator_listens_on_it() -> None:
    reserved = ReservedPort("127.0.0.1")
    address = f"127.0.0.1:{reserved.port}"
    assert refuses(address, 1.0)
    for _ in range(2):
        made = Coordinator("127.0.0.1", reserved.port)
        assert not refuses(address, 1.0)
        reach(address, TIMEOUT_S)
        made.close()
    reserved.close()


def test_silence_is_no_refusal() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        clients = [socket.socket() for _ in range(4)]
        for client in clients:
            client.setblocking(False)
            client.connect_ex(address)  # the backlog is full: further ones get no answer
        with pytest.raises(SilentError):
            refuses(f"127.0.0.1:{address[1]}", 0.3)
        for client in clients:
            client.close()


def test_the_names_of_all_jobs_are_known_to_it(coordinator: Coordinator) -> None:
    for job in ("b", "a", "b"):
        open_session(coordinator, "agent", job=job)
    assert json.loads(reach(coordinator.address, TIMEOUT_S).store.get("elasticgang/jobs")) == ["a", "b"]


def test_beside_a_coordinator_for_all_machines_an_agent_is_known_by_an_address_that_others_reach() -> None:
    made = Coordinator("0.0.0.0", 0, grace_s=0.0)
    try:
        host = reach(f"127.0.0.1:{made.port}", TIMEOUT_S).host
        if host.startswith("127."):
            pytest.skip("this machine has no other address")
        assert reach(f"{host}:{made.port}", TIMEOUT_S).host == host
    finally:
        made.close()


def test_beside_one_for_this_machine_alone_it_is_known_by_the_loopback_address(coordinator: Coordinator) -> None:
    assert reach(coordinator.address, TIMEOUT_S).host == "127.0.0.1"
