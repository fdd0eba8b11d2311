"""Receiving from any source, and monitored barriers: as Gloo has them, on every kind of group of ours."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

from elasticgang.collectives.collective import Collective
from elasticgang.collectives.table import TABLE
from elasticgang.comm import SwallowingProcessGroup, create_process_group
from elasticgang.errors import CollectiveTimeoutError, GangError, InvalidOperationError, StepAborted
from elasticgang.gang import FakeGang
from tests.integration.conftest import Rings
from tests.integration.rings import Ring
from tests.support import REPOSITORY, Job, run_preloaded, wait_until

SIZE = 3
DEADLINE_S = 120
SHORT, LONG = timedelta(seconds=0.5), timedelta(seconds=60)
KINDS: dict[str, Callable[[], Any]] = {
    "isolated": lambda: create_process_group("isolated-gloo", 30.0),
    "swallowing": lambda: SwallowingProcessGroup(create_process_group("isolated-gloo", 30.0)),
    "in-process": lambda: create_process_group("gloo", 30.0),
    "swallowing in-process": lambda: SwallowingProcessGroup(create_process_group("gloo", 30.0)),
}


@pytest.fixture(params=list(KINDS))
def ring(request: pytest.FixtureRequest, rings: Rings) -> Ring:
    return rings(SIZE, make=KINDS[request.param])


# -- messages


def values(rank: int) -> torch.Tensor:
    return torch.arange(6.0).view(2, 3) + 10 * rank


def test_a_message_tells_who_sent_it(ring: Ring) -> None:
    def use(rank: int) -> list[tuple[int, Any]]:
        found = []
        for _ in range(SIZE - 1) if rank == 0 else []:
            tensor = torch.zeros(2, 3)
            work = ring[0].recv_anysource([tensor], 7)
            work.wait()
            found.append((work._source_rank(), tensor.tolist()))
        if rank:
            ring[rank].send([values(rank)], 0, 7).wait()
        return sorted(found)

    assert ring.each(use)[0] == [(rank, values(rank).tolist()) for rank in (1, 2)]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.bool, torch.complex64], ids=str)
def test_a_message_of_any_dtype(dtype: torch.dtype, rings: Rings) -> None:
    ring = rings(2)
    sent = (torch.arange(4) % 2).to(dtype)
    received = torch.zeros(8, dtype=dtype)[::2]
    pending = ring.begin(lambda: ring[1].send([sent], 0, 1).wait())
    work = ring[0].recv_anysource([received], 1)
    assert [tensor.tolist() for tensor in work.get_future().wait()] == [sent.tolist()]
    assert work._source_rank() == 1
    pending.result(DEADLINE_S)


def test_large_messages_and_many(rings: Rings) -> None:
    """Whose memory the comm process shares; sources come in any order."""
    ring = rings(SIZE)
    big = [torch.full((600_000,), float(rank)) for rank in range(SIZE)]

    def use(rank: int) -> list[int]:
        sources = []
        for turn in range(20):
            if rank == 0:
                for _ in range(SIZE - 1):
                    received = big[0] if turn % 2 else torch.zeros(5)
                    work = ring[0].recv_anysource([received], turn)
                    work.wait()
                    assert (received == work._source_rank()).all()
                    sources.append(work._source_rank())
            else:
                ring[rank].send([big[rank] if turn % 2 else torch.full((5,), float(rank))], 0, turn).wait()
        return sources

    sources = ring.each(use)[0]
    assert [sources.count(rank) for rank in range(SIZE)] == [0, 20, 20]


def test_a_message_from_a_named_source_tells_it_too(ring: Ring) -> None:
    def use(rank: int) -> int | None:
        if rank == 2:
            ring[2].send([torch.ones(1)], 1, 0).wait()
        if rank != 1:
            return None
        work = ring[1].recv([torch.zeros(1)], 2, 0)
        work.wait()
        return int(work._source_rank())

    assert ring.each(use) == [None, 2, None]


def test_what_is_no_message_has_no_source(rings: Rings) -> None:
    ring = rings(2)
    works = ring.each(lambda rank: ring[rank].allreduce([torch.ones(1)]))
    for work in works:
        work.wait()
        with pytest.raises(RuntimeError, match="recv"):
            work._source_rank()


def test_what_does_not_fit_is_refused(rings: Rings) -> None:
    pg = rings(2)[0]
    for tensors in ([], [torch.ones(1), torch.ones(1)], [torch.ones(1).expand(3)]):
        with pytest.raises(ValueError, match=r"one tensor|share memory"):
            pg.recv_anysource(tensors, 0)
    assert pg.errored() is None


def test_a_message_that_does_not_come_is_an_error(rings: Rings) -> None:
    ring = rings(2)
    ring[0].set_timeout(SHORT)  # not for the configuration
    work = ring[0].recv_anysource([torch.ones(1)], 0)
    with pytest.raises(CollectiveTimeoutError):
        work.wait()
    assert isinstance(ring[0].errored(), CollectiveTimeoutError)


def test_a_swallowed_message_is_no_value(rings: Rings) -> None:
    ring = rings(2, make=KINDS["swallowing"])
    work = ring[0].recv_anysource([torch.ones(1)], 0)
    os.kill(ring[0].parent.comm_process.pid, signal.SIGKILL)
    for end in (work.wait, work.wait, work._source_rank):
        with pytest.raises(StepAborted):
            end()
    for call in (ring[0].monitored_barrier, lambda: ring[0].recv_anysource([torch.ones(1)], 0)):
        with pytest.raises(StepAborted, match="failed before"):
            call()


def test_a_fake_gang_receives_from_whom_it_sent_to() -> None:
    pg: Any = FakeGang("cpu", rank=1, size=4).as_process_group()
    with pytest.raises(InvalidOperationError, match="any rank"):
        pg.recv_anysource([torch.ones(1)], 0)
    pg.send([torch.full((2,), 5.0)], 3, 0)
    work = pg.recv_anysource([tensor := torch.zeros(2)], 0)
    assert work.wait()
    assert (work._source_rank(), tensor.tolist()) == (3, [5.0, 5.0])
    pg.monitored_barrier()


# -- monitored barriers


def named(error: BaseException) -> str:
    found = re.search(r"Ranks? [\d, ]+ failed to pass monitoredBarrier in \d+ ms", str(error))
    assert found, error
    return found[0]


def test_a_barrier_that_all_pass(ring: Ring) -> None:
    for arguments in ({}, {"timeout": LONG}, {"timeout": LONG, "wait_all_ranks": True}):
        assert ring.each(lambda rank, a=arguments: ring[rank].monitored_barrier(**a)) == [None] * SIZE  # type: ignore[misc]
    assert ring.sums() == [3.0] * SIZE


@pytest.mark.parametrize(
    ("present", "wait_all_ranks", "expected"),
    [
        ([0, 1], False, "Rank 2 failed to pass monitoredBarrier in 4000 ms"),  # rank 1 has that long to come
        ([0], False, "Rank 1 failed to pass monitoredBarrier in 500 ms"),
        ([0], True, "Ranks 1, 2 failed to pass monitoredBarrier in 500 ms"),
        ([0, 2], True, "Ranks 1 failed to pass monitoredBarrier in 4000 ms"),
    ],
)
def test_who_did_not_come_is_named(present: list[int], wait_all_ranks: bool, expected: str, ring: Ring) -> None:
    def use(rank: int) -> BaseException | None:
        try:
            ring[rank].monitored_barrier(patience if rank == 0 else LONG, wait_all_ranks)
        except RuntimeError as error:
            return error
        return None

    patience = SHORT if present == [0] else timedelta(seconds=4)
    pending = [ring.begin(lambda rank=rank: use(rank)) for rank in present]  # type: ignore[misc]
    error = pending[0].result(DEADLINE_S)
    assert error is not None
    assert named(error) == expected
    if hasattr(ring[0], "parent"):  # the in-process one has a parent too, which is torch's
        assert isinstance(error, StepAborted) == isinstance(ring[0], SwallowingProcessGroup)
    else:
        assert isinstance(error, CollectiveTimeoutError)
        assert named(ring[0].errored()) == expected
    for waiting in pending[1:]:
        assert waiting.result(DEADLINE_S) is not None, "it was told by rank 0"


class Noted:
    """Another process group, and when its monitored barrier raised."""

    def __init__(self, pg: Any) -> None:
        self._pg = pg
        self.raised_s = math.inf

    def rank(self) -> int:
        return int(self._pg.rank())

    def monitored_barrier(self, **arguments: Any) -> None:
        try:
            self._pg.monitored_barrier(**arguments)
        finally:
            self.raised_s = time.monotonic()


def test_rank_0_fails_before_those_whose_connections_it_closes(rings: Rings) -> None:
    """TABLE-3: only its error names the absent rank."""
    ring = rings(SIZE, make=KINDS["in-process"])

    def use(rank: int) -> float:
        noted = Noted(ring[rank])
        barrier = Collective("monitored_barrier", timeout_s=2.0 if rank == 0 else 60.0, wait_all_ranks=True)
        work, _ = TABLE[barrier.call].issue(noted, barrier)
        with pytest.raises(RuntimeError):
            work.wait()
        return time.monotonic() - noted.raised_s

    pending = [ring.begin(lambda rank=rank: use(rank)) for rank in (0, 1)]  # type: ignore[misc]
    pending[0].result(DEADLINE_S)
    assert pending[1].result(DEADLINE_S) >= 0.25


def test_a_lost_comm_process_ends_a_barrier_at_once(rings: Rings) -> None:
    """Long before its timeout: the process answers while it waits."""
    ring = rings(2)

    def use() -> None:
        ring[0].monitored_barrier(timedelta(hours=1))

    pending = ring.begin(use)
    wait_until(lambda: ring[0].num_active_work(), "the barrier's start")
    os.kill(ring[1].comm_process.pid, signal.SIGKILL)
    with pytest.raises(GangError):
        pending.result(DEADLINE_S)
    with pytest.raises(GangError):
        use()
    ring.configure()
    assert ring.sums() == [2.0, 2.0]


def test_other_collectives_go_on_beside_a_barrier(rings: Rings) -> None:
    """A message between the same ranks, while one of them waits in the barrier."""
    ring = rings(2)
    pending = ring.begin(lambda: ring[0].monitored_barrier(LONG))
    wait_until(lambda: ring[0].num_active_work(), "the barrier's start")
    received = ring.begin(lambda: ring[0].recv([torch.zeros(1)], 1, 3).wait())
    ring[1].send([torch.ones(1)], 0, 3).wait()
    assert received.result(DEADLINE_S)
    assert not pending.done()
    ring[1].monitored_barrier(LONG)
    pending.result(DEADLINE_S)


# WORKER-6
@pytest.mark.parametrize("kind", ["isolated", "swallowing"])
def test_messages_under_any_tag_go_on_beside_a_barrier(kind: str, rings: Rings) -> None:
    """Gloo sends the barrier's own messages under the number of the collective."""
    ring = rings(2, make=KINDS[kind])
    tags = range(12)
    received = [torch.zeros(1) for _ in tags]
    works = [ring[0].recv_anysource([received[tag]], tag) for tag in tags]
    for _ in range(3):
        assert ring.each(lambda rank: ring[rank].monitored_barrier(LONG)) == [None] * 2
    for tag in tags:
        ring[1].send([torch.tensor([tag + 0.5])], 0, tag).wait()
    for work in works:
        work.wait()
    assert [tensor.item() for tensor in received] == [tag + 0.5 for tag in tags]


@pytest.mark.parametrize("tag", [0, 1, (1 << 31) - 1])
def test_a_message_under_the_first_and_the_last_tag(tag: int, ring: Ring) -> None:
    pending = ring.begin(lambda: ring[1].send([torch.ones(1)], 0, tag).wait())
    ring[0].recv([received := torch.zeros(1)], 1, tag).wait()
    pending.result(DEADLINE_S)
    assert received.item() == 1.0


@pytest.mark.parametrize("timeout", [3, 3.0, "3"])
def test_a_timeout_is_a_timedelta(timeout: Any, rings: Rings) -> None:
    with pytest.raises(TypeError, match="timedelta"):
        rings(2)[0].monitored_barrier(timeout)


# -- in processes


@pytest.mark.parametrize("backend", ["gloo", "elasticgang"])
def test_torchs_function_names_who_did_not_come(backend: str) -> None:
    launcher = [sys.executable, "-m", "tests.integration.forked_ranks", "3"]
    command = [*launcher, "tests/integration/monitored_ranks.py", "--backend", backend]
    done = run_preloaded(command, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    found = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert sorted(found) == [0, 1]
    assert "Ranks 2 failed to pass monitoredBarrier in 4000 ms" in found[0][0]
    assert "error" in found[1][0]
    if backend == "elasticgang":
        assert all(other for _, other in found.values()), "an error ends all groups of the process"


def test_an_elastic_gang_loses_the_step_and_goes_on(tmp_path: Any) -> None:
    with Job(tmp_path / "job", REPOSITORY / "tests/integration/monitored_ranks.py", str(tmp_path), ranks=3) as job:
        assert job.wait() == 0, job.stderr
        job.assert_nothing_left()
    found = [json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(3)]
    assert "Ranks 2 failed to pass monitoredBarrier in 4000 ms" in found[0]["lost"]
    for rank in found:
        assert rank["after"] == ["StepAborted"] * 3, "a poisoned gang gives no value, and no barrier"
        assert rank["steps"] == 2
    assert found[0]["sources"] == [[1, 10.0], [2, 20.0]]
