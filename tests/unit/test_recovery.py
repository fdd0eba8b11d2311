"""The committed state at a generation change: who is waited for, what is rolled forward or back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from elasticgang.layout import ParallelLayout
from elasticgang.protocol.commit import Action, Attempt, action
from elasticgang.protocol.next_record import next_record
from elasticgang.protocol.record import (
    ACTIVE,
    LEARNER,
    SPARE,
    CheckpointRef,
    Record,
    RecordRef,
    Report,
    Undecided,
    Unrecoverable,
)
from tests.unit.proposals import PAIRS, agreed, first, member, report, trained, undecided

# --- the state


@pytest.mark.parametrize(
    ("are_prepared", "known", "expected", "rolled_forward"),
    [
        ((True, True), None, Attempt(4, 2), True),
        ((True, False), None, Attempt(3, 1), False),
        ((True, True), Attempt(4, 2), Attempt(4, 2), False),
        ((True, False), Attempt(4, 2), Attempt(4, 2), False),
        ((False, False), None, Attempt(3, 1), False),
    ],
)
def test_a_step_in_doubt(
    are_prepared: Sequence[bool], known: Attempt | None, expected: Attempt, rolled_forward: bool
) -> None:
    record, tip = trained("a", "b", "c")
    members = [
        member(id, tip, Attempt(4, 2) if is_prepared else None, entered=2)
        for id, is_prepared in zip(("a0", "b0"), are_prepared, strict=True)
    ]
    after = agreed(record, *(report(mine.id[0], mine, seen=record, newest_commit=known) for mine in members))
    assert (after.committed, after.rolled_forward) == (expected, rolled_forward)
    for seat, mine in zip(after.seats, members, strict=True):
        assert (seat.status == ACTIVE) == (action(mine.tip, mine.pending, after.committed) is not Action.HEAL)


def test_the_decision_stands_for_those_who_have_not_acted_on_it() -> None:
    """COMMIT-3, over a chain of records: generation 3 decides, nobody acts, 4 and 5 decide the same."""
    record, tip = trained("a", "b")
    doubt = Attempt(4, 2)
    chain = [record]
    for _ in range(3):
        asked = [report(agent, member(f"{agent}0", tip, doubt, entered=2), seen=chain[-1]) for agent in "ab"]
        chain.append(agreed(chain[-1], *asked))
    assert [after.committed for after in chain[1:]] == [doubt] * 3
    assert [after.rolled_forward for after in chain[1:]] == [True, False, False]
    assert [after.generation for after in chain] == [2, 3, 4, 5]
    assert [after.parent for after in chain[1:]] == [before.digest for before in chain[:-1]]
    assert chain[-1].members(ACTIVE) == ("a0", "b0")


# COMMIT-2
def test_a_step_number_alone_does_not_name_a_state() -> None:
    """c0 is back with step 4 of an earlier generation, in doubt there; the others have committed another step 4."""
    record, tip = trained("a", "b")
    other = Attempt(4, 1)
    here = report("a", member("a0", Attempt(4, 2), entered=2, active=True), seen=record)
    for mine in (member("c0", other, entered=1), member("c0", tip, other, entered=1)):
        after = agreed(record, here, report("c", mine))
        assert (after.committed, after.members(ACTIVE), after.members(LEARNER)) == (Attempt(4, 2), ("a0",), ("c0",))


def test_a_dropped_attempt_stays_dropped() -> None:
    record, tip = trained("a", "b", "c")
    doubt = Attempt(4, 2)
    a, b = member("a0", tip, doubt, entered=2), member("b0", tip, entered=2)
    dropped = agreed(record, report("a", a, seen=record), report("b", b, seen=record))
    assert dropped.committed == tip
    again = agreed(dropped, report("a", a, seen=dropped))  # alone now, and it never acted
    assert (again.committed, again.rolled_forward) == (tip, False)


def test_joiners_and_returning_members_learn() -> None:
    record, tip = trained("a", "b")
    newer = Attempt(5, 2)
    back = member("b0", tip, entered=1)
    after = agreed(
        record, report("a", member("a0", newer, entered=2), member("a1"), seen=record), report("b", back, seen=record)
    )
    assert after.committed == newer
    assert (after.members(ACTIVE), set(after.members(LEARNER))) == (("a0",), {"a1", "b0"})


def test_state_of_other_model_coordinates_does_not_count() -> None:
    hosts = [report(host, member(f"{host}0"), member(f"{host}1"), layout=PAIRS) for host in "ab"]
    record = agreed(None, *hosts)
    tip = Attempt(2, 1)
    swapped = dict(zip("ab", "ba", strict=True))
    asked = [
        report(
            host,
            *(member(f"{host}{i}", tip, entered=1, holds=record.model_coordinates(f"{host}{1 - i}")) for i in (0, 1)),
            seen=record,
            layout=PAIRS,
        )
        for host in swapped
    ]
    after = agreed(record, *asked)
    for seat in after.seats:
        held = next(m.holds for r in asked for m in r.members if m.id == seat.member)
        assert (seat.status == ACTIVE) == (held == after.model_coordinates(seat.member))


def test_missing_state_is_waited_for() -> None:
    record, tip = trained("a", "b")
    newer = Attempt(4, 2)
    heard = report("a", member("a0", tip, entered=2), seen=record, newest_commit=newer)
    assert undecided(record, heard).reason == "nobody here holds step 4 of generation 2, but b0 may live"
    lowered = agreed(record, dataclasses.replace(heard, exited=("b0",)))
    assert (lowered.committed, lowered.rolled_back) == (tip, True)


def test_a_spare_may_hold_the_missing_state() -> None:
    """It was active in the generation before, and nothing was committed since."""
    start = agreed(None, *(report(host, member(f"{host}0"), member(f"{host}1"), layout=PAIRS) for host in "ab"))
    tip = Attempt(2, 1)
    three = [member(m, tip, entered=1, holds=start.model_coordinates(m)) for m in ("a0", "a1", "b0")]
    record = agreed(
        start,
        report("a", *three[:2], seen=start, layout=PAIRS),
        report("b", three[2], seen=start, exited=("b1",), layout=PAIRS),
    )
    assert record.members(SPARE) == ("b0",)
    lost = next(m for m in three[:2] if m.holds == three[2].holds)
    kept = next(m for m in three[:2] if m is not lost)
    asked = report("a", kept, member("a2"), seen=record, exited=(lost.id,), layout=PAIRS)
    assert undecided(record, asked).reason == "nobody here holds step 2 of generation 1, but b0 may live"
    back = report("b", three[2], seen=record, layout=PAIRS)
    assert agreed(record, asked, back).committed == tip
    assert isinstance(next_record(record, [dataclasses.replace(asked, exited=(lost.id, "b0"))]), Unrecoverable)


def test_lost_state_is_rolled_back_to_the_newest_checkpoint() -> None:
    record, _ = trained("a", "b")
    newer, checkpoint = Attempt(4, 2), CheckpointRef(Attempt(2, 1), "d2")
    torn = member("a0", entered=2)
    asked = report("a", torn, seen=record, newest_commit=newer, exited=("b0",), checkpoint=checkpoint)
    other = report("c", member("c0"), checkpoint=CheckpointRef(Attempt(1, 1), "d1"))
    after = agreed(record, asked, other)
    assert (after.committed, after.rolled_back, after.rolled_forward) == (checkpoint.attempt, True, False)
    assert after.checkpoint == "d2"
    assert not after.members(ACTIVE)


# RECOVERY-5
def test_a_job_begins_with_the_newest_checkpoint_that_an_agent_can_load() -> None:
    checkpoint, earlier = CheckpointRef(Attempt(30, 4), "d30"), CheckpointRef(Attempt(20, 4), "d20")
    asked = [
        report("a", member("a0"), checkpoint=earlier),
        report("b", member("b0"), checkpoint=checkpoint),
        report("c", member("c0")),
    ]
    record = agreed(None, *asked)
    assert (record.committed, record.rolled_back, record.rolled_forward) == (checkpoint.attempt, True, False)
    assert record.checkpoint == "d30"
    assert set(record.members(LEARNER)) == {"a0", "b0", "c0"}
    # Nobody has loaded it: the next record begins with it again, or with the one before when it is corrupt.
    again = [dataclasses.replace(each, newest_record=record.ref) for each in asked]
    after = agreed(record, *again)
    assert (after.committed, after.checkpoint) == checkpoint
    after = agreed(record, again[0], dataclasses.replace(again[1], checkpoint=earlier), again[2])
    assert (after.committed, after.checkpoint) == earlier
    assert isinstance(
        next_record(record, [dataclasses.replace(each, checkpoint=None) for each in again]), Unrecoverable
    )
    # One has loaded it, and its state is copied from there on.
    tip = dataclasses.replace(again[0], members=(member("a0", checkpoint.attempt, entered=1),))
    after = agreed(record, tip, *again[1:])
    assert (after.committed, after.checkpoint, after.members(ACTIVE)) == (checkpoint.attempt, "", ("a0",))


# NEXT-8
def test_a_record_names_the_newest_checkpoint_that_is_complete() -> None:
    record, tip = trained("a", "b")
    assert record.saved is None
    old, new = CheckpointRef(Attempt(1, 1), "d1"), CheckpointRef(Attempt(2, 1), "d2")
    mine, other = (report(agent, member(f"{agent}0", tip, entered=2), seen=record) for agent in "ab")
    after = agreed(record, dataclasses.replace(mine, checkpoint=old), dataclasses.replace(other, checkpoint=new))
    assert (after.saved, after.checkpoint) == (new, "")
    mine, other = (report(agent, member(f"{agent}0", Attempt(4, 3), entered=3), seen=after) for agent in "ab")
    assert agreed(after, mine, other).saved == new, "nobody can list the directory"
    assert agreed(after, dataclasses.replace(mine, checkpoint=old), other).saved == new
    later = CheckpointRef(Attempt(9, 3), "d9")
    assert agreed(after, dataclasses.replace(mine, checkpoint=later), other).saved == new, "of steps that are lost"
    newer = agreed(after, dataclasses.replace(mine, checkpoint=CheckpointRef(Attempt(4, 3), "d4")), other)
    assert newer.saved == CheckpointRef(Attempt(4, 3), "d4")
    assert Record.from_text(newer.text).saved == newer.saved
    assert newer.digest != dataclasses.replace(newer, saved=None, digest="").digest


# RECOVERY-8
def test_a_job_waits_for_whoever_may_load_the_checkpoint_that_the_record_names() -> None:
    """One half of the state is lost with those of hosts b and d. a0 and c0 hold the other, and a0 is here."""
    across = ParallelLayout(tp=2, within_host=())
    start = first(*"abcd", layout=across)
    halves = {agent: start.model_coordinates(f"{agent}0") for agent in "abcd"}
    lost = [agent for agent in "abcd" if halves[agent] != halves["a"]]
    [away] = [agent for agent in "bcd" if agent not in lost]
    saved, older = CheckpointRef(Attempt(3, 1), "d3"), CheckpointRef(Attempt(1, 1), "d1")

    def ask(seen: Record, agent: str, checkpoint: CheckpointRef | None, tip: Attempt) -> Report:
        mine = member(f"{agent}0", tip, entered=seen.generation, holds=halves[agent])
        return report(agent, mine, seen=seen, layout=across, checkpoint=checkpoint)

    record = agreed(start, *(ask(start, agent, saved, Attempt(3, 1)) for agent in "abcd"))
    assert record.saved == saved
    tip = Attempt(5, 2)
    others = [report(agent, member(f"{agent}1"), seen=record, layout=across, exited=(f"{agent}0",)) for agent in lost]
    alike = CheckpointRef(Attempt(3, 1), "aa")  # in a directory of its own
    after = agreed(record, ask(record, "a", alike, tip), *others)
    assert (after.committed, after.checkpoint) == alike
    for checkpoint in (None, older):
        here = [ask(record, "a", checkpoint, tip), *others]
        reason = f"nobody here can load the checkpoint of step 3, but {away}0 may live"
        assert undecided(record, *here).reason == reason
        after = agreed(record, *here, ask(record, away, saved, tip))
        assert (after.committed, after.checkpoint, after.saved) == (saved.attempt, "d3", saved)
        answer = next_record(record, here, lost=(away,))  # with its checkpoint
        if checkpoint is None:
            assert isinstance(answer, Unrecoverable)
            assert "no rank that is left can load the checkpoint of step 3: its directory must be one" in answer.reason
        else:
            assert isinstance(answer, Record)
            assert (answer.committed, answer.checkpoint, answer.saved) == (older.attempt, "d1", older)


def test_a_checkpoint_that_was_tried_is_not_waited_for() -> None:
    """It is corrupt. b0 has not asked yet, and is of no use: it was to load it too."""
    saved, older = CheckpointRef(Attempt(3, 1), "d3"), CheckpointRef(Attempt(1, 1), "d1")
    record = agreed(None, *(report(agent, member(f"{agent}0"), checkpoint=saved) for agent in "ab"))
    assert (record.checkpoint, record.saved) == ("d3", saved)
    again = report("a", member("a0"), seen=record, checkpoint=older)
    answer = next_record(record, [again, report("b", seen=record, exited=("b0",))])
    assert isinstance(answer, Record)
    assert (answer.committed, answer.saved) == (older.attempt, older)


# RECOVERY-6
def test_state_in_memory_is_no_holder_of_a_checkpoint_of_the_same_attempt() -> None:
    """Half of step 4 is lost with b0. What a0 holds of it may be of another checkpoint."""
    across = ParallelLayout(tp=2, within_host=())
    start = first("a", "b", layout=across)
    tip = Attempt(4, 1)
    mine = member("a0", tip, entered=1, holds=start.model_coordinates("a0"))
    ref = CheckpointRef(tip, "d4")
    asked = report("a", mine, member("a1"), seen=start, layout=across, checkpoint=ref)
    after = agreed(start, asked, lost="b")
    assert (after.committed, after.checkpoint) == ref
    assert set(after.members(LEARNER)) == {"a0", "a1"}


def test_checkpoints_of_one_attempt_and_different_content_are_told_apart() -> None:
    """Two hosts have directories of their own: the record names one of the two, and its digest covers which."""
    one, other = CheckpointRef(Attempt(30, 4), "1"), CheckpointRef(Attempt(30, 4), "2")
    record = agreed(None, report("a", member("a0"), checkpoint=one), report("b", member("b0"), checkpoint=other))
    assert (record.committed, record.checkpoint) == other
    alike = agreed(None, report("a", member("a0"), checkpoint=one), report("b", member("b0"), checkpoint=one))
    assert alike.committed == record.committed
    assert alike.digest != record.digest


# RECOVERY-4
def test_lost_state_is_rolled_back_to_the_newest_whole_copy() -> None:
    """Step 5 was told, and is lost with b0; a0 holds step 4, of the same generation, or the one before, or neither."""
    record, tip = trained("a", "b")

    def ask(held: Attempt | None, checkpoint: Attempt | None) -> Record | Undecided | Unrecoverable:
        mine = member("a0", held, entered=2)
        ref = None if checkpoint is None else CheckpointRef(checkpoint, "d")
        asked = report("a", mine, seen=record, newest_commit=Attempt(5, 2), exited=("b0",), checkpoint=ref)
        return next_record(record, [asked])

    for held in (Attempt(4, 2), tip):
        for checkpoint in (None, Attempt(1, 1), held):
            after = ask(held, checkpoint)
            assert isinstance(after, Record)
            assert (after.committed, after.rolled_back, after.checkpoint) == (held, True, "")
            assert after.members(ACTIVE) == ("a0",)
    newest = ask(tip, Attempt(4, 2))
    assert isinstance(newest, Record)
    assert (newest.committed, newest.checkpoint) == (Attempt(4, 2), "d")
    assert isinstance(ask(Attempt(2, 1), None), Unrecoverable)  # it may be of a line that was given up


def test_a_possible_holder_is_awaited_before_a_rollback() -> None:
    """Half of step 4 is lost with b0. Of step 3, c0 may hold that half."""
    across = ParallelLayout(tp=2, within_host=())
    start = first("a", "b", "c", layout=across)
    (spare,) = start.members(SPARE)
    here, dead = (m for m in ("a0", "b0", "c0") if m != spare)
    mine = member(here, Attempt(1, 1), entered=1, holds=start.model_coordinates(here))
    asked = report(here[0], mine, member(spare), seen=start, layout=across)
    assert undecided(start, asked).reason.endswith(f"but {dead} may live")
    assert isinstance(next_record(start, [asked], dead[0]), Unrecoverable)


# --- agents that are lost


def test_members_of_a_lost_agent_are_not_awaited() -> None:
    record, tip = trained("a", "b", "c")
    joiner = report("j", member("j0"))
    assert undecided(record, joiner).reason.endswith("but a0, b0, c0 may live")
    behind = report("a", member("a0", entered=2), seen=record)  # torn
    assert undecided(record, behind, joiner).reason.endswith("but b0, c0 may live")
    assert undecided(record, behind, joiner, lost="b").reason.endswith("but c0 may live")
    after = agreed(record, behind, report("k", member("k0", tip)), lost="bc")
    assert (after.committed, after.members(ACTIVE)) == (tip, ("k0",))
    assert after.dead_agents == ("b", "c")


def test_quorum_without_voters_does_not_restart_from_step_zero() -> None:
    """All that took part in the first generation are lost: nobody knows how many steps there were."""
    record = first("a", "b")
    joiner = report("j", member("j0"))
    answer = next_record(record, [joiner], "ab")
    assert answer == Unrecoverable("all that took part in generation 1 are lost, and there is no checkpoint")
    loaded = agreed(record, dataclasses.replace(joiner, checkpoint=CheckpointRef(Attempt(7, 1), "d7")), lost="ab")
    assert (loaded.committed, loaded.rolled_back, loaded.checkpoint) == (Attempt(7, 1), True, "d7")
    behind = report("b", seen=record, exited=("b0",))  # it would have heard of a step
    told = agreed(record, joiner, behind, lost="a")
    assert (told.committed, told.rolled_back) == (Attempt(0, 2), False)


def test_quorum_without_voters_names_no_step_as_the_last_one() -> None:
    """The record has the step with which its generation began."""
    record, tip = trained("a", "b")
    second = agreed(record, report("a", member("a0", tip, entered=2), seen=record), lost="b")
    assert second.committed.step > 0
    answer = next_record(second, [report("j", member("j0"))], "a")
    assert answer == Unrecoverable("all that took part in generation 3 are lost, and there is no checkpoint")


def test_a_return_to_a_lost_generation_is_recorded_as_a_rollback() -> None:
    record, tip = trained("a", "b")
    shrunk = agreed(record, report("a", member("a0", tip, entered=2), seen=record))
    after = agreed(shrunk, report("b", member("b0", tip, entered=2), seen=record), lost="a")
    assert (after.committed, after.rolled_back, after.checkpoint) == (tip, True, "")


# --- chains of records


def test_an_old_ancestor_is_known_up_to_a_limit() -> None:
    record, tip = trained("a", "b")
    chain = [record]
    for _ in range(30):
        chain.append(agreed(chain[-1], report("a", member("a0", tip, entered=2), seen=chain[-1])))
    assert [chain[-1].builds_on(seen.ref) for seen in reversed(chain)] == [number <= 16 for number in range(31)]
    assert all(len(record.ancestors) <= 16 for record in chain)


def test_a_record_builds_on_no_other_chain_whatever_its_numbers() -> None:
    """Two jobs began with the same names: their attempts are called alike and are not the same."""
    record, _ = trained("a", "b")
    other, _ = trained("a", "c")
    assert record.generation == other.generation
    assert not record.builds_on(other.ref)
    assert not record.builds_on(RecordRef(1, other.parent))  # of one before
    assert not record.builds_on(RecordRef(1, ""))
    assert record.builds_on(RecordRef(1, record.parent))


def test_a_rolled_back_attempt_does_not_return() -> None:
    """COMMIT-4: the agent still knows of step 4, and somebody who was long away even holds it."""
    record, tip = trained("a", "b")
    gone, checkpoint = Attempt(4, 2), CheckpointRef(Attempt(2, 1), "d2")
    asked = report(
        "a", member("a0", tip, entered=2), seen=record, newest_commit=gone, exited=("b0",), checkpoint=checkpoint
    )
    lowered = agreed(record, asked)
    going_on = report("a", member("a0", Attempt(3, 3), entered=3, active=True), seen=lowered, newest_commit=gone)
    back = report("z", member("z0", gone, entered=2), seen=record)
    after = agreed(lowered, going_on, back)
    assert (after.committed, after.rolled_back) == (Attempt(3, 3), False)
    assert (after.members(ACTIVE), after.members(LEARNER)) == (("a0",), ("z0",))


def test_the_state_before_the_first_step_is_designated_anew() -> None:
    """RECOVERY-3, under a new attempt: who held the former one and comes back heals."""
    record = first("a", "b", "c")
    (holder,) = record.members(ACTIVE)
    others = [m for m in ("a0", "b0", "c0") if m != holder]
    asked = [report(m[0], member(m, entered=1), seen=record) for m in others]
    assert undecided(record, *asked).reason == f"no witness of generation 1 is here, but {holder} may live"
    asked.append(report(holder[0], seen=record, exited=(holder,)))
    after = agreed(record, *asked)
    assert (after.committed, after.rolled_back) == (Attempt(0, 2), False)
    (designated,) = after.members(ACTIVE)
    assert action(Attempt(0, 1), None, after.committed) is Action.HEAL
    entered = [
        report(m[0], member(m, after.committed if m == designated else None, entered=2), seen=after) for m in others
    ]
    back = report(holder[0], member(holder, Attempt(0, 1), entered=1), seen=after)
    third = agreed(after, *entered, back)
    assert (third.committed, third.members(ACTIVE)) == (Attempt(0, 2), (designated,))


def test_a_step_that_cannot_be_completed_is_dropped_rather_than_lost() -> None:
    """Nobody is left with one half of step 3, in doubt, but somebody has that half of the step before."""
    across = ParallelLayout(tp=2, within_host=())
    start = first("a", "b", "c", "d", layout=across)
    before, doubt = Attempt(2, 1), Attempt(3, 2)
    half = {m: start.model_coordinates(m) for m in ("a0", "b0", "c0", "d0")}
    kept = "a0"
    lost, learner = (m for m in half if half[m] != half[kept])
    pair = [report(m[0], member(m, before, entered=1, holds=half[m]), seen=start, layout=across) for m in (kept, lost)]
    record = agreed(start, *pair)
    assert set(record.members(ACTIVE)) == {kept, lost}
    here = report("a", member(kept, before, doubt, entered=2, holds=half[kept]), seen=record, layout=across)
    back = report(learner[0], member(learner, before, entered=1, holds=half[learner]), seen=start, layout=across)
    assert undecided(record, here, back).reason == f"nobody here holds step 3 of generation 2, but {lost} may live"
    after = agreed(record, dataclasses.replace(here, exited=(lost,)), back)
    assert (after.committed, after.rolled_forward, after.rolled_back) == (before, False, False)
    assert set(after.members(ACTIVE)) == {kept, learner}
