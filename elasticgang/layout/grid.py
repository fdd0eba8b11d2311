"""Axes -> groups of ranks, for the four axes of a plan and for any number of named ones.

Pure. Refuses to know processes and process groups: `gang/grid.py` makes gangs of what is enumerated here.

A1  Every rank of a grid is in exactly one group of each enumeration.
A2  Groups come in ascending order of their lowest rank, and ranks ascend within a group, unless the caller asks for
    the order as given. Hence two enumerations with the same groups are equal.
A3  Equal dims have equal keys, in whatever order they are named; different groups of one grid have different keys.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass, field

from elasticgang.errors import LayoutError
from elasticgang.layout.layout import AXES

KEY_SEPARATOR = "-"
VIEW_SEPARATOR = "/"


def groups_over(shape: Sequence[int], along: Container[str]) -> tuple[tuple[int, ...], ...]:
    """Ranks that differ only along `along`: one tuple per group, in rank order. `shape`: sizes of `AXES`."""
    strides = [math.prod(shape[index + 1 :]) for index in range(len(shape))]
    axes = list(zip(AXES, shape, strides, strict=True))
    firsts = _sums([(size, stride) for axis, size, stride in axes if axis not in along])
    offsets = _sums([(size, stride) for axis, size, stride in axes if axis in along])
    return tuple(tuple([first + offset for offset in offsets]) for first in firsts)


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
        object.__setattr__(self, "shape", tuple(self.shape))
        object.__setattr__(self, "dim_names", tuple(self.dim_names))
        if len(self.shape) != len(self.dim_names):
            raise LayoutError(
                f"`shape` must have one size for each of `dim_names`, but {list(self.shape)} has {len(self.shape)} "
                f"and {list(self.dim_names)} has {len(self.dim_names)} instead."
            )
        if not all(_is_at_least(1, size) for size in self.shape):
            raise LayoutError(f"`shape` must hold integers of at least 1, but is {list(self.shape)} instead.")
        if not _is_at_least(0, self.rank_offset):
            raise LayoutError(f"`rank_offset` must be an integer of at least 0, but is {self.rank_offset!r} instead.")
        for name in self.dim_names:
            if not name or KEY_SEPARATOR in name or VIEW_SEPARATOR in name:
                raise LayoutError(f'A name in `dim_names` must not be empty or contain "-" or "/", but {name!r} does.')
        _refuse_repeated("dim_names", self.dim_names)

    @property
    def size(self) -> int:
        """Ranks in the grid."""
        return math.prod(self.shape)

    def rank_groups(self, dims: str | Sequence[str], *, ordered_as_given: bool = False) -> list[list[int]]:
        """The ranks that differ only along `dims`: one list per group.

        In ascending order, whatever the order of `dims`; `ordered_as_given=True` lets the last of `dims` vary fastest
        within a group.

        Raises:
            LayoutError: `dims` is empty, repeats a name, or names something else than the grid's dims.

        Source: `ordered_as_given` is HyperCommGrid's `_gen_rank_enum`.
        """
        named = self._slowest_first(dims)
        inner = list(_as_list(dims)) if ordered_as_given else named
        outer = [name for name in reversed(self.dim_names) if name not in named]
        offsets = self._offsets(inner)
        return [[self.rank_offset + first + offset for offset in offsets] for first in self._offsets(outer)]

    def key(self, dims: str | Sequence[str]) -> str:
        """The name of the gangs along `dims`: them in reversed `dim_names` order, joined by "-"."""
        return KEY_SEPARATOR.join(self._slowest_first(dims))

    def _slowest_first(self, dims: str | Sequence[str]) -> list[str]:
        named = _as_list(dims)
        if not named:
            raise LayoutError("`dims` must name at least one dim, but is empty instead.")
        _refuse_repeated("dims", named)
        for name in named:
            if name not in self.dim_names:
                raise LayoutError(f"`dims` must be among {list(self.dim_names)}, but names {name!r} instead.")
        return [name for name in reversed(self.dim_names) if name in named]

    def _offsets(self, names: Sequence[str]) -> list[int]:
        indices = [self.dim_names.index(name) for name in names]
        return _sums([(self.shape[index], math.prod(self.shape[:index])) for index in indices])


@dataclass(frozen=True)
class View:
    """A further factorisation; the gangs along `shared_dims` are those of the base."""

    axes: Axes
    shared_dims: tuple[str, ...]


@dataclass
class Grid:
    """A base factorisation of some ranks, and further ones of the same ranks by name: the pure half of `GangGrid`.

    `world_size`: if given, the grid must lie within it.

    Raises:
        LayoutError: see `Axes`; or the grid is larger than the world minus its offset.
    """

    base: Axes
    world_size: int | None = None
    views: dict[str, View] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        room = self.base.size if self.world_size is None else self.world_size - self.base.rank_offset
        if self.base.size > room:
            raise LayoutError(
                f"A grid of shape {list(self.base.shape)} at rank {self.base.rank_offset} must fit into the world, but "
                f"has {self.base.size} ranks, and a world of {self.world_size} has {max(room, 0)} from there."
            )

    def register_view(
        self, name: str, shape: Sequence[int], dim_names: Sequence[str], shared_dims: Sequence[str] = ()
    ) -> None:
        """Name a further factorisation of the same ranks, for example for expert parallelism.

        It is enough that each shared dim alone enumerates to the same groups: so do any of them together, since their
        groups are what the groups of the single dims join to.

        Raises:
            LayoutError: the name is taken or ambiguous, the sizes do not multiply to the size of the grid, a shared dim
                is not a dim of both, or enumerates to other groups. The grid is unchanged.
        """
        if not name or VIEW_SEPARATOR in name or name in self.views:
            raise LayoutError(f'`name` must be new, not empty and without "/", but is {name!r} instead.')
        axes = Axes(tuple(shape), tuple(dim_names), self.base.rank_offset)
        if axes.size != self.base.size:
            raise LayoutError(
                f"The view {name!r} of shape {list(axes.shape)} must have the grid's {self.base.size} ranks, but has "
                f"{axes.size} instead."
            )
        _refuse_repeated("shared_dims", shared_dims)
        for dim in shared_dims:
            _refuse_different_groups(name, dim, self.base, axes)
        self.views[name] = View(axes, tuple(shared_dims))

    def rank_groups(
        self, dims: str | Sequence[str], *, view: str | None = None, ordered_as_given: bool = False
    ) -> list[list[int]]:
        """See `Axes.rank_groups`; of the base, or of a view."""
        return self._axes(view).rank_groups(dims, ordered_as_given=ordered_as_given)

    def key(self, dims: str | Sequence[str], *, view: str | None = None) -> str:
        """See `Axes.key`. What a view shares has the key of the base; its own are prefixed by its name and "/"."""
        key = self._axes(view).key(dims)
        if view is None:
            return key
        if set(_as_list(dims)) <= set(self.views[view].shared_dims):
            return self.base.key(dims)
        return f"{view}{VIEW_SEPARATOR}{key}"

    def _axes(self, view: str | None) -> Axes:
        if view is None:
            return self.base
        if view not in self.views:
            raise LayoutError(f"`view` must be one of {sorted(self.views)}, but is {view!r} instead.")
        return self.views[view].axes


def _is_at_least(minimum: int, value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum


def _as_list(dims: str | Sequence[str]) -> list[str]:
    return [dims] if isinstance(dims, str) else list(dims)


def _refuse_repeated(what: str, names: Sequence[str]) -> None:
    if len(set(names)) != len(names):
        raise LayoutError(f"`{what}` must name each dim once, but is {list(names)} instead.")


def _refuse_different_groups(view: str, dim: str, base: Axes, axes: Axes) -> None:
    for where in (base, axes):
        if dim not in where.dim_names:
            raise LayoutError(
                f"The shared dim {dim!r} of view {view!r} must be a dim of both, but is not among "
                f"{list(where.dim_names)}."
            )
    ours, theirs = base.rank_groups(dim), axes.rank_groups(dim)
    if ours != theirs:
        raise LayoutError(
            f"The shared dim {dim!r} must have the same groups in the base and in view {view!r}, but has {ours} and "
            f"{theirs} instead."
        )
