"""Callbacks of collectives may block: also for another collective, to any depth, and when a peer dies meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.futures import Future

from elasticgang.comm.error_swallowing import SwallowingProcessGroup
from elasticgang.comm.in_process import create_process_group
from elasticgang.comm.isolated import ProcessGroupIsolatedGloo
from tests.integration.conftest import Rings
from tests.integration.rings import SUM, Ring
from tests.support import DEADLINE_S, wait_until

SIZE = 3
DEPTH = 3
PROMPT_S = 30.0  # an error that comes by a deadline of the groups (60 s) is none of the death
KINDS: dict[str, Callable[[float], Any]] = {
    "isolated": ProcessGroupIsolatedGloo,
    "swallowing": lambda timeout: SwallowingProcessGroup(ProcessGroupIsolatedGloo(timeout)),
}
kinds = pytest.mark.parametrize("kind", KINDS)
# They share torch's Gloo with their callers, so that a lost peer cannot end them.
IN_PROCESS: dict[str, Callable[[float], Any]] = {
    "in-process": lambda timeout: create_process_group("gloo", timeout),
    "swallowing in-process": lambda timeout: SwallowingProcessGroup(create_process_group("gloo", timeout)),
}
all_kinds = pytest.mark.parametrize("kind", [*KINDS, *IN_PROCESS])


def ring_of(rings: Rings, kind: str, size: int = SIZE, timeout: float = 60.0) -> Ring:
    return rings(size, make=lambda: {**KINDS, **IN_PROCESS}[kind](timeout))


def isolated(pg: Any) -> ProcessGroupIsolatedGloo:
    found: ProcessGroupIsolatedGloo = pg.parent if isinstance(pg, SwallowingProcessGroup) else pg
    return found


def num_threads(pg: Any) -> int:
    comm = isolated(pg).comm_process
    assert comm is not None
    return sum(thread.name == f"comm-{comm.pid}" for thread in threading.enumerate())


def kill_comm(pg: Any) -> None:
    comm = isolated(pg).comm_process
    assert comm is not None
    os.kill(comm.pid, signal.SIGKILL)


def nested(pg: Any, before: Callable[[int], object] = lambda level: None, level: int = 1) -> torch.Tensor:
    """The sum of the last of `DEPTH` all-reduces, each waited for in the callback of the one before."""
    before(level)
    future = pg.allreduce([torch.full((4,), float(level))], SUM).get_future()
    if level < DEPTH:
        future = future.then(lambda _: [nested(pg, before, level + 1)])
    result: torch.Tensor = future.wait()[0]
    return result


@all_kinds
def test_a_callback_waits_for_collectives_three_deep(kind: str, rings: Rings) -> None:
    ring = ring_of(rings, kind)
    for _ in range(10):
        assert [found.tolist() for found in ring.each(lambda rank: nested(ring[rank]))] == [[9.0] * 4] * SIZE
    if kind in KINDS:  # threads that are no longer needed may be about to end
        wait_until(lambda: max(map(num_threads, ring.groups)) <= DEPTH + 1, "no more threads than needed", PROMPT_S)


@kinds
@pytest.mark.parametrize("level", range(1, DEPTH + 1))
def test_nested_waits_end_when_a_peer_dies_inside(kind: str, level: int, rings: Rings) -> None:
    ring = ring_of(rings, kind)

    def die(rank: int) -> Callable[[int], object]:
        return lambda now: kill_comm(ring[rank]) if (rank, now) == (SIZE - 1, level) else None

    futures = [ring.begin(lambda rank=rank: nested(ring[rank], die(rank))) for rank in range(SIZE)]  # type: ignore[misc]
    for future in futures:
        if kind == "isolated":
            with pytest.raises(RuntimeError, match=r"PeerLostError|died|closed|reset|aborted"):
                future.result(PROMPT_S)
        else:
            assert future.result(PROMPT_S).isfinite().all()
    ring.configure()
    assert [found.tolist() for found in ring.each(lambda rank: nested(ring[rank]))] == [[9.0] * 4] * SIZE


@kinds
def test_a_nested_wait_ends_at_its_deadline(kind: str, rings: Rings) -> None:
    ring = ring_of(rings, kind, size=2, timeout=6.0)
    alone = ring.begin(lambda: nested(ring[0]))
    ring[1].allreduce([torch.ones(4)], SUM).wait()  # and no more
    if kind == "isolated":
        with pytest.raises(RuntimeError, match=r"imed out|aborted|closed"):
            alone.result(PROMPT_S)
    else:
        assert alone.result(PROMPT_S).isfinite().all()


@all_kinds
def test_a_callback_waits_for_a_future_that_was_made_before(kind: str, rings: Rings) -> None:
    """Nothing that the callback calls says that it waits."""
    ring = ring_of(rings, kind, size=2)
    inside = threading.Event()
    later = ring[0].recv([torch.zeros(2)], 1, 0).get_future()

    def wait_for_later(_: Any) -> Any:
        inside.set()
        return later.wait()

    outer = ring[0].allreduce([torch.ones(2)], SUM).get_future().then(wait_for_later)
    ring[1].allreduce([torch.ones(2)], SUM).wait()
    assert inside.wait(DEADLINE_S)
    ring[1].send([torch.full((2,), 7.0)], 0, 0).wait()
    assert ring.begin(outer.wait).result(PROMPT_S)[0].tolist() == [7.0, 7.0]


# COMM-5
@kinds
def test_blocked_callbacks_keep_no_other_from_running_and_their_threads_end(kind: str, rings: Rings) -> None:
    ring = ring_of(rings, kind, size=2)
    number, go_on = 8, threading.Event()
    running = threading.Semaphore(0)

    def block(_: Any) -> None:
        running.release()
        assert go_on.wait(DEADLINE_S)

    chains = []
    for _ in range(number):
        chains.append(ring[0].allreduce([torch.ones(2)], SUM).get_future().then(block))
        ring[1].allreduce([torch.ones(2)], SUM).wait()
    for _ in range(number):
        assert running.acquire(timeout=DEADLINE_S)
    assert ring.sums() == [2.0, 2.0]
    assert [found.tolist() for found in ring.each(lambda rank: nested(ring[rank]))] == [[6.0] * 4] * 2
    assert number <= num_threads(ring[0]) <= number + DEPTH + 1
    go_on.set()
    for chain in chains:
        ring.begin(chain.wait).result(DEADLINE_S)
    wait_until(lambda: num_threads(ring[0]) <= 2, "the threads of blocked callbacks end")


def test_callbacks_of_a_chain_run_in_their_order(rings: Rings) -> None:
    ring = ring_of(rings, "isolated", size=2)
    for _ in range(20):
        order: list[int] = []
        future = ring[0].allreduce([torch.ones(2)], SUM).get_future()
        chain = future
        for number in range(5):
            chain = chain.then(lambda _, order=order, number=number: order.append(number))
        ring[1].allreduce([torch.ones(2)], SUM).wait()
        ring.begin(chain.wait).result(DEADLINE_S)
        assert order == list(range(5))


@all_kinds
def test_a_callback_of_several_collectives_waits_for_another(kind: str, rings: Rings) -> None:
    ring = ring_of(rings, kind)

    def both(rank: int) -> float:
        pg = ring[rank]
        futures = [pg.allreduce([torch.ones(2)], SUM).get_future() for _ in range(3)]
        joined: Future[Any] = torch.futures.collect_all(futures)
        third = joined.then(lambda _: pg.allreduce([torch.full((1,), 2.0)], SUM).get_future().wait()[0].item())
        return float(third.wait())

    assert ring.each(both) == [2.0 * SIZE] * SIZE


@all_kinds
def test_a_callback_waits_by_the_work_itself(kind: str, rings: Rings) -> None:
    ring = ring_of(rings, kind)

    def wait_by_work(rank: int) -> float:
        def reduce(_: Any) -> float:
            ring[rank].allreduce([tensor := torch.ones(1)], SUM).wait()
            ring[rank].barrier().wait()
            return tensor.item()

        return float(ring[rank].allreduce([torch.ones(2)], SUM).get_future().then(reduce).wait())

    assert ring.each(wait_by_work) == [SIZE] * SIZE


@pytest.mark.parametrize("leave", ["abort", "shutdown", "configure"])
def test_a_group_can_be_left_while_a_callback_waits_for_something_else(leave: str, rings: Rings) -> None:
    """The callback waits for the thread that leaves: that one goes on after a while."""
    ring = ring_of(rings, "isolated", size=2)
    inside, go_on = threading.Event(), threading.Event()

    def block(_: Any) -> None:
        inside.set()
        assert go_on.wait(DEADLINE_S)

    chain = ring[0].allreduce([torch.ones(2)], SUM).get_future().then(block)
    ring[1].allreduce([torch.ones(2)], SUM).wait()
    assert inside.wait(DEADLINE_S)
    if leave == "configure":
        ring.begin(ring.configure).result(PROMPT_S)
        assert ring.sums() == [2.0, 2.0]
    else:
        ring.begin(getattr(ring[0], leave)).result(PROMPT_S)
    assert not chain.done()
    go_on.set()
    ring.begin(chain.wait).result(DEADLINE_S)


def test_a_configuration_begins_only_when_callbacks_of_the_one_before_have_returned(rings: Rings) -> None:
    """What a callback starts belongs to the configuration of its collective."""
    ring = ring_of(rings, "isolated", size=2)
    inside, never, ended = threading.Event(), threading.Event(), threading.Event()

    def take_long(_: Any) -> None:
        inside.set()
        never.wait(1.0)
        ended.set()

    future = ring[0].allreduce([torch.ones(2)], SUM).get_future()
    future.then(take_long)
    ring[1].allreduce([torch.ones(2)], SUM).wait()
    assert inside.wait(DEADLINE_S)

    def configure() -> bool:
        ring.configure()
        return ended.is_set()

    assert ring.begin(configure).result(PROMPT_S)


# REPLY-4
def test_a_death_is_noticed_while_all_threads_run_callbacks(rings: Rings) -> None:
    ring = ring_of(rings, "isolated", size=2)
    inside, go_on = threading.Event(), threading.Event()

    def block(_: Any) -> None:
        inside.set()
        assert go_on.wait(DEADLINE_S)

    chain = ring[0].allreduce([torch.ones(2)], SUM).get_future().then(block)
    ring[1].allreduce([torch.ones(2)], SUM).wait()
    assert inside.wait(DEADLINE_S)
    kill_comm(ring[0])
    for end in (lambda work: work.wait(), lambda work: work.get_future().wait()):
        work = ring[0].allreduce([torch.ones(2)], SUM)
        with pytest.raises(RuntimeError):
            ring.begin(lambda end=end, work=work: end(work)).result(PROMPT_S)  # type: ignore[misc]
    go_on.set()
    ring.begin(chain.wait).result(DEADLINE_S)
