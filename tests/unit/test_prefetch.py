"""Which slots a data loader fetches, and when."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from elasticgang.train.prefetch import MAX_ATTEMPTS, Key, Prefetch, divided


def keys_of(step: int, *numbers: int) -> list[Key]:
    return [(step, number) for number in numbers]


# PREFETCH-2
def test_what_is_needed_first_is_fetched_first() -> None:
    prefetch: Prefetch[str] = Prefetch()
    prefetch.want([*keys_of(3, 1, 2), *keys_of(4, 1)])
    assert [prefetch.assign(0) for _ in range(4)] == [(3, 1), (3, 2), (4, 1), None]
    assert not prefetch.has_next(0)


# PREFETCH-1
def test_what_was_fetched_and_what_is_under_way_is_not_fetched_again() -> None:
    prefetch: Prefetch[str] = Prefetch()
    prefetch.want(keys_of(0, 0, 1, 2))
    assert [prefetch.assign(0), prefetch.assign(0)] == keys_of(0, 0, 1)
    prefetch.arrived((0, 0), "first")
    prefetch.want(keys_of(0, 0, 1, 2, 3))
    assert prefetch.get((0, 0)) == "first"
    assert [prefetch.assign(0), prefetch.assign(0), prefetch.assign(0)] == [(0, 2), (0, 3), None]


def test_what_nobody_wants_any_more_is_dropped_also_when_it_comes_later() -> None:
    prefetch: Prefetch[str] = Prefetch()
    prefetch.want(keys_of(0, 0, 1))
    prefetch.assign(0), prefetch.assign(0)
    prefetch.arrived((0, 0), "first")
    prefetch.want(keys_of(0, 2))
    prefetch.arrived((0, 1), "second")
    prefetch.want(keys_of(0, 0, 1))
    assert prefetch.get((0, 0)) is prefetch.get((0, 1)) is None
    assert [prefetch.assign(0), prefetch.assign(0)] == keys_of(0, 0, 1)


# PREFETCH-3
def test_an_interrupted_fetch_is_tried_again_a_few_times() -> None:
    prefetch: Prefetch[str] = Prefetch()
    prefetch.want(keys_of(0, 0))
    for attempt in range(1, MAX_ATTEMPTS + 1):
        assert prefetch.assign(0) == (0, 0)
        assert prefetch.interrupted((0, 0)) == (attempt < MAX_ATTEMPTS)


def test_what_a_lost_worker_had_not_begun_counts_as_no_attempt() -> None:
    prefetch: Prefetch[str] = Prefetch()
    prefetch.want(keys_of(0, 0))
    for _ in range(2 * MAX_ATTEMPTS):
        assert prefetch.assign(0) == (0, 0)
        prefetch.returned([(0, 0)])
    assert prefetch.assign(0) == (0, 0)
    assert prefetch.interrupted((0, 0))


# PREFETCH-4
def test_a_slot_that_continues_another_one_waits_for_it() -> None:
    prefetch: Prefetch[str] = Prefetch()
    prefetch.want([*keys_of(0, 0, 1), *keys_of(1, 0)], {(1, 0): (0, 0)})
    assert [prefetch.assign(0) for _ in range(3)] == [(0, 0), (0, 1), None]
    prefetch.arrived((0, 1), "second")
    assert not prefetch.has_next(0)
    prefetch.arrived((0, 0), "first")
    assert prefetch.assign(0) == (1, 0)


# PREFETCH-5
def test_a_slot_of_one_worker_is_fetched_by_no_other() -> None:
    prefetch: Prefetch[str] = Prefetch()
    prefetch.want(keys_of(0, 0, 1, 2), workers={(0, 0): 1, (0, 1): 0})
    assert [prefetch.assign(0) for _ in range(3)] == [(0, 1), (0, 2), None]
    assert prefetch.has_next(1)
    assert prefetch.assign(1) == (0, 0)


# PREFETCH-5
@given(
    splits=st.lists(st.integers(0, 30), unique=True),
    before=st.dictionaries(st.integers(0, 30), st.integers(0, 3)),
    num_workers=st.integers(4, 6),
)
def test_splits_are_divided_evenly_and_few_change_their_worker(
    splits: list[int], before: dict[int, int], num_workers: int
) -> None:
    found = divided(splits, before, num_workers)
    assert found.keys() == set(splits)
    loads = [list(found.values()).count(worker) for worker in range(num_workers)]
    assert max(loads) <= -(-len(splits) // num_workers)
    assert divided(splits, found, num_workers) == found
    most = -(-len(splits) // num_workers)
    for worker in range(num_workers):
        had = [split for split in splits if before.get(split) == worker]
        assert sum(found[split] == worker for split in had) == min(len(had), most)


MOVES = st.lists(st.tuples(st.sampled_from(["want", "assign", "arrive", "interrupt", "drop"]), st.integers(0, 7)))


@settings(max_examples=200)
@given(moves=MOVES)
def test_everything_wanted_comes_and_nothing_is_fetched_twice_at_once(moves: list[tuple[str, int]]) -> None:
    prefetch: Prefetch[int] = Prefetch()
    under_way: list[Key] = []
    wanted: list[Key] = []

    def assign() -> None:
        key = prefetch.assign(0)
        if key is not None:
            assert key in wanted
            assert key not in under_way
            assert prefetch.get(key) is None
            under_way.append(key)

    for move, number in moves:
        if move == "want":
            wanted = keys_of(number // 2, *range(number))
            prefetch.want(wanted)
        elif move == "assign":
            assign()
        elif move == "drop":
            prefetch.drop((number // 2, number))
        elif under_way:
            key = under_way.pop(number % len(under_way))
            prefetch.arrived(key, number) if move == "arrive" else prefetch.returned([key])
    while prefetch.has_next(0):
        assign()
    for key in under_way:
        prefetch.arrived(key, 0)
    assert all(prefetch.get(key) is not None for key in wanted)
