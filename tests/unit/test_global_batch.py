"""The samples of committed steps, however the ranks come and go, are those of an undisturbed run."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticgang.errors import StepAborted
from elasticgang.member.step import Step
from elasticgang.protocol.member_state import Share
from elasticgang.protocol.sample_positions import BatchShape
from elasticgang.train.data import GlobalBatch, Slot, Slots

SIZES = st.tuples(st.integers(1, 90), st.integers(1, 8), st.integers(1, 5))  # samples, slots in a batch, slot


def batch_of(sizes: tuple[int, int, int], seed: int = 0) -> GlobalBatch:
    num_samples, num_slots, slot = sizes
    return GlobalBatch(num_samples, size=num_slots * slot, slot=slot, seed=seed)


def shares(count: int) -> list[Share]:
    return [Share(index, count) for index in range(count)]


def taken(batches: GlobalBatch, step: int, count: int) -> list[int]:
    return [int(i) for share in shares(count) for slot in batches.share(step, share) for i in slot.index]


class FakeStep:
    """Lost after `checks` checks."""

    def __init__(self, index: int, share: Share | None, checks: int = 1000) -> None:
        self.index, self.share, self._checks = index, share, checks

    def check(self) -> None:
        self._checks -= 1
        if self._checks < 0:
            raise StepAborted("lost")

    def divide(self, num_slots: int) -> None:
        """Nobody keeps slots."""

    def take_samples(self, shape: BatchShape) -> int:
        return self.index * shape.size

    def end_slot(self) -> None:
        pass

    def contribute(self) -> None:
        assert self.share is None, "only a rank without slots has nothing else to contribute"


def slots_in(batches: GlobalBatch, **fields: Any) -> Slots:
    return batches.slots(cast(Step, FakeStep(**fields)))


@pytest.mark.parametrize("sampler", [None, lambda seed, step: range(step, step + 4)])
def test_a_default_device_of_the_script_changes_no_samples(sampler: Any) -> None:
    batches = GlobalBatch(10, size=4, slot=2, sampler=sampler)
    expected = batches.samples(1).tolist()
    batches = GlobalBatch(10, size=4, slot=2, sampler=sampler)
    with torch.device("meta"):
        assert batches.has_samples(1)
        assert taken(batches, 1, 2) == batches.samples(1).tolist() == expected


@settings(max_examples=60)
@given(sizes=SIZES, counts=st.lists(st.integers(1, 12), min_size=1, max_size=20), seed=st.integers(0, 3))
def test_each_sample_is_taken_once_a_pass_with_other_ranks_at_every_step(
    sizes: tuple[int, int, int], counts: list[int], seed: int
) -> None:
    batches = batch_of(sizes, seed)
    samples = [i for step, count in enumerate(counts) for i in taken(batches, step, count)]
    assert len(samples) == len(counts) * batches.size
    for start in range(0, len(samples), batches.num_samples):
        one_pass = Counter(samples[start : start + batches.num_samples])
        assert set(one_pass.values()) == {1}
        if start + batches.num_samples <= len(samples):
            assert set(one_pass) == set(range(batches.num_samples))


@settings(max_examples=60)
@given(sizes=SIZES, count=st.integers(1, 12), step=st.integers(0, 30))
def test_a_step_takes_the_same_samples_in_the_same_order_over_any_number_of_ranks(
    sizes: tuple[int, int, int], count: int, step: int
) -> None:
    batches = batch_of(sizes)
    assert taken(batches, step, count) == batches.samples(step).tolist()
    slots = [slot for share in shares(count) for slot in batches.share(step, share)]
    assert [slot.number for slot in slots] == list(range(batches.num_slots))
    alone = batches.share(step, Share(0, 1))
    assert [slot.seed for slot in slots] == [slot.seed for slot in alone]
    assert all(slot.num_samples == batches.slot for slot in slots)


def test_a_batch_does_not_depend_on_what_was_asked_for_before() -> None:
    wandering, straight = batch_of((17, 2, 3)), batch_of((17, 2, 3))
    for step in (40, 0, 12, 3, 40, 1):
        wandering.samples(step)
    assert all(torch.equal(wandering.samples(step), straight.samples(step)) for step in range(20))


def test_the_tail_of_a_pass_and_the_head_of_the_next_share_a_batch() -> None:
    batches = GlobalBatch(10, size=4, slot=2)
    positions = torch.cat([batches.samples(step) for step in range(5)])
    assert sorted(positions[:10].tolist()) == list(range(10))
    assert sorted(positions[10:].tolist()) == list(range(10))
    assert positions[:10].tolist() != positions[10:].tolist()  # each pass has its own order


def test_a_batch_larger_than_the_data_holds_whole_passes() -> None:
    batches = GlobalBatch(3, size=8, slot=4)
    samples = torch.cat([batches.samples(0), batches.samples(1), batches.samples(2)])
    assert all(sorted(samples[start : start + 3].tolist()) == [0, 1, 2] for start in range(0, 24, 3))


# ORDER-2
def test_a_huge_dataset_costs_no_memory() -> None:
    """Around the end of a pass."""
    num_samples = 10**11 + 1
    batches = GlobalBatch(num_samples, size=8, slot=2)
    step = num_samples // 8
    samples = [taken(batches, at, count) for at, count in ((step - 1, 1), (step, 3), (step + 1, 2))]
    assert samples == [batches.samples(at).tolist() for at in (step - 1, step, step + 1)]
    assert len({*samples[0], samples[1][0]}) == 9  # of one pass
    assert all(0 <= each < num_samples for each in itertools.chain(*samples))


def test_the_seed_decides_the_order() -> None:
    first, same, other = (GlobalBatch(100, size=100, slot=10, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.samples(0), same.samples(0))
    assert not torch.equal(first.samples(0), other.samples(0))


def test_seeds_of_slots_differ_between_slots_steps_and_seeds() -> None:
    seeds = {
        slot.seed
        for seed in range(3)
        for step in range(10)
        for slot in GlobalBatch(50, size=8, slot=2, seed=seed).share(step, Share(0, 1))
    }
    assert len(seeds) == 3 * 10 * 4
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_asking_for_a_batch_leaves_the_random_state_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    GlobalBatch(50, size=8, slot=2).share(5, Share(0, 1))
    assert torch.equal(torch.rand(3), expected)


def test_the_last_slot_of_each_share_and_no_other_is_marked() -> None:
    batches = GlobalBatch(50, size=10, slot=2)
    for count in (1, 2, 3, 5, 8):
        for share in shares(count):
            marks = [slot.last for slot in batches.share(0, share)]
            assert marks == [False] * (len(marks) - 1) + [True] * bool(marks)


def test_more_ranks_than_slots_leaves_some_without() -> None:
    batches = GlobalBatch(50, size=4, slot=2)
    sizes = [batches.share(0, share).num_samples for share in shares(5)]
    assert sorted(sizes) == [0, 0, 0, 2, 2]


def test_a_learner_has_no_slots() -> None:
    empty = slots_in(GlobalBatch(50, size=4, slot=2), index=3, share=None)
    assert len(empty) == 0
    assert empty.num_samples == 0
    assert list(empty) == []


def test_iterating_seeds_torch_for_each_slot() -> None:
    batches = GlobalBatch(50, size=8, slot=2)
    alone = {slot.number: torch.rand(2) for slot in slots_in(batches, index=1, share=Share(0, 1))}
    for share in shares(3):
        for slot in slots_in(batches, index=1, share=share):
            assert torch.equal(torch.rand(2), alone[slot.number])
            torch.rand(5)  # how much a slot draws does not show in the next


def test_a_lost_step_is_left_before_its_next_slot_and_after_the_last() -> None:
    batches = GlobalBatch(50, size=8, slot=2)
    for checks in range(5):
        left = iter(slots_in(batches, index=0, share=Share(0, 1), checks=checks))
        assert [next(left).number for _ in range(checks)] == list(range(checks))
        with pytest.raises(StepAborted):
            next(left)


def test_slots_are_a_sequence() -> None:
    slots = slots_in(GlobalBatch(50, size=8, slot=2), index=0, share=Share(0, 1), checks=4)
    assert [slot.number for slot in slots[1:3]] == [1, 2]
    assert slots[-1].last
    assert slots[1:].num_samples == 6


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"num_samples": 0}, "`num_samples` must be at least 1, but is 0 instead."),
        ({"size": 0}, "`size` must be at least 1, but is 0 instead."),
        ({"slot": 0}, "`slot` must be at least 1, but is 0 instead."),
        ({"slot": -2}, "`slot` must be at least 1, but is -2 instead."),
        ({"slot": 3}, "`size` must be a multiple of `slot` (3), but is 4 instead."),
        ({"num_samples": 10.0}, "`num_samples` must be an integer, but is 10.0 instead."),
        ({"size": "4"}, "`size` must be an integer, but is '4' instead."),
        ({"slot": True}, "`slot` must be an integer, but is True instead."),
        ({"seed": "0"}, "`seed` must be an integer, but is '0' instead."),
        ({"seed": 0.5}, "`seed` must be an integer, but is 0.5 instead."),
    ],
)
def test_a_bad_size_is_refused_with_what_was_given(arguments: dict[str, object], complaint: str) -> None:
    given_arguments: dict[str, Any] = {"num_samples": 10, "size": 4, "slot": 2, **arguments}
    with pytest.raises(ValueError, match="must be") as refused:
        GlobalBatch(**given_arguments)
    assert str(refused.value) == complaint


def test_integers_of_numpy_are_those_of_python() -> None:
    """What ranks compare with each other, and write into checkpoints, is the same."""
    given_numbers: dict[str, Any] = {"size": np.int32(4), "slot": np.int8(2), "seed": np.uint64(7)}
    found = GlobalBatch(cast(int, np.int64(10)), **given_numbers)
    numbers = (found.num_samples, found.size, found.slot, found.seed)
    assert numbers == (10, 4, 2, 7)
    assert {type(number) for number in numbers} == {int}


def test_a_step_is_asked_for_nothing_but_its_index_its_place_its_share_and_what_is_kept() -> None:
    """Purity: neither the generation nor anything else of a step decides."""
    batches = GlobalBatch(50, size=8, slot=2)
    fields = {"check": lambda: None, "divide": lambda num_slots: None, "end_slot": lambda: None}
    fields["take_samples"] = lambda shape: 7 * shape.size
    bare = cast(Step, SimpleNamespace(index=7, share=Share(1, 2), **fields))
    assert [slot.index.tolist() for slot in batches.slots(bare)] == [
        slot.index.tolist() for slot in batches.share(7, Share(1, 2))
    ]


# -- samplers

LENGTHS = torch.randint(1, 100, (50,), generator=torch.Generator().manual_seed(4))


def weighted(seed: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + step)
    return torch.multinomial(LENGTHS.float(), 8, replacement=True, generator=generator)


def of_similar_length(seed: int, step: int) -> list[int]:
    """Each slot of four has samples of similar length."""
    chosen = torch.randperm(50, generator=torch.Generator().manual_seed(seed + step))[:8]
    return [int(i) for i in chosen[LENGTHS[chosen].argsort()]]


@pytest.mark.parametrize("sampler", [weighted, of_similar_length])
@given(counts=st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_the_ranks_divide_what_a_sampler_returns(sampler: Any, counts: list[int]) -> None:
    batches = GlobalBatch(50, size=8, slot=4, seed=3, sampler=sampler)
    for step, count in enumerate(counts):
        assert taken(batches, step, count) == list(sampler(3, step)) == batches.samples(step).tolist()


def test_a_sampler_is_asked_for_any_step_in_any_order() -> None:
    batches = GlobalBatch(50, size=8, slot=4, seed=3, sampler=weighted)
    assert [batches.samples(step).tolist() for step in (7, 2, 7)] == [weighted(3, step).tolist() for step in (7, 2, 7)]


@pytest.mark.parametrize(
    ("returned", "complaint"),
    [
        (torch.zeros(7, dtype=torch.int64), "must return the 8 indices"),
        (torch.zeros(2, 4, dtype=torch.int64), "must return the 8 indices"),
        (torch.zeros(8), "torch.float32"),
        ([], "must return the 8 indices"),
        ([0] * 7 + [50], "from 0 to 49, but has returned 50 for step 5"),
        ([-1] + [0] * 7, "from 0 to 49, but has returned -1 for step 5"),
    ],
)
def test_what_is_no_batch_is_refused(returned: Any, complaint: str) -> None:
    batches = GlobalBatch(50, size=8, slot=4, sampler=lambda seed, step: returned)
    with pytest.raises(ValueError, match=complaint):
        batches.share(5, Share(0, 2))


def test_a_sampler_that_draws_from_the_processs_own_generator_is_refused() -> None:
    batches = GlobalBatch(50, size=8, slot=4, sampler=lambda seed, step: torch.randperm(50)[:8])
    with pytest.raises(ValueError, match="the same samples whenever it is called"):
        batches.share(0, Share(0, 1))


def test_each_slot_seeds_the_generators_of_cuda_too_where_cuda_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that dropout on a device does not depend on the rank that computes the slot."""
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    slots = Slots([Slot(number, torch.arange(2), seed=10 + number, last=number == 2) for number in range(3)])
    assert [slot.number for slot in slots] == [0, 1, 2]
    assert seeded == [], "CUDA is not initialized, and need not be"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert [torch.initial_seed() for _ in slots] == seeded == [10, 11, 12]
