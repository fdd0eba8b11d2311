"""The waits for a comm process that is being started: each has an end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import cast

import pytest

from elasticgang.comm import standby_pool as supply_module
from elasticgang.comm.comm_process import CommProcess
from elasticgang.comm.standby_pool import StandbyPool
from elasticgang.errors import CollectiveTimeoutError, OperationalError


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


class Starts:
    """Counts the comm processes that a pool starts, which come up at once."""

    def __init__(self) -> None:
        self.num = 0
        self.has_two = threading.Event()

    def __call__(self) -> Future[CommProcess]:
        self.num += 1
        if self.num == 2:
            self.has_two.set()
        started = starting()
        started.set_result(cast(CommProcess, Started()))
        return started


class Timer:
    """In place of `threading.Timer`: `fire` is its time."""

    made: list[Timer]

    def __init__(self, interval_s: float, fire: Callable[[], object]) -> None:
        assert 0 < interval_s <= supply_module.STANDBY_S
        self.fire, self.is_cancelled = fire, False
        self.made.append(self)

    def start(self) -> None: ...

    def cancel(self) -> None:
        self.is_cancelled = True


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> list[Timer]:
    """Between two lines of a test, no standby becomes due."""
    monkeypatch.setattr(supply_module, "STANDBY_S", 3600.0)
    Timer.made = []
    monkeypatch.setattr(threading, "Timer", Timer)
    return Timer.made


# STANDBY-3
def test_the_next_standby_starts_some_time_after_one_was_taken(
    monkeypatch: pytest.MonkeyPatch, timers: list[Timer]
) -> None:
    starts = Starts()
    pool = StandbyPool(starts)
    pool.take()
    pool.prepare_when_due()
    assert (starts.num, len(timers)) == (1, 1)
    monkeypatch.setattr(supply_module, "STANDBY_S", 0.0)
    pool.prepare_when_due()
    assert (starts.num, timers[0].is_cancelled) == (2, True)
    pool.prepare_when_due()  # there is one
    timers[0].fire()  # too late to be cancelled
    assert starts.num == 2
    monkeypatch.setattr(supply_module, "STANDBY_S", 3600.0)
    pool.take()
    pool.prepare_when_due()
    assert starts.num == 2
    pool.take()  # whoever needs one does not wait
    assert (starts.num, timers[1].is_cancelled) == (3, True)


# STANDBY-3
def test_the_next_standby_is_started_although_no_commit_follows(timers: list[Timer]) -> None:
    """The first commit came at once, and the next step takes long."""
    starts = Starts()
    pool = StandbyPool(starts)
    pool.take()
    pool.prepare_when_due()
    pool.prepare_when_due()  # a further commit
    (timer,) = timers
    timer.fire()
    assert starts.num == 2
    pool.prepare()
    assert starts.num == 2


# STANDBY-3
def test_a_timer_that_fires_late_starts_nothing(timers: list[Timer]) -> None:
    starts = Starts()
    pool = StandbyPool(starts)
    pool.take()
    pool.prepare_when_due()
    pool.take()  # by a further failure: the next commit is waited for
    timers[0].fire()
    assert starts.num == 2
    pool.prepare_when_due()
    pool.close()
    assert timers[1].is_cancelled
    timers[1].fire()
    assert starts.num == 2


# STANDBY-3
def test_the_timer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supply_module, "STANDBY_S", 0.05)
    starts = Starts()
    pool = StandbyPool(starts)
    pool.take()
    pool.prepare_when_due()
    assert starts.has_two.wait(60)
    pool.close()


# STANDBY-4
def test_a_standby_that_dies_is_replaced_at_the_next_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supply_module, "STANDBY_RETRY_S", 0.0)
    comms = [Started(), Started()]
    futures = [starting() for _ in comms]
    starts = iter(futures)
    pool = StandbyPool(lambda: next(starts))
    pool.prepare_when_due()  # it still starts
    futures[0].set_result(cast(CommProcess, comms[0]))
    pool.prepare_when_due()  # it is well
    comms[0].has_died = True
    pool.prepare_when_due()
    assert comms[0].is_closed
    futures[1].set_result(second := cast(CommProcess, comms[1]))
    assert pool.take() is second


# STANDBY-4
def test_a_standby_that_cannot_be_started_is_tried_again_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    failed, started = starting(), starting()
    failed.set_exception(OperationalError("no process is left"))
    started.set_result(cast(CommProcess, Started()))
    starts = iter([failed, started])
    pool = StandbyPool(lambda: next(starts))
    pool.prepare_when_due()  # too early
    assert next(starts) is started
    starts = iter([started])
    monkeypatch.setattr(supply_module, "STANDBY_RETRY_S", 0.0)
    pool.prepare_when_due()
    assert not list(starts)
    assert pool.take() is started.result()
