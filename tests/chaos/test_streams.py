"""Jobs that read from streams: whoever is killed, each sample of each split counts once in each pass."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from elasticgang.checkpoint import listing
from elasticgang.checkpoint.locations import storage_at
from tests.chaos.stream_job import NUM_SAMPLES, NUM_SPLITS, SIZE, SLOT, SPLIT_SAMPLES
from tests.chaos.test_checkpoints import kill_whole
from tests.chaos.test_kills import Fault, at, histories, soon
from tests.exhaustive import exhaustive
from tests.support import REPOSITORY, Job, wait_until

NUM_STEPS = 30
JOB = REPOSITORY / "tests" / "chaos" / "stream_job.py"
EVERY = 10

pytestmark = pytest.mark.timeout(300)  # several jobs, one after another


def run(
    directory: Path, ranks: int, faults: list[Fault], every: int = 0, workers: int = 0, steps: int = NUM_STEPS
) -> Job:
    arguments = [str(directory), str(steps), json.dumps(faults), str(every), str(workers)]
    return Job(directory, JOB, *arguments, ranks=ranks)


def expected_samples(steps: int) -> Iterator[Counter[int]]:
    """Of each step, from the definition: slot j of step t reads from split j or j + 4, which has 3 samples a pass."""
    num_slots = SIZE // SLOT
    places = [0] * NUM_SPLITS
    for step in range(steps):
        samples: Counter[int] = Counter()
        for slot in range(num_slots):
            split = slot + num_slots * (step % 2)
            for _ in range(SLOT):
                samples[SPLIT_SAMPLES * split + places[split] % SPLIT_SAMPLES] += 1
                places[split] += 1
        yield samples


def check(directory: Path, steps: int = NUM_STEPS) -> set[str]:
    """The committed steps have had each sample once in each pass. Returns the digests that the ranks ended with."""
    prepared: defaultdict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    committed: defaultdict[int, set[int]] = defaultdict(set)
    digests = set()
    for line in (line for history in histories(directory) for line in history):
        if line["kind"] == "prepared":
            prepared[line["step"], line["generation"]].update(line["samples"])
        elif line["kind"] == "committed":
            committed[line["step"]].add(line["generation"])
        else:
            digests.add(line["digest"])
    assert sorted(committed) == list(range(steps))
    whole: Counter[int] = Counter()
    for step, expected in enumerate(expected_samples(steps)):
        (generation,) = committed[step]
        assert prepared[step, generation] == expected, f"step {step}"
        whole.update(expected)
    assert whole == dict.fromkeys(range(NUM_SAMPLES), steps * SIZE // NUM_SAMPLES)
    return digests


@cache
def alone() -> set[str]:
    with TemporaryDirectory() as name, run(Path(name), 1, []) as job:
        assert job.wait() == 0, job.stderr
        (digest,) = check(Path(name))
        return {digest}


@pytest.mark.parametrize(
    ("faults", "workers"),
    [
        pytest.param([at("forward", 1), at("forward", 0, "comm"), at("forward", 2)], 0, marks=exhaustive),
        pytest.param([at("body", 0), soon("body", 1)], 2, marks=exhaustive),
        ([at("totals_received", 2), at("votes_received", 0), at("votes_received", 1, "comms")], 1),
        ([at("applied", 1), soon("healing", 1), at("body", 2, [0, 1])], 2),
        ([at("forward", 0, "workers"), soon("body", 1), at("forward", 2, "workers"), soon("body", 2)], 2),
    ],
)
def test_each_sample_counts_once_whoever_is_killed(faults: list[Fault], workers: int, tmp_path: Path) -> None:
    with run(tmp_path, 3, faults, workers=workers) as job:
        assert job.wait() == 0, job.stderr
        job.assert_nothing_left()
    assert len(list(tmp_path.glob("fired-*"))) == len(faults)
    assert check(tmp_path) == alone()


# STREAM-1
def test_a_job_goes_on_in_its_streams_with_other_ranks(tmp_path: Path) -> None:
    """Only what is committed in the end counts: steps after the checkpoint are read again."""
    (tmp_path / "hold").write_text(str(EVERY + 5))
    with run(tmp_path, 3, [], EVERY, workers=1) as job:
        found = wait_until(lambda: next(listing.scan(storage_at(tmp_path / "checkpoints")), None), "a checkpoint")
        kill_whole(job)
    assert found.attempt.step == EVERY
    for path in (tmp_path / "history").glob("*.jsonl"):
        lines = [line for line in path.read_text().splitlines(keepends=True) if json.loads(line)["step"] < EVERY]
        path.write_text("".join(lines))
    (tmp_path / "hold").unlink()
    with run(tmp_path, 2, [], EVERY, workers=2) as job:
        assert job.wait() == 0, job.stderr
        assert f"continues at the checkpoint of step {EVERY};" in job.stderr
    assert check(tmp_path) == alone()


# STREAMREADER-2
@exhaustive
def test_states_of_megabytes_move_with_their_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are exchanged, healed and saved: 12 MB of them."""
    steps = 12
    monkeypatch.setenv("STREAM_JOB_PADDING", str(3_000_000))
    with run(tmp_path, 3, [at("body", 1), at("forward", 0, "workers")], EVERY, workers=1, steps=steps) as job:
        assert job.wait() == 0, job.stderr
        assert [event for event in job.events() if event["event"] == "healed"]
    assert len(check(tmp_path, steps)) == 1
    (newest, *_) = listing.scan(storage_at(tmp_path / "checkpoints"))
    assert newest.attempt.step == steps


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_that_raises_once_costs_its_rank_alone(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STREAM_JOB_RAISES", str(tmp_path / "raises"))
    (tmp_path / "hold").write_text(str(NUM_STEPS // 2))
    with run(tmp_path, 3, [], workers=workers) as job:
        wait_until(lambda: _committed(tmp_path) == [NUM_STEPS // 2 - 1] * 3, "the step in which all ranks wait")
        (tmp_path / "raises").touch()
        (tmp_path / "hold").unlink()
        assert job.wait() == 0, job.stderr
        events, stderr = job.events(), job.stderr
    assert [event["status"] for event in events if event["event"] == "exited"].count(1) == 1
    assert re.search(r"slot 1 of step \d+ cannot be read from split 5:", stderr)
    assert "the `state_dict` of the split cannot be saved: ArithmeticError: this state cannot be saved" in stderr
    assert check(tmp_path) == alone()


def _committed(directory: Path) -> list[int]:
    """The last step that each rank has committed."""
    found = [[line["step"] for line in history if line["kind"] == "committed"] for history in histories(directory)]
    return [max(steps, default=-1) for steps in found]
