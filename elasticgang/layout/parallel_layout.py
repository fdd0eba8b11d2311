"""What the user declares about parallelism: the sizes of the axes, and which of them stay on one host.

Pure. Refuses to know ranks, hosts or members: `planner.py` seats members by what is declared here.

LAYOUT-1  A layout is valid once constructed; nothing changes it afterwards.
LAYOUT-2  `rdp` is elastic: no layout fixes its size.
LAYOUT-3  Layouts that declare the same are equal, in whatever order `within_host` was given.
LAYOUT-4  Further axes factorise a replica group, never `rdp`: a seat's place along them follows from its model
    coordinates, so that a member is healed from where the same part of the model is, whatever the number of replica
    groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from elasticgang.errors import LayoutError
from elasticgang.integers import integer_from
from elasticgang.layout.axes import FAMILIES, MODEL_AXES, RUNTIME_GANGS, Axes, refuse_repeated
from elasticgang.layout.grid import Grid

_SEATS = tuple(reversed(MODEL_AXES))  # as seats are numbered within a replica group: fastest-varying first


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the model axes; `unit` seats of one `rdp` index hold one whole copy of the model, a replica group.

    `min_replicas`: fewer whole replica groups than these are not worth training with.
    `within_host`: the axes that never span hosts, out of pp, sdp and tp.
    `views`: further factorisations of the seats of a replica group, the first name varying fastest as in `GangGrid`;
    the grid itself is `Axes((tp, sdp, pp), ("tp", "sdp", "pp"))`. Each of their names that is no model axis is a
    further axis, with gangs of its own: with `sdp=4, tp=2`, `Axes((2, 2, 2), ("tp", "cp", "outer"))` lets `cp` pair
    adjacent ranks of `sdp`. A model axis may be named again where it has the same groups.

    Raises:
        LayoutError: a size below 1, `within_host` names something else than model axes, each once, or a view does not
            factorise a replica group: it has another number of seats, an offset, names a model axis that has other
            groups there, or an axis that a family or another view has.
    """

    pp: int = 1
    sdp: int = 1
    tp: int = 1
    min_replicas: int = 1
    within_host: tuple[str, ...] = ("tp",)
    views: tuple[Axes, ...] = ()

    def __post_init__(self) -> None:
        for name in (*MODEL_AXES, "min_replicas"):
            size = integer_from(1, getattr(self, name))
            if size is None:
                raise LayoutError(f"`{name}` must be an integer of at least 1, but is {getattr(self, name)!r} instead.")
            object.__setattr__(self, name, size)
        object.__setattr__(self, "within_host", _model_axes(self.within_host))
        object.__setattr__(self, "views", _factorisations(self.views, Axes((self.tp, self.sdp, self.pp), _SEATS)))

    @property
    def unit(self) -> int:
        """Seats in a replica group."""
        return self.pp * self.sdp * self.tp

    @property
    def num_needed(self) -> int:
        """The fewest ranks that it can be trained with."""
        return self.min_replicas * self.unit

    @property
    def sizes(self) -> str:
        """Which of the sizes are not 1, for messages."""
        named = {name: getattr(self, name) for name in (*MODEL_AXES, "min_replicas")}
        return ", ".join(f"{name}={size}" for name, size in named.items() if size > 1) or "all sizes 1"

    @property
    def further_axes(self) -> tuple[str, ...]:
        """The names that `views` add to the model axes, in the order in which they are given."""
        return tuple(name for axes in self.views for name in axes.dim_names if name not in MODEL_AXES)


def _model_axes(given: object) -> tuple[str, ...]:
    """`within_host` in the order of the model axes."""
    named = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else ("",)
    ordered = tuple(axis for axis in MODEL_AXES if axis in named)
    if len(ordered) != len(named):
        names = ", ".join(MODEL_AXES)
        raise LayoutError(f"`within_host` must be a tuple of some of {names}, each once, but is {given!r} instead.")
    return ordered


def _factorisations(given: object, seats: Axes) -> tuple[Axes, ...]:
    """`views`, each of which factorises `seats`."""
    views = tuple(given) if isinstance(given, tuple | list) else (None,)
    grid = Grid(seats)
    for index, axes in enumerate(views):
        if not isinstance(axes, Axes) or axes.rank_offset:
            raise LayoutError(f"`views` must be a tuple of Axes without an offset, but is {given!r} instead.")
        shared = [name for name in axes.dim_names if name in MODEL_AXES]
        grid.register_view(f"views[{index}]", axes.shape, axes.dim_names, shared)
    further = [name for axes in views for name in axes.dim_names if name not in MODEL_AXES]
    taken = [name for name in further if name in FAMILIES or name in RUNTIME_GANGS]
    if taken:
        raise LayoutError(f"`views` must name further axes, but {taken[0]!r} is taken: it names a family of gangs.")
    refuse_repeated("views", further)
    return views
