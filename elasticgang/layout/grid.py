"""Axes -> groups of ranks. Pure."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Container, Sequence

from elasticgang.layout.layout import AXES


def groups_over(shape: Sequence[int], along: Container[str]) -> tuple[tuple[int, ...], ...]:
    """Ranks that differ only along `along`: one tuple per group, in rank order."""
    buckets: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank, coord in enumerate(itertools.product(*map(range, shape))):
        buckets[tuple(c for axis, c in zip(AXES, coord, strict=True) if axis not in along)].append(rank)
    return tuple(map(tuple, buckets.values()))
