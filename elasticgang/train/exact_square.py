"""The exact sum of squares of the elements of tensors, as whole numbers that any sum over ranks keeps exact.

A float sum depends on the order of its additions, and so on how ranks divide a parameter. Here every square is a
float64, and their sum is not rounded.

EXACT-1  The limbs depend on the elements alone: not on their order, nor on the tensors and ranks that have them. What
    is below `2**LOW` of a square is left out before the sum.
EXACT-2  The sum over up to `2**13` ranks of one limb is below `2**53`, so that float64 adds the ranks' limbs exactly.

The square of a float32 is exact in float64, and those of a bfloat16 and a float16 are too. That of a float64 is
rounded, each by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

LOW, HIGH = -320, 320  # a square is below 2**HIGH; those of float32 are from 2**-298 to 2**256
_LIMB_BITS = 40  # EXACT-2
NUM_LIMBS = (HIGH - LOW) // _LIMB_BITS + 1  # the last one is for carries
NUM_NUMBERS = NUM_LIMBS + 1

# Elements that are summed at a time, as a power of two: on the CPU, some vectors of them fit into a core's cache. On
# other devices, each pass waits for the device.
_CHUNK_BITS, _CHUNK_BITS_ELSEWHERE = 15, 22
_SUM_BITS = 52  # of whole numbers in float64, with one to spare


@torch.no_grad()
def numbers_of(parts: Iterable[Tensor], *, chunk_bits: int | None = None) -> list[float]:
    """NUM_NUMBERS numbers, to be summed over ranks: 0.0, or what is not finite or too large; and the limbs.
    `chunk_bits`: how many elements are summed at a time, as a power of two."""
    total, special = 0, 0.0
    for part in parts:
        flat = (torch.view_as_real(part) if part.is_complex() else part).reshape(-1)
        bits = chunk_bits or (_CHUNK_BITS if part.device.type == "cpu" else _CHUNK_BITS_ELSEWHERE)
        for chunk in torch.split(flat, 1 << bits):
            found = _sum_of(chunk, _SUM_BITS - bits)
            if isinstance(found, float):
                special += found
            else:
                total += found
    limbs = []
    for _ in range(NUM_LIMBS):
        total, limb = divmod(total, 1 << _LIMB_BITS)
        limbs.append(float(limb))
    return [special, *limbs]


def root_of(numbers: Sequence[float]) -> float:
    """The square root of the sum that `numbers_of` stands for. `numbers`: summed over ranks."""
    special, *limbs = numbers
    if special:  # NaN too
        return special
    total = sum(int(limb) << (_LIMB_BITS * place) for place, limb in enumerate(limbs))
    return math.ldexp(math.sqrt(total), LOW // 2)


def _sum_of(chunk: Tensor, bits: int) -> int | float:
    """The sum of the squares in units of `2**LOW`; a float is infinite or NaN. `bits`: of each square in a pass."""
    squares = chunk.to(torch.float64, copy=True).square_()
    total = 0
    while largest := float(squares.max()) if squares.numel() else 0.0:
        if not largest < 2.0**HIGH:
            return math.nan if math.isnan(largest) else math.inf
        unit = max(math.frexp(largest)[1] - bits, LOW)
        whole = squares.mul(2.0**-unit).floor_()  # below 2**bits, so that their sum is exact
        total += int(whole.sum()) << (unit - LOW)
        if unit == LOW:
            break  # EXACT-1
        squares.sub_(whole, alpha=2.0**unit)  # exact: the lower bits of each
    return total
