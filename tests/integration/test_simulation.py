"""Random schedules of a job by the real rules: after every move, all promises hold.

`scripts/chaos simulate --schedules 1000000` does more of the same.
"""

from __future__ import annotations

import gc
import itertools
import os

import pytest

from elasticgang.simulation.invariants import is_broken
from elasticgang.simulation.runner import run, run_over
from elasticgang.simulation.scenario import play, read, replay, shrink, write
from elasticgang.simulation.schedule import SETTINGS, Failure, Schedule
from tests.integration.schedules import run_all
from tests.unit.mutants import mutated

NUM_SCHEDULES = 400

# How many schedules in a thousand must have seen it: else they show little.
PER_MILLE = {
    "agent lost": 200,
    "agent paused beyond its lease": 35,
    "another layout": 8,
    "asked for spares": 100,
    "coordinator paused beyond a lease": 70,
    "crashed before it had written": 10,
    "crashed before it pushed what it had written": 15,
    "crashed in mid-push": 15,
    "decided beside another in office": 10,
    "drained": 40,
    "duplicate id": 80,
    "ended": 80,
    "exit noticed early": 400,
    "failed": 200,
    "failed start": 150,
    "fenced": 250,
    "founded anew": 40,
    "ghost": 300,
    "given up": 50,
    "half-open session": 500,
    "host paused beyond its lease": 35,
    "joiner waited": 100,
    "kept runs": 15,
    "learner": 300,
    "lease over": 400,
    "lease renewed by a refusal": 80,
    "lost agent came back": 4,
    "lost but alive": 150,
    "more than three coordinators": 200,
    "only heals": 1,
    "narrow network": 40,
    "notice of a living rank": 30,
    "operator's word": 80,
    "partition": 250,
    "rejoined": 200,
    "restarted with its directory": 150,
    "rolled forward": 40,
    "saved at the end": 5,
    "sharded": 400,
    "signalled": 100,
    "slow session": 300,
    "spare": 300,
    "spare promoted": 50,
    "started without a directory": 500,
    "state directory": 300,
    "state moved": 8,
    "timed out: exit": 15,
    "timed out: grace": 5,
    "timed out: start": 100,
    "two coordinators": 400,
    "warned": 200,
}


@pytest.mark.timeout(600)
def test_random_schedules() -> None:
    parts = run_over(range(NUM_SCHEDULES), min(4, os.cpu_count() or 1))
    total = run_all(parts, NUM_SCHEDULES, PER_MILLE)
    assert total.num_records > 2 * NUM_SCHEDULES
    assert total.num_steps > 2 * NUM_SCHEDULES


# BATCH-1
def test_equal_seeds_give_equal_schedules() -> None:
    one, other = (list(run_over(range(30), num_processes)) for num_processes in (1, 2))
    assert one == other
    schedule = Schedule(7)
    assert schedule.run() is None
    assert replay(schedule.setting, schedule.moves) == (schedule.moves, "")


def test_garbage_is_collected_between_schedules_alone() -> None:
    phases: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        phases.append(phase)

    gc.callbacks.append(note)
    try:
        run(range(3))
        during = list(phases)
    finally:
        gc.callbacks.remove(note)
    assert during == ["start", "stop"] * 3
    assert gc.isenabled()
    gc.disable()
    try:
        run(range(1))
        assert not gc.isenabled()  # as the caller has it
    finally:
        gc.enable()


def test_a_failure_names_its_seed() -> None:
    with mutated("the highest term alone decides"):
        first = run(range(40)).failures[0]
        again = Schedule(first.seed).run()
    assert again == first
    assert is_broken(first.violation)


def test_what_the_rules_raise_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_it(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("elasticgang.protocol.next_record.recover", raise_it)
    (failure,) = run(range(1)).failures
    assert "ZeroDivisionError" in failure.violation
    assert not is_broken(failure.violation)


def test_a_scenario_says_all_of_its_setting() -> None:
    """Without it, another job is told: one without checkpoints makes no last save."""
    short = next(setting for setting in SETTINGS if setting.num_steps < 10)
    for seed in range(1, 200, 2):
        schedule = Schedule(seed, short)
        assert schedule.run() is None
        if any(verb == "saves" for _, verb in schedule.moves):
            break
    story, told = read(write(Failure(seed, schedule.setting, tuple(schedule.moves), "")))
    assert told[: len(schedule.cluster.log)] == schedule.cluster.log
    assert " ; checkpoints\n" in story


# WORD-1, SIMHOST-4, LOST-1
@pytest.mark.parametrize("seed", [1_092_135, 1_077_017, 1_109_415, 300_023_565, 300_259_354])
def test_schedules_that_the_simulator_took_for_violations(seed: int) -> None:
    """A stopped coordinator got the operator's word. An agent that ended on a second SIGTERM, after the job had
    finished, was to notify the others of the end of a generation. The ranks of a frozen host that a coordinator had
    declared lost, and decided without at the same moment, were held to live on. A lease that another coordinator
    granted was held to be of the one before. An agent that had yet to connect under its new id was held to be gone."""
    assert Schedule(seed).run() is None


# BACK, WORD
@pytest.mark.parametrize(
    "seed",
    [
        *(2_204_067, 3_038_107, 8_015_409, 9_003_603, 60_009_637, 60_009_903, 100_000_093, 200_015_046, 200_105_654),
        *(300_150_053, 300_235_525),
    ],
)
def test_schedules_in_which_a_rule_of_the_coordinator_was_missing(seed: int) -> None:
    """An office by the operator's word over an agent that went elsewhere; a committed step given up for a record that
    nobody had accepted; a notice of a joiner that had been given for another record of that number; a state given
    up with a record that nobody had accepted; exits after the end of the job, beside ranks that wait for those of the
    agent; a state given up by a coordinator to which an agent came under another id; agents that were never sent
    the record to which a coordinator in office went back; and a report of an agent whose ranks had yet to get the
    record before."""
    assert Schedule(seed).run() is None


def test_a_failure_is_a_scenario_that_replays_it() -> None:
    with mutated("the highest term alone decides"):
        found = itertools.islice(filter(None, (Schedule(seed).run() for seed in range(400))), 4)
        failure = min(found, key=lambda failure: len(failure.moves))  # the longest takes ten times as long
        short = shrink(failure)
        story, told = read(write(short))
        assert replay(short.setting, short.moves) == (list(short.moves), short.violation)
        assert play(story) == told
        assert told[-1] == short.violation
        assert short.violation.split(":")[0] == failure.violation.split(":")[0]
        assert len(short.moves) < len(failure.moves) / 2
    assert replay(short.setting, short.moves)[1] == ""  # by our rules it ends well
