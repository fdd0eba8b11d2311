"""The numbers that ranks report are in the events, at a bounded rate (NUMBERLOG-1)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from elasticgang.agent.number_log import NUMBERS_S, NumberLog
from elasticgang.process.status_page import StatusPage


class Events:
    def __init__(self) -> None:
        self.written: list[tuple[str, int, dict[str, Any]]] = []

    def write(self, event: str, **fields: Any) -> None:
        self.written.append((event, fields["step"], fields["numbers"]))

    def write_file(self, name: str, text: str) -> None: ...


@pytest.fixture
def pages() -> Iterator[dict[str, StatusPage]]:
    fds = {member: StatusPage.create() for member in ("a/0/x", "a/1/x")}
    yield {member: StatusPage(fd) for member, fd in fds.items()}
    for fd in fds.values():
        os.close(fd)


# NUMBERLOG-1
def test_the_means_of_the_last_numbers_are_written_at_a_bounded_rate(pages: dict[str, StatusPage]) -> None:
    events, (one, other) = Events(), pages.values()
    log = NumberLog(events)
    log.look(100.0, pages)
    assert events.written == []
    one.report("loss", 1.0)
    one.commit(1, 1)
    log.look(100.25, pages)
    for number in range(1000):
        now_s = 100.25 + (number + 1) * NUMBERS_S / 1001
        one.report("loss", 2.0)
        other.report("loss", float(number))
        one.commit(2 + number, 1)
        log.look(now_s, pages)
    assert events.written == [("reported", 1, {"loss": 1.0})]
    log.look(100.25 + NUMBERS_S, pages)
    assert events.written[1:] == [("reported", 1001, {"loss": (2.0 + 999.0) / 2})]
    log.look(200.0, pages)
    assert len(events.written) == 2, "nobody has reported since"
    log.write()
    assert len(events.written) == 2


# NUMBERLOG-1
def test_the_last_numbers_of_a_rank_that_has_exited_are_written_at_the_end(pages: dict[str, StatusPage]) -> None:
    events, (one, other) = Events(), pages.values()
    log = NumberLog(events)
    one.report("loss", 1.0)
    log.look(100.0, pages)
    one.report("loss", float("nan"))
    other.report("loss", 3.0)
    other.report("tokens", 8.0)
    other.commit(7, 1)
    log.read("a/1/x", other)
    log.look(101.0, {"a/0/x": one})
    assert len(events.written) == 1
    log.write()
    assert events.written[1:] == [("reported", 7, {"loss": 3.0, "tokens": 8.0})]
    one.commit(7, 1)
    log.look(120.0, {"a/0/x": one})
    assert events.written[2:] == [("reported", 7, {"loss": "nan"})]


# NUMBERLOG-1
def test_after_a_job_has_gone_back_the_steps_are_those_that_are_trained_again(pages: dict[str, StatusPage]) -> None:
    events, (one, _) = Events(), pages.values()
    log = NumberLog(events)
    for now_s, step in ((100.0, 90), (120.0, 41), (140.0, 60)):
        one.report("loss", 1.0)
        one.commit(step, 1)
        log.look(now_s, pages)
    assert [step for _, step, _ in events.written] == [90, 41, 60]


# NUMBERLOG-1
def test_the_step_is_that_of_the_newest_generation(pages: dict[str, StatusPage]) -> None:
    """A rank that has exited had come further, before the job went back."""
    events, (one, other) = Events(), pages.values()
    log = NumberLog(events)
    one.report("loss", 1.0)
    other.report("loss", 1.0)
    other.commit(90, 1)
    one.commit(41, 2)
    log.read("a/1/x", other)
    log.look(100.0, {"a/0/x": one})
    assert [step for _, step, _ in events.written] == [41]


# NUMBERLOG-1
def test_a_successor_reports_in_the_place_of_the_rank_that_has_died(pages: dict[str, StatusPage]) -> None:
    events, (one, other) = Events(), pages.values()
    log = NumberLog(events)
    one.report("loss", 8.0)
    other.report("loss", 2.0)
    log.read("a/0/x", one)
    log.look(100.0, {"a/0/y": other})
    assert [numbers for _, _, numbers in events.written] == [{"loss": 2.0}]
