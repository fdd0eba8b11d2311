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
from elasticgang.agent.device_memory import DeviceMemory, running_members
from tests.support import wait_until


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


# MEMORY-1
def test_a_rank_waits_for_the_group_of_the_former_one(group: int) -> None:
    looks = threading.Semaphore(0)
    memory = DeviceMemory(lambda device: looks.release())

    async def run() -> None:
        memory.left(3, group)
        waiting = asyncio.ensure_future(memory.wait_free(3))
        await asyncio.to_thread(lambda: [looks.acquire(timeout=30) for _ in range(3)])
        assert not waiting.done()
        os.killpg(group, signal.SIGKILL)
        assert await asyncio.wait_for(waiting, 30) is None
        assert await memory.wait_free(3) is None, "it waits once"

    asyncio.run(run())


# MEMORY-1
def test_a_rank_waits_until_nvml_lists_the_former_one_no_more() -> None:
    looks = threading.Semaphore(0)
    users = {1, 2**22 + 1}  # no process has such an id

    def read(device: int) -> set[int]:
        looks.release()
        assert device == 3
        return set(users)

    memory = DeviceMemory(read)

    async def run() -> None:
        memory.left(3, 2**22 + 1)
        waiting = asyncio.ensure_future(memory.wait_free(3))
        await asyncio.to_thread(lambda: [looks.acquire(timeout=30) for _ in range(3)])
        assert not waiting.done()
        users.discard(2**22 + 1)
        assert await asyncio.wait_for(waiting, 30) is None

    asyncio.run(run())


# MEMORY-1
def test_a_rank_that_starts_long_after_the_former_one_has_died_looks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = DeviceMemory(lambda device: set())
    monkeypatch.setattr(device_memory, "MEMORY_TIMEOUT_S", 0.0)
    memory.left(3, 2**22 + 1)  # as if that had been `MEMORY_TIMEOUT_S` ago
    monkeypatch.undo()
    assert asyncio.run(memory.wait_free(3)) is None


def test_another_device_or_none_is_not_waited_for() -> None:
    memory = DeviceMemory(lambda device: {5})
    memory.left(3, 5)
    assert asyncio.run(memory.wait_free(2)) is None


# MEMORY-1
@pytest.mark.parametrize("hangs", [False, True])
def test_the_wait_has_an_end_also_when_the_driver_has_none(hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "MEMORY_TIMEOUT_S", 0.2)
    let_go = threading.Event()

    def read(device: int) -> set[int]:
        if hangs:
            let_go.wait(60)
        return {2**22 + 1}

    memory = DeviceMemory(read)
    memory.left(3, 2**22 + 1)
    warning = asyncio.run(memory.wait_free(3))  # `run` would wait for threads of the loop's executor
    assert not let_go.is_set()
    let_go.set()
    assert warning is not None
    assert warning.startswith(f"the former process {2**22 + 1} on device 3, or one of its group, has not freed")
