"""The heaviest choice, against a second implementation that tries all choices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from elasticgang.layout.max_weight_matching import Claim, max_weight_matching

ROWS = ("r0", "r1", "r2", "r3")
WEIGHTS = (1, 2, 3, 4, 20)


def fits(chosen: Sequence[Claim], row_room: Mapping[str, int], column_room: Sequence[int]) -> bool:
    rows, columns = Counter(claim.row for claim in chosen), Counter(claim.column for claim in chosen)
    return all(rows[row] <= row_room[row] for row in rows) and all(columns[at] <= column_room[at] for at in columns)


def most_weight(claims: Sequence[Claim], row_room: Mapping[str, int], column_room: Sequence[int]) -> int:
    """The weight of the best of all choices that fit."""
    fitting: list[tuple[Claim, ...]] = [()]
    for claim in claims:
        fitting += [wider for chosen in fitting if fits(wider := (*chosen, claim), row_room, column_room)]
    return max(sum(claim.weight for claim in chosen) for chosen in fitting)


# MATCHING-1
@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.builds(Claim, st.sampled_from(ROWS), st.integers(0, 3), st.sampled_from(WEIGHTS)), max_size=9),
    st.fixed_dictionaries({row: st.integers(0, 3) for row in ROWS}),
    st.lists(st.integers(0, 3), min_size=4, max_size=4),
)
def test_no_choice_that_fits_is_heavier(claims: list[Claim], row_room: dict[str, int], column_room: list[int]) -> None:
    taken = max_weight_matching(claims, row_room, column_room)
    chosen = [claim for claim, take in zip(claims, taken, strict=True) if take]
    assert fits(chosen, row_room, column_room)
    assert sum(claim.weight for claim in chosen) == most_weight(claims, row_room, column_room)


def test_a_column_sheds_through_rows_to_where_there_is_room() -> None:
    """Column 0 is one too many. Rather than drop 3, `a` goes to column 1, whose `b` goes to column 2: 1 is lost."""
    claims = [Claim("a", 0, 3), Claim("c", 0, 9), Claim("a", 1, 3), Claim("b", 1, 3), Claim("b", 2, 2)]
    taken = max_weight_matching(claims, {"a": 1, "b": 1, "c": 1}, [1, 1, 1])
    assert taken == [False, True, True, False, True]


def test_nothing_to_choose() -> None:
    assert max_weight_matching([], {}, []) == []
    assert max_weight_matching([Claim("a", 0, 1)], {"a": 0}, [1]) == [False]
    assert max_weight_matching([Claim("a", 0, 1)], {"a": 1}, [0]) == [False]
