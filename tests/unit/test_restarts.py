"""Whether a rank whose script has failed is restarted: the rules of `protocol/restarts.py`, against a second
account."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from elasticgang.protocol.restarts import WINDOW_S, Failure, Restarts


def failure(rank: int, step: int | None, at_s: float = 0.0, number: int = 0) -> Failure:
    return Failure(f"a/{rank}/{number}", rank, step, at_s)


def after_commits(max_restarts: int, *ranks: int) -> Restarts:
    restarts = Restarts(max_restarts)
    for rank in ranks or range(8):
        restarts.committed(rank)
    return restarts


@pytest.mark.parametrize("step", [None, 0, 5])
@pytest.mark.parametrize("has_committed", [False, True])
def test_restart_4_with_none_allowed_the_first_failure_ends_the_job(step: int | None, has_committed: bool) -> None:
    restarts = after_commits(0) if has_committed else Restarts(0)
    assert restarts.failed(failure(0, step)) == "; --max-restarts is 0"


# RESTART-1
@pytest.mark.parametrize("step", [None, 0, 5])
def test_restart_1_a_rank_that_has_committed_nothing_ends_the_job(step: int | None) -> None:
    restarts = after_commits(9, 1)
    assert restarts.failed(failure(0, step)) == " before its first committed step"


# RESTART-2
def test_restart_2_a_step_that_fails_again_on_the_same_rank_ends_the_job() -> None:
    restarts = after_commits(9)
    assert restarts.failed(failure(0, 5)) is None
    assert restarts.failed(failure(0, 5, number=1)) == " in step 5, in which rank 0 had failed too"


def test_restart_2_a_step_that_fails_on_another_rank_ends_the_job_however_late() -> None:
    restarts = after_commits(9)
    assert restarts.failed(failure(0, 5)) is None
    assert restarts.failed(failure(1, 6)) is None
    assert restarts.failed(failure(2, 5, 10 * WINDOW_S)) == " in step 5, in which rank 0 had failed too"


def test_restart_2_does_not_count_ranks_that_heal_because_their_state_is_wrong() -> None:
    restarts = after_commits(9)
    assert restarts.failed(Failure("a/0/0", 0, 5, 0.0, heals=True)) is None
    assert restarts.failed(Failure("a/1/0", 1, 5, 0.0, heals=True)) is None
    assert restarts.failed(failure(2, 5)) is None
    assert restarts.failed(failure(3, 5)) == " in step 5, in which rank 2 had failed too"


def test_restart_2_counts_ranks_of_other_hosts() -> None:
    restarts = after_commits(9)
    assert restarts.failed_elsewhere("b/0/0", "rank 0 of agent b", 5) is None
    assert restarts.failed(failure(0, 5)) == " in step 5, in which rank 0 of agent b had failed too"
    assert restarts.failed_elsewhere("b/0/0", "rank 0 of agent b", 6) is None
    assert restarts.failed_elsewhere("b/0/0", "rank 0 of agent b", 6) is None  # what is told twice
    why = restarts.failed_elsewhere("b/0/1", "rank 0 of agent b", 6)
    assert why == "rank 0 of agent b failed in step 6, in which rank 0 of agent b had failed too"


# RESTART-3
def test_restart_3_a_restarted_rank_that_cannot_begin_a_step_is_given_up() -> None:
    restarts = after_commits(9)
    assert not restarts.gives_up(failure(0, None))
    assert restarts.failed(failure(0, None)) is None
    assert not restarts.gives_up(failure(1, None))
    assert not restarts.gives_up(failure(0, 5))
    assert restarts.gives_up(failure(0, None))


def test_restart_3_begins_anew_with_a_commit() -> None:
    restarts = after_commits(9)
    assert restarts.failed(failure(0, None)) is None
    restarts.committed(0)
    assert not restarts.gives_up(failure(0, None))


@pytest.mark.parametrize("restarts", [Restarts(9), after_commits(0)], ids=["no commit", "no restarts"])
def test_restart_3_is_of_ranks_that_are_restarted(restarts: Restarts) -> None:
    assert restarts.failed(failure(0, None)) is not None
    assert not restarts.gives_up(failure(0, None))


# RESTART-4
@pytest.mark.parametrize("max_restarts", [1, 2, 3, 7])
def test_restart_4_each_rank_has_restarts_of_its_own(max_restarts: int) -> None:
    restarts = after_commits(max_restarts)
    steps = itertools.count()
    for rank, _ in itertools.product(range(4), range(max_restarts)):
        assert restarts.failed(failure(rank, next(steps))) is None
    for rank in range(4):
        why = restarts.failed(failure(rank, next(steps)))
        assert why == f"; --max-restarts is {max_restarts} for each rank in an hour"


def test_restart_4_failures_of_more_than_an_hour_ago_do_not_count() -> None:
    restarts = after_commits(2)
    assert restarts.failed(failure(0, 0, 0.0)) is None
    assert restarts.failed(failure(0, 1, WINDOW_S - 1)) is None
    assert restarts.num_recent(0) == 2
    assert restarts.failed(failure(0, 2, WINDOW_S)) is None  # the window is open at its far end
    assert restarts.failed(failure(0, 3, WINDOW_S + 1)) is not None


Happening = tuple[str, int, int, float]  # what, rank, step (-1: none was begun), seconds since the one before

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["fails", "commits", "elsewhere"]),
        st.integers(0, 2),
        st.integers(-1, 6),
        st.sampled_from([0.0, 1.0, WINDOW_S / 3, 2 * WINDOW_S]),
    ),
    max_size=14,
)


def gives_up(past: list[Happening], max_restarts: int) -> bool:
    """Whether the rank of the last of `past`, a failure here, is given up: read from the whole past."""
    _, rank, step, _ = past[-1]
    mine = [(what, number) for number, (what, of, _, _) in enumerate(past[:-1]) if of == rank]
    commits = [number for what, number in mine if what == "commits"]
    early = [number for what, number in mine if what == "fails" and past[number][2] < 0]
    return bool(max_restarts and step < 0 and commits and early and early[-1] > commits[-1])


def ends_job(past: list[Happening], max_restarts: int) -> bool:
    """Whether the last of `past`, a failure here of a rank that is not given up, ends the job."""
    times = list(itertools.accumulate(seconds for *_, seconds in past))
    _, rank, step, _ = past[-1]
    earlier = list(zip(past[:-1], times, strict=False))
    if max_restarts == 0 or not any((what, of) == ("commits", rank) for (what, of, _, _), _ in earlier):
        return True
    if step >= 0 and any(what != "commits" and at == step for (what, _, at, _), _ in earlier):
        return True
    recent = [
        number
        for number, ((what, of, _, _), at_s) in enumerate(earlier)
        if (what, of) == ("fails", rank)
        and at_s > times[-1] - WINDOW_S
        and not gives_up(past[: number + 1], max_restarts)
    ]
    return len(recent) >= max_restarts


@given(st.integers(0, 4), EVENTS)
@example(2, [("commits", 1, 0, 0.0), ("fails", 1, -1, 0.0), ("fails", 1, -1, 0.0), ("fails", 1, 3, 0.0)])
def test_any_story_is_judged_as_by_a_reading_of_its_whole_past(max_restarts: int, story: list[Happening]) -> None:
    restarts, now_s = Restarts(max_restarts), 0.0
    for number, (what, rank, step, seconds) in enumerate(story):
        now_s += seconds
        past = story[: number + 1]
        if what == "commits":
            restarts.committed(rank)
        elif what == "elsewhere":
            if step >= 0:
                restarts.failed_elsewhere(f"b/{rank}/{number}", f"rank {rank} of agent b", step)
        else:
            failed = failure(rank, None if step < 0 else step, now_s, number)
            assert restarts.gives_up(failed) == gives_up(past, max_restarts)
            if not gives_up(past, max_restarts):
                why = restarts.failed(failed)
                assert (why is not None) == ends_job(past, max_restarts), why
