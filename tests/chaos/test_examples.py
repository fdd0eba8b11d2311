"""The scripts of `examples/`, as users run them, while ranks and data workers are killed: each sample counts once."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from elasticgang.train.data import GlobalBatch
from tests.chaos.test_kills import at, histories, soon
from tests.support import REPOSITORY, Job

RUNNER = REPOSITORY / "tests" / "chaos" / "example_job.py"
NUM_STEPS = 41  # the leader tells the loss of each twentieth; more than a pass of the image classifier
BATCHES = {
    "image_classifier": GlobalBatch(2048, size=64, slot=8),
    "language_model": GlobalBatch(4096, size=32, slot=4),
}
FAULTS = [
    at("body", 0, "workers"),
    soon("body", 1),  # no generation ends by the death of a data worker
    at("totals_received", 2, "workers"),
    soon("body", 2),
    at("votes_received", 0),
]


def run(
    directory: Path, script: Path, batches: GlobalBatch, ranks: int, faults: list[dict[str, object]]
) -> tuple[set[str], str]:
    """The digests of the optimizer's state that the ranks of `script` ended with, and what they printed."""
    directory.mkdir()
    arguments = [str(script), str(NUM_STEPS), str(directory), json.dumps(faults)]
    with Job(directory, RUNNER, *arguments, ranks=ranks) as job:
        assert job.wait() == 0, job.stderr
        job.assert_nothing_left()
        output = job.stdout
    assert len(list(directory.glob("fired-*"))) == len(faults)
    found = histories(directory)
    prepared: defaultdict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    committed: defaultdict[int, set[int]] = defaultdict(set)
    for line in (line for history in found for line in history):
        if line["kind"] == "prepared":
            prepared[line["step"], line["generation"]].update(line["samples"])
        elif line["kind"] == "committed":
            committed[line["step"]].add(line["generation"])
    assert sorted(committed) == list(range(NUM_STEPS))
    for step, generations in committed.items():
        (generation,) = generations
        assert prepared[step, generation] == Counter(batches.samples(step).tolist()), f"step {step}"
    return {line["digest"] for history in found for line in history if line["kind"] == "finished"}, output


@pytest.mark.parametrize("name", BATCHES)
def test_an_example_counts_each_sample_once_whoever_is_killed(name: str, tmp_path: Path) -> None:
    script = REPOSITORY / "examples" / f"{name}.py"
    digests, output = run(tmp_path / "killed", script, BATCHES[name], 3, FAULTS)
    assert len(digests) == 1
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert losses[-1] < losses[0]
    if name == "image_classifier":
        alone, _ = run(tmp_path / "alone", script, BATCHES[name], 1, [])
        assert digests == alone
