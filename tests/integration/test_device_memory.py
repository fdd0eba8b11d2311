"""A rank waits for the memory of the former one on its device (MEMORY-1). The processes are real ones."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from elasticgang.agent import device_memory
from elasticgang.agent.device_memory import DeviceMemory, Memory, running_members
from tests.support import wait_until

GONE = 2**22 + 1  # no process has such an id


@pytest.fixture
def group() -> Iterator[int]:
    """A live process group of two, whose leader is a child of this process. Its id."""
    program = "import os, time\nif os.fork() == 0: time.sleep(600)\nprint(flush=True)\ntime.sleep(600)"
    leader = subprocess.Popen([sys.executable, "-c", program], start_new_session=True, stdout=subprocess.PIPE)
    assert leader.stdout is not None
    leader.stdout.readline()
    yield leader.pid
    if leader.poll() is None:
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()
    leader.stdout.close()


def test_the_live_members_of_a_group(group: int) -> None:
    members = running_members(group)
    assert len(members) == 2
    os.kill(group, signal.SIGKILL)  # a zombie from then on: its memory is free
    wait_until(lambda: running_members(group) == [pid for pid in members if pid != group], "the leader is dead")
    os.killpg(group, signal.SIGKILL)
    wait_until(lambda: not running_members(group), "all are dead")


async def wait_for(memory: DeviceMemory, device: int, wanted: Memory) -> None:
    while await asyncio.wait_for(memory.look(device), 30) is not wanted:
        await asyncio.sleep(0.005)


# MEMORY-1
def test_a_rank_waits_for_the_group_of_the_former_one(group: int) -> None:
    memory = DeviceMemory(lambda device: None)

    async def run() -> None:
        memory.left(3, group)
        for _ in range(3):
            assert await memory.look(3) is Memory.USED
        os.killpg(group, signal.SIGKILL)
        await asyncio.wait_for(wait_for(memory, 3, Memory.FREE), 30)
        assert await memory.look(3) is Memory.FREE, "it is forgotten"

    asyncio.run(run())


# MEMORY-1
def test_a_rank_waits_until_nvml_lists_the_former_one_no_more() -> None:
    users = {1, GONE}

    def read(device: int) -> set[int]:
        assert device == 3
        return set(users)

    memory = DeviceMemory(read)

    async def run() -> None:
        memory.left(3, GONE)
        for _ in range(3):
            assert await memory.look(3) is Memory.USED
        users.discard(GONE)
        await asyncio.wait_for(wait_for(memory, 3, Memory.FREE), 30)

    asyncio.run(run())


# MEMORY-1
def test_a_rank_that_starts_long_after_the_former_one_has_died_looks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    users = {GONE}
    memory = DeviceMemory(lambda device: set(users))
    memory.left(3, GONE)
    monkeypatch.setattr(device_memory, "LOOK_S", 30.0)
    assert asyncio.run(memory.look(3)) is Memory.USED


def test_another_device_or_none_is_not_waited_for() -> None:
    memory = DeviceMemory(lambda device: {5})
    memory.left(3, 5)
    assert asyncio.run(memory.look(2)) is Memory.FREE


# MEMORY-1
@pytest.mark.parametrize("hangs", [False, True])
def test_the_wait_has_an_end_also_when_the_driver_has_none(hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "MEMORY_TIMEOUT_S", 0.2)
    let_go = threading.Event()
    num_calls = 0

    def read(device: int) -> set[int]:
        nonlocal num_calls
        num_calls += 1
        if hangs:
            let_go.wait(60)
        return {GONE}

    memory = DeviceMemory(read)
    memory.left(3, GONE)

    async def run() -> None:
        await asyncio.wait_for(wait_for(memory, 3, Memory.OVERDUE), 30)
        assert await memory.look(3) is Memory.FREE, "nothing waits any longer"

    asyncio.run(run())  # `run` would wait for threads of the loop's executor
    assert not let_go.is_set()
    let_go.set()
    assert num_calls == 1 or not hangs, "one call of the driver at a time"


def test_a_rank_that_dies_during_a_look_is_looked_for_too() -> None:
    began, let_go = threading.Event(), threading.Event()

    def read(device: int) -> set[int]:
        began.set()
        let_go.wait(60)
        return {GONE + 1}

    memory = DeviceMemory(read)

    async def run() -> None:
        memory.left(3, GONE)
        looking = asyncio.ensure_future(memory.look(3))
        await asyncio.to_thread(began.wait, 30)
        memory.left(3, GONE + 1)
        let_go.set()
        await looking
        assert await memory.look(3) is Memory.USED

    asyncio.run(run())
