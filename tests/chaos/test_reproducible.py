"""`reduction="reproducible"`: with gradients whose sums are rounded, a job ends in the bits of a run alone, for every
number of ranks and all kills."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.chaos import sharded
from tests.chaos.sharded import Sizes
from tests.chaos.sharded_job import whole_parameters
from tests.chaos.test_kills import NUM_STEPS, Fault, at, check, histories, run, run_alone, soon
from tests.exhaustive import always_without, exhaustive

REAL = ("--real", "--rows", "2000")
REPRODUCIBLE = (*REAL, "--reduction", "reproducible")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_alone(tmp_path_factory.mktemp("alone"), *REPRODUCIBLE)


def digests(directory: Path) -> set[str]:
    return {line["digest"] for history in histories(directory) for line in history if line["kind"] == "finished"}


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=exhaustive), pytest.param(4, marks=exhaustive), 5])
def test_every_number_of_ranks_ends_in_the_same_bits(ranks: int, tmp_path: Path, alone: str) -> None:
    """With five, one has no slots."""
    check(run(tmp_path, [], ranks=ranks, script_options=REPRODUCIBLE), [], alone)


@pytest.mark.parametrize("ranks", [2, 3])
def test_plain_sums_of_these_gradients_depend_on_the_ranks(
    ranks: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Otherwise these tests would show nothing."""
    job = run(tmp_path, [], ranks=ranks, script_options=REAL)
    assert job.process.returncode == 0, job.stderr
    assert digests(tmp_path).isdisjoint({run_alone(tmp_path_factory.mktemp("alone"), *REAL)})


SCENARIOS: dict[str, list[Fault]] = {
    "a rank at each place of a step": [
        at("step", 1),
        at("body", 0),
        at("totals_received", 2),
        at("votes_received", 0),
        at("commit_recorded", 1),
        at("torn", 0),
        at("applied", 2),
    ],
    "two ranks at once": [at("body", 0, [0, 1]), at("totals_received", 2, [0, 2]), at("votes_received", 1, [1, 2])],
    "comm processes, which share the memory of the sums": [
        at("body", 0, "comm"),
        at("totals_received", 1, "comms"),
        at("votes_received", 2, "comm"),
    ],
    "ranks that heal": [
        at("body", 2),
        soon("healing", 2),
        soon("chunk_received", 2),
        at("body", 1),
        soon("serving", None),
    ],
    "data workers": [at("body", 0, "workers"), soon("body", 1), soon("torn", 0)],
}


@pytest.mark.parametrize("name", always_without(SCENARIOS, {"two ranks at once", "data workers"}))
def test_kills_leave_no_trace_in_the_bits(name: str, tmp_path: Path, alone: str) -> None:
    workers = ["--num-workers", "1"] if name == "data workers" else []
    check(run(tmp_path, SCENARIOS[name], script_options=[*REPRODUCIBLE, *workers]), SCENARIOS[name], alone)


# SMALLSTATE-1
def test_kills_leave_no_trace_in_settings_that_a_step_sets(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The ranks set the weight decay before `optim.step`: a learner before it heals, its sources after that."""
    options = (*REPRODUCIBLE, "--decay")
    faults = SCENARIOS["a rank at each place of a step"]
    check(run(tmp_path, faults, script_options=options), faults, run_alone(tmp_path_factory.mktemp("alone"), *options))


# Jobs whose ranks hold parts of the model: the number of active ranks of one replica group, and the layout.
LAYOUTS = {
    "FSDP2": (2, {"sdp": 2, "fsdp": True}),
    "shards by hand": (2, {"sdp": 2}),
    "stages of split layers": (4, {"pp": 2, "tp": 2}),
}


def parts_of(
    directory: Path,
    layout: dict[str, int],
    num_groups: int,
    unit: int,
    faults: list[Fault],
    *options: str,
    steps: int,
) -> dict[tuple[int, int, int], set[str]]:
    """The digests that the ranks have ended with, by model coordinates."""
    sizes = Sizes(active=num_groups * unit, **layout)  # type: ignore[arg-type]
    job = sharded.run(directory, sizes, faults, steps=steps, options=options)
    assert job.process.returncode == 0, job.stderr
    assert len(list(directory.glob("fired-*"))) == len(faults)
    found: dict[tuple[int, int, int], set[str]] = {}
    for lines in sharded.histories(directory).values():
        for line in lines:
            if line["kind"] == "finished":
                pp, _, sdp, tp = line["seat"]
                found.setdefault((pp, sdp, tp), set()).add(line["digest"])
    assert len(found) == unit
    return found


@pytest.mark.parametrize("name", always_without(LAYOUTS, {"shards by hand", "FSDP2"}))
def test_parts_of_a_model_end_in_the_bits_of_one_replica_group(name: str, tmp_path: Path) -> None:
    """Two groups, of which one dies and heals, and three. Clipping is by the norm of the whole model."""
    unit, layout = LAYOUTS[name]
    reproducible, steps = ("--reduction", "reproducible"), 10
    alone = parts_of(tmp_path / "alone", layout, 1, unit, [], *reproducible, steps=steps)
    kills = [at("forward", 0), at("totals_received", 1), at("applied", unit)]
    assert parts_of(tmp_path / "two", layout, 2, unit, kills, *reproducible, steps=steps) == alone
    if name != "stages of split layers":
        assert parts_of(tmp_path / "three", layout, 3, unit, [], *reproducible, steps=steps) == alone
        assert parts_of(tmp_path / "plain", layout, 2, unit, [], steps=steps) != alone


# SCATTER-1
@pytest.mark.parametrize("sdp", [1, *(pytest.param(sdp, marks=exhaustive) for sdp in (2, 4))])
def test_kills_leave_no_trace_in_the_bits_of_shards(sdp: int, tmp_path: Path) -> None:
    """Two groups, at all places of a step, end in the bits of one rank that holds the whole model."""

    def whole(directory: Path, sizes: Sizes, faults: list[Fault]) -> dict[str, list[float]]:
        job = sharded.run(directory, sizes, faults, steps=steps, options=("--reduction", "reproducible"))
        assert job.process.returncode == 0, job.stderr
        assert len(list(directory.glob("fired-*"))) == len(faults)
        parts: dict[tuple[int, int, int], dict[str, list[float]]] = {}
        for line in itertools.chain(*sharded.histories(directory).values()):
            if line["kind"] == "finished":
                pp, _, own, tp = line["seat"]
                assert parts.setdefault((pp, own, tp), line["parameters"]) == line["parameters"]
        return whole_parameters(parts)

    kills = [at("forward", 0), at("totals_received", 1), at("votes_received", 0), at("torn", 1), at("applied", sdp)]
    steps = sharded.steps_for([*kills, {}])
    alone = whole(tmp_path / "alone", Sizes(active=1), [])
    assert whole(tmp_path / "two", Sizes(active=2 * sdp, sdp=sdp, fsdp=True), kills) == alone


# -- gradients that survivors keep

NUM_SLOTS = 8  # two or three on each of three ranks
KEPT = (*REPRODUCIBLE, "--keep", "--slot", "1")


@pytest.fixture(scope="module")
def alone_by_slot(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Without `--keep`: the slots are smaller than in `alone`."""
    return run_alone(tmp_path_factory.mktemp("alone"), *REPRODUCIBLE, "--slot", "1")


def check_slots(directory: Path) -> None:
    """RULE-5 by slots; and who has committed a step has computed no slot of it twice, nor has another one, except at
    step 0 (DIVISION-5)."""
    committed: defaultdict[int, set[int]] = defaultdict(set)
    in_attempt: defaultdict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    by_survivors: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for history in histories(directory):
        survived = {line["step"] for line in history if line["kind"] == "committed"}
        for line in history:
            if line["kind"] == "committed":
                committed[line["step"]].add(line["generation"])
            elif line["kind"] == "computed" and line["step"] in survived:
                by_survivors[line["step"]][line["slot"]] += 1
        prepared = {(line["step"], line["generation"]): line for line in history if line["kind"] == "prepared"}
        for attempt, line in prepared.items():
            in_attempt[attempt].update(line["slots"])
    assert sorted(committed) == list(range(NUM_STEPS))
    for step, (generation,) in committed.items():
        assert in_attempt[step, generation] == Counter(range(NUM_SLOTS)), f"step {step}"
        assert step == 0 or max(by_survivors[step].values()) == 1, f"step {step}: {by_survivors[step]}"


def kept_slots(directory: Path) -> int:
    """How many times a rank has prepared a slot that it computed in an earlier generation."""
    num = 0
    for history in histories(directory):
        computed = {(line["step"], line["generation"], line["slot"]) for line in history if line["kind"] == "computed"}
        for line in history:
            if line["kind"] == "prepared":
                num += sum((line["step"], line["generation"], slot) not in computed for slot in line["slots"])
    return num


KEEPING: dict[str, list[Fault]] = {
    # Each of these waits until the other two ranks have finished so many of their five or six slots.
    "a rank at each place of a step": [
        at("slot", 1, slots=5),
        at("slot", 0, slots=1),
        at("step", 1),
        at("body", 0, slots=5),
        at("totals_received", 2),
        at("votes_received", 0),
        at("torn", 1),
    ],
    "another rank in the next try": [
        at("slot", 1, slots=5),
        soon("step", 0, later=True),  # before it computes
        at("body", 2, slots=5),
        soon("body", 1, later=True),
        at("slot", 0, slots=2),
        soon("configuring", 2),
        at("body", 1, slots=4),
        soon("entered", 0),
    ],
    "two ranks at once, and ranks that heal": [
        at("body", 0, [0, 1], slots=4),
        at("slot", 1, [1, 2], slots=4),
        at("slot", 2, slots=5),
        soon("healing", 2),
        at("body", 1, slots=5),
        soon("serving", None),
    ],
    "comm processes and data workers": [
        at("slot", 0, "comm", slots=4),
        at("body", 1, "comms"),  # in the next try
        at("totals_received", 1, "comms"),
        at("votes_received", 2, "comm"),
        at("slot", 0, "workers"),
        soon("slot", 1),
        at("body", 2, slots=5),
    ],
}


# DIVISION-5, KEEP-2, DIVISION-1
@pytest.mark.parametrize(
    "name", always_without(KEEPING, {"another rank in the next try", "two ranks at once, and ranks that heal"})
)
def test_survivors_keep_the_gradients_of_their_slots(name: str, tmp_path: Path, alone_by_slot: str) -> None:
    workers = ["--num-workers", "1"] if "data workers" in name else []
    faults = KEEPING[name]
    check(run(tmp_path, faults, script_options=[*KEPT, *workers]), faults, alone_by_slot)
    check_slots(tmp_path)
    assert kept_slots(tmp_path) >= max(fault.get("slots", 0) for fault in faults)
