"""SIGKILL of any process, at any moment: the job ends with the very bits of a run alone, each sample taken once.

Where a rank dies is decided by the job itself (`job.py`), so that each moment is met every time.
"""

from __future__ import annotations

import json
import re
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from elasticgang.train.data import GlobalBatch
from scripts.demo_job.driver import Tail
from tests.chaos.job import BATCH_SIZE, NUM_SAMPLES, PLACES, SEED, SLOT
from tests.support import REPOSITORY, Job, run_preloaded

NUM_STEPS = 30
JOB = REPOSITORY / "tests" / "chaos" / "job.py"
RECOVERY_S = 8.0  # from a death to the next generation; milliseconds in fact, unless somebody waits for a timeout

Fault = dict[str, Any]


def at(place: str, rank: int | None, kill: str | list[int] = "self", **conditions: Any) -> Fault:
    assert place in PLACES
    return {"at": place, "rank": rank, "kill": kill, **conditions}


def soon(place: str, rank: int | None, kill: str | list[int] = "self", **conditions: Any) -> Fault:
    """Without waiting until all ranks are back."""
    return at(place, rank, kill, full=False, **conditions)


BACK = at("body", None, "paused", **{"for": 0.01})  # the others wait for the lost rank to come back


def histories(directory: Path) -> list[list[dict[str, Any]]]:
    """Without a line that is being written, or in which its rank was killed."""
    return [list(Tail(path).read()) for path in (directory / "history").glob("*.jsonl")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_alone(tmp_path_factory.mktemp("alone"))


def run_alone(directory: Path, *options: str) -> str:
    """The digest of the state that an undisturbed run of one process ends with."""
    command = [sys.executable, str(JOB), "--steps", str(NUM_STEPS), "--output-dir", str(directory), *options]
    done = run_preloaded(command, ends_at_once=True)
    assert done.returncode == 0, done.stderr
    ((*_, last),) = histories(directory)
    assert last["kind"] == "finished"
    assert last["steps"] == NUM_STEPS
    return str(last["digest"])


def run(
    directory: Path,
    faults: list[Fault],
    ranks: int = 3,
    options: Sequence[str] = (),
    script_options: Sequence[str] = (),
) -> Job:
    """The job, ended."""
    script = ["--output-dir", str(directory), "--faults", json.dumps(faults), *script_options]
    with Job(directory, JOB, *script, ranks=ranks, options=options) as job:
        job.wait()
        job.assert_nothing_left()
        return job


def check(job: Job, faults: list[Fault], alone: str, recovery_s: float = RECOVERY_S) -> None:
    """Every fault has happened, and nothing of it shows in the result."""
    is_late = any(fault["at"] == "finished" for fault in faults)  # AGENT-10
    assert job.process.returncode == (128 + signal.SIGKILL if is_late else 0), job.stderr
    assert {path.name for path in job.directory.glob("fired-*")} == {f"fired-{n}" for n in range(len(faults))}
    found = histories(job.directory)
    digests = [line["digest"] for history in found for line in history if line["kind"] == "finished"]
    assert digests, "nobody has finished"
    assert set(digests) == {alone}
    check_samples(found)
    check_recoveries(job, recovery_s)


def check_samples(found: list[list[dict[str, Any]]]) -> None:
    """RULE-4, RULE-5 and MANAGER-15: one attempt at each step is committed, and it is made of the step's samples, each
    once. Every rank has the sums over all of them."""
    prepared: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    committed: defaultdict[int, set[int]] = defaultdict(set)
    sums: defaultdict[int, list[dict[str, float]]] = defaultdict(list)
    for history in found:
        mine: dict[tuple[int, int], list[int]] = {}
        for line in history:
            if line["kind"] == "prepared":
                mine[line["step"], line["generation"]] = line["samples"]
            elif line["kind"] == "committed":
                committed[line["step"]].add(line["generation"])
                sums[line["step"]].append(line["sums"])
        for attempt, samples in mine.items():
            prepared[attempt] += samples
    batches = GlobalBatch(NUM_SAMPLES, size=BATCH_SIZE, slot=SLOT, seed=SEED)
    assert sorted(committed) == list(range(NUM_STEPS))
    for step, generations in committed.items():
        assert len(generations) == 1, f"step {step} was committed in the generations {generations}"
        (generation,) = generations
        samples = batches.samples(step).tolist()
        assert Counter(prepared[step, generation]) == Counter(samples), f"step {step}"
        wanted = {"num": len(samples), "squares": sum(sample * sample for sample in samples)}
        assert all(each == wanted for each in sums[step]), f"step {step}: {sums[step]}"


def check_recoveries(job: Job, recovery_s: float) -> None:
    """From a death: its `exited` may come after the next generation, and the one after that waits for a rank that
    starts."""
    events = job.events()
    killed = {event["member"] for event in events if event["event"] == "exited" and event["status"] == -9}
    for place, event in enumerate(events):
        if event["event"] in ("exit_began", "exited") and event["member"] in killed:
            killed.remove(event["member"])
            following = next((later for later in events[place:] if later["event"] == "generation"), None)
            assert following is None or following["t"] - event["t"] < recovery_s, f"{event} to {following}"


SCENARIOS: dict[str, list[Fault]] = {
    "a rank at each place of a step": [
        at("step", 1),
        at("body", 0),
        at("totals_received", 2),  # its gradients are in, and it has not voted
        at("votes_received", 0),  # all have voted, and it has told nobody
        at("commit_recorded", 1),
        at("torn", 0),
        at("applied", 2),
    ],
    "two ranks at once": [
        at("body", 0, [0, 1]),
        at("totals_received", 2, [0, 2]),
        at("votes_received", 1, [1, 2]),
        at("torn", 0, [0, 2]),
    ],
    "comm processes": [
        at("body", 0, "comm"),
        at("totals_received", 1, "comm"),
        at("votes_received", 2, "comm"),
        at("applied", 0, "comm"),
        at("step", 2, "standby"),
        soon("step", 2, "comm"),  # and there is no standby to take
        at("body", 0, "comms"),
        at("totals_received", 1, "comms"),
        at("votes_received", 0, "comms"),
    ],
    "the script raises": [
        at("body", 1, "raise", step=5),
        at("totals_received", 2, "raise"),  # its gradients are in, and it has not voted
        at("applied", 0, "raise"),
        soon("joined", 0, "raise"),  # as it comes back
    ],
    "another rank during a generation change": [
        at("body", 1),
        soon("requesting", 2),
        at("body", 1),
        soon("requested", 2),
        at("body", 1),
        soon("record_received", 0),
        at("body", 1),
        soon("configuring", 2),
        at("body", 1),
        soon("entered", 0),
    ],
    "comm processes during a generation change": [
        at("body", 1),
        soon("configuring", 0, "comms"),
        at("body", 1),
        soon("requested", 2, "standby"),
        at("body", 1),
        soon("entered", 0, "comm"),
    ],
    "who heals, and who is healed from": [
        at("body", 2),
        soon("healing", 2),
        soon("chunk_received", 2),
        soon("healed", 2),
        at("body", 1),
        soon("serving", None),
        at("body", 1),
        soon("chunk_received", 1, "comm"),
        at("body", 1),
        soon("serving", None, "comms"),
    ],
    "while ranks start": [
        soon("start", 1, free=True),
        soon("joined", 0, free=True),
        soon("requested", 2, free=True),
        soon("configuring", 1, free=True),
        soon("entered", 0, free=True),
        at("body", 2),
    ],
    "everyone that has the state before the first step": [
        soon("body", 0, "await-next"),  # it does not vote before
        soon("serving", 0, free=True),
        soon("totals_received", 1),
        soon("votes_received", 2),
    ],
    "the first to have the state, half applied": [soon("torn", 0)],
    "the first to have the state, applied": [soon("applied", 0)],
    "the first to have the state, once another is healed": [soon("healed", 1, [0])],
    "in the last step": [
        at("body", 1, step=NUM_STEPS - 1),
        soon("votes_received", 0, step=NUM_STEPS - 1),
        soon("finished", 2),
    ],
    "in the last step, and what it leaves in doubt": [
        at("totals_received", 1, step=NUM_STEPS - 1),
        soon("finished", 2),
    ],
    "two ranks in the apply before the last": [at("torn", 0, [0, 1], step=NUM_STEPS - 1)],
    "in the last apply": [at("torn", 0, step=NUM_STEPS)],
}


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[Job]]]:
    """The jobs of all scenarios that were selected, two at a time: each is idle half of its time."""
    selected = [
        str(item.callspec.params["name"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_a_kill_leaves_no_trace_in_the_result
    ]
    with ThreadPoolExecutor(2) as pool:
        directories = {name: tmp_path_factory.mktemp("job") for name in selected}
        yield {name: pool.submit(run, directories[name], SCENARIOS[name]) for name in selected}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_kill_leaves_no_trace_in_the_result(name: str, jobs: dict[str, Future[Job]], alone: str) -> None:
    check(jobs[name].result(), SCENARIOS[name], alone)


# DDP-5
def test_gradients_that_comm_processes_share_are_exact_whoever_dies(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    large = ["--rows", "100000"]  # a bucket of 2 MB
    faults = [
        at("body", 0, "comm"),  # its comm process may be writing to the gradients
        at("body", 1),
        at("totals_received", 2, "comms"),  # all have their gradients, and keep them until the next record
        at("votes_received", 0),
    ]
    job = run(tmp_path, faults, script_options=[*large, "--memory"])
    check(job, faults, run_alone(tmp_path_factory.mktemp("alone"), *large))
    lines = [line for history in histories(tmp_path) for line in history if line["kind"] == "prepared"]
    assert {re.sub(r"\d+", "N", line["memory"]) for line in lines} - {""} == {"/memfd:elasticgang-N-N-N (deleted)"}


def test_the_fork_server_may_die(tmp_path: Path, alone: str) -> None:
    """What it is needed for afterwards waits until another one has imported torch."""
    faults = [at("body", 1, "forkserver"), soon("step", 0, "comm"), at("step", 1)]
    check(run(tmp_path, faults, ranks=2), faults, alone, recovery_s=60.0)


def test_data_workers_may_die_and_so_may_their_ranks(tmp_path: Path, alone: str) -> None:
    faults = [
        at("body", 0, "workers"),
        soon("body", 1),  # no generation ends by the death of a data worker
        at("totals_received", 2, "workers"),
        soon("body", 2),
        at("step", 1, "workers"),
        soon("torn", 0),
        soon("entered", 1, "workers"),
    ]
    job = run(tmp_path, faults, script_options=["--num-workers", "2"])
    check(job, faults, alone)


def test_of_two_ranks_one_goes_on(tmp_path: Path, alone: str) -> None:
    faults = [at("votes_received", 0), at("votes_received", 1), at("torn", 0), at("body", 1)]
    check(run(tmp_path, faults, ranks=2), faults, alone)


def test_when_all_that_have_the_state_die_the_job_ends_and_says_so(tmp_path: Path) -> None:
    job = run(tmp_path, [at("body", 0, [0, 1, 2])])
    assert job.process.returncode == 1
    assert "the job's state is lost: no live member holds step" in job.stderr
