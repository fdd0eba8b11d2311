"""`DataLoader` with samples of different sizes: what its collate function makes of them is a batch of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import elasticgang as eg
from elasticgang.errors import OperationalError
from tests.integration.loading import NUM_SAMPLES, SIZE, SLOT, step


class Texts:
    """Sample i has i + 1 tokens. Each is i."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((index + 1,), index)


def padded(samples: list[Tensor]) -> Tensor:
    return pad_sequence(samples, batch_first=True, padding_value=-1)


@pytest.fixture(params=[0, 2], ids=["no worker", "two workers"])
def num_workers(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_the_batches_of_slots_may_have_different_shapes(
    num_workers: int, batches: eg.GlobalBatch, loaders: list[eg.DataLoader]
) -> None:
    loaders.append(loader := eg.DataLoader(Texts(), batches, num_workers=num_workers, collate_fn=padded))
    shapes = set()
    for index in range(NUM_SAMPLES // SIZE):
        for slot, batch in loader.slots(step(index)):
            expected = padded([torch.full((int(sample) + 1,), int(sample)) for sample in slot.index])
            assert torch.equal(batch, expected)
            shapes.add(tuple(batch.shape))
    assert len(shapes) > 1, "the slots are of different sizes"


def test_a_slot_that_cannot_be_collated_is_named_and_the_loader_goes_on(
    num_workers: int, batches: eg.GlobalBatch, loaders: list[eg.DataLoader]
) -> None:
    """torch's own collate function stacks, and wants samples of one size. What it says depends on which sample comes
    first, and on whether a worker calls it."""
    loaders.append(loader := eg.DataLoader(Texts(), batches, num_workers=num_workers))
    slots = iter(loader.slots(step(0)))
    with pytest.raises(OperationalError) as info:
        next(slots)
    one, other = batches.samples(0)[:SLOT].tolist()
    assert f"slot 0 of step 0 (the samples {one}, {other}) cannot be loaded" in str(info.value)
    shapes = " and ".join(sorted((f"[{one + 1}]", f"[{other + 1}]")))
    assert f"the samples of a slot have different shapes ({shapes}): give the loader a `collate_fn`" in str(info.value)
    with pytest.raises(OperationalError, match="slot 0 of step 1 "):
        next(iter(loader.slots(step(1))))
