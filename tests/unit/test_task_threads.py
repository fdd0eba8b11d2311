from __future__ import annotations

import threading
import weakref
from concurrent.futures import Future

import pytest

from elasticgang.comm.task_threads import TaskThreads
from tests.support import DEADLINE_S


def num_since(before: list[threading.Thread]) -> int:
    """Threads that were begun since. Those of other tests may end meanwhile."""
    return len(set(threading.enumerate()) - set(before))


def test_tasks_that_wait_for_each_other_all_run() -> None:
    threads, all_run = TaskThreads(), threading.Barrier(20)
    waiting = [threads.submit(all_run.wait, DEADLINE_S) for _ in range(20)]
    assert sorted(each.result(DEADLINE_S) for each in waiting) == list(range(20))


def test_there_are_as_many_threads_as_tasks_at_one_time() -> None:
    """However many there have been, and however they follow each other."""
    threads, before = TaskThreads(), threading.enumerate()
    under_way: list[Future[int]] = []
    for number in range(3000):
        under_way.append(threads.submit(abs, -number))
        if len(under_way) == 3:
            under_way.pop(0).result(DEADLINE_S)
    assert [each.result(DEADLINE_S) for each in under_way] == [2998, 2999]
    assert num_since(before) <= 3


def test_an_error_is_the_futures_and_its_thread_goes_on() -> None:
    threads, before = TaskThreads(), threading.enumerate()
    for _ in range(3):
        with pytest.raises(ValueError, match="invalid literal"):
            threads.submit(int, "x").result(DEADLINE_S)
    assert threads.submit(int, "7", base=8).result(DEADLINE_S) == 7
    assert num_since(before) == 1


def test_a_thread_without_a_task_keeps_nothing_of_its_last_one() -> None:
    class Large:
        pass

    threads, large = TaskThreads(), Large()
    known = weakref.ref(large)
    threads.submit(id, large).result(DEADLINE_S)
    del large
    threads.submit(int).result(DEADLINE_S)  # by the same thread
    assert known() is None
