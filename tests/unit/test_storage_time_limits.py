"""A storage that does not answer."""

from __future__ import annotations

import os
import threading

import pytest

from elasticgang.checkpoint.timely import TimelyCalls


# TIMELY-1
def test_a_call_that_blocks_is_left_behind_and_others_fail_at_once_until_it_has_ended() -> None:
    calls, answers = TimelyCalls("/storage"), threading.Event()
    begun: list[int] = []

    def call(number: int) -> int:
        begun.append(number)
        assert answers.wait(60)
        return number

    with pytest.raises(TimeoutError, match="it does not answer: '/storage'"):
        calls.within(0.01, lambda: call(1))
    with pytest.raises(TimeoutError, match="it does not answer: '/storage'"):
        calls.within(60, lambda: call(2))
    (late,) = [thread for thread in threading.enumerate() if thread.name == "storage"]
    answers.set()
    late.join(60)
    assert calls.within(60, lambda: call(3)) == 3
    assert begun == [1, 3]


# TIMELY-1
def test_what_a_call_raises_is_raised() -> None:
    with pytest.raises(FileNotFoundError):
        TimelyCalls("/storage").within(60, lambda: os.listdir("/nothing/there"))


def test_without_a_further_thread_the_call_has_no_limit() -> None:
    usual = threading.stack_size(1 << 47)  # more than there is
    try:
        assert TimelyCalls("/storage").within(60, threading.get_ident) == threading.get_ident()
    finally:
        threading.stack_size(usual)
