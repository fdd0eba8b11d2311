"""Waits of a process's first thread, and a signal that does not interrupt them (SIGNAL-LATE).

Another thread takes it and leaves Python's handler to the first one. A signal that arrives just before the wait begins
in the kernel does the same.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from elasticgang.process.sum_block import SumBlock
from tests.chaos.training_scripts import training
from tests.integration.comm_calls import GUARD_S, start_sum
from tests.integration.conftest import Worlds
from tests.support import Job


class Arrived(Exception):
    """The handler has run."""


@contextlib.contextmanager
def signal_in_another_thread() -> Iterator[Callable[[], None]]:
    """Yields what sends it, a moment later: before or in the wait, which is to end in either case."""

    def handle(number: int, frame: object) -> None:
        raise Arrived

    def signal_itself() -> None:
        time.sleep(0.05)
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, handle)
    thread = threading.Thread(target=signal_itself)
    try:
        yield thread.start
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)


# SIGNAL-LATE
def test_a_wait_for_a_word() -> None:
    def wait() -> None:
        send()
        block.read(1, 1, deadline_s)

    fd = os.memfd_create("block")
    SumBlock.prepare(fd, 2)
    block, deadline_s = SumBlock(fd, 2), time.monotonic() + GUARD_S
    with signal_in_another_thread() as send, pytest.raises(Arrived):
        wait()
    assert time.monotonic() < deadline_s - GUARD_S / 2
    block.close()
    os.close(fd)


# SIGNAL-LATE, REPLY-2
@pytest.mark.parametrize("is_beside", [False, True], ids=["as the reader", "beside the reader"])
def test_a_wait_for_a_collective(is_beside: bool, worlds: Worlds) -> None:
    """Its peer does not take part before the signal."""
    world = worlds(2)
    first, *others = (start_sum(world.comms[0], torch.ones(1)) for _ in range(1 + is_beside))
    readers = [threading.Thread(target=other.wait, args=(GUARD_S,)) for other in others]
    for reader in readers:
        reader.start()
        time.sleep(0.2 * is_beside)  # it may be late: then this thread reads, which has to end too
    began_s = time.monotonic()

    def wait() -> None:
        send()
        first.wait(GUARD_S)

    with signal_in_another_thread() as send, pytest.raises(Arrived):
        wait()
    assert time.monotonic() - began_s < GUARD_S / 2
    peers = [start_sum(world.comms[1], torch.ones(1)) for _ in range(1 + is_beside)]
    for work in (first, *others, *peers):
        work.wait(GUARD_S)
    for reader in readers:
        reader.join(GUARD_S)
        assert not reader.is_alive()


# SIGNAL-LATE
@pytest.mark.timeout(240)
def test_a_wait_for_a_record(tmp_path: Path) -> None:
    """Of a spare, which drains."""
    setup = """
        def go():
            while not (here / f"go-{rank}").exists(): time.sleep(0.01)
            signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        import threading
        threading.Thread(target=go, daemon=True).start()
    """
    path = training(tmp_path, steps=100_000, setup=setup, body="time.sleep(0.01)")
    with Job(tmp_path, path, ranks=1, options=("--spares", "1")) as job:
        spare = job.expect("spare")["local_rank"]
        (tmp_path / f"go-{spare}").touch()
        began_s = time.monotonic()
        assert job.expect("exited", local_rank=spare)["status"] == 0
        assert time.monotonic() - began_s < GUARD_S
