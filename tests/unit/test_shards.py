"""The commit rule where a replica group has shards: never is one at a step that another part of the model is not at.

Every schedule of small jobs with two parts, as in `test_commit.py`, decided by `recovery.py`. All there is of up to 4
members and two generation changes; ELASTICGANG_EXHAUSTIVE=1 adds that of 5 members, and longer schedules (minutes).
"""

from __future__ import annotations

from collections import Counter

import pytest

from elasticgang.protocol.commit import Attempt, action, resolve
from elasticgang.protocol.recovery import CommittedState
from tests.exhaustive import exhaustive
from tests.unit.commit_model import AWAY, DIES, FIRST, PRESENT, start
from tests.unit.commit_search import Bounds, explore
from tests.unit.mutants import MUTANTS, patched
from tests.unit.shards_model import ShardedRule
from tests.unit.unit_mutants import UNIT_MUTANTS

TWO_CHANGES = Bounds(changes=2, steps=1)

SMALL = [
    (2, 0, Bounds(changes=3, steps=2)),
    (2, 1, TWO_CHANGES),
    (2, 2, TWO_CHANGES),
    (3, 0, TWO_CHANGES),
    (3, 1, TWO_CHANGES),
    (4, 0, TWO_CHANGES),
]
LARGE = [
    (2, 0, Bounds(changes=4, steps=2)),
    (3, 0, Bounds(changes=2, steps=2)),
    *((num_active, 5 - num_active, TWO_CHANGES) for num_active in range(2, 6)),
]


def settle_py() -> ShardedRule:
    return ShardedRule("recovery.py", resolve, action)


@pytest.mark.parametrize(("num_active", "num_learners", "bounds"), SMALL)
def test_no_schedule_breaks_a_promise(num_active: int, num_learners: int, bounds: Bounds) -> None:
    rule = settle_py()
    found = explore(rule, start(num_active, num_learners, num_parts=2), bounds)
    assert not found.violation, "\n".join([found.violation, *map(str, found.scenario)])
    assert found.num_proposals > 5 * found.num_worlds
    said = Counter(type(answer).__name__ for answer in rule.known.values())
    assert said["CommittedState"] > 50
    assert any(isinstance(answer, CommittedState) and answer.rolled_forward for answer in rule.known.values())
    if num_active + num_learners > 2:  # somebody can be left out
        assert min(said["Undecided"], said["Unrecoverable"]) > 50


@exhaustive
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("num_active", "num_learners", "bounds"), LARGE)
def test_no_longer_schedule_breaks_a_promise(num_active: int, num_learners: int, bounds: Bounds) -> None:
    test_no_schedule_breaks_a_promise(num_active, num_learners, bounds)


@pytest.mark.parametrize(
    ("name", "num_active", "num_learners", "promise"),
    [
        ("decision not in the record", 3, 0, "COMMIT-1"),
        ("never rolled forward", 3, 0, "COMMIT-1"),
        ("nobody is waited for", 3, 0, "COMMIT-1"),
        ("any part will do", 2, 0, "RECOVERY-2"),
        ("by step alone", 2, 0, "RECOVERY-2"),
        ("learners never decide", 2, 2, "COMMIT-1"),
    ],
)
def test_the_check_fails_other_rules(name: str, num_active: int, num_learners: int, promise: str) -> None:
    steps = 1 if num_learners else 2
    with patched(UNIT_MUTANTS[name].patches if name in UNIT_MUTANTS else MUTANTS[name]):
        found = explore(settle_py(), start(num_active, num_learners, num_parts=2), Bounds(changes=2, steps=steps))
    assert found.violation.startswith(promise), found


def test_what_is_in_doubt_rolls_forward_with_all_shards_or_with_none() -> None:
    """r0 has part 0, r1 part 1, both prepared. Without r1 its part of the step is gone: r0 may not apply it alone."""
    world = start(4, num_parts=2)
    prepared = tuple(mem._replace(pending=Attempt(1, 1)) for mem in world.mems)
    doubt = world._replace(mems=prepared, base={Attempt(1, 1): FIRST}, passed=frozenset({Attempt(1, 1)}))
    rule = settle_py()
    assert rule.decide(doubt, (PRESENT, PRESENT, DIES, DIES), None).committed == Attempt(1, 1)
    mixed = doubt._replace(mems=(prepared[0], prepared[1]._replace(pending=None), *prepared[2:]), passed=frozenset())
    assert rule.decide(mixed, (PRESENT, PRESENT, DIES, DIES), None).committed == FIRST
    assert rule.decide(mixed, (PRESENT, PRESENT, PRESENT, AWAY), None).committed == FIRST
