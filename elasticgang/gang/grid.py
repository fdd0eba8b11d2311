"""Gangs along any named axes of a grid of ranks: the function of HyperCommGrid, with gangs.

GRID-1  `create_gang` is collective over the grid. It makes the gangs in the same order on all ranks.
GRID-2  A gang is made once. `create_gang` and `get_gang` are separate because only making one takes options.
GRID-3  Megatron-LM's methods (`create_pg`, `get_pg`, `get_rank_enum`, ...) return the same gangs as process groups.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from elasticgang.errors import InvalidOperationError, LayoutError, NoWorldError
from elasticgang.gang.base import Gang, create_one_of
from elasticgang.gang.fake import FakeGang
from elasticgang.gang.gangs import Gangs, get_default_device, get_world_size
from elasticgang.gang.process_group import ProcessGroupGang
from elasticgang.gang.torch_process_group import GangProcessGroup
from elasticgang.layout import Axes, Grid

Dims = str | Sequence[str]

_BASE = "base"  # what HyperCommGrid calls the grid itself, among its views
_OURS = ("root", "pp", "dp", "rdp", "sdp", "tp")


class GangGrid:
    """A grid of the ranks `rank_offset` to `rank_offset + prod(shape)`; the first of `dim_names` varies fastest."""

    def __init__(
        self,
        shape: Sequence[int],
        dim_names: Sequence[str],
        rank_offset: int = 0,
        backend: str | None = None,
        *,
        root: Gang | None = None,
    ) -> None:
        """`root`: the gang whose ranks the grid contains. None means torch's default process group, which may be made
        later; then WORLD_SIZE gives its size. `backend`: the backend of new gangs, "gloo" or "nccl"; None for the
        root's.

        Raises:
            LayoutError: the lengths differ, a name is repeated, or a size is below 1.
            GridTooLargeError: the grid is larger than the world minus its offset.
            NoWorldError: there is neither a `root` nor a default process group nor WORLD_SIZE.
        """
        self._given_root = root if root is not None or not dist.is_initialized() else _default_root()
        world = self._given_root
        if backend is not None and not isinstance(world, ProcessGroupGang | None):
            raise LayoutError(f"`backend` must be None for a root of {type(world).__name__}, but is {backend!r}.")
        if backend is not None and backend not in dist.Backend.backend_list:
            known = ", ".join(dist.Backend.backend_list)
            raise LayoutError(f"`backend` must be one of {known}, but is {backend!r} instead.")
        world_size = _world_size_to_be() if world is None else world.size
        for argument, given in (("shape", shape), ("dim_names", dim_names)):
            if not isinstance(given, Iterable):
                raise LayoutError(f"`{argument}` must be a list, but is {given!r} instead.")
        self._grid = Grid(Axes(tuple(shape), tuple(dim_names), rank_offset), world_size)
        self._backend = backend
        self._gangs: dict[str, Gang | None] = {}

    @property
    def _root(self) -> Gang:
        if self._given_root is None:
            self._given_root = _default_root()
        return self._given_root

    @property
    def shape(self) -> list[int]:
        return list(self._grid.base.shape)

    @property
    def dim_names(self) -> list[str]:
        return list(self._grid.base.dim_names)

    @property
    def backend(self) -> str | None:
        """The backend of new gangs, as it was given; None for the root's."""
        return self._backend

    @property
    def rank_offset(self) -> int:
        return self._grid.base.rank_offset

    @property
    def size(self) -> int:
        """Ranks in the grid."""
        return self._grid.base.size

    def rank_groups(self, dims: Dims, *, ordered_as_given: bool = False, view: str | None = None) -> list[list[int]]:
        """The ranks that differ only along `dims`: one list per group, ascending whatever the order of `dims`.

        With `ordered_as_given=True`, as in HyperCommGrid's `_gen_rank_enum`, the last of `dims` varies fastest in a
        group.
        """
        return self._grid.rank_groups(dims, view=view, ordered_as_given=ordered_as_given)

    def _gen_rank_enum(self, dims: Dims) -> list[list[int]]:
        """`rank_groups` in the order as given: Megatron-LM calls it by this name."""
        return self.rank_groups(dims, ordered_as_given=True)

    def register_view(
        self, name: str, shape: Sequence[int], dim_names: Sequence[str], shared_dims: Sequence[str] | None = None
    ) -> None:
        """Register a further factorisation of the same ranks. Gangs along `shared_dims` are those of the grid itself.

        Raises:
            LayoutError: the name is taken, the sizes do not multiply to the grid's size, or a shared dim has other
                groups; the message names it. Nothing is registered.
        """
        if name == _BASE:
            raise LayoutError(f"`name` must be new, but {name!r} is the grid itself.")
        self._grid.register_view(name, shape, dim_names, shared_dims or ())

    def create_gang(
        self,
        dims: Dims,
        *,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        view: str | None = None,
    ) -> Gang | None:
        """Make the gangs along `dims`, and return this rank's; None on a rank outside the grid. Call it on every rank
        of the root (GRID-1). `group_desc`: the description of the gang and its process group.

        Raises:
            LayoutError: `dims` are not dims of the grid.
            KeyError: the gangs exist already; use `get_gang`.
            ValueError: `timeout` is not above 0, or the root's gangs do not have these options.
            GangError: the gangs could not be made.
        """
        key = self._grid.key(dims, view=view)
        if key in self._gangs:  # GRID-2
            raise KeyError(f"the gangs {key!r} exist already; use get_gang({dims!r})")
        groups = self._grid.rank_groups(dims, view=view)
        if isinstance(self._root, ProcessGroupGang):
            gang: Gang | None = self._root.split(
                groups, group_desc or key, timeout=timeout, backend=self._backend, pg_options=pg_options
            )
        else:
            if timeout is not None or pg_options is not None:
                raise ValueError(
                    f"`timeout` and `pg_options` must be None for a root of {type(self._root).__name__}, whose gangs "
                    f"inherit them, but are {timeout!r} and {pg_options!r} instead."
                )
            gang = create_one_of(self._root, groups, group_desc or key)
        self._gangs[key] = gang
        return gang

    def get_gang(self, dims: Dims, *, view: str | None = None) -> Gang | None:
        """The result of `create_gang`. Raises KeyError: that was not called for `dims`."""
        key = self._grid.key(dims, view=view)
        if key not in self._gangs:
            raise KeyError(f"the gangs {key!r} do not exist; use create_gang({dims!r}) first")
        return self._gangs[key]

    def create_gangs(self) -> Gangs | None:
        """The gangs of this grid as `Gangs`; None on a rank outside the grid. Call it on every rank of the root.

        The dims `pp`, `rdp`, `sdp` and `tp` become the gangs of these names, and `dp` is along `rdp` and `sdp`. A grid
        may have a dim `dp` instead, which replicates. All other dims, also those of views, become further gangs under
        their names, or as "view/dim" if the grid has a dim of that name. A gang without a dim is a fake gang of one
        rank. Gangs that exist already are used.

        Raises:
            LayoutError: the grid has both `dp` and `rdp` or `sdp`, or a dim "root".
            GangError: a gang could not be made.
        """
        dims = self.dim_names
        data = [dim for dim in ("rdp", "sdp") if dim in dims]
        if "root" in dims or ("dp" in dims and data):
            raise LayoutError(f"`dim_names` must have `dp`, or `rdp` and `sdp`, and no `root`, but is {list(dims)}.")
        made = {dim: self._made(dim) for dim in reversed(dims)}
        if data:
            made["dp"] = self._made(data)
        if self.size < self._root.size:
            made["root"] = self._made(dims)
        for view, its in self._grid.views.items():
            for dim in its.axes.dim_names:
                if dim not in its.shared_dims:
                    made[self._grid.key(dim, view=view) if dim in made or dim in _OURS else dim] = self._made(dim, view)
        gangs = {name: gang for name, gang in made.items() if gang is not None}
        if len(gangs) < len(made):
            return None
        root, pp, dp, rdp, sdp, tp = (gangs.pop(name, None) for name in _OURS)
        one = FakeGang(self._root.device)
        return Gangs(
            root=root or self._root,
            dp=dp or one,
            rdp=rdp or (one if data else dp or one),
            sdp=sdp or one,
            tp=tp or one,
            pp=pp or one,
            further=gangs,
        )

    def create_pg(
        self,
        dims: Dims,
        *,
        view: str | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
    ) -> dist.ProcessGroup | None:
        """`create_gang`, returned as a process group (GRID-3); None on a rank outside the grid.

        Raises:
            LayoutError: `dims` are not dims of the grid.
            KeyError: the groups exist already, or the view is unknown.

        Source: HyperCommGrid (Megatron-LM).
        """
        view = self._known_view(view)
        if self._grid.key(dims, view=view) in self._gangs:
            raise KeyError(
                f"Process group {dims} has already been created, maybe with other options; use get_pg({dims!r})"
            )
        gang = self.create_gang(dims, timeout=timeout, pg_options=pg_options, group_desc=group_desc, view=view)
        return None if gang is None else gang.as_process_group()

    def get_pg(self, dims: Dims, *, view: str | None = None) -> dist.ProcessGroup | None:
        """The result of `create_pg`, or the process group of the gang that `create_gang` made.

        Raises:
            KeyError: neither was called for `dims`, or the view is unknown.

        Source: HyperCommGrid (Megatron-LM).
        """
        view = self._known_view(view)
        key = self._grid.key(dims, view=view)
        if key not in self._gangs:
            raise KeyError(f"Process group for {key} hasn't been created. Call create_pg({dims!r}) first")
        gang = self._gangs[key]
        return None if gang is None else gang.as_process_group()

    def get_rank_enum(self, dims: Dims, *, view: str | None = None) -> list[list[int]]:
        """The ranks of the process groups of `create_pg` for `dims`: `rank_groups`.

        Raises:
            KeyError: the view is unknown.

        Source: HyperCommGrid (Megatron-LM).
        """
        return self._grid.rank_groups(dims, view=self._known_view(view))

    def is_current_rank_in_grid(self) -> bool:
        """Whether this rank is in the grid. Source: HyperCommGrid (Megatron-LM)."""
        return 0 <= self._root.rank - self.rank_offset < self.size

    def destroy(self) -> None:
        """`close`, under HyperCommGrid's name."""
        self.close()

    def _known_view(self, view: str | None) -> str | None:
        """HyperCommGrid calls the grid itself the view "base", and raises KeyError for an unknown view."""
        if view == _BASE:
            return None
        if view is not None and view not in self._grid.views:
            known = sorted({_BASE, *self._grid.views})
            raise KeyError(f"View {view!r} is not registered. Registered views: {known}")
        return view

    def close(self) -> None:
        """Close every gang that this grid has made."""
        for gang in reversed(list(self._gangs.values())):
            if gang is not None:
                gang.close()
        self._gangs.clear()

    def _made(self, dims: Dims, view: str | None = None) -> Gang | None:
        if self._grid.key(dims, view=view) in self._gangs:
            return self.get_gang(dims, view=view)
        return self.create_gang(dims, view=view)


def _default_root() -> Gang:
    """The default process group as a gang: the gang that it belongs to, or a new one."""
    if not dist.is_available() or not dist.is_initialized():
        raise InvalidOperationError(
            "There is no default process group; use ProcessGroupGang.create_default_process_group, or give a `root`."
        )
    world = dist.group.WORLD
    assert world is not None
    return world.gang if isinstance(world, GangProcessGroup) else ProcessGroupGang(world, get_default_device())


def _world_size_to_be() -> int:
    """The size of the default process group, which is made later."""
    if "WORLD_SIZE" not in os.environ:
        raise NoWorldError(
            "There is no default process group, and WORLD_SIZE is not set; use "
            "ProcessGroupGang.create_default_process_group, or give a `root`."
        )
    return get_world_size()
