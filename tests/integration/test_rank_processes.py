"""What the agent does to the processes of its ranks."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticgang.agent.change_log import ChangeLog
from elasticgang.agent.rank_events import MAX_SHOWN, RankEvents
from elasticgang.agent.rank_link import RankLink
from elasticgang.agent.rank_processes import RankProcess, lower_group_priority
from elasticgang.observe.events import EventLog
from elasticgang.process import framing
from elasticgang.process.death_watch import fields_of
from elasticgang.process.lease import Lease
from elasticgang.process.priority import raise_priority
from elasticgang.process.status_page import StatusPage
from elasticgang.protocol.agent_events import ExitBegan
from elasticgang.protocol.commit import Attempt
from tests.unit.agent_hosts import record_of

_NICE = 16  # the field of /proc/PID/task/TID/stat behind the name
_FAMILY = """
import subprocess, sys, threading
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
threading.Thread(target=threading.Event().wait, daemon=True).start()
print(child.pid, flush=True)
input()
child.stdin.close()
child.wait()
"""


def nices(pid: int) -> set[int]:
    """Of all threads of a process."""
    tasks = [str(task) for task in Path(f"/proc/{pid}/task").iterdir()]
    assert tasks
    return {int(fields_of(task)[_NICE]) for task in tasks}


# RANK-4
def test_what_is_left_of_a_rank_gets_a_lower_priority_with_all_its_threads_and_children() -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    argv = [sys.executable, "-c", _FAMILY]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as rank:
        assert rank.stdout is not None
        child = int(rank.stdout.readline())
        assert nices(rank.pid) | nices(child) == {own}
        lower_group_priority(rank.pid)
        assert nices(rank.pid) | nices(child) == {min(own + 10, 19)}
        assert os.getpriority(os.PRIO_PROCESS, 0) == own
        os.setpriority(os.PRIO_PGRP, rank.pid, own)
        with ThreadPoolExecutor(1, initializer=raise_priority) as loop:  # as that of an agent
            loop.submit(lower_group_priority, rank.pid).result()
        assert nices(rank.pid) | nices(child) == {min(own + 10, 19)}
        rank.communicate(b"\n")
    lower_group_priority(rank.pid)  # it is gone: nothing happens


# RANK-4
@pytest.mark.parametrize("takes_part", [True, False])
def test_the_agent_lowers_the_priority_of_a_rank_that_begins_to_exit_before_it_is_killed(takes_part: bool) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    seen: list[set[int]] = []
    argv = [sys.executable, "-c", _FAMILY]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())

        def handle(event: Any) -> None:
            assert event == ExitBegan("a/0")
            seen.append(nices(process.pid) | nices(child))
            rank.kill()  # as the lifecycle demands

        state = SimpleNamespace(takes_part=lambda member: takes_part, record=None)
        lifecycle: Any = SimpleNamespace(state=state)
        unused: Any = None
        events = EventLog(None, print)
        parts = lifecycle, handle, ChangeLog(events, 0.0), events, unused
        agent = RankEvents(*parts, threading.Event(), lambda rank: "", Lease.create())
        rank = RankProcess("a/0", 0, process.pid, -1, unused, unused, unused, -1, list)
        agent.on_exit_began(rank, 0.0)
        if not takes_part:
            assert nices(process.pid) | nices(child) == {own}
            rank.kill()
        assert process.wait(60) == -signal.SIGKILL
    assert seen == ([{min(own + 10, 19)}] if takes_part else [])


def exit_lines(lease: Lease | None = None) -> tuple[RankEvents, threading.Event, list[str]]:
    """What translates exits, of ranks that no record knows; what stops it; and what it writes."""
    state = SimpleNamespace(takes_part=lambda member: True, record=None)
    lifecycle: Any = SimpleNamespace(state=state, is_retired=lambda member: False, device_of=lambda local_rank: None)
    told: list[str] = []
    output: Any = SimpleNamespace(write_line=told.append)
    stopping, events = threading.Event(), EventLog(None, print)

    def handle(event: Any, on_decided: Callable[[list[Any]], None]) -> None:
        on_decided([])

    changes = ChangeLog(events, 0.0)
    parts = lifecycle, handle, changes, events, output
    return RankEvents(*parts, stopping, lambda rank: "", lease or Lease.create()), stopping, told


def exited_rank(local_rank: int, status: int) -> RankProcess:
    unused: Any = None
    rank = RankProcess(f"a/{local_rank}", local_rank, 100 + local_rank, -1, unused, unused, StatusPage(), -1, list)
    rank.status = status
    return rank


def test_a_traceback_that_was_shown_is_not_told_of_after_the_end_of_the_job() -> None:
    agent, stopping, told = exit_lines()
    failure = {"traceback": "ValueError: no\n", "error": "ValueError: no", "blameless": False, "device_fault": None}
    for number in range(3):
        rank = exited_rank(number, 1)
        rank.failure = {**failure, "differs": False, "heals": False}
        agent.on_exit(rank, 0.0)
        if number == 1:
            stopping.set()
    shown, again = told
    assert shown == "elasticgang: rank 0 failed:\nValueError: no"
    assert again == "elasticgang: rank 1 failed with the traceback of rank 0"


# FAILURES-1
def test_the_tracebacks_that_an_agent_remembers_are_bounded() -> None:
    agent, _, told = exit_lines()
    counted = MAX_SHOWN * 100
    failure = {"error": "ValueError", "blameless": False, "device_fault": None, "differs": False, "heals": False}

    def fail(step: int) -> None:
        rank = exited_rank(0, 1)
        rank.failure = {**failure, "traceback": f"ValueError: step {step}{' ' * 10_000}at the end"}
        agent.on_exit(rank, 0.0)

    tracemalloc.start()
    try:
        for step in range(MAX_SHOWN):
            fail(step)
        told.clear()
        before = tracemalloc.get_traced_memory()[0]
        for step in range(MAX_SHOWN, counted):
            fail(step)
            assert told.pop().startswith(f"elasticgang: rank 0 failed:\nValueError: step {step} ")
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert after - before < 10_000 * MAX_SHOWN
    fail(counted - 1)
    assert told == ["elasticgang: rank 0 failed with the traceback of rank 0"]


def test_a_kill_that_was_told_with_its_reason_is_not_told_again() -> None:
    agent, _, told = exit_lines()
    for local_rank, status, is_told in [(0, -9, True), (1, -9, False), (2, 3, True)]:
        rank = exited_rank(local_rank, status)
        rank.is_told = is_told
        agent.on_exit(rank, 0.0)
    assert told == [
        "elasticgang: rank 1 (pid 101) was killed by SIGKILL",
        "elasticgang: rank 2 (pid 102) exited with code 3",
    ]


def test_a_rank_that_reads_first_that_the_lease_is_over_is_not_told_of() -> None:
    lease = Lease.create()
    agent, _, told = exit_lines(lease)
    lease.until = 0.0
    agent.on_exit(exited_rank(0, -9), 0.0)
    agent.on_exit(exited_rank(1, 3), 0.0)
    assert told == ["elasticgang: rank 1 (pid 101) exited with code 3"]


def test_the_steps_of_a_rank_are_those_that_it_knows_to_be_committed() -> None:
    """Also those that it has loaded, or has healed, before a commit of its own."""
    unused: Any = None
    rank = RankProcess("a0", 0, os.getpid(), -1, unused, unused, StatusPage(), -1, list)
    record = record_of(["a0"], 4, committed=Attempt(400, 3))
    assert rank.num_steps(None) == rank.num_steps(record) == 0, "it has entered no generation"
    rank.page.entered(4)
    assert rank.num_steps(record) == 400
    rank.page.commit(401, 4)
    assert rank.num_steps(record) == 401
    assert rank.num_steps(record_of(["a0"], 5, committed=Attempt(350, 2))) == 350, "rolled back"


def test_a_rank_is_notified_once_of_the_end_of_a_generation() -> None:
    async def run() -> list[str]:
        ours, theirs = socket.socketpair()
        with theirs:
            link = await RankLink.open(ours)
            rest: Any = None
            rank = RankProcess("a/0", 0, os.getpid(), -1, link, rest, rest, -1, list)
            for generation, kind in ((2, "first"), (2, "again"), (1, "late"), (3, "next")):
                rank.notify_end(generation, framing.pack(kind))
            link.send(framing.pack("over"))
            kinds = []
            while (message := framing.receive(theirs)) is not None and message["kind"] != "over":
                kinds.append(message["kind"])
            link.close()
        return kinds

    assert asyncio.run(run()) == ["first", "next"]
