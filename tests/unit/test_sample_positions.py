"""How far a job has come in its data, also where it goes on with another size of the global batch."""

from __future__ import annotations

import pytest

from elasticgang.errors import MismatchError
from elasticgang.protocol.sample_positions import MAX_LINES, BatchShape, SamplePositions


def shape(num_samples: int = 64, size: int = 16, seed: int = 0, *, is_sampled: bool = False) -> BatchShape:
    return BatchShape(num_samples, size, 2, seed, is_sampled)


def voted(steps: int, *shapes: BatchShape) -> SamplePositions:
    """That of a rank that takes part in so many steps."""
    positions = SamplePositions()
    for step in range(steps):
        for each in shapes:
            positions.take(step, each)
        positions.vote(step, shapes)
    return positions


def resumed(of: SamplePositions) -> SamplePositions:
    """That of a job that goes on at a checkpoint, or of a rank that has healed."""
    positions = SamplePositions()
    positions.load_state_dict(of.state_dict())
    return positions


# POSITION-1
@pytest.mark.parametrize("size", [8, 16, 48])
def test_a_job_that_is_resumed_with_another_size_goes_on_where_the_samples_were(size: int) -> None:
    positions = resumed(voted(3, shape()))
    before, firsts = positions.state_dict(), []
    for step in (3, 3, 4, 6):
        positions.load_state_dict(before if step == 3 else positions.state_dict())  # the first step is tried again
        firsts.append(positions.take(step, shape(size=size)))
        positions.vote(step, [shape(size=size)])
    assert firsts == [48, 48, 48 + size, 48 + 3 * size]


# POSITION-1
def test_global_batches_of_several_sizes_in_a_job_do_not_move_each_other() -> None:
    """A loader fetches ahead what its own batches take by the index of the step."""
    positions = SamplePositions()
    for step in range(6):
        sizes = (16, 8) if step < 2 else (16 if step % 2 else 8,)
        for size in sizes * 2:
            assert positions.take(step, shape(size=size)) == step * size
        positions.vote(step, [shape(size=size) for size in sizes])


# POSITION-2
def test_a_job_is_not_resumed_with_another_number_of_samples_of_one_seed() -> None:
    positions = resumed(voted(3, shape()))
    for _ in range(2):
        with pytest.raises(ValueError, match="must be 64, as in the job that this one continues, but is 80 instead"):
            positions.take(3, shape(80))
    assert positions.take(3, shape(80, seed=1)) == 3 * 16


def test_other_data_may_follow_in_a_job_that_goes_on() -> None:
    """Also in one that was resumed before, and where the first step with it is tried again."""
    positions = resumed(voted(3, shape()))
    positions.take(3, shape())
    positions.vote(3, [shape()])
    positions.load_state_dict(positions.state_dict())
    assert [positions.take(4, shape(80)) for _ in range(2)] == [4 * 16] * 2


def healed(own: BatchShape) -> SamplePositions:
    """Of a rank that has healed in step 3 from others, which took it from `shape()`."""
    positions = SamplePositions()
    positions.take(3, own)
    positions.vote(3, [own])
    positions.load_state_dict(voted(4, shape()).state_dict())
    return positions


# POSITION-3
@pytest.mark.parametrize("own", [shape(80), shape(size=8), shape(seed=1)], ids=["num_samples", "size", "seed"])
def test_a_rank_that_heals_with_another_global_batch_takes_no_samples(own: BatchShape) -> None:
    positions = healed(own)
    for _ in range(2):
        with pytest.raises(
            MismatchError, match=r"took step 3 from `GlobalBatch\(64, size=16, seed=0\)`, but this rank"
        ):
            positions.take(4, own)


def test_a_rank_that_has_yet_to_heal_in_the_next_step_is_not_refused() -> None:
    """The others have committed the step in which it began to heal, with the state of before that step."""
    positions = voted(0)
    positions.take(0, shape())
    positions.vote(0, [shape()])
    positions.load_state_dict(voted(0).state_dict())
    assert positions.take(1, shape()) == 16


def test_a_rank_heals_in_a_step_with_the_data_of_before_and_goes_on_with_other_data() -> None:
    assert healed(shape()).take(4, shape(80)) == 64
    assert healed(shape()).take(4, shape(size=8)) == 32


def test_a_step_may_be_tried_again_with_fewer_batches() -> None:
    positions = voted(3, shape())
    before = positions.state_dict()
    positions.take(3, shape()), positions.take(3, shape(80))
    positions.vote(3, [shape(), shape(80)])
    positions.load_state_dict(before)
    positions.take(3, shape())
    positions.vote(3, [shape()])
    assert positions.take(4, shape()) == 64


def test_batches_of_two_orders_in_a_step_have_positions_of_their_own() -> None:
    both = shape(64, 16), shape(80, 8)
    positions = resumed(voted(3, *both))
    assert [positions.take(3, each) for each in both] == [48, 24]


def test_two_batches_of_one_order_in_a_step_begin_at_the_same_sample() -> None:
    positions = voted(3, shape(), shape())
    assert [positions.take(3, shape()) for _ in range(2)] == [48, 48]


def test_what_a_sampler_chooses_has_no_position() -> None:
    positions = voted(3, shape(is_sampled=True))
    assert positions.state_dict() == SamplePositions().state_dict()
    assert positions.take(3, shape(size=8, is_sampled=True)) == 24


def test_a_job_without_positions_goes_on_as_one_of_one_size() -> None:
    assert resumed(SamplePositions()).take(3, shape()) == 48


def test_the_positions_of_few_kinds_are_kept() -> None:
    positions = voted(2 * MAX_LINES)
    for step in range(2 * MAX_LINES):
        positions.take(step, shape(seed=step))
    assert len(positions.state_dict()["taken"]) == MAX_LINES
