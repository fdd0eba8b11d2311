"""Axes -> groups of ranks, for the four axes of a plan and for any number of named ones.

Pure, without processes and process groups: `gang/grid.py` makes gangs of the enumerated groups.

AXES-1  Every rank is in exactly one group of each enumeration.
AXES-2  Groups ascend by their lowest rank, and ranks ascend within a group, unless the caller requests the order as
    given. Hence two enumerations with the same groups are equal.
AXES-3  Equal dims have equal keys, in whatever order they are named; different groups of one grid have different keys.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticgang.errors import LayoutError
from elasticgang.integers import integer_from

AXES = ("pp", "rdp", "sdp", "tp")  # slowest-varying first
MODEL_AXES = ("pp", "sdp", "tp")  # a seat's coordinates along these say which part of the model it holds

FAMILIES: dict[str, tuple[str, ...]] = {
    "root": AXES,
    "dp": ("rdp", "sdp"),
    "rdp": ("rdp",),
    "sdp": ("sdp",),
    "tp": ("tp",),
    "pp": ("pp",),
    "replica": MODEL_AXES,
}
# Process groups for the runtime's own collectives: over the ranks of root, of dp, and of rdp.
RUNTIME_GANGS = ("control", "reduce", "reduce_rdp")

KEY_SEPARATOR = "-"
VIEW_SEPARATOR = "/"


def groups_over(shape: Sequence[int], along: Container[str]) -> tuple[tuple[int, ...], ...]:
    """Ranks that differ only along `along`: one tuple per group, in rank order. `shape`: sizes of `AXES`."""
    axes = _strided(shape)
    firsts = _sums([(size, stride) for axis, size, stride in axes if axis not in along])
    offsets = _sums([(size, stride) for axis, size, stride in axes if axis in along])
    return tuple(tuple([first + offset for offset in offsets]) for first in firsts)


def group_of(shape: Sequence[int], along: Container[str], rank: int) -> tuple[int, ...]:
    """The group of `groups_over` with `rank` in it."""
    axes = [(size, stride) for axis, size, stride in _strided(shape) if axis in along]
    first = rank - sum(rank // stride % size * stride for size, stride in axes)
    return tuple([first + offset for offset in _sums(axes)])


def groups_within(shape: Sequence[int], axes: Axes, dim: str) -> tuple[tuple[int, ...], ...]:
    """Ranks that differ only along `dim` of `axes`, a factorisation of the seats of each replica group: one tuple per
    group, in rank order. `shape`: sizes of `AXES`."""
    places = axes.rank_groups(dim)
    replicas = groups_over(shape, MODEL_AXES)
    return tuple(sorted(tuple(replica[place] for place in group) for replica in replicas for group in places))


def group_within(shape: Sequence[int], axes: Axes, dim: str, rank: int) -> tuple[int, ...]:
    """The group of `groups_within` with `rank` in it."""
    replica = group_of(shape, MODEL_AXES, rank)
    place = replica.index(rank)
    return tuple([replica[each] for each in next(group for group in axes.rank_groups(dim) if place in group)])


def text_of_ranks(ranks: Sequence[int]) -> str:
    """Another text for other ranks: "3-5-8"; for three or more at equal distances "0..7" or "0..14by2"."""
    if len(ranks) > 2:
        first, last, step = ranks[0], ranks[-1], ranks[1] - ranks[0]
        if step > 0 and tuple(ranks) == tuple(range(first, last + 1, step)):
            return f"{first}..{last}" if step == 1 else f"{first}..{last}by{step}"
    return "-".join(map(str, ranks))


def _strided(shape: Sequence[int]) -> list[tuple[str, int, int]]:
    """The name, size and stride of each of `AXES`."""
    strides = [math.prod(shape[index + 1 :]) for index in range(len(shape))]
    return list(zip(AXES, shape, strides, strict=True))


def _sums(axes: Sequence[tuple[int, int]]) -> list[int]:
    """Every sum of one multiple per (size, stride), the last axis varying fastest."""
    sums = [0]
    for size, stride in axes:
        sums = [start + index * stride for start in sums for index in range(size)]
    return sums


@dataclass(frozen=True)
class Axes:
    """One factorisation of the ranks `rank_offset` to `rank_offset + size`; the first name varies fastest.

    Raises:
        LayoutError: lengths that differ; a name that is repeated, empty or contains "-" or "/", which would make keys
            ambiguous; a size below 1; a negative offset.

    Source: the order of HyperCommGrid's `dim_names` (Megatron-LM).
    """

    shape: tuple[int, ...]
    dim_names: tuple[str, ...]
    rank_offset: int = 0

    def __post_init__(self) -> None:
        shape, offset = tuple(self.shape), integer_from(0, self.rank_offset)
        object.__setattr__(self, "dim_names", tuple(self.dim_names))
        if len(shape) != len(self.dim_names):
            raise LayoutError(
                f"`shape` must have one size for each of `dim_names`, but {list(shape)} has {len(shape)} "
                f"and {list(self.dim_names)} has {len(self.dim_names)} instead."
            )
        sizes = [number for number in (integer_from(1, size) for size in shape) if number is not None]
        if len(sizes) < len(shape):
            raise LayoutError(f"`shape` must hold integers of at least 1, but is {list(shape)} instead.")
        if offset is None:
            raise LayoutError(f"`rank_offset` must be an integer of at least 0, but is {self.rank_offset!r} instead.")
        object.__setattr__(self, "shape", tuple(sizes))
        object.__setattr__(self, "rank_offset", offset)
        for name in self.dim_names:
            if not isinstance(name, str):
                raise LayoutError(f"`dim_names` must hold strings, but is {list(self.dim_names)} instead.")
            if not name or KEY_SEPARATOR in name or VIEW_SEPARATOR in name:
                raise LayoutError(f'A name in `dim_names` must not be empty or contain "-" or "/", but {name!r} does.')
        refuse_repeated("dim_names", self.dim_names)

    @property
    def size(self) -> int:
        """Ranks in the grid."""
        return math.prod(self.shape)

    def rank_groups(self, dims: str | Sequence[str], *, ordered_as_given: bool = False) -> list[list[int]]:
        """The ranks that differ only along `dims`: one list per group.

        In ascending order, whatever the order of `dims`; `ordered_as_given=True` lets the last of `dims` vary fastest
        within a group.

        Raises:
            LayoutError: `dims` is no name and no list of names, is empty, repeats a name, or names a dim that the grid
                does not have.

        Source: `ordered_as_given` is HyperCommGrid's `_gen_rank_enum`.
        """
        named = self._slowest_first(dims)
        inner = list(as_list(dims)) if ordered_as_given else named
        outer = [name for name in reversed(self.dim_names) if name not in named]
        offsets = self._offsets(inner)
        return [[self.rank_offset + first + offset for offset in offsets] for first in self._offsets(outer)]

    def key(self, dims: str | Sequence[str]) -> str:
        """The name of the gangs along `dims`: `dims` in reversed `dim_names` order, joined by "-"."""
        return KEY_SEPARATOR.join(self._slowest_first(dims))

    def to_json(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "dim_names": list(self.dim_names), "rank_offset": self.rank_offset}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Axes:
        """Raises KeyError, TypeError or ValueError: `data` is not a result of `to_json`."""
        return Axes(tuple(map(int, data["shape"])), tuple(map(str, data["dim_names"])), int(data["rank_offset"]))

    def _slowest_first(self, dims: str | Sequence[str]) -> list[str]:
        if not isinstance(dims, Iterable):
            raise LayoutError(f"`dims` must be one or several of {list(self.dim_names)}, but is {dims!r} instead.")
        named = as_list(dims)
        if not named:
            raise LayoutError("`dims` must name at least one dim, but is empty instead.")
        for name in named:
            if name not in self.dim_names:
                raise LayoutError(f"`dims` must be among {list(self.dim_names)}, but names {name!r} instead.")
        refuse_repeated("dims", named)
        return [name for name in reversed(self.dim_names) if name in named]

    def _offsets(self, names: Sequence[str]) -> list[int]:
        indices = [self.dim_names.index(name) for name in names]
        return _sums([(self.shape[index], math.prod(self.shape[:index])) for index in indices])


def as_list(dims: str | Sequence[str]) -> list[str]:
    return [dims] if isinstance(dims, str) else list(dims)


def refuse_repeated(what: str, names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        raise LayoutError(f"`{what}` must name each dim once, but is {list(names)} instead.")
