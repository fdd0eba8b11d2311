"""Several counts in one number of a sum over all ranks. Pure.

A vote says of each part of the model how many of its members drain, and of each learner whether it has healed. A job of
8,000 ranks may have thousands of parts, and nearly all of these counts are 0.

PACK-1  The sum of packed counts is the packed form of the sums of these counts: no count is above the maximum, so that
    none runs over into the next one, and all numbers are integers that a double holds exactly, in whatever order they
    are added.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

_MAX_EXACT = 2**53


class PackedCounts:
    """The form of `num_counts` counts, of which each is at most `max_count` over all ranks. `num_numbers`: the length
    of what `pack` returns."""

    def __init__(self, num_counts: int, max_count: int) -> None:
        self._base = _base(max_count)
        self._num_each = _num_each(self._base)
        self.num_numbers = -(-num_counts // self._num_each)

    def pack(self, counts: Mapping[int, int]) -> list[float]:
        """`counts`: of this rank, by their index; those that it lacks are 0."""
        base, num_each = self._base, self._num_each
        numbers = [0] * self.num_numbers
        for index, count in counts.items():
            at, place = divmod(index, num_each)
            numbers[at] += count * base**place
        return list(map(float, numbers))

    def unpack(self, sums: Sequence[float]) -> dict[int, int]:
        """The counts that are not 0, by their index. `sums`: over all ranks, of `pack`."""
        base, num_each = self._base, self._num_each
        found = {}
        for at, number in enumerate(map(int, sums)):
            index = at * num_each
            while number:
                number, count = divmod(number, base)
                if count:
                    found[index] = count
                index += 1
        return found


def _base(max_count: int) -> int:
    return max_count + 1


def _num_each(base: int) -> int:
    """How many counts share a number (PACK-1)."""
    num = 1
    while base ** (num + 1) <= _MAX_EXACT:
        num += 1
    return num
