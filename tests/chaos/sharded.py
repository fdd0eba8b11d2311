"""Runs `sharded_job.py`, and says what its ranks must have written, whatever was killed."""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elasticgang.train.data import GlobalBatch
from scripts.demo_job.driver import Tail
from tests.chaos.sharded_job import BATCH_SIZE, NUM_SAMPLES, SEED, SLOT, whole_parameters
from tests.support import REPOSITORY, Job, run_preloaded

JOB = REPOSITORY / "tests" / "chaos" / "sharded_job.py"
NUM_STEPS = 20  # the most
TOLERANCE = 1e-9  # of sums of doubles in another order, over 20 steps of Adam

Seat = tuple[int, int, int, int]  # pp, rdp, sdp, tp
Line = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Of a job. `active`: ranks that have a seat at full strength."""

    active: int
    spares: int = 0
    pp: int = 1
    sdp: int = 1
    tp: int = 1
    fsdp: bool = False

    @property
    def axes(self) -> list[str]:
        fsdp = ["--fsdp"] if self.fsdp else []
        return [*fsdp, "--pp", str(self.pp), "--sdp", str(self.sdp), "--tp", str(self.tp), "--active", str(self.active)]


def steps_for(faults: Sequence[Line]) -> int:
    """A fault takes two steps, or three where ranks wait for one that is to take a seat: some follow the last one."""
    return min(2 * len(faults) + 5, NUM_STEPS)


@dataclass(frozen=True)
class Reference:
    """An undisturbed run without any sharding. `after`: the parameters after each step."""

    losses: dict[int, float]
    after: list[dict[str, list[float]]]

    @property
    def num_steps(self) -> int:
        return len(self.losses)

    @property
    def parameters(self) -> dict[str, list[float]]:
        return self.after[-1]

    def first(self, steps: int) -> Reference:
        """Of a run that ends after so many."""
        assert steps <= self.num_steps
        return Reference({step: self.losses[step] for step in range(steps)}, self.after[:steps])


def reference_in(directory: Path, steps: int = NUM_STEPS) -> Reference:
    command = [sys.executable, str(JOB), "--steps", str(steps), "--output-dir", str(directory), "--write-parameters"]
    done = run_preloaded(command, ends_at_once=True)
    assert done.returncode == 0, done.stderr
    (lines,) = histories(directory).values()
    losses = {line["step"]: line["loss"] for line in lines if line["kind"] == "prepared"}
    assert sorted(losses) == list(range(steps))
    after = [line["parameters"] for line in lines if line["kind"] == "committed"]
    assert len(after) == steps
    return Reference(losses, after)


def histories(directory: Path) -> dict[str, list[Line]]:
    """What each member wrote, by its name, without a line in which it was killed."""
    return {path.stem: list(Tail(path).read()) for path in (directory / "history").glob("*.jsonl")}


def run(
    directory: Path, sizes: Sizes, faults: list[Line], *, steps: int | None = None, options: Sequence[str] = ()
) -> Job:
    """The job, ended. `steps`: those for its faults if there is none; `options`: of the script."""
    directory.mkdir(exist_ok=True)
    num_steps = steps_for(faults) if steps is None else steps
    with start(directory, sizes, faults, steps=num_steps, script_options=options) as job:
        job.wait()
        job.assert_nothing_left()
        return job


def start(directory: Path, sizes: Sizes, faults: list[Line], *, steps: int, script_options: Sequence[str] = ()) -> Job:
    asked = [
        *sizes.axes,
        *script_options,
        "--steps",
        str(steps),
        "--output-dir",
        str(directory),
        "--faults",
        json.dumps(faults),
    ]
    options = ["--spares", str(sizes.spares)] if sizes.spares else []
    return Job(directory, JOB, *asked, ranks=sizes.active, options=options)


def check(job: Job, sizes: Sizes, faults: list[Line], reference: Reference, *, steps: int | None = None) -> None:
    """Every fault has happened, and nothing of it shows in the result. `steps`: as `run` was given it."""
    reference = reference.first(steps_for(faults) if steps is None else steps)
    assert job.process.returncode == 0, job.stderr
    assert {path.name for path in job.directory.glob("fired-*")} == {f"fired-{n}" for n in range(len(faults))}
    found = histories(job.directory)
    check_agreement(found, reference.num_steps)
    check_samples_and_losses(found, sizes, reference)
    check_parameters(found, sizes, reference)


def check_agreement(found: dict[str, list[Line]], num_steps: int) -> None:
    """RULE-4: one attempt at each step is committed, and no step is begun on shards of different steps."""
    committed: defaultdict[int, set[int]] = defaultdict(set)
    tips: defaultdict[tuple[int, int], set[tuple[int, int]]] = defaultdict(set)
    for line in itertools.chain(*found.values()):
        if line["kind"] == "committed":
            committed[line["step"]].add(line["generation"])
        elif line["kind"] == "prepared" and line["tip"] is not None:
            tips[line["step"], line["generation"]].add(tuple(line["tip"]))
    assert sorted(committed) == list(range(num_steps))
    assert all(len(generations) == 1 for generations in committed.values()), committed
    assert all(len(held) == 1 for held in tips.values()), tips


def check_samples_and_losses(found: dict[str, list[Line]], sizes: Sizes, reference: Reference) -> None:
    """RULE-5, in each part of the model; and what the last stage computed is what the run without sharding did."""
    generation_of = {
        line["step"]: line["generation"] for line in itertools.chain(*found.values()) if line["kind"] == "committed"
    }
    batches = GlobalBatch(NUM_SAMPLES, size=BATCH_SIZE, slot=SLOT, seed=SEED)
    taken: defaultdict[tuple[int, int, int], Counter[int]] = defaultdict(Counter)
    losses: defaultdict[int, float] = defaultdict(float)
    for line in itertools.chain(*found.values()):
        if line["kind"] != "prepared" or generation_of[line["step"]] != line["generation"]:
            continue
        pp, _, _, tp = line["seat"]
        taken[line["step"], pp, tp].update(line["samples"])
        if (pp, tp) == (sizes.pp - 1, 0):
            losses[line["step"]] += line["loss"]
    for step, pp, tp in itertools.product(range(reference.num_steps), range(sizes.pp), range(sizes.tp)):
        assert taken[step, pp, tp] == Counter(batches.samples(step).tolist()), f"step {step}, pp {pp}, tp {tp}"
    for step, loss in losses.items():
        assert math.isclose(loss, reference.losses[step], rel_tol=TOLERANCE), f"step {step}"


def check_parameters(found: dict[str, list[Line]], sizes: Sizes, reference: Reference) -> None:
    """Bit for bit among those that hold the same part; together, those of the run without sharding."""
    finished = [line for line in itertools.chain(*found.values()) if line["kind"] == "finished"]
    digests: defaultdict[tuple[int, int, int], set[str]] = defaultdict(set)
    parts = {}
    for line in finished:
        pp, _, sdp, tp = line["seat"]
        digests[pp, sdp, tp].add(line["digest"])
        parts[pp, sdp, tp] = line["parameters"]
        assert set(line["steps"]) == {reference.num_steps}
    assert len(digests) == sizes.pp * sizes.sdp * sizes.tp
    assert all(len(of_part) == 1 for of_part in digests.values()), digests
    whole = whole_parameters(parts)
    assert whole.keys() == reference.parameters.keys()
    for name, values in whole.items():
        wanted = reference.parameters[name]
        assert all(
            math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE) for a, b in zip(values, wanted, strict=True)
        )


def seats(found: dict[str, list[Line]]) -> dict[int, dict[str, Seat]]:
    """Who sat where in each generation, of those that came as far as the end of a step's backward."""
    sat: defaultdict[int, dict[str, Seat]] = defaultdict(dict)
    for member, lines in found.items():
        for line in lines:
            if line["kind"] == "prepared":
                pp, rdp, sdp, tp = line["seat"]
                assert sat[line["generation"]].setdefault(member, (pp, rdp, sdp, tp)) == (pp, rdp, sdp, tp)
    return dict(sorted(sat.items()))


def moved(found: dict[str, list[Line]]) -> list[tuple[int, str]]:
    """(generation, member) of those that came to another seat than their last one."""
    last: dict[str, Seat] = {}
    moves = []
    for generation, of_member in seats(found).items():
        moves += [(generation, member) for member, seat in of_member.items() if last.get(member, seat) != seat]
        last.update(of_member)
    return moves
