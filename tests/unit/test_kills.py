"""Whom the demo may kill, and when it does."""

from __future__ import annotations

import math
from itertools import islice, pairwise
from typing import cast

import pytest

from scripts.demo_job.kills import Killer, ScheduledKills, choose, draw_schedule
from scripts.demo_job.run_audit import Kill
from scripts.demo_job.run_log import RunLog


def journal_of(committed: dict[int, tuple[int, int]], *, ranks: int = 3, generations: int = 1) -> RunLog:
    """Live members "m0", "m1"...; `committed`: of each rank, the (step, generation) it committed last."""
    run_log = RunLog()
    for rank in range(ranks):
        run_log.add_event({"event": "spawned", "t": 0.0, "member": f"m{rank}", "local_rank": rank, "pid": 100 + rank})
    for number in range(generations):
        begin_generation(run_log, number + 1, ["active"] * ranks)
    for rank, (step, generation) in committed.items():
        run_log.add_history(f"m{rank}", {"kind": "committed", "t": 0.0, "step": step, "generation": generation})
    return run_log


def begin_generation(run_log: RunLog, number: int, statuses: list[str]) -> None:
    """`statuses`: by local rank."""
    seats = [(rank, None, status) for rank, status in enumerate(statuses)]
    counts = {status: statuses.count(status) for status in ("active", "learner", "spare")}
    run_log.add_event(
        {
            "event": "generation",
            "t": 0.0,
            "generation": number,
            "ranks": list(range(len(statuses))),
            "seats": [{"agent": "a", "host": "a", "seats": seats}],
            **counts,
        }
    )


def chosen(run_log: RunLog, rank: int, dead: tuple[int, ...] = ()) -> int | None:
    victim = choose(run_log, rank, lambda who: who.local_rank not in dead)
    return None if victim is None else victim.local_rank


def test_the_rank_that_was_drawn_is_killed() -> None:
    run_log = journal_of({0: (5, 1), 1: (5, 1), 2: (5, 1)})
    assert [chosen(run_log, rank) for rank in range(3)] == [0, 1, 2]


def test_the_next_rank_is_killed_where_the_drawn_one_is_down() -> None:
    run_log = journal_of({0: (5, 1), 1: (5, 1), 2: (5, 1)})
    assert chosen(run_log, 1, dead=(1,)) == 2
    assert chosen(run_log, 2, dead=(2,)) == 0


# KILL-2
def test_the_last_member_with_state_is_spared_and_those_without_may_die() -> None:
    run_log = journal_of({0: (5, 1)})
    assert [chosen(run_log, rank) for rank in range(3)] == [1, 1, 2]
    assert chosen(run_log, 0, dead=(1, 2)) is None


# KILL-2
def test_the_last_member_with_a_part_of_the_state_is_spared() -> None:
    run_log = journal_of({}, ranks=4)

    def commits(rank: int, part: list[int]) -> None:
        line = {"kind": "committed", "t": 0.0, "step": 5, "generation": 1, "part": part}
        run_log.add_history(f"m{rank}", line)

    def chosen_of_two(rank: int) -> int | None:
        victim = choose(run_log, rank, lambda _: True, num_parts=2)
        return None if victim is None else victim.local_rank

    commits(0, [0, 0, 0])
    commits(1, [0, 0, 0])
    assert chosen_of_two(0) is None  # who holds the other part is not known
    commits(2, [0, 1, 0])
    assert [chosen_of_two(rank) for rank in range(4)] == [0, 1, 3, 3]
    commits(3, [0, 1, 0])
    assert [chosen_of_two(rank) for rank in range(4)] == [0, 1, 2, 3]


# KILL-2
def test_the_parts_that_need_a_holder_are_those_of_the_newest_layout() -> None:
    run_log = journal_of({}, ranks=3)

    def commits(rank: int, step: int, part: list[int], sizes: list[int]) -> None:
        line = {"kind": "committed", "t": 0.0, "step": step, "generation": 1, "part": part, "sizes": sizes}
        run_log.add_history(f"m{rank}", line)

    def chosen_of(rank: int) -> int | None:
        victim = choose(run_log, rank, lambda _: True, num_parts=2)
        return None if victim is None else victim.local_rank

    for rank, sdp in enumerate((0, 1, 1)):
        commits(rank, 5, [0, sdp, 0], [1, 2, 1])
    assert [chosen_of(rank) for rank in range(3)] == [1, 1, 2]
    for rank in range(3):
        commits(rank, 6, [0, 0, 0], [1, 1, 1])
    assert [chosen_of(rank) for rank in range(3)] == [0, 1, 2], "each holds the whole model now"


def test_seats_of_another_agent_say_nothing_of_the_ranks_of_this_one() -> None:
    run_log = RunLog()
    run_log.add_event({"event": "started", "t": 0.0, "agent": "a"})
    run_log.add_event({"event": "spawned", "t": 0.0, "member": "m0", "local_rank": 0, "pid": 100})
    seats = [
        {"agent": "a", "host": "a", "seats": [(0, 0, "active")]},
        {"agent": "b", "host": "b", "seats": [(0, None, "spare")]},
    ]
    run_log.add_history("m0", {"kind": "committed", "t": 0.0, "step": 5, "generation": 1})
    told = {"generation": 2, "ranks": [0], "seats": seats, "active": 1, "learner": 0, "spare": 1}
    run_log.add_event({"event": "generation", "t": 0.0, **told})
    assert run_log.holders() == {"m0"}


def test_a_member_one_step_behind_in_the_same_generation_holds_what_it_needs() -> None:
    assert chosen(journal_of({0: (5, 1), 1: (4, 1)}, ranks=2), 0) == 0


@pytest.mark.parametrize("behind", [(3, 1), (4, 2)])
def test_a_member_further_behind_or_of_another_generation_does_not(behind: tuple[int, int]) -> None:
    assert chosen(journal_of({0: (5, 1), 1: behind}, ranks=2), 0) == 1


# KILL-2
@pytest.mark.parametrize("status", ["spare", "learner"])
def test_who_has_lost_its_active_seat_holds_nothing_until_it_commits(status: str) -> None:
    """The others may have committed a step of which this process has not read."""
    run_log = journal_of({0: (5, 1), 1: (5, 1)}, ranks=2)
    begin_generation(run_log, 2, ["active", status])
    assert chosen(run_log, 0) == 1
    for rank in (0, 1):
        run_log.add_history(f"m{rank}", {"kind": "committed", "t": 0.0, "step": 6, "generation": 2})
    assert chosen(run_log, 0) == 0


def test_before_the_first_generation_all_but_the_last_may_die() -> None:
    run_log = journal_of({}, ranks=2, generations=0)
    assert chosen(run_log, 0) == 0
    assert chosen(run_log, 0, dead=(1,)) is None


def test_nobody_dies_while_it_is_not_known_who_holds_the_first_state() -> None:
    assert chosen(journal_of({}), 0) is None


def test_a_seed_draws_the_same_schedule_again() -> None:
    first, again, other = (list(islice(draw_schedule(seed, 4, 5.0), 50)) for seed in (3, 3, 4))
    assert first == again != other
    waits = [later.after_s - earlier.after_s for earlier, later in pairwise(first)]
    assert all(3.0 <= wait <= 7.0 for wait in [first[0].after_s, *waits])
    assert {due.local_rank for due in first} == {0, 1, 2, 3}


def finished_at(end_s: float) -> RunLog:
    run_log = RunLog()
    run_log.add_event({"event": "started", "t": 100.0})
    run_log.add_history("m0", {"kind": "finished", "t": 100.0 + end_s, "digest": "d"})
    return run_log


def test_what_was_due_while_the_job_ran_was_asked_for() -> None:
    kills = ScheduledKills(0, 4, 5.0)
    kills.drawn = list(islice(draw_schedule(0, 4, 5.0), 4))
    third = kills.drawn[2].after_s
    assert kills.asked(finished_at(third + 1.5), 2) == kills.drawn[:3]
    assert kills.asked(finished_at(third + 0.5), 2) == kills.drawn[:2]  # in the last moments
    assert kills.asked(finished_at(third + 0.5), 3) == kills.drawn[:3]


def test_a_run_that_is_over_before_the_first_kill_was_asked_for_one() -> None:
    assert len(ScheduledKills(0, 4, 5.0).asked(finished_at(0.5), 0)) == 1


class OfAnyRank:
    """Kills whoever is due, unless nobody may be killed."""

    may_kill = True

    def kill(self, run_log: RunLog, local_rank: int) -> Kill | None:
        return Kill(f"m{local_rank}", local_rank, 100 + local_rank, 0.0, 0) if self.may_kill else None


def test_a_kill_that_is_held_up_to_the_end_of_the_job_was_not_asked_for() -> None:
    run_log = journal_of({0: (1, 1)})
    run_log.started_at = -1e6  # all kills are due
    kills, killer = ScheduledKills(0, 3, 5.0), OfAnyRank()
    assert kills.tick(cast(Killer, killer), run_log) == 0.0
    killer.may_kill = False
    assert 0.0 < kills.tick(cast(Killer, killer), run_log) < 1.0
    assert kills.asked(finished_at(1e6), 1) == kills.drawn[:1]
    killer.may_kill = True
    assert kills.tick(cast(Killer, killer), run_log) == 0.0
    assert kills.asked(finished_at(1e6), 1) == kills.drawn, "it has been sent, and has not happened"


def test_after_the_most_kills_the_ranks_are_left_alone() -> None:
    run_log = journal_of({0: (1, 1)})
    run_log.started_at = -1e6  # all kills are due
    kills, killer = ScheduledKills(0, 3, 5.0, max_kills=2), cast(Killer, OfAnyRank())
    assert [kills.tick(killer, run_log) for _ in range(4)] == [0.0, 0.0, math.inf, math.inf]
    assert len(kills.carried_out) == 2
    assert kills.asked(finished_at(1e6), 2) == kills.drawn == [due for due, _ in kills.carried_out]
