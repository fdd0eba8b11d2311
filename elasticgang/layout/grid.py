"""A grid of ranks and further factorisations of the same ranks: the pure half of `GangGrid`.

Pure; `axes.py` defines the rules of enumeration (AXES-1 to AXES-3), which hold here too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from elasticgang.errors import GridTooLargeError, LayoutError
from elasticgang.layout.axes import VIEW_SEPARATOR, Axes, as_list, refuse_repeated


@dataclass(frozen=True)
class View:
    """A further factorisation. Its gangs along `shared_dims` are those of the base."""

    axes: Axes
    shared_dims: tuple[str, ...]


@dataclass
class Grid:
    """A base factorisation of some ranks, and further ones of the same ranks by name: the pure half of `GangGrid`.

    `world_size`: if given, the grid must fit into it.

    Raises:
        LayoutError: see `Axes`.
        GridTooLargeError: the grid is larger than the world minus its offset.
    """

    base: Axes
    world_size: int | None = None
    views: dict[str, View] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        room = self.base.size if self.world_size is None else self.world_size - self.base.rank_offset
        if self.base.size > room:
            raise GridTooLargeError(
                f"A grid of shape {list(self.base.shape)} at rank {self.base.rank_offset} must fit into the world, but "
                f"has {self.base.size} ranks, and a world of {self.world_size} has {max(room, 0)} from there."
            )

    def register_view(
        self, name: str, shape: Sequence[int], dim_names: Sequence[str], shared_dims: Sequence[str] = ()
    ) -> None:
        """Name a further factorisation of the same ranks, for example for expert parallelism.

        Each shared dim must enumerate to the same groups in the base and in the view. Combinations of shared dims then
        do too: their groups are unions of the groups of the single dims.

        Raises:
            LayoutError: the name is taken or ambiguous, the sizes do not multiply to the size of the grid, or a shared
                dim is not a dim of both or has different groups. The grid is unchanged.
        """
        if not name or VIEW_SEPARATOR in name or name in self.views:
            raise LayoutError(f'`name` must be new, not empty and without "/", but is {name!r} instead.')
        axes = Axes(tuple(shape), tuple(dim_names), self.base.rank_offset)
        if axes.size != self.base.size:
            raise LayoutError(
                f"The view {name!r} of shape {list(axes.shape)} must have the grid's {self.base.size} ranks, but has "
                f"{axes.size} instead."
            )
        refuse_repeated("shared_dims", shared_dims)
        for dim in shared_dims:
            _refuse_different_groups(name, dim, self.base, axes)
        self.views[name] = View(axes, tuple(shared_dims))

    def rank_groups(
        self, dims: str | Sequence[str], *, view: str | None = None, ordered_as_given: bool = False
    ) -> list[list[int]]:
        """See `Axes.rank_groups`. `view`: None for the base."""
        return self._axes(view).rank_groups(dims, ordered_as_given=ordered_as_given)

    def key(self, dims: str | Sequence[str], *, view: str | None = None) -> str:
        """See `Axes.key`. Shared dims of a view have the key of the base; its other keys start with its name and
        "/"."""
        key = self._axes(view).key(dims)
        if view is None:
            return key
        if set(as_list(dims)) <= set(self.views[view].shared_dims):
            return self.base.key(dims)
        return f"{view}{VIEW_SEPARATOR}{key}"

    def _axes(self, view: str | None) -> Axes:
        if view is None:
            return self.base
        if view not in self.views:
            raise LayoutError(f"`view` must be one of {sorted(self.views)}, but is {view!r} instead.")
        return self.views[view].axes


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
