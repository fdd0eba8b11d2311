"""What a device has passed of its collectives, over a stand-in for CUDA's events."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from elasticgang.comm import device_progress
from elasticgang.comm.device_progress import DeviceProgress
from tests.integration.fake_cuda import Event, FakeCuda
from tests.support import wait_until


class HeldCuda(FakeCuda):
    """Its events pass when the test lets them."""

    def __init__(self) -> None:
        super().__init__()
        self.disturb_no_capture: set[str] = set()

    def new_event(self, device: int, *, shared: bool) -> Event:
        event = super().new_event(device, shared=shared)
        event.hold_back()
        event.record(self.current_stream(device))
        return event

    def query_beside_captures(self, device: int) -> None:
        self.disturb_no_capture.add(threading.current_thread().name)


class Followed:
    """Collectives that a `DeviceProgress` follows, at a clock that the test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.cuda = HeldCuda()
        self.told: list[str] = []
        self.progress = DeviceProgress(0, self.cuda, lambda: self.now_s)

    def follow(self, name: str, timeout_s: float = 60.0) -> Event:
        told = self.told
        self.progress.follow(timeout_s, lambda: told.append(f"{name} passed"), lambda: told.append(f"{name} late"))
        return self.cuda.own_events[-1]


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Followed]:
    """No thread looks before the test does: it might have found what the test looks for, and not told it yet."""
    monkeypatch.setattr(device_progress, "POLL_S", 60.0)
    followed = Followed()
    yield followed
    followed.progress.close()


# PASSED-1
def test_a_collective_has_completed_once_the_device_has_passed_it(followed: Followed) -> None:
    first, second = followed.follow("first"), followed.follow("second")
    followed.progress.look()
    assert followed.told == []
    second.let_pass()
    followed.progress.look()
    assert followed.told == ["second passed"]
    first.let_pass()
    followed.progress.look()
    followed.progress.look()
    assert followed.told == ["second passed", "first passed"]


# PASSED-1, PASSED-3
def test_a_thread_looks_too_and_disturbs_no_capture(followed: Followed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_progress, "POLL_S", 0.05)
    followed.follow("first").let_pass()
    wait_until(lambda: followed.told, "the look of the thread")
    assert followed.told == ["first passed"]
    assert followed.cuda.disturb_no_capture == {"device-progress"}


# PASSED-2
def test_a_collective_that_the_device_does_not_pass_is_late_once(followed: Followed) -> None:
    followed.follow("first", 60.0)
    followed.follow("second", 10.0)
    followed.now_s = 10.5
    followed.progress.look()
    assert followed.told == ["second late"]
    followed.now_s = 60.5
    followed.progress.look()
    followed.progress.look()
    assert followed.told == ["second late", "first late"]


# PASSED-2
def test_a_device_with_much_to_do_is_not_late(followed: Followed) -> None:
    """It is behind with all that is queued, and passes one collective after the other."""
    events = [followed.follow(str(number), 60.0) for number in range(3)]
    for number, event in enumerate(events):
        followed.now_s = 50.0 * (number + 1)
        event.let_pass()
        followed.progress.look()
    assert followed.told == ["0 passed", "1 passed", "2 passed"]


def test_a_configuration_that_has_ended_is_told_nothing_more(followed: Followed) -> None:
    event = followed.follow("first", 10.0)
    followed.progress.close()
    event.let_pass()
    followed.now_s = 60.0
    followed.progress.look()
    assert followed.told == []
