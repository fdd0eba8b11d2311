"""`keep=True` where replica groups have several ranks: a kill in the middle of a step costs the dead group's slots, and
those under way. The others keep theirs, each rank its own part of the gradients."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import sharded
from tests.chaos.sharded import Line, Reference, Sizes, steps_for
from tests.chaos.test_kills import BACK, Fault, at, soon
from tests.chaos.test_reproducible import parts_of
from tests.exhaustive import always_without, exhaustive

NUM_SLOTS = 16  # eight for each of two groups
KEPT = ("--keep", "--slot", "1")

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp=2": {"tp": 2},
    "sdp=2 by FSDP2": {"sdp": 2, "fsdp": True},
    "sdp=2 by hand": {"sdp": 2},
    "pp=2": {"pp": 2},
}
# Each of these waits until the others have finished so many slots: at most two of them, of the group that dies.
FAULTS: list[Fault] = [
    at("slot", 1, slots=8, step=2),
    at("slot", 2, slots=8),
    soon("slot", 1, later=True),  # in the next try
    at("body", 3, slots=6),
    at("totals_received", 0),
    at("votes_received", 2),
    at("slot", 0, "comm", slots=8),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return sharded.reference_in(tmp_path_factory.mktemp("reference"))


def check_slots(directory: Path, sizes: Sizes, steps: int) -> None:
    """RULE-5 by slots, in each part of the model; and what the groups that stay whole compute again."""
    found = sharded.histories(directory)
    committed = {
        line["step"]: line["generation"] for line in itertools.chain(*found.values()) if line["kind"] == "committed"
    }
    assert sorted(committed) == list(range(steps))
    taken: defaultdict[tuple[int, int, int], Counter[int]] = defaultdict(Counter)
    for lines in found.values():
        prepared = {(line["step"], line["generation"]): line for line in lines if line["kind"] == "prepared"}
        for step, generation in committed.items():
            if (line := prepared.get((step, generation))) is not None:
                pp, _, _, tp = line["seat"]
                taken[step, pp, tp].update(line["slots"])
    for step, pp, tp in itertools.product(committed, range(sizes.pp), range(sizes.tp)):
        assert taken[step, pp, tp] == Counter(range(NUM_SLOTS)), f"step {step}, pp {pp}, tp {tp}"
    for step in range(1, steps):  # DIVISION-5: not step 0
        check_computed_once(found, step, sizes)


def check_computed_once(found: dict[str, list[Line]], step: int, sizes: Sizes) -> None:
    """A rank whose group was the same in all tries of `step` has computed a slot again only if that was under way when
    a generation ended, or was not finished by its whole group (KEEP-4)."""
    by_member: dict[str, list[Line]] = {
        member: [line for line in lines if line["kind"] == "computed" and line["step"] == step]
        for member, lines in found.items()
    }
    groups: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
    for member, lines in by_member.items():
        for line in lines:
            groups[line["generation"], line["seat"][1]].add(member)
    for member, lines in by_member.items():
        tries = {(line["generation"], line["seat"][1]) for line in lines}
        if len({frozenset(groups[each]) for each in tries}) == 1:
            counts = Counter(line["slot"] for line in lines if not line["lost"])
            num_again = sum(count - 1 for count in counts.values())
            assert num_again <= sizes.pp * (len(tries) - 1), f"step {step}, {member}: {counts}"


def kept_slots(directory: Path) -> dict[int, list[int]]:
    """How many slots each rank has kept that has kept any, by step."""
    kept: defaultdict[int, list[int]] = defaultdict(list)
    for lines in sharded.histories(directory).values():
        for line in lines:
            if line["kind"] == "kept":
                kept[line["step"]].append(len(line["slots"]))
    return dict(kept)


# DIVISION-5, KEEP-2, KEEP-4, DIVISION-1, DIVISION-3
@pytest.mark.parametrize("name", always_without(LAYOUTS, {"tp=2", "sdp=2 by FSDP2", "sdp=2 by hand"}))
def test_whole_groups_keep_the_sums_of_their_slots(name: str, tmp_path: Path, reference: Reference) -> None:
    sizes = Sizes(active=4, **LAYOUTS[name])
    job = sharded.run(tmp_path, sizes, FAULTS, options=KEPT)
    sharded.check(job, sizes, FAULTS, reference)
    check_slots(tmp_path, sizes, steps_for(FAULTS))
    kept = kept_slots(tmp_path)
    assert sum(map(sum, kept.values())) >= 8, kept


# KEEP-4, SUM-1, SUM-2
@pytest.mark.parametrize("name", always_without(LAYOUTS, {"tp=2", "sdp=2 by hand", "pp=2"}))
def test_kept_parts_leave_no_trace_in_the_bits(name: str, tmp_path: Path) -> None:
    """One group alone keeps nothing, and has the same slots."""
    faults = FAULTS[1:4]  # the test before has all of them
    options, steps = ("--reduction", "reproducible", "--slot", "1"), steps_for(faults)
    alone = parts_of(tmp_path / "alone", LAYOUTS[name], 1, 2, [], *options, steps=steps)
    assert parts_of(tmp_path / "two", LAYOUTS[name], 2, 2, faults, *options, "--keep", steps=steps) == alone
    check_slots(tmp_path / "two", Sizes(active=4, **LAYOUTS[name]), steps)
    kept = kept_slots(tmp_path / "two")
    assert sum(map(sum, kept.values())) >= 8, kept


# Each waits until the others' forwards of so many slots have begun. The kills: at least thirteen of the group that
# stays, so that each of its stages has had the backward of three. The comm process: all that can begin. The first stage
# of its group has had the backward of three slots then, and the last one that of a fourth, or has it under way.
SCHEDULE_FAULTS: list[Fault] = [
    at("slot", 1, slots=18, step=2),
    at("slot", 2, slots=18, step=5),
    at("slot", 0, "comm", slots=20, step=8),
    BACK,
]


# PIPELINE-3, KEEP-4
def test_stages_of_a_schedule_keep_the_gradients_of_their_slots(tmp_path: Path, reference: Reference) -> None:
    sizes = Sizes(active=4, pp=2)
    job = sharded.run(tmp_path, sizes, SCHEDULE_FAULTS, options=(*KEPT, "--schedule"))
    sharded.check(job, sizes, SCHEDULE_FAULTS, reference)
    kept = kept_slots(tmp_path)
    assert [len(kept[step]) for step in (2, 5, 8)] == [2, 2, 4], kept
    assert min(map(min, kept.values())) >= 3, kept


OTHER_GROUPS: dict[str, list[Fault]] = {
    # Rank 1 and rank 2 are of different groups, and have different columns: those that are left form a group.
    "a group of ranks of two groups": [at("slot", 1, [1, 2], slots=6, step=2), at("body", 0, [0, 3], slots=6), BACK],
    "a spare in a group": [at("slot", 1, slots=8, step=2), at("slot", 2, slots=8), soon("healing", None), BACK],
}


# DIVISION-3, DIVISION-4, DIVISION-5
@pytest.mark.parametrize(
    ("name", "reduction"),
    [
        pytest.param("a group of ranks of two groups", "sum", marks=exhaustive),
        pytest.param("a group of ranks of two groups", "reproducible", marks=exhaustive),
        pytest.param("a spare in a group", "sum", marks=exhaustive),
        ("a spare in a group", "reproducible"),
    ],
)
def test_a_group_with_another_rank_computes_its_slots(
    name: str, reduction: str, tmp_path: Path, reference: Reference
) -> None:
    sizes = Sizes(active=4, tp=2, spares=int("spare" in name))
    faults = OTHER_GROUPS[name]
    job = sharded.run(tmp_path, sizes, faults, options=(*KEPT, "--reduction", reduction))
    sharded.check(job, sizes, faults, reference)
    check_slots(tmp_path, sizes, steps_for(faults))
