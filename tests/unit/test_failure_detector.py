"""Who is held to be lost: never sooner than it can have ended."""

from __future__ import annotations

from elasticgang.protocol.failure_detector import EXITED_S, FailureDetector

SILENCE_S = 6.0


def test_a_count_that_grows_keeps_an_agent_alive_for_ever() -> None:
    detector = FailureDetector(SILENCE_S)
    assert not any(detector.detect("c", {"a": n}, ["a"], n * 1.0, n * 1.0 + 0.1) for n in range(100))


# LEASE-2, DETECTOR-1
def test_silence_counts_from_the_answer_to_the_question() -> None:
    """A count may have grown right up to the answer, and the next question may have been asked long before its own."""
    detector = FailureDetector(SILENCE_S)
    assert detector.detect("c", {"a": 7}, [], 0.0, 2.0) == []
    assert detector.detect("c", {"a": 7}, [], 7.9, 9.0) == []
    assert detector.detect("c", {"a": 7}, [], 8.0, 8.0) == ["a"]


def test_a_process_that_is_gone_is_waited_for_as_long_as_what_it_started_may_live() -> None:
    detector = FailureDetector(SILENCE_S)
    detector.detect("c", {"a": 7, "b": 7}, [], 0.0, 0.0)
    assert detector.detect("c", {"a": 7, "b": 7}, ["a"], 1.0, 1.0) == []
    assert detector.detect("c", {"a": 7, "b": 7}, ["a"], 0.99 + EXITED_S, 1.0 + EXITED_S) == []
    assert detector.detect("c", {"a": 7, "b": 7}, ["a"], 1.0 + EXITED_S, 1.0 + EXITED_S) == ["a"]


def test_one_that_was_gone_and_is_not_any_more_begins_anew() -> None:
    detector = FailureDetector(SILENCE_S)
    detector.detect("c", {"a": 7}, ["a"], 0.0, 0.0)
    detector.detect("c", {"a": 7}, [], 1.0, 1.0)
    assert detector.detect("c", {"a": 7}, ["a"], 2.0, 2.0) == []


# DETECTOR-2
def test_a_new_coordinator_has_heard_of_nobody_yet() -> None:
    detector = FailureDetector(SILENCE_S)
    detector.detect("c", {"a": 7}, [], 0.0, 0.0)
    assert detector.detect("d", {"a": 0}, [], SILENCE_S + 1, SILENCE_S + 1) == []
    assert detector.detect("d", {"a": 0}, [], 2 * SILENCE_S, 2 * SILENCE_S) == []
    assert detector.detect("d", {"a": 0}, [], 2 * SILENCE_S + 1, 2 * SILENCE_S + 1) == ["a"]


def test_who_was_not_looked_at_begins_anew() -> None:
    detector = FailureDetector(SILENCE_S)
    detector.detect("c", {"a": 7}, [], 0.0, 0.0)
    detector.detect("c", {}, [], 1.0, 1.0)
    assert detector.detect("c", {"a": 7}, [], SILENCE_S, SILENCE_S) == []
