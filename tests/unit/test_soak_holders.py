"""What a soak knows of who holds the state, and whom it leaves alone (FAULT-1)."""

from __future__ import annotations

import random
from typing import Any

import pytest

from scripts.chaos_runs.soaking.holders import (
    choose_safe,
    holders_of,
    passive_members,
    seated_members,
    seats_by_part,
)
from scripts.demo_job.run_log import RunLog

FIRST, SECOND = (0, 0, 0), (0, 1, 0)


def committed(*lines: tuple[str, int, int, tuple[int, ...] | None, int]) -> RunLog:
    """Of each (member, step, generation, part, sdp), in order; without a layout if the part is None."""
    run_log = RunLog()
    for member, step, generation, part, sdp in lines:
        of_layout = {} if part is None else {"part": list(part), "sizes": [1, sdp, 1]}
        line = {"kind": "committed", "t": 0.0, "step": step, "generation": generation, **of_layout}
        run_log.add_history(member, line)
    return run_log


def test_nobody_holds_anything_before_the_first_commit() -> None:
    assert holders_of(RunLog(), {"a"}) == {}


def test_each_member_holds_all_of_a_plain_model() -> None:
    run_log = committed(("a", 3, 1, None, 1), ("b", 4, 1, None, 1), ("c", 2, 1, None, 1))
    assert holders_of(run_log, {"a", "b", "c"}) == {(): ["a", "b"]}


def test_who_votes_for_the_step_before_has_the_newest_one_in_the_same_generation_alone() -> None:
    run_log = committed(("a", 3, 1, FIRST, 2), ("b", 3, 1, SECOND, 2), ("c", 4, 2, FIRST, 2), ("d", 3, 2, SECOND, 2))
    assert holders_of(run_log, {"a", "b", "c", "d"}) == {FIRST: ["c"], SECOND: ["d"]}
    assert holders_of(run_log, {"a", "b", "c"}) == {FIRST: ["c"], SECOND: []}


def test_the_parts_are_those_of_the_newest_layout() -> None:
    run_log = committed(("a", 3, 1, FIRST, 2), ("b", 3, 1, SECOND, 2), ("a", 4, 2, FIRST, 1))
    assert holders_of(run_log, {"a", "b"}) == {FIRST: ["a"]}


def generation(*statuses: tuple[str, int, str]) -> dict[str, Any]:
    """The event, with the seats of each (agent, local rank, status)."""
    agents = {agent for agent, _, _ in statuses}
    seats = [
        {"agent": agent, "seats": [[local, 0, status] for name, local, status in statuses if name == agent]}
        for agent in agents
    ]
    return {"active": sum(status == "active" for _, _, status in statuses), "seats": seats}


LIVE = {"a": ("A", 0), "b": ("A", 1), "c": ("B", 0), "d": ("B", 1)}


def test_spares_and_learners_are_passive_and_so_is_who_has_no_seat() -> None:
    event = generation(("A", 0, "active"), ("A", 1, "spare"), ("B", 0, "learner"))
    assert passive_members(event, LIVE, ()) == {"b", "c", "d"}


def test_nobody_becomes_passive_while_state_moves_to_another_layout() -> None:
    event = generation(("A", 0, "learner"), ("A", 1, "learner"))
    assert passive_members(event, LIVE, {"d"}) == {"d"}


def test_each_seat_has_the_part_of_its_rank() -> None:
    event = {
        "layout": "sdp=2,min_replicas=2",
        "active": 3,
        "seats": [
            {"agent": "A", "seats": [[1, 1, "active"], [0, 0, "active"]]},
            {"agent": "B", "seats": [[1, 3, "active"], [0, 2, "learner"], [2, None, "spare"]]},
        ],
    }
    assert seats_by_part(event) == {FIRST: [("A", 0)], SECOND: [("A", 1), ("B", 1)]}
    moving = seats_by_part({**event, "active": 0})
    assert moving == {FIRST: [("A", 0), ("B", 0)], SECOND: [("A", 1), ("B", 1)]}
    stages = seats_by_part({**event, "layout": "pp=2", "active": 0})
    assert stages == {FIRST: [("A", 0), ("A", 1)], (1, 0, 0): [("B", 0), ("B", 1)]}


def test_a_successor_of_a_dead_member_has_no_seat_before_the_next_generation() -> None:
    live = {"a": ("A", 0), "b": ("A", 1), "successor": ("B", 0)}
    entered = {"a": 4, "b": 4, "dead": 4}
    assert seated_members({"generation": 4}, live, entered) == {("A", 0): "a", ("A", 1): "b"}
    assert seated_members({"generation": 5}, live, {**entered, "a": 5, "successor": 5}) == {
        ("A", 0): "a",
        ("B", 0): "successor",
    }


HOST_OF = {"a": 0, "b": 0, "c": 1, "d": 1}


@pytest.mark.parametrize("seed", range(20))
def test_one_holder_of_each_part_is_safe_on_one_host_if_that_has_all(seed: int) -> None:
    safe = choose_safe([["a", "c"], ["b", "d"]], HOST_OF, random.Random(seed))
    assert safe in ({"a", "b"}, {"c", "d"})


def test_any_host_may_be_the_one_that_is_left_alone() -> None:
    found = [choose_safe([["a", "c"], ["b", "d"]], HOST_OF, random.Random(seed)) == {"a", "b"} for seed in range(20)]
    assert set(found) == {True, False}


def test_holders_on_several_hosts_are_safe_if_none_has_all_parts() -> None:
    assert choose_safe([["a"], ["c"]], HOST_OF, random.Random(0)) == {"a", "c"}
    assert choose_safe([["a"], ["a", "c"]], HOST_OF, random.Random(0)) == {"a"}


@pytest.mark.parametrize("groups", [[], [["a"], []]])
def test_nobody_is_safe_while_a_part_is_not_known_to_be_held(groups: list[list[str]]) -> None:
    assert choose_safe(groups, HOST_OF, random.Random(0)) is None
