"""The agent kills a hung rank also when it lacks what it needs to read the rank's stack."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from elasticgang.agent.change_log import ChangeLog
from elasticgang.agent.hang_response import HangResponse
from elasticgang.agent.rank_processes import RankProcess
from elasticgang.observe.events import EventLog
from elasticgang.process import stacks
from elasticgang.process.status_page import StatusPage, ThreadState
from elasticgang.protocol.hang_detector import Hung, Standstill
from tests.support import DEADLINE_S

UNUSED: Any = None
LACKS = {"descriptors": "[Errno 24] Too many open files", "threads": "can't start new thread"}


@contextmanager
def rank_process() -> Iterator[tuple[subprocess.Popen[bytes], RankProcess]]:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True) as process:
        pidfd, file = os.pidfd_open(process.pid), stacks.create_file()
        try:
            page = StatusPage()
            page.set_thread_state(ThreadState.USER_CODE)
            yield process, RankProcess("member", 0, process.pid, pidfd, UNUSED, UNUSED, page, file, list)
        finally:
            process.kill()
            os.close(pidfd)
            os.close(file)


@contextmanager
def lacking(what: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError(LACKS["threads"])

    before = os.listdir("/proc/self/fd")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with monkeypatch.context() as patch:
        if what == "threads":
            patch.setattr(threading.Thread, "start", no_thread)
        elif what == "descriptors":
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # those that are open work on
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) <= len(before), "a descriptor is left open"


def respond(
    what: str,
    monkeypatch: pytest.MonkeyPatch,
    rank: RankProcess,
    act: Callable[[HangResponse], Awaitable[None]],
) -> tuple[ChangeLog, str]:
    """Have an agent that lacks `what` respond. Returns its output."""
    said: list[str] = []
    events = EventLog(None, print)
    changes = ChangeLog(events, 0.0)
    ranks: Any = SimpleNamespace(of=lambda members: [rank])
    output: Any = SimpleNamespace(write_line=said.append)
    response = HangResponse(ranks, changes, events, output)

    async def run() -> None:
        with lacking(what, monkeypatch):
            await act(response)

    asyncio.run(run())
    return changes, "\n".join(said)


# RULE-8
@pytest.mark.parametrize("what", LACKS)
def test_a_hung_rank_is_killed_though_its_stack_cannot_be_read(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with rank_process() as (process, rank):
        changes, said = respond(what, monkeypatch, rank, lambda response: response.kill(Hung("member", 1000)))
        assert process.wait(DEADLINE_S) == -signal.SIGKILL
    assert changes.incidents.stacks == {"member": f"its stack cannot be read: {LACKS[what]}"}
    assert f"killed rank 0 (pid {rank.pid})" in said


# HANG-6
@pytest.mark.parametrize("goes_on", [True, False])
def test_a_rank_that_goes_on_while_its_stack_is_read_is_not_killed(goes_on: bool) -> None:
    with rank_process() as (process, rank):

        async def act(response: HangResponse) -> None:
            killing = asyncio.ensure_future(response.kill(Hung("member", 1000)))
            await asyncio.sleep(0)  # it has begun
            if goes_on:
                rank.page.beat()
            await killing

        _, said = respond("nothing", pytest.MonkeyPatch(), rank, act)
        if goes_on:
            assert (process.poll(), said) == (None, "")
        else:
            assert process.wait(DEADLINE_S) == -signal.SIGKILL


# HANG-5
@pytest.mark.parametrize("what", LACKS)
def test_a_standstill_is_reported_though_no_stack_can_be_read(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with rank_process() as (process, rank):
        _, said = respond(what, monkeypatch, rank, lambda response: response.report(Standstill(("member",), 1000)))
        assert process.poll() is None
    assert f"rank 0 (pid {rank.pid}): its stack cannot be read: {LACKS[what]}" in said
