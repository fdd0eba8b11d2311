"""Sums of squares that no division and no order changes."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elasticgang.train.exact_square import LOW, NUM_NUMBERS, numbers_of, root_of

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)


def summed(*numbers: list[float]) -> list[float]:
    return [sum(column) for column in zip(*numbers, strict=True)]


def square_of(numbers: list[float]) -> Fraction:
    """What the limbs stand for."""
    special, *limbs = numbers
    assert special == 0.0
    total = sum((Fraction(limb) * 2 ** (40 * place) for place, limb in enumerate(limbs)), Fraction(0))
    return total * Fraction(2) ** LOW


# EXACT-1, EXACT-2
@given(st.lists(FINITE, max_size=40), st.lists(st.integers(0, 40), max_size=5), st.randoms(use_true_random=False))
def test_every_order_and_division_has_the_exact_sum(values: list[float], cuts: list[int], random: Random) -> None:
    exact = sum((Fraction(value) ** 2 for value in values), Fraction(0))
    whole = numbers_of([torch.tensor(values)])
    assert len(whole) == NUM_NUMBERS
    assert square_of(whole) == exact
    assert root_of(whole) == pytest.approx(math.sqrt(exact), rel=1e-15)
    random.shuffle(values)
    at = [0, *sorted(min(cut, len(values)) for cut in cuts), len(values)]
    parts = [torch.tensor(values[first:last]) for first, last in itertools.pairwise(at)]
    assert numbers_of(parts) == whole
    assert square_of(summed(*(numbers_of([part]) for part in parts))) == exact


def test_many_large_elements_carry() -> None:
    """Some chunks, of the largest squares that a float32 has, and of many ranks."""
    largest = torch.finfo(torch.float32).max
    numbers = numbers_of([torch.full((3, 40_000), largest)])
    assert square_of(numbers) == 3 * 40_000 * Fraction(largest) ** 2
    ranks = [number * 2**13 for number in numbers]
    assert max(ranks) < 2.0**53
    assert square_of(ranks) == 2**13 * square_of(numbers)


# EXACT-1
@pytest.mark.parametrize("chunk_bits", [1, 4, 22])
def test_the_size_of_a_chunk_does_not_show(chunk_bits: int) -> None:
    part = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 1000)
    assert numbers_of([part], chunk_bits=chunk_bits) == numbers_of([part])


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64], ids=str
)
def test_every_dtype_is_measured_and_left_alone(dtype: torch.dtype) -> None:
    part = torch.randn(3, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    before = part.clone()
    found = root_of(numbers_of([part.t()]))
    assert torch.equal(part, before)
    plain = torch.view_as_real(part) if dtype.is_complex else part
    assert found == pytest.approx(float(torch.linalg.vector_norm(plain.to(torch.float64))), rel=1e-14)


def test_squares_of_float64_are_rounded_each_by_itself() -> None:
    part = torch.randn(500, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    halves = [numbers_of([half]) for half in torch.split(part, 123)]
    assert square_of(summed(*halves)) == sum(map(Fraction, part.square().tolist()))


@pytest.mark.parametrize(
    ("values", "root"),
    [
        ([1.0, torch.inf], math.inf),
        ([-torch.inf, torch.inf], math.inf),
        ([torch.inf, torch.nan], math.nan),
        ([1e200], math.inf),
        ([1e-200], 0.0),
        ([-0.0], 0.0),
        ([], 0.0),
    ],
)
def test_what_has_no_exact_sum(values: list[float], root: float) -> None:
    """The limbs cover the squares of every float32, and not those of every float64."""

    def of(values: list[float]) -> list[float]:
        return numbers_of([torch.tensor(values, dtype=torch.float64)])

    assert root_of(of(values)) == pytest.approx(root, nan_ok=True)
    assert root_of(summed(*(of([value]) for value in values), of([]))) == pytest.approx(root, nan_ok=True)


def test_a_subnormal_float32_counts() -> None:
    assert root_of(numbers_of([torch.tensor([2.0**-149])])) == 2.0**-149
