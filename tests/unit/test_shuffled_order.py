"""Orders of samples of which any places can be computed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from elasticgang.train.shuffled_order import ShuffledOrder

SIZES = [1, 2, 1000, 1 << 17, (1 << 17) + 1, 362**2, 362**2 + 1, 500_000, 1 << 20]
HUGE = 10**12
NUM = 1 << 16  # places, of a test
NUM_PARTS = 256


def places(num: int = NUM, first: int = 0) -> Tensor:
    return torch.arange(first, first + num)


def deviation(samples: Tensor, num_samples: int) -> float:
    """How unevenly they lie in equal parts of the dataset: a chi-square, in standard deviations of that of uniform
    ones."""
    parts = (samples.double() * NUM_PARTS / num_samples).long().clamp(max=NUM_PARTS - 1)
    expected = samples.numel() / NUM_PARTS
    square = ((torch.bincount(parts, minlength=NUM_PARTS) - expected) ** 2 / expected).sum().item()
    return (square - (NUM_PARTS - 1)) / math.sqrt(2 * (NUM_PARTS - 1))


# ORDER-1
@pytest.mark.parametrize("num_samples", SIZES)
def test_an_order_has_each_sample_once(num_samples: int) -> None:
    order = ShuffledOrder(num_samples, seed=3)
    assert order.at(places(num_samples)).sort().values.equal(places(num_samples))


# ORDER-2
@pytest.mark.parametrize("num_samples", [1000, 500_000, 10**9])
def test_the_sample_at_a_place_is_the_same_whatever_is_asked_for_beside_it(num_samples: int) -> None:
    order, some = ShuffledOrder(num_samples, seed=3), places(200, first=300)
    whole = order.at(some)
    assert torch.cat([ShuffledOrder(num_samples, seed=3).at(some[at : at + 1]) for at in range(200)]).equal(whole)
    assert order.at(some.flip(0)).equal(whole.flip(0))
    assert not order.at(some[:0]).numel()


def test_a_large_order_is_the_same_in_every_version() -> None:
    assert ShuffledOrder(10**9, seed=5).at(places(4)).tolist() == [206219727, 141803168, 257214170, 66964420]
    assert ShuffledOrder(HUGE, seed=2**63 - 1).at(places(2, first=HUGE - 2)).tolist() == [27059296881, 298783243510]


@pytest.mark.parametrize("num_samples", [500_000, 1 << 20, HUGE])
@pytest.mark.parametrize("distance", [1, 2, 64, 1000, 1024])
def test_a_large_order_is_random(num_samples: int, distance: int) -> None:
    """The places, and the distances of samples, also from those of another pass."""
    order, other = ShuffledOrder(num_samples, seed=1), ShuffledOrder(num_samples, seed=2)
    for base in (0, math.isqrt(num_samples) * 3):
        samples, later = order.at(places(first=base)), order.at(places(first=base + distance))
        assert abs(deviation(samples, num_samples)) < 5
        assert abs(deviation((later - samples) % num_samples, num_samples)) < 5
        assert abs(deviation((other.at(places(first=base)) - samples) % num_samples, num_samples)) < 5
