"""How much of the model two parts have in common, where the parts may be of different layouts.

Pure. A layout divides the model evenly along each axis, as if each axis divided a dimension of its own. Real tensors
round to whole rows, so that the numbers are close to the bytes, and not equal to them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from elasticgang.layout.parallel_layout import ParallelLayout
from elasticgang.layout.seat_plan import ModelCoordinates


class Part(NamedTuple):
    """The part at `coordinates` of a model that is divided by `sizes`, those of pp, sdp and tp."""

    sizes: tuple[int, int, int]
    coordinates: ModelCoordinates

    @staticmethod
    def of(layout: ParallelLayout, coordinates: Sequence[int]) -> Part:
        """`coordinates`: the part's (pp, sdp, tp)."""
        return Part((layout.pp, layout.sdp, layout.tp), ModelCoordinates(*coordinates))

    @property
    def share(self) -> Fraction:
        """Of the whole model."""
        return Fraction(1, math.prod(self.sizes))


def common_share(one: Part, other: Part) -> Fraction:
    """What both parts contain, as a share of the whole model."""
    lengths = map(_common_length, one.sizes, one.coordinates, other.sizes, other.coordinates)
    return math.prod(lengths, start=Fraction(1))


def common_shares(one: Part, sizes: tuple[int, int, int]) -> dict[int, Fraction]:
    """What `one` has in common with each part of a model that is divided by `sizes`, by the place of the part among
    them. Parts with nothing in common are left out, and take no time."""
    along = [
        [
            (at, _common_length(size, index, other, at))
            for at in range(index * other // size, -(-(index + 1) * other // size))
        ]
        for size, index, other in zip(one.sizes, one.coordinates, sizes, strict=True)
    ]
    _, num_sdp, num_tp = sizes
    return {
        (pp * num_sdp + sdp) * num_tp + tp: of_pp * of_sdp * of_tp
        for (pp, of_pp), (sdp, of_sdp), (tp, of_tp) in itertools.product(*along)
    }


def _common_length(size: int, index: int, other_size: int, other_index: int) -> Fraction:
    """Of the intervals [index / size, (index + 1) / size) and the other's."""
    low = max(Fraction(index, size), Fraction(other_index, other_size))
    high = min(Fraction(index + 1, size), Fraction(other_index + 1, other_size))
    return max(Fraction(0), high - low)


def sizes_of(shape: Sequence[int]) -> tuple[int, int, int]:
    """Those of pp, sdp and tp, of a plan's shape."""
    pp, _, sdp, tp = shape
    return pp, sdp, tp
