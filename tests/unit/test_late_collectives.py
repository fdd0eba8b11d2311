"""What is said of collectives that time out."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from elasticgang.agent.job import Output
from elasticgang.agent.late_collectives import LateCollectives
from elasticgang.collectives.collective import Collective, ReduceOperation
from elasticgang.collectives.description import Description, describe
from elasticgang.member.stopped_at import script_line, stopped_at
from elasticgang.process.status_page import CommBlock, StatusPage

HERE = Path(__file__).name
MEMBERS = {"a/0", "a/1"}


class Told:
    """Both `Events` and `Output`."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.events: list[dict[str, Any]] = []

    def write_line(self, line: str) -> None:
        self.lines.append(line)

    def write(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})

    def write_file(self, name: str, text: str) -> None:
        raise AssertionError(name)


@pytest.fixture
def block() -> Iterator[CommBlock]:
    fd = StatusPage.create()
    found = cast(CommBlock, StatusPage(fd).take_block())
    found.configure(["0-1", "reduce:0-1"], {"0-1": "root, dp", "reduce:0-1": "reduce"})
    found.add("control:0-1", "control")
    yield found
    os.close(fd)


def test_a_collective_is_described_without_its_tensors() -> None:
    tensor = torch.ones(2, 3, dtype=torch.bfloat16)
    reduced = describe(Collective("all_reduce", (tensor,), (tensor,), ReduceOperation.MAX))
    assert str(reduced) == "all_reduce of 2x3 bfloat16 by MAX"
    assert str(describe(Collective("broadcast", (torch.ones(()),), ()))) == "broadcast of 1 float32"
    assert str(describe(Collective("barrier"))) == "barrier"


def test_a_rank_names_the_collectives_that_it_has_not_completed(block: CommBlock) -> None:
    block.set_groups(["0-1", "reduce:0-1"])
    for _ in range(3):
        block.submitted("0-1", False)
    for _ in range(2):
        block.completed("0-1", False)
    tensor = torch.ones(4)
    under_way = [("0-1", describe(Collective("all_reduce", (tensor,), (tensor,))))]
    what, _, line = stopped_at(block, under_way).partition(", at ")
    assert what == "in all_reduce of 4 float32 by SUM (number 3 of gang root, dp)"
    assert line.startswith(f"{HERE}:")
    block.submitted("reduce:0-1", False)
    block.submitted("0-1", True)
    assert stopped_at(block, []).startswith(
        "in a collective (number 3 of gang root, dp), a message of gang root, dp, "
        "the reduction of gradients (a collective, number 1), at "
    )


def described(call: str, size: int, *, has_ended: bool = False) -> tuple[str, Description]:
    tensor = torch.ones(size)
    return "0-1", describe(Collective(call, (tensor,), (tensor,)))._replace(has_ended=has_ended)


def test_the_oldest_collective_that_has_not_ended_is_named(block: CommBlock) -> None:
    block.set_groups(["0-1"])
    for _ in range(4):
        block.submitted("0-1", False)
    block.completed("0-1", False)  # of which the rank may not know yet
    under_way = [described("all_reduce", size) for size in (1, 2, 3, 4)]
    for known in (under_way, under_way[1:]):
        assert stopped_at(block, known).startswith("in all_reduce of 2 float32 by SUM (number 2 of gang root, dp), at ")
    unwaited = [described("all_reduce", size, has_ended=size < 4) for size in (1, 2, 3, 4)]
    assert stopped_at(block, unwaited).startswith("in all_reduce of 4 float32 by SUM (number 4 of gang root, dp), at ")
    assert stopped_at(block, unwaited[:3]).startswith("in no collective, at ")


def test_a_message_is_not_taken_for_a_collective_of_its_gang(block: CommBlock) -> None:
    block.submitted("0-1", True)
    block.submitted("0-1", False)
    assert stopped_at(block, [described("send", 7), described("all_gather", 2)]).startswith(
        "in all_gather of 2 float32 (number 1 of gang root, dp), send of 7 float32 of gang root, dp, at "
    )


def test_a_collective_of_a_group_that_is_not_counted_is_named(block: CommBlock) -> None:
    under_way = [
        (gang, described("all_reduce", 1, has_ended=gang == "dp.70:0-1")[1]) for gang in ("dp.70:0-1", "dp.71:0-1")
    ]
    assert stopped_at(block, under_way).startswith("in all_reduce of 1 float32 by SUM of gang dp.71:0-1, at ")


def test_a_rank_names_sums_and_messages(block: CommBlock) -> None:
    assert stopped_at(block, []).startswith("in no collective, at ")
    assert stopped_at(block, [], (4_000_000, 20_000_000)).startswith(
        "while it healed (4,000,000 of 20,000,000 bytes), at "
    )
    assert stopped_at(block, [], (7, 7)).startswith("in no collective, at ")
    block.submitted("control:0-1", False)
    block.submitted("0-1", True)
    send = describe(Collective("send", (), (torch.ones(2),)))
    assert stopped_at(block, [("0-1", send)]).startswith(
        "in send of 2 float32 of gang root, dp, a sum over all ranks (a vote, or totals), at "
    )


def test_the_line_is_that_of_the_main_thread() -> None:
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(script_line()))
    thread.start()
    thread.join()  # in the standard library
    assert found[0].startswith(f"{HERE}:")


def test_the_name_of_a_file_is_bounded() -> None:
    found: dict[str, str] = {}
    exec(compile("found = script_line()", "n" * 100_000, "exec"), {"script_line": script_line}, found)
    assert found["found"] == "n" * 255 + ":1"


# LATE-1
def test_where_ranks_have_stopped_is_told_once_for_each_doubling() -> None:
    told = Told()
    late = LateCollectives(told, cast(Output, told))
    for generation in range(2, 11):
        late.timed_out()
        for rank, where in ((1, "in a sum, at a.py:7"), (0, "in no collective, at a.py:3"), (2, "in a sum, at a.py:7")):
            late.stopped(rank, 5, where)
        late.agreed(generation, 5, MEMBERS)
    places = "rank 0 stopped in no collective, at a.py:3; rank 1, 2 stopped in a sum, at a.py:7"
    assert told.lines == [
        f"elasticgang: a collective has timed out in step 5{times}: {places}"
        for times in ("", ", 2 times in a row", ", 4 times in a row", ", 8 times in a row")
    ]
    assert [(event["generation"], event["num_times"]) for event in told.events] == [(n, n) for n in range(1, 10)]
    assert told.events[0]["ranks"][1] == {"local_rank": 1, "stopped_at": "in a sum, at a.py:7"}


def test_nothing_is_told_of_other_ends() -> None:
    told = Told()
    late = LateCollectives(told, cast(Output, told))
    late.stopped(0, 5, "in a sum, at a.py:7")
    late.agreed(2, 5, MEMBERS)
    late.timed_out()
    late.stopped(0, 6, "")
    late.agreed(3, 5, MEMBERS)
    assert not told.lines
    assert not told.events
    for step in (7, 8):
        late.timed_out()
        late.stopped(0, step, "in a sum, at a.py:7")
        late.agreed(step, step, MEMBERS)
    assert [line.partition(": rank")[0] for line in told.lines] == [
        f"elasticgang: a collective has timed out in step {step}" for step in (7, 8)
    ]


# LATE-2
def test_collectives_that_fail_again_and_again_are_told_without_an_event() -> None:
    told = Told()
    late = LateCollectives(told, cast(Output, told))
    late.agreed(1, 0, MEMBERS)
    for generation, step in enumerate((5, 5, 5, 5, 6, 7), 2):
        late.failed()
        late.stopped(0, step, "in all_reduce of 3 float32, at a.py:7")
        late.agreed(generation, step, MEMBERS)
    assert [line.partition(": rank")[0] for line in told.lines] == [
        f"elasticgang: a collective has failed in step 5, {num} times in a row" for num in (2, 4)
    ]
    assert not told.events
    told.lines.clear()
    for generation in range(8, 12):  # a rank has died in each
        late.failed()
        late.stopped(0, 8, "in all_reduce of 3 float32, at a.py:7")
        late.agreed(generation, 8, {"a/0", f"a/1-{generation}"})
    for generation in range(12, 16):  # nothing has failed
        late.stopped(0, 9, "in all_reduce of 3 float32, at a.py:7")
        late.agreed(generation, 9, MEMBERS)
    assert not told.lines


def test_a_rank_that_has_not_connected_is_in_the_first_step_of_its_generation() -> None:
    told = Told()
    late = LateCollectives(told, cast(Output, told))
    late.agreed(2, 71, MEMBERS)
    for generation, step in ((3, None), (4, 70)):  # of a rank that joins, and of one that has committed step 70
        late.timed_out()
        late.stopped(0, step, "while it connected to the other ranks")
        late.agreed(generation, 71, MEMBERS)
    assert [event["step"] for event in told.events] == [71, 71]


def test_many_places_are_not_all_named() -> None:
    told = Told()
    late = LateCollectives(told, cast(Output, told))
    late.timed_out()
    for rank in range(8):
        late.stopped(rank, 5, f"at a.py:{rank}")
    late.agreed(2, 5, MEMBERS)
    assert told.lines[0].endswith("; rank 5 stopped at a.py:5; 2 more places")
