"""The demo's accounting: what it must catch, on journals that are made by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import pytest

from scripts.demo_job.row_digest import sum_of
from scripts.demo_job.run_audit import (
    Audit,
    CommittedRun,
    Difference,
    Kill,
    Outcome,
    audit,
    faults,
    largest_difference,
    percentile,
    recoveries,
)
from scripts.demo_job.run_audit import rejoins as find_rejoins
from scripts.demo_job.run_log import RunLog, StepAttempt

RANKS = 2
EXPECTED = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]
GOOD = Outcome(
    failure=None,
    steps_asked=3,
    steps=3,
    audit=Audit(0, 0),
    torn=(),
    digests={(): ("d", "d")},
    difference=Difference(1e-6, 2),
    tolerance=1e-5,
    kills_asked=1,
    kills=1,
)


SHARDED = replace(GOOD, digests={(0, 0, 0): ("d", "d"), (0, 1, 0): ("e",)})


@dataclass
class Writer:
    """Writes what ranks and agent would, with a clock that goes on by a second with each line."""

    run_log: RunLog = field(default_factory=RunLog)
    t: float = 0.0

    def event(self, event: str, **fields: object) -> float:
        self.t += 1.0
        self.run_log.add_event({"event": event, "t": self.t, **fields})
        return self.t

    def line(self, member: str, kind: str, **fields: object) -> float:
        self.t += 1.0
        self.run_log.add_history(member, {"kind": kind, "t": self.t, **fields})
        return self.t

    def spawn(self, member: str, local_rank: int) -> None:
        self.event("spawned", member=member, local_rank=local_rank, pid=local_rank + 100)

    def exit(self, member: str) -> None:
        self.event("exit_began", member=member, monotonic=self.t)
        self.event("exited", member=member, monotonic=self.t, status=-9)

    def generation(self, number: int, ranks: Iterable[int], members: Iterable[str] = ()) -> None:
        seats = [{"agent": "a", "host": "a", "seats": [(rank, rank, "active") for rank in ranks]}]
        counts = {"active": len(list(ranks)), "learner": 0, "spare": 0}
        self.event("generation", generation=number, ranks=list(ranks), seats=seats, **counts)
        for member in members:
            phases = {
                "began": self.t + 0.1,
                "aborted": self.t + 0.2,
                "agreed": self.t + 0.4,
                "configured": self.t + 0.7,
            }
            self.event("entered", member=member, generation=number, **phases)

    def prepare(self, step: int, generation: int, shares: dict[str, list[int]], active: int = RANKS) -> None:
        for member, samples in shares.items():
            self.line(
                member,
                "prepared",
                step=step,
                generation=generation,
                samples=samples,
                active=active,
                tokens=2 * len(samples),
                loss_sum=6.0 * len(samples),
            )

    def commit(self, step: int, generation: int, members: Iterable[str]) -> None:
        for member in members:
            self.line(member, "committed", step=step, generation=generation)

    def step(self, step: int, generation: int, shares: dict[str, list[int]], active: int = RANKS) -> None:
        self.prepare(step, generation, shares, active)
        self.commit(step, generation, shares)


def undisturbed() -> Writer:
    writer = Writer()
    for step, samples in enumerate(EXPECTED):
        writer.step(step, 1, {"a": samples[:2], "b": samples[2:]})
    return writer


# -- samples


def test_each_part_of_a_layout_sees_every_sample_once() -> None:
    """Two stages, whose two ranks of `sdp` divide the samples."""

    def run(of_last: list[int]) -> CommittedRun:
        writer = Writer()
        for pp, sdp, samples in ((0, 0, [0, 1]), (0, 1, [2, 3]), (1, 0, [0, 1]), (1, 1, of_last)):
            share = {"samples": samples, "active": 4, "tokens": 0, "loss_sum": 0.0, "part": [pp, sdp, 0]}
            writer.line(f"{pp}{sdp}", "prepared", step=0, generation=1, **share)
        writer.commit(0, 1, ["00"])
        return CommittedRun(writer.run_log)

    parts = [(0, 0), (1, 0)]
    assert audit(run([2, 3]), EXPECTED[:1], parts) == Audit(0, 0)
    assert audit(run([2]), EXPECTED[:1], parts) == Audit(1, 0)
    assert audit(run([2, 3, 3]), EXPECTED[:1], parts) == Audit(0, 1)
    assert audit(run([2, 3]), EXPECTED[:1], [*parts, (2, 0)]) == Audit(4, 0)


def test_the_parts_that_see_every_sample_are_those_of_the_layout_of_the_step() -> None:
    """Two ranks that divide the tensors, and then each with the whole model."""

    def run(of_last: list[int]) -> CommittedRun:
        writer = Writer()
        layouts = [
            ((1, 1, 2), [([0, 0, 0], EXPECTED[0]), ([0, 0, 1], EXPECTED[0])]),
            ((1, 1, 1), [([0, 0, 0], EXPECTED[1][:2]), ([0, 0, 0], of_last)]),
        ]
        for step, (sizes, shares) in enumerate(layouts):
            for rank, (part, samples) in enumerate(shares):
                told = {"samples": samples, "active": 2, "tokens": 0, "loss_sum": 0.0, "part": part, "sizes": sizes}
                writer.line(str(rank), "prepared", step=step, generation=step + 1, **told)
            writer.commit(step, step + 1, ["0"])
        return CommittedRun(writer.run_log)

    assert run([6, 7]).layouts == [(1, 1, 2), (1, 1, 1)]
    assert audit(run([6, 7]), EXPECTED[:2], [(0, 0), (0, 1)]) == Audit(0, 0)
    assert audit(run([6]), EXPECTED[:2], [(0, 0), (0, 1)]) == Audit(1, 0)
    assert audit(run([5, 6, 7]), EXPECTED[:2], [(0, 0), (0, 1)]) == Audit(0, 1)


def test_an_undisturbed_run_is_whole() -> None:
    state = CommittedRun(undisturbed().run_log)
    assert audit(state, EXPECTED) == Audit(lost=0, duplicate=0)
    assert state.curve == {0: 3.0, 1: 3.0, 2: 3.0}
    assert state.num_tokens == 24
    assert (state.dropped, state.torn) == ([], [])


def test_a_step_that_was_tried_again_counts_once() -> None:
    writer = Writer()
    writer.prepare(0, 1, {"a": [0, 1], "b": [2, 3]})
    writer.step(0, 2, {"a": [0, 1, 2, 3]}, active=1)
    state = CommittedRun(writer.run_log)
    assert audit(state, EXPECTED[:1]) == Audit(lost=0, duplicate=0)
    assert state.dropped == [StepAttempt(0, 1)]


def test_a_try_in_the_same_generation_replaces_the_one_before() -> None:
    writer = Writer()
    writer.prepare(0, 1, {"a": [0, 1], "b": [2, 3]})
    writer.step(0, 1, {"a": [0, 1], "b": [2, 3]})
    assert audit(CommittedRun(writer.run_log), EXPECTED[:1]) == Audit(lost=0, duplicate=0)


# AUDIT-2
def test_a_dead_members_share_counts_where_the_survivors_committed_the_attempt() -> None:
    writer = Writer()
    writer.prepare(0, 1, {"a": [0, 1], "b": [2, 3]})
    writer.commit(0, 1, ["a"])  # b died after its vote; a rolled the step forward
    assert audit(CommittedRun(writer.run_log), EXPECTED[:1]) == Audit(lost=0, duplicate=0)


def test_a_lost_sample_is_seen() -> None:
    writer = undisturbed()
    writer.run_log.prepared[3] = replace(writer.run_log.prepared[3], samples=(6,))
    assert audit(CommittedRun(writer.run_log), EXPECTED) == Audit(lost=1, duplicate=0)


def test_a_duplicate_sample_is_seen() -> None:
    writer = undisturbed()
    writer.run_log.prepared[3] = replace(writer.run_log.prepared[3], samples=(6, 7, 7))
    assert audit(CommittedRun(writer.run_log), EXPECTED) == Audit(lost=0, duplicate=1)


def test_a_sample_in_the_place_of_another_is_lost_and_seen_twice() -> None:
    writer = undisturbed()
    writer.run_log.prepared[3] = replace(writer.run_log.prepared[3], samples=(6, 0))
    assert audit(CommittedRun(writer.run_log), EXPECTED) == Audit(lost=1, duplicate=1)


# AUDIT-1
def test_a_share_of_another_attempt_does_not_fill_a_gap() -> None:
    writer = Writer()
    writer.prepare(0, 1, {"a": [0, 1], "b": [2, 3]})
    writer.step(0, 2, {"a": [0, 1]})
    assert audit(CommittedRun(writer.run_log), EXPECTED[:1]) == Audit(lost=2, duplicate=0)


def test_a_step_that_nobody_committed_is_lost() -> None:
    writer = undisturbed()
    assert audit(CommittedRun(writer.run_log), [*EXPECTED, [2, 3]]) == Audit(lost=2, duplicate=0)


def test_a_step_too_many_is_seen_twice() -> None:
    assert audit(CommittedRun(undisturbed().run_log), EXPECTED[:2]) == Audit(lost=0, duplicate=4)


def test_a_step_committed_in_two_attempts_is_torn_and_its_samples_seen_twice() -> None:
    writer = undisturbed()
    writer.prepare(1, 2, {"b": [4, 5, 6, 7]}, active=1)
    writer.commit(1, 2, ["b"])
    state = CommittedRun(writer.run_log)
    assert state.torn == [1]
    assert audit(state, EXPECTED) == Audit(lost=0, duplicate=4)


# -- kills


def killed() -> tuple[Writer, Kill]:
    """b dies in step 1; a goes on alone; b's successor c heals in step 2 and votes in step 3."""
    writer = Writer()
    writer.spawn("a", 0)
    writer.spawn("b", 1)
    writer.generation(1, [0, 1], ["a", "b"])
    writer.step(0, 1, {"a": [0, 1], "b": [2, 3]})
    writer.prepare(1, 1, {"a": [4, 5]})
    kill = Kill("b", 1, 101, writer.t, step=1)
    writer.exit("b")
    writer.spawn("c", 1)
    writer.generation(2, [0], ["a"])
    writer.step(1, 2, {"a": [4, 5, 6, 7]}, active=1)
    writer.generation(3, [0, 1], ["a", "c"])
    writer.step(2, 3, {"a": [8, 9, 0, 1], "c": []}, active=1)
    writer.step(3, 3, {"a": [2, 3], "c": [4, 5]})
    return writer, kill


def committed_at(writer: Writer, step: int, generation: int) -> float:
    return CommittedRun(writer.run_log).committed_at[StepAttempt(step, generation)]


def test_recovery_ends_with_the_first_step_without_the_victim_and_rejoin_with_the_first_at_full_strength() -> None:
    writer, kill = killed()
    [recovery] = recoveries(writer.run_log, CommittedRun(writer.run_log), [kill], RANKS)
    assert recovery.recovery_ms == pytest.approx((committed_at(writer, 1, 2) - kill.t) * 1e3)
    assert recovery.rejoin_ms == pytest.approx((committed_at(writer, 3, 3) - kill.t) * 1e3)


def test_a_step_in_doubt_that_is_rolled_forward_ends_neither() -> None:
    writer = Writer()
    writer.spawn("a", 0)
    writer.spawn("b", 1)
    writer.generation(1, [0, 1], ["a", "b"])
    writer.prepare(0, 1, {"a": [0, 1], "b": [2, 3]})
    kill = Kill("b", 1, 101, writer.t, step=0)
    writer.commit(0, 1, ["a"])
    [recovery] = recoveries(writer.run_log, CommittedRun(writer.run_log), [kill], RANKS)
    assert (recovery.recovery_ms, recovery.rejoin_ms) == (None, None)


def test_the_phases_add_up_to_the_recovery() -> None:
    writer, kill = killed()
    [recovery] = recoveries(writer.run_log, CommittedRun(writer.run_log), [kill], RANKS)
    phases = recovery.phases
    assert phases is not None
    assert recovery.recovery_ms is not None
    assert phases.quorum == pytest.approx(200)
    assert phases.configure == pytest.approx(300)
    assert phases.detect == pytest.approx((writer.run_log.noticed["b"] - kill.t) * 1e3)
    assert phases.leave > 0
    total = phases.detect + phases.leave + phases.abort + phases.quorum + phases.configure + phases.first_commit
    assert total == pytest.approx(recovery.recovery_ms)


# AUDIT-3
def test_the_kill_of_a_rank_without_a_seat_has_no_recovery_but_a_rejoin() -> None:
    writer, _ = killed()
    writer.exit("c")
    writer.spawn("d", 1)
    kill = Kill("d", 1, 101, writer.t, step=4)
    writer.exit("d")
    writer.commit(3, 3, ["a"])  # a late word of the old generation, which c was still in
    writer.spawn("e", 1)
    writer.generation(4, [0, 1], ["a", "e"])
    writer.step(4, 4, {"a": [0], "e": [1]})
    [recovery] = recoveries(writer.run_log, CommittedRun(writer.run_log), [kill], RANKS)
    assert (recovery.seated, recovery.recovery_ms) == (False, None)
    assert recovery.rejoin_ms == pytest.approx((committed_at(writer, 4, 4) - kill.t) * 1e3)


def test_a_generation_that_was_agreed_with_the_victim_in_it_is_not_one_without_it() -> None:
    writer, _ = killed()
    kill = Kill("c", 1, 101, writer.t, step=4)
    writer.generation(4, [0, 1])  # agreed before its death was known
    writer.exit("c")
    writer.generation(5, [0], ["a"])
    writer.step(4, 5, {"a": [0]}, active=1)
    [recovery] = recoveries(writer.run_log, CommittedRun(writer.run_log), [kill], RANKS)
    assert writer.run_log.generation_of("c") == 4
    assert recovery.recovery_ms == pytest.approx((committed_at(writer, 4, 5) - kill.t) * 1e3)


def test_a_restarted_rank_is_back_with_its_first_share_in_a_committed_step() -> None:
    writer, _ = killed()
    [rejoin] = find_rejoins(writer.run_log, CommittedRun(writer.run_log))
    assert (rejoin.member, rejoin.step) == ("c", 3)


@pytest.mark.parametrize(("percent", "value"), [(50, 2.0), (99, 4.0), (100, 4.0), (1, 1.0)])
def test_percentiles_are_values_that_were_measured(percent: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == value


def test_there_is_no_percentile_of_nothing() -> None:
    assert percentile([], 50) is None


# -- the audit


@pytest.mark.parametrize(
    ("curve", "size", "step"),
    [
        ({0: 3.0, 1: 2.0}, 0.0, 0),
        ({0: 3.0, 1: 2.5}, 0.5, 1),
        ({0: 3.0}, math.inf, 1),
        ({0: 3.0, 1: 2.0, 2: 1.0}, math.inf, 2),
        ({0: 3.0, 1: math.nan}, math.inf, 1),
    ],
)
def test_the_largest_difference_between_two_curves(curve: dict[int, float], size: float, step: int) -> None:
    assert largest_difference(curve, {0: 3.0, 1: 2.0}) == Difference(size, step)


def test_a_good_run_has_no_faults() -> None:
    assert faults(GOOD) == []
    assert faults(SHARDED) == []
    assert faults(replace(SHARDED, reference_digest=sum_of(["d", "e"]))) == []
    assert faults(replace(GOOD, difference=None, kills=2)) == []
    assert faults(replace(GOOD, reference_digest="d")) == []


@pytest.mark.parametrize(
    ("outcome", "fault"),
    [
        (replace(GOOD, failure="rank 1 exited with code 3"), "the job failed: rank 1 exited with code 3"),
        (replace(GOOD, steps=2), "2 steps are committed, not 3"),
        (replace(GOOD, torn=(1,)), "steps 1 were committed in two different attempts"),
        (replace(GOOD, audit=Audit(1, 0)), "1 samples were lost"),
        (replace(GOOD, audit=Audit(0, 2)), "2 samples were seen twice"),
        (replace(GOOD, digests={(): ()}), "no rank finished"),
        (replace(GOOD, digests={(0, 0, 0): ("d",), (0, 1, 0): ()}), "no rank of the part (0, 1, 0) finished"),
        (replace(GOOD, digests={(): ("d", "e")}), "the ranks ended with 2 different sets of parameters"),
        (replace(GOOD, reference_digest="e"), "the ranks ended with other bits than one undisturbed rank"),
        (replace(SHARDED, reference_digest="d"), "the ranks ended with other bits than one undisturbed rank"),
        (replace(SHARDED, reference_digest="7"), "the ranks ended with other bits than one undisturbed rank"),
        (replace(GOOD, difference=Difference(1e-4, 7)), "the loss curve leaves the undisturbed run's"),
        (replace(GOOD, difference=Difference(math.nan, 7)), "the loss curve leaves the undisturbed run's"),
        (replace(GOOD, kills=0), "0 kills happened, fewer than the 1 asked for"),
        (
            replace(GOOD, hosts_asked=2, fallbacks=1),
            "the job took a fallback layout 1 times, fewer than the 2 hosts lost",
        ),
    ],
)
def test_each_fault_is_found(outcome: Outcome, fault: str) -> None:
    [found] = faults(outcome)
    assert found.startswith(fault)
