"""What a rank says when a sum over all ranks does not come about."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from elasticgang.comm.group_set import Configuration
from elasticgang.errors import CollectiveTimeoutError, PeerLostError
from elasticgang.member import sums
from elasticgang.member.agent_link import take_block
from elasticgang.member.sums import Sums
from elasticgang.process.sum_block import MAX_VALUES, SumBlock
from elasticgang.protocol.sum_route import SumRoute
from tests.integration.state_ranks import DEADLINE_S, Background

TIMEOUT_S = 0.01
GROUPS: Any = SimpleNamespace(error=None, comm=SimpleNamespace(block=None), wait_error=lambda timeout: None)


@pytest.fixture
def make() -> Iterator[Callable[[SumRoute, int], Sums]]:
    """The sums of a rank, whose host has a block, and no comm process."""
    fds: dict[SumRoute, int] = {}

    def sums_of(route: SumRoute, rank: int) -> Sums:
        if route not in fds:
            fds[route] = block_of(route)
        return Sums(route, rank, "sums", None, GROUPS, SumBlock(fds[route], len(route.local)), TIMEOUT_S)

    yield sums_of
    for fd in fds.values():
        os.close(fd)


# RULE-7
def test_a_timeout_names_the_rank_whose_numbers_are_missing(make: Callable[[SumRoute, int], Sums]) -> None:
    route = SumRoute((0, 1, 2), (0,))
    waits = [make(route, rank).start([1.0]) for rank in (0, 2)]
    for wait in waits:
        with pytest.raises(CollectiveTimeoutError, match=r"after 0\.01 seconds; rank 1 has not added its numbers"):
            wait()


# RULE-7
def test_a_timeout_of_another_host_blames_no_rank_of_this_one(make: Callable[[SumRoute, int], Sums]) -> None:
    wait = make(SumRoute((2, 3), (0, 2)), 3).start([1.0])
    with pytest.raises(CollectiveTimeoutError, match="rank 2 has not got the sums of the other hosts"):
        wait()


def block_of(route: SumRoute) -> int:
    fd = SumBlock.create()
    SumBlock.prepare(fd, len(route.local))
    return fd


# SUMS-3, SUMS-7
@pytest.mark.parametrize("is_noticed", [True, False])
def test_a_rank_whose_wait_another_has_ended_takes_the_error_of_its_own_notice(
    is_noticed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sums, "NOTICE_S", DEADLINE_S if is_noticed else 0.0)
    route = SumRoute((0, 1), (0,))
    comm: Any = SimpleNamespace(block=None, kill=lambda error, halt: None, under_way=lambda: [])
    groups = Configuration(comm)
    notice = PeerLostError("rank 2 died")
    fd = block_of(route)
    try:
        own, other = (Sums(route, rank, "sums", None, groups, SumBlock(fd, 2), DEADLINE_S) for rank in (0, 1))
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(own.start([1.0]))
            other.end()
            if is_noticed:
                groups.kill(notice, halt=True)
            with pytest.raises(PeerLostError) as found:
                waiting.result(DEADLINE_S)
    finally:
        os.close(fd)
    assert (found.value is notice) is is_noticed


# SUMS-6
@pytest.mark.parametrize("others", [1, MAX_VALUES - 2, MAX_VALUES, MAX_VALUES + 1, 3 * MAX_VALUES])
def test_ranks_that_sum_different_numbers_of_numbers_get_no_sum(
    make: Callable[[SumRoute, int], Sums], others: int
) -> None:
    """The numbers of the first ones fill one part, and a part of another."""
    route = SumRoute((0, 1), (0,))
    lengths = [MAX_VALUES + 100, others]
    waits = [make(route, rank).start([1.0] * length) for rank, length in enumerate(lengths)]
    for wait in waits:
        with pytest.raises(PeerLostError, match="different numbers of numbers"):
            wait()


@pytest.mark.parametrize("length", [0, MAX_VALUES - 2, MAX_VALUES - 1, MAX_VALUES, 2 * MAX_VALUES, 9_999])
def test_any_number_of_numbers_is_summed(
    make: Callable[[SumRoute, int], Sums], length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.TIMEOUT_S", DEADLINE_S)
    route = SumRoute((0, 1), (0,))
    waits = [make(route, rank).start([float(rank + at) for at in range(length)]) for rank in (0, 1)]
    summing = [Background(wait) for wait in waits]
    assert [each.result() for each in summing] == [[1.0 + 2 * at for at in range(length)]] * 2


# SUMS-5
def test_a_rank_without_a_free_descriptor_does_not_say_that_its_agent_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "NO_MEMORY_S", 0.0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        block = SumBlock.create()
        SumBlock.prepare(block, 2)
        socket.send_fds(ours, [b"digest"], [block])
        os.close(block)
        former = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, former[1]))
        try:
            assert take_block(theirs, "digest") is None
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, former)
    route = SumRoute((0, 1), (0,))
    with pytest.raises(PeerLostError, match="its agent prints why, or this process has no free descriptor"):
        Sums(route, 0, "sums", None, GROUPS, None, TIMEOUT_S).check()
