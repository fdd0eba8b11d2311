"""Each broken promise is seen in what members and agents wrote."""

from __future__ import annotations

from typing import Any

from scripts.chaos_runs.soaking.checks import failed_checks
from scripts.demo_job.run_log import RunLog

EXPECTED = [[0, 1], [2, 3]]
REFERENCE = {0: 1.0, 1: 2.0}
GENERATIONS: list[dict[str, Any]] = [
    {"generation": 1, "digest": "a"},
    {"generation": 2, "digest": "b"},
    {"generation": 2, "digest": "b"},
]
CHANGES: list[dict[str, Any]] = [{"generation": 1, "parent": ""}, {"generation": 2, "parent": "a"}]


def run_log_of(
    *, samples: dict[tuple[int, int], list[int]] | None = None, digests: tuple[str, ...] = ("d", "d")
) -> RunLog:
    """Two steps of two members, which commit in generation 1 what `samples` says."""
    written = RunLog()
    for (step, generation), taken in (samples or {(0, 1): [0, 1], (1, 1): [2, 3]}).items():
        share = {"step": step, "generation": generation, "t": 1.0}
        loss = float(step + 1) * len(taken)
        written.add_history(
            "m", {"kind": "prepared", **share, "loss_sum": loss, "tokens": len(taken), "active": 1, "samples": taken}
        )
        written.add_history("m", {"kind": "committed", **share})
    for digest in digests:
        written.add_history("m", {"kind": "finished", "t": 2.0, "digest": digest})
    return written


def faults(written: RunLog, **changed: Any) -> list[str]:
    given = {"generations": GENERATIONS, "changes": CHANGES, "expected": EXPECTED, "reference": REFERENCE, **changed}
    return failed_checks(written, **given)


def test_a_good_run_has_none() -> None:
    assert faults(run_log_of()) == []


def test_two_records_of_a_generation() -> None:
    (told,) = faults(run_log_of(), generations=[*GENERATIONS, {"generation": 2, "digest": "c"}])
    assert told == "RULE-2: generation 2 has 2 records"


def test_a_record_that_skips_its_parent() -> None:
    generations = [*GENERATIONS, {"generation": 3, "digest": "c"}]
    (told,) = faults(run_log_of(), generations=generations, changes=[*CHANGES, {"generation": 3, "parent": "a"}])
    assert told == "RULE-2: generation 3 builds on generation 1"


def test_a_step_in_two_attempts() -> None:
    told = faults(run_log_of(samples={(0, 1): [0, 1], (1, 1): [2, 3], (1, 2): [2, 3]}))
    assert told[0] == "RULE-4: steps [1] were committed in two different attempts"


def test_a_step_that_nobody_committed() -> None:
    told = faults(run_log_of(samples={(0, 1): [0, 1]}))
    assert told[0] == "RULE-4: 1 steps were never committed, the first is 1"


def test_samples_lost_and_taken_twice() -> None:
    (told,) = faults(run_log_of(samples={(0, 1): [0, 1], (1, 1): [2, 2]}))
    assert told == "RULE-5: 1 samples were lost and 1 seen twice"


def test_members_that_end_apart() -> None:
    (told,) = faults(run_log_of(digests=("d", "e")))
    assert told == "the members ended with 2 different sets of parameters"


def test_members_that_end_in_other_bits_than_the_undisturbed_run() -> None:
    (told,) = faults(run_log_of(), reference_digest="e")
    assert told == "the members ended with other bits than one undisturbed rank"
    assert faults(run_log_of(), reference_digest="d") == []


def test_nobody_that_finished() -> None:
    assert faults(run_log_of(digests=())) == ["no member finished"]


def test_a_loss_that_leaves_the_undisturbed_one() -> None:
    (told,) = faults(run_log_of(), reference={0: 1.0, 1: 2.1})
    assert told == "the loss of step 1 is 0.1 from the undisturbed run's"


def test_a_long_run_is_compared_by_the_means_of_windows() -> None:
    samples = {(step, 1): [0, 1] for step in range(1100)}
    reference = {step: float(step + 1) * (1.0 if step < 1000 else 1.02) for step in range(1100)}
    (told,) = faults(run_log_of(samples=samples), expected=[[0, 1]] * 1100, reference=reference)
    assert told == "the mean loss from step 1000 on is 1050.5000, the undisturbed run's 1071.5100"


FIRST, SECOND = [0, 0, 0], [0, 1, 0]


def with_parts(*ends: tuple[list[int], str], sdp: int = 2) -> RunLog:
    """A good run whose members end with each (part, digest)."""
    written = run_log_of(digests=())
    for part, digest in ends:
        line = {"kind": "finished", "t": 2.0, "digest": digest, "part": part, "sizes": [1, sdp, 1]}
        written.add_history("m", line)
    return written


def test_the_digests_of_all_parts_sum_to_that_of_one_undisturbed_rank() -> None:
    ends = [(FIRST, "1"), (SECOND, "2"), (SECOND, "2")]
    whole = f"{3:064x}"
    assert faults(with_parts(*ends), reference_digest=whole) == []
    (told,) = faults(with_parts(*ends), reference_digest=f"{4:064x}")
    assert told == "the members ended with other bits than one undisturbed rank"
    assert faults(with_parts((FIRST, whole), (FIRST, whole), sdp=1), reference_digest=whole) == []


def test_members_that_end_apart_with_one_part() -> None:
    (told,) = faults(with_parts((FIRST, "1"), (SECOND, "2"), (SECOND, "3")), reference_digest="3")
    assert told == "the members of the part (0, 1, 0) ended with 2 different sets of parameters"


def test_nobody_that_finished_with_one_part() -> None:
    (told,) = faults(with_parts((FIRST, "1")), reference_digest="1")
    assert told == "no member of the part (0, 1, 0) finished"
