"""The commit rule: its cases one by one, every schedule of small jobs, and that the check of those can fail.

All there is of up to 4 members and two generation changes; ELASTICGANG_EXHAUSTIVE=1 adds that of 5 members, and longer
schedules (minutes).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

import pytest

from elasticgang.protocol.commit import Action, Attempt, Fate, Standing, action, resolve
from tests.exhaustive import exhaustive
from tests.unit.commit_model import FIRST, Op, Rule, parse, replay, start
from tests.unit.commit_search import Bounds, explore

GOLDEN = Path(__file__).parent / "golden"

# The generation of the record is 5, its committed attempt K; NEXT is what generation 5 may have left in doubt.
K, NEXT = Attempt(3, 4), Attempt(4, 5)
PREPARED = Standing(K, NEXT, True)
UNPREPARED = Standing(K, None, True)
COMMITTED = Standing(NEXT, None, True)
TORN = Standing(None, None, True)
JOINER = Standing(None, None, False)
LEARNER_PREPARED = Standing(K, NEXT, False)
LEARNER_UNPREPARED = Standing(K, None, False)


def test_attempts_are_ordered_by_step_then_generation() -> None:
    assert max(Attempt(2, 9), Attempt(3, 1), Attempt(3, 2)) == Attempt(3, 2)


@pytest.mark.parametrize(
    ("present", "known", "expected"),
    [
        pytest.param([], [], Fate(K, False), id="nobody"),
        pytest.param([UNPREPARED, UNPREPARED], [], Fate(K, False), id="between steps"),
        pytest.param([PREPARED, PREPARED], [], Fate(NEXT, True), id="all in doubt: roll forward"),
        pytest.param([PREPARED, UNPREPARED], [], Fate(K, False), id="one was not prepared: drop"),
        pytest.param([PREPARED, COMMITTED], [], Fate(NEXT, False), id="one has committed"),
        pytest.param([PREPARED, PREPARED], [NEXT], Fate(NEXT, False), id="a dead one has committed"),
        pytest.param([PREPARED, UNPREPARED], [NEXT], Fate(NEXT, False), id="heard, though it cannot be"),
        pytest.param([PREPARED, JOINER], [], Fate(NEXT, True), id="joiners have no say"),
        pytest.param([JOINER, JOINER], [], Fate(K, False), id="joiners only"),
        pytest.param([PREPARED, LEARNER_UNPREPARED], [], Fate(NEXT, True), id="learners have no say"),
        pytest.param([UNPREPARED, LEARNER_PREPARED], [], Fate(K, False), id="a learner alone is prepared"),
        pytest.param([LEARNER_PREPARED, LEARNER_UNPREPARED], [], Fate(NEXT, True), id="only learners are left"),
        pytest.param([PREPARED, TORN], [], Fate(NEXT, True), id="a torn member cannot tell"),
        pytest.param([TORN, TORN], [], Fate(K, False), id="all torn"),
        pytest.param([Standing(NEXT, Attempt(5, 5), True)] * 2, [], Fate(Attempt(5, 5), True), id="a later step"),
        pytest.param([Standing(NEXT, Attempt(5, 5), True), PREPARED], [], Fate(NEXT, False), id="one step apart"),
        pytest.param([Standing(K, Attempt(4, 4), True)] * 2, [], Fate(K, False), id="pending of a former generation"),
        pytest.param([Standing(K, Attempt(5, 5), True)] * 2, [], Fate(K, False), id="pending one step too far"),
        pytest.param([Standing(Attempt(2, 2), K, True), PREPARED], [], Fate(K, False), id="one has not acted yet"),
        pytest.param([Standing(Attempt(9, 3), None, False), UNPREPARED], [], Fate(K, False), id="a tip given up"),
        pytest.param([PREPARED], [Attempt(9, 3)], Fate(NEXT, True), id="a known attempt given up"),
    ],
)
def test_resolve(present: list[Standing], known: list[Attempt], expected: Fate) -> None:
    assert resolve(K, 5, present, known) == expected
    assert resolve(K, 5, present[::-1], known) == expected


@pytest.mark.parametrize(
    ("tip", "pending", "expected"),
    [
        (NEXT, None, Action.KEEP),
        (NEXT, Attempt(5, 5), Action.KEEP),
        (K, NEXT, Action.APPLY),
        (K, None, Action.HEAL),
        (K, Attempt(4, 4), Action.HEAL),
        (None, None, Action.HEAL),
        (None, NEXT, Action.HEAL),  # prepared while its state was not whole
        (Attempt(2, 2), NEXT, Action.HEAL),
        (Attempt(4, 4), None, Action.HEAL),  # the same step, another gradient
        (Attempt(5, 5), None, Action.HEAL),  # above a lowered truth
    ],
)
def test_action(tip: Attempt | None, pending: Attempt | None, expected: Action) -> None:
    assert action(tip, pending, NEXT) is expected


# --- every schedule of small jobs

COMMIT_PY = Rule("commit.py", resolve, action)

SMALL = [
    (1, 0, Bounds(changes=4, steps=3)),
    (1, 1, Bounds(changes=2, steps=2)),
    (2, 0, Bounds(changes=3, steps=2)),
    (1, 2, Bounds(changes=2, steps=1)),
    (3, 0, Bounds(changes=2, steps=2)),
    (2, 2, Bounds(changes=2, steps=1)),
    (3, 1, Bounds(changes=2, steps=1)),
    (4, 0, Bounds(changes=2, steps=1)),
]
LARGE = [
    *((num_active, 5 - num_active, Bounds(changes=2, steps=1)) for num_active in range(1, 6)),
    (1, 3, Bounds(changes=2, steps=1)),
    (1, 2, Bounds(changes=2, steps=2)),
    (1, 1, Bounds(changes=3, steps=2)),
    (1, 2, Bounds(changes=3, steps=1)),
    (2, 1, Bounds(changes=3, steps=1)),
    (2, 1, Bounds(changes=2, steps=2)),
    (3, 0, Bounds(changes=3, steps=1)),
    (4, 0, Bounds(changes=2, steps=2)),
    (3, 1, Bounds(changes=2, steps=2)),
]


@pytest.mark.parametrize(("num_active", "num_learners", "bounds"), SMALL)
def test_no_schedule_breaks_a_promise(num_active: int, num_learners: int, bounds: Bounds) -> None:
    found = explore(COMMIT_PY, start(num_active, num_learners), bounds)
    assert not found.violation, "\n".join([found.violation, *map(str, found.scenario)])
    assert found.num_proposals > found.num_worlds > 50 * (num_active + num_learners)


@exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("num_active", "num_learners", "bounds"), LARGE)
def test_no_longer_schedule_breaks_a_promise(num_active: int, num_learners: int, bounds: Bounds) -> None:
    test_no_schedule_breaks_a_promise(num_active, num_learners, bounds)


# --- rules that do break them: two simpler ones, and ours without one of its clauses


def _voters(present: Collection[Standing]) -> list[Standing]:
    return [standing for standing in present if standing.active and standing.tip is not None]


def _resolve_by_step(recorded: Attempt, _: int, present: Collection[Standing], known: Iterable[Attempt]) -> Fate:
    tips = [standing.tip for standing in present if standing.tip is not None]
    highest = max((recorded, *tips, *known))
    pending = [standing.pending for standing in _voters(present)]
    if pending and pending[0] and all(other and other.step == highest.step + 1 for other in pending):
        return Fate(pending[0], rolled_forward=True)
    return Fate(highest, rolled_forward=False)


def _action_by_step(tip: Attempt | None, pending: Attempt | None, committed: Attempt) -> Action:
    if tip is not None and tip.step == committed.step:
        return Action.KEEP
    if pending is not None and pending.step == committed.step:
        return Action.APPLY
    return Action.HEAL


def _resolve_without_decision(
    _: Attempt, generation: int, present: Collection[Standing], known: Iterable[Attempt]
) -> Fate:
    return _resolve_with_all_heard(FIRST, generation, present, known)


def _resolve_with_torn_voters(
    recorded: Attempt, generation: int, present: Collection[Standing], known: Iterable[Attempt]
) -> Fate:
    fate = resolve(recorded, generation, present, known)
    if fate.rolled_forward and any(standing.active and standing.pending != fate.committed for standing in present):
        return Fate(max((recorded, *(standing.tip for standing in _voters(present) if standing.tip))), False)
    return fate


def _resolve_without_learners(
    recorded: Attempt, generation: int, present: Collection[Standing], known: Iterable[Attempt]
) -> Fate:
    if any(standing.active for standing in present):
        return resolve(recorded, generation, present, known)
    return resolve(recorded, generation, [Standing(standing.tip, None, False) for standing in present], known)


def _resolve_with_all_heard(
    recorded: Attempt, generation: int, present: Collection[Standing], known: Iterable[Attempt]
) -> Fate:
    heard = [*known, *(standing.tip for standing in present if standing.tip is not None)]
    return resolve(max((recorded, *heard)), generation, present, known)


def _action_on_any_state(tip: Attempt | None, pending: Attempt | None, committed: Attempt) -> Action:
    return Action.APPLY if pending == committed and tip != committed else action(tip, pending, committed)


BY_STEP = Rule("by step alone", _resolve_by_step, _action_by_step)
UNRECORDED = Rule("decision not in the record", _resolve_without_decision, action)
RULES = {rule.name: rule for rule in (COMMIT_PY, BY_STEP, UNRECORDED)}


@pytest.mark.parametrize(
    ("rule", "num_active", "num_learners", "promise"),
    [
        (BY_STEP, 2, 0, "COMMIT-4"),
        (BY_STEP, 3, 0, "RULE-4"),
        (UNRECORDED, 2, 0, "COMMIT-1"),
        (UNRECORDED, 3, 0, "COMMIT-1"),
        (Rule("torn members have a say", _resolve_with_torn_voters, action), 2, 0, "COMMIT-1"),
        (Rule("learners never decide", _resolve_without_learners, action), 1, 1, "COMMIT-1"),
        (Rule("all that is heard counts", _resolve_with_all_heard, action), 1, 0, "COMMIT-4"),
        (Rule("applied to any state", resolve, _action_on_any_state), 1, 1, "RULE-4"),
    ],
    ids=lambda value: value.name if isinstance(value, Rule) else None,
)
def test_the_check_fails_other_rules(rule: Rule, num_active: int, num_learners: int, promise: str) -> None:
    found = explore(rule, start(num_active, num_learners), Bounds(changes=2, steps=2))
    assert found.violation.startswith(promise), found


# SUMS-1
@pytest.mark.parametrize(("num_active", "num_missing"), [(2, 1), (3, 1), (4, 2)])
def test_the_check_fails_outcomes_of_a_part_of_the_votes(num_active: int, num_missing: int) -> None:
    """Such as the sum of one host of two, or of rows that an older generation has left."""
    world = start(num_active)._replace(num_missing=num_missing)
    found = explore(COMMIT_PY, world, Bounds(changes=2, steps=1))
    assert found.violation.startswith("COMMIT-1"), found


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("commit_*.txt")), ids=lambda path: path.stem)
def test_golden(path: Path) -> None:
    scenario, *outcomes = path.read_text().split("---- ")
    lines = [line for line in scenario.splitlines() if not line.startswith("#")]
    for outcome in outcomes:
        name, *expected = outcome.splitlines()
        assert replay(lines, RULES[name]) == expected
    assert len(outcomes) > 1


@pytest.mark.parametrize(
    "op",
    [
        Op("prepares", 2),
        Op("heals", 1, 0),
        Op("reduces", 1, pending=Attempt(3, 2)),
        Op("propose", fates=("away", "present", "dies", "present"), heard=Attempt(12, 7)),
        Op("propose", fates=("present",)),
    ],
)
def test_scenarios_are_spelled_and_read_alike(op: Op) -> None:
    assert parse(str(op)) == op
