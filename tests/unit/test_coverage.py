"""Whether the stages of a pipeline have all that those of another one had."""

from __future__ import annotations

from collections.abc import Sequence

from elasticgang.layout import ParallelLayout
from elasticgang.protocol import coverage
from elasticgang.protocol.coverage import Coverage

NAMES = ("a", "b", "c")
LAYOUT = ParallelLayout(pp=2)

Rank = tuple[int, str | None]  # its stage, and what this has; None: it does not know


def knowledge(has: str | None) -> Coverage | None:
    return None if has is None else Coverage(NAMES, frozenset(has))


def judged(ranks: Sequence[Rank]) -> list[str | None]:
    """What each rank finds."""
    told = [coverage.first_round(knowledge(has), stage, LAYOUT.pp) for stage, has in ranks]
    num = coverage.num_names([sum(column) for column in zip(*told, strict=True)])
    told = [coverage.second_round(knowledge(has), num) for _, has in ranks]
    sums = [sum(column) for column in zip(*told, strict=True)]
    return [coverage.left_out(knowledge(has), LAYOUT, sums) for _, has in ranks]


def test_stages_that_have_all_names_are_accepted() -> None:
    assert judged([(0, "ab"), (1, "c")]) == [None, None]
    assert judged([(0, "ab"), (0, "ab"), (1, "bc"), (1, "bc")]) == [None] * 4


# COVERAGE-1
def test_a_name_that_no_stage_has_is_found_by_every_rank() -> None:
    rest = "which the state has that was loaded"
    assert judged([(0, "a"), (1, "c")]) == [f"no stage of the layout (pp=2) has b, {rest}"] * 2
    assert judged([(0, "a"), (1, "")]) == [f"no stage of the layout (pp=2) has b and 1 more, {rest}"] * 2
    assert judged([(0, "a"), (0, None), (1, "c")])[1] == f"no stage of the layout (pp=2) has 1 of 3 names, {rest}"


# COVERAGE-2
def test_nothing_is_judged_unless_a_rank_of_each_stage_knows() -> None:
    assert judged([(0, "ab"), (1, None)]) == [None, None]
    assert judged([(0, None), (1, None)]) == [None, None]
    assert judged([(0, "ab"), (1, None), (1, "c"), (1, None)]) == [None] * 4
