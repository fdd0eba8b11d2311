"""The waits for a comm process that is being started: each has an end."""

from __future__ import annotations

from concurrent.futures import Future
from typing import cast

import pytest

from elasticgang.comm import standby_pool as supply_module
from elasticgang.comm.comm_process import CommProcess
from elasticgang.comm.standby_pool import StandbyPool
from elasticgang.errors import CollectiveTimeoutError


class Started:
    """A comm process that has come up."""

    ended = has_died = False

    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


def starting() -> Future[CommProcess]:
    """One that is being started, and cannot be called off any more."""
    future: Future[CommProcess] = Future()
    future.set_running_or_notify_cancel()
    return future


# STANDBY-1
def test_close_does_not_wait_for_a_standby_that_does_not_start() -> None:
    coming = starting()
    pool = StandbyPool(lambda: coming)
    with pytest.raises(CollectiveTimeoutError, match=r"timed out after 0.05 seconds"):
        pool.take(0.05)
    comm = cast(CommProcess, Started())
    coming.set_result(comm)
    assert pool.take(0.05) is comm


@pytest.mark.timeout(30)
def test_a_standby_that_starts_after_close_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supply_module, "CLOSE_TIMEOUT_S", 0.05)
    coming = starting()
    StandbyPool(lambda: coming).close()
    late = Started()
    coming.set_result(cast(CommProcess, late))
    assert late.is_closed


# STANDBY-3
def test_the_next_standby_starts_some_time_after_one_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[Future[CommProcess]] = []

    def start() -> Future[CommProcess]:
        starts.append(starting())
        starts[-1].set_result(cast(CommProcess, Started()))
        return starts[-1]

    pool = StandbyPool(start)
    pool.take()
    pool.prepare_when_due()
    assert len(starts) == 1
    monkeypatch.setattr(supply_module, "STANDBY_S", 0.0)
    pool.prepare_when_due()
    assert len(starts) == 2
    pool.prepare_when_due()  # there is one
    assert len(starts) == 2
    monkeypatch.undo()
    pool.take()
    pool.prepare_when_due()
    assert len(starts) == 2
    pool.take()  # whoever needs one does not wait
    assert len(starts) == 3
