"""The declared parallelism: the sizes of the axes, and which of them stay on one host.

Pure, without ranks, hosts and members: `planner.py` seats members according to the layout.

LAYOUT-1  A constructed layout is valid and immutable.
LAYOUT-2  `rdp` is elastic: no layout fixes its size.
LAYOUT-3  Layouts with equal declarations are equal, whatever the order of `within_host`.
LAYOUT-4  Further axes factorise a replica group, never `rdp`. A seat's place along them therefore follows from its
    model coordinates, so that a member can heal from the same coordinates of any replica group.
LAYOUT-5  The layouts of a job, the first and its `fallback`, divide the model differently, so that the sizes say of
    which layout a part is.
LAYOUT-6  `text` and `parse` are inverse for layouts without `views`: one notation for every command.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from elasticgang.errors import LayoutError
from elasticgang.integers import integer_from
from elasticgang.layout.axes import FAMILIES, MODEL_AXES, RUNTIME_GANGS, Axes, refuse_repeated
from elasticgang.layout.grid import Grid

NOTATION = "AXIS=N,...[/AXIS=N,...]"
NOTATION_HELP = (
    "the sizes of pp, sdp and tp that are not 1, with commas between, such as sdp=2,tp=2; also min_replicas=N, the "
    "fewest replica groups to train with, and within_host=AXES, the axes that never span hosts, with + between "
    "(default: tp). After each / follows a fallback layout: sdp=4/sdp=2/sdp=1"
)
_SIZES = (*MODEL_AXES, "min_replicas")
_SEATS = tuple(reversed(MODEL_AXES))  # as seats are numbered within a replica group: fastest-varying first


@dataclass(frozen=True)
class ParallelLayout:
    """The sizes of the model axes. The `unit` seats with one `rdp` index are a replica group: they hold one whole copy
    of the model. `rdp` has no declared size (LAYOUT-2).

    `min_replicas`: the fewest replica groups to train with.
    `within_host`: the model axes (pp, sdp, tp) that never span hosts.
    `views`: further factorisations of the seats of a replica group, the first name varying fastest as in `GangGrid`;
    the grid itself is `Axes((tp, sdp, pp), ("tp", "sdp", "pp"))`. Each name that is not a model axis is a further axis
    with its own gangs: with `sdp=4, tp=2`, in `Axes((2, 2, 2), ("tp", "cp", "outer"))` the axis `cp` pairs adjacent
    ranks of `sdp`. A view may repeat a model axis if that has the same groups there.

    Raises:
        LayoutError: a size is below 1; `within_host` repeats a name or names another axis; or a view does not factorise
            a replica group: it has another number of seats or an offset, repeats a model axis with different groups,
            or names an axis that a family of gangs or another view has; or a layout in `fallback` has a `fallback` of
            its own, or the `pp`, `sdp` and `tp` of another one, or there are `views` beside `fallback`.
    """

    pp: int = 1
    sdp: int = 1
    tp: int = 1
    min_replicas: int = 1
    within_host: tuple[str, ...] = ("tp",)
    views: tuple[Axes, ...] = ()
    fallback: tuple[ParallelLayout, ...] = ()

    def __post_init__(self) -> None:
        for name in _SIZES:
            size = integer_from(1, getattr(self, name))
            if size is None:
                raise LayoutError(f"`{name}` must be an integer of at least 1, but is {getattr(self, name)!r} instead.")
            object.__setattr__(self, name, size)
        object.__setattr__(self, "within_host", _model_axes(self.within_host))
        object.__setattr__(self, "views", _factorisations(self.views, Axes((self.tp, self.sdp, self.pp), _SEATS)))
        object.__setattr__(self, "fallback", _fallback(self))

    @property
    def unit(self) -> int:
        """Seats in a replica group."""
        return self.pp * self.sdp * self.tp

    @property
    def num_needed(self) -> int:
        """The fewest ranks that can train with this layout, without its `fallback`."""
        return self.min_replicas * self.unit

    @property
    def options(self) -> tuple[ParallelLayout, ...]:
        """This layout and those of `fallback`, in order of preference, each without a `fallback`."""
        return _options(self)

    @property
    def sizes(self) -> str:
        """The sizes other than 1, for messages."""
        named = {name: getattr(self, name) for name in _SIZES}
        return ", ".join(f"{name}={size}" for name, size in named.items() if size > 1) or "all sizes 1"

    @property
    def text(self) -> str:
        """The layout as `parse` takes it, without `views`: "sdp=4,tp=2/sdp=2,tp=2" has one fallback."""
        return "/".join(map(_notation, self.options))

    @staticmethod
    def parse(text: str) -> ParallelLayout:
        """The layout that `text` declares, as `--layout` of the commands takes it: such as "sdp=2,tp=2". Entries with
        commas between are sizes of `pp`, `sdp` and `tp` (1 if left out), `min_replicas=N`, and `within_host=AXES`, with
        + between the axes. After each / follows a layout of `fallback`.

        Raises:
            LayoutError: `text` is none, or the layout is not valid.
        """
        first, *others = (_parsed(text, each) for each in text.split("/"))
        return ParallelLayout(**first, fallback=tuple(ParallelLayout(**each) for each in others))

    @property
    def further_axes(self) -> tuple[str, ...]:
        """The names that `views` add to the model axes, in their order."""
        return tuple(name for axes in self.views for name in axes.dim_names if name not in MODEL_AXES)


@functools.lru_cache(64)
def _options(layout: ParallelLayout) -> tuple[ParallelLayout, ...]:
    """Remembered: a coordinator looks at them for each record, and a rank for each vote."""
    return (replace(layout, fallback=()), *layout.fallback)


def _notation(layout: ParallelLayout) -> str:
    """LAYOUT-6: of one layout without its `fallback`."""
    sizes = {name: getattr(layout, name) for name in _SIZES}
    named = [f"{name}={size}" for name, size in sizes.items() if size > 1]
    if layout.within_host != ("tp",):
        named.append(f"within_host={'+'.join(layout.within_host)}")
    return ",".join(named) or "sdp=1"


def _parsed(text: str, part: str) -> dict[str, Any]:
    """The fields that `part` of `text` names. Raises LayoutError: it names none, one twice, or no size."""
    fields: dict[str, Any] = {}
    for entry in part.split(","):
        name, separator, value = (each.strip() for each in entry.partition("="))
        if name in fields or not separator or name not in (*_SIZES, "within_host"):
            names = ", ".join((*_SIZES, "within_host"))
            raise LayoutError(f"a layout must be like sdp=2,tp=2 with the names {names}, each once, but is {text!r}.")
        if name == "within_host":
            fields[name] = tuple(filter(None, value.split("+")))
        elif value.isdecimal() and value.isascii():
            fields[name] = int(value)
        else:
            raise LayoutError(f"`{name}` must be an integer of at least 1, but is {value!r} in the layout {text!r}.")
    return fields


def _fallback(layout: ParallelLayout) -> tuple[ParallelLayout, ...]:
    """`fallback` as a tuple; raises LayoutError unless it goes with the layout (LAYOUT-5)."""
    given: object = layout.fallback
    others: list[ParallelLayout] = []
    for each in given if isinstance(given, tuple | list) else (None,):
        if not isinstance(each, ParallelLayout) or each.fallback:
            raise LayoutError(f"`fallback` must be a tuple of layouts without a `fallback`, but is {given!r} instead.")
        if each.views or layout.views:
            raise LayoutError("`views` and `fallback` must not be given together.")
        others.append(each)
    sizes = [(each.pp, each.sdp, each.tp) for each in (layout, *others)]
    if len(set(sizes)) < len(sizes):
        raise LayoutError(
            "`fallback` must hold layouts of other sizes `pp`, `sdp` and `tp`, but two layouts have the same."
        )
    return tuple(others)


def _model_axes(given: object) -> tuple[str, ...]:
    """`within_host` in the order of the model axes (LAYOUT-3)."""
    named = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else ("",)
    ordered = tuple(axis for axis in MODEL_AXES if axis in named)
    if len(ordered) != len(named):
        names = ", ".join(MODEL_AXES)
        raise LayoutError(f"`within_host` must be a tuple of some of {names}, each once, but is {given!r} instead.")
    return ordered


def _factorisations(given: object, seats: Axes) -> tuple[Axes, ...]:
    """`views`; raises LayoutError unless each factorises `seats` (LAYOUT-1, LAYOUT-4)."""
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
