"""Who writes what of a checkpoint, and which ones are kept."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticgang.checkpoint.plan import (
    MIN_SHARE_BYTES,
    attempt_in,
    directory_name,
    num_writers,
    obsolete,
    remains,
    save_plan,
    share_of_rows,
)
from elasticgang.layout import Member, ParallelLayout, plan
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.record import ACTIVE, LEARNER, Record, Seat

TENSORS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 9)), max_size=8)


# SAVEPLAN-2
@given(TENSORS, st.integers(1, 6))
def test_each_row_has_one_writer_and_the_bytes_are_divided_equally(tensors: list[tuple[int, int]], count: int) -> None:
    shares = [share_of_rows(tensors, number, count) for number in range(count)]
    for index, (rows, row_bytes) in enumerate(tensors):
        written = [row for share in shares for row in share[index]]
        assert written == list(range(rows if row_bytes else 0))
    total = sum(rows * row_bytes for rows, row_bytes in tensors)
    for share in shares:
        num_bytes = sum(len(rows) * row_bytes for rows, (_, row_bytes) in zip(share, tensors, strict=True))
        assert abs(num_bytes - total / count) <= max((row_bytes for _, row_bytes in tensors), default=0)


def record(hosts: str, layout: ParallelLayout | None = None, draining: tuple[str, ...] = ()) -> Record:
    """The members m0, m1, ... on the hosts of these letters."""
    layout = layout or ParallelLayout()
    members = [Member(f"m{number}", host) for number, host in enumerate(hosts)]
    planned = plan(members, layout)
    agents = tuple(sorted(set(hosts)))
    seats = tuple(Seat(member.id, member.host, member.host, 0, "", ACTIVE) for member in members)
    return Record("job", 3, "", layout, planned, seats, agents, Attempt(4, 2), draining_members=draining)


ALL = {f"m{number}" for number in range(8)}


# SAVEPLAN-1
def test_all_holders_share_the_writing_one_of_each_host_first() -> None:
    made = save_plan(record("aabb"), ALL, Attempt(5, 3))
    assert made is not None
    assert made.holders == {(0, 0, 0): ("m0", "m2", "m1", "m3")}
    assert made.place("m2") == ((0, 0, 0), 1)
    assert made.place("other") is None


def test_each_shard_is_written_by_its_holders_alone() -> None:
    its = record("aabb", ParallelLayout(sdp=2))
    made = save_plan(its, ALL, Attempt(5, 3))
    assert made is not None
    for model, members in made.holders.items():
        assert {its.model_coordinates(member) for member in members} == {model}
    assert sorted(member for members in made.holders.values() for member in members) == ["m0", "m1", "m2", "m3"]
    assert save_plan(its, {"m0"}, Attempt(5, 3)) is None  # the other shard has no holder


def test_a_draining_member_writes_only_if_all_holders_drain() -> None:
    made = save_plan(record("ab", draining=("m0",)), ALL, Attempt(5, 3))
    assert made is not None
    assert made.holders == {(0, 0, 0): ("m1",)}
    made = save_plan(record("ab", draining=("m0", "m1")), ALL, Attempt(5, 3))
    assert made is not None
    assert made.holders == {(0, 0, 0): ("m0", "m1")}


def test_a_member_that_heals_writes_nothing() -> None:
    its = record("ab")
    its = replace(its, seats=(its.seats[0], its.seats[1]._replace(status=LEARNER)), digest="")
    made = save_plan(its, {"m0"}, Attempt(5, 3))
    assert made is not None
    assert made.holders == {(0, 0, 0): ("m0",)}


def test_different_plans_have_different_directories() -> None:
    its = record("ab")
    plans = [
        save_plan(its, ALL, Attempt(5, 3)),
        save_plan(its, {"m0"}, Attempt(5, 3)),
        save_plan(replace(its, generation=4, digest=""), ALL, Attempt(5, 3)),
        save_plan(its, ALL, Attempt(5, 2)),
        save_plan(its, ALL, Attempt(6, 3)),
    ]
    assert len({made.directory for made in plans if made is not None}) == 5
    same = save_plan(record("ab"), ALL, Attempt(5, 3))
    assert same == plans[0]


def test_small_state_has_one_writer() -> None:
    assert num_writers(8, 0) == num_writers(8, 2 * MIN_SHARE_BYTES - 1) == 1
    assert num_writers(8, 3 * MIN_SHARE_BYTES) == 3
    assert num_writers(8, 100 * MIN_SHARE_BYTES) == 8


@pytest.mark.parametrize("name", ["step-1-1-0", "manifest.json", "step-000000000001-1-0123456789abcdeg", "..", ""])
def test_another_name_is_no_checkpoint(name: str) -> None:
    assert attempt_in(name) is None


def name(step: int, generation: int = 1, plan: int = 0) -> str:
    made = directory_name(Attempt(step, generation), f"{plan:016x}")
    assert attempt_in(made) == Attempt(step, generation)
    return made


# SAVEPLAN-3
def test_only_older_complete_checkpoints_and_older_remains_are_deleted() -> None:
    complete = [name(10), name(20), name(30), name(40)]
    assert obsolete(name(40), complete, [], 2) == [name(20), name(10)]
    assert obsolete(name(40), complete, [], 9) == []
    assert obsolete(name(40), complete, [name(35), name(40, 1, 7), name(50)], 9) == [name(35), name(40, 1, 7)]
    assert obsolete(name(20), complete, [name(25)], 1) == [name(10)]  # those of later steps are another line's
    assert obsolete(name(100), [name(9), name(100)], [], 1) == [name(9)]


# SAVEPLAN-3
def test_a_checkpoint_that_is_corrupt_is_none_of_those_that_are_kept() -> None:
    complete = [name(10), name(20), name(30), name(40), name(50)]
    assert obsolete(name(50), complete, [], 2, {name(40)}) == [name(20), name(10)]
    assert obsolete(name(50), complete, [], 2, {name(20), name(40)}) == [name(20), name(10)]
    assert obsolete(name(50), complete, [name(45)], 3, {name(20), name(30), name(40)}) == [name(45)]


# WRITER-4
def test_remains_are_of_attempts_before() -> None:
    """Those of a killed job may have a higher generation: a job that is started again begins with the first one."""
    earlier = [name(10), name(35, 7), name(40, 1)]
    assert remains(name(40, 2), [*earlier, name(40, 2), name(40, 2, 7), name(50)]) == earlier
