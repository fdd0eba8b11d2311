"""What the user declares about parallelism: the sizes of the axes, and which of them stay on one host.

Pure. Refuses to know ranks, hosts or members: `planner.py` seats members by what is declared here.

L1  A layout is valid once constructed; nothing changes it afterwards.
L2  `rdp` is elastic: no layout fixes its size.
L3  Layouts that declare the same are equal, in whatever order `within_host` was given.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from elasticgang.errors import LayoutError

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


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the model axes; `unit` seats of one `rdp` index hold one whole copy of the model, a replica group.

    `min_replicas`: fewer whole replica groups than these are not worth training with.
    `within_host`: the axes that never span hosts, out of pp, sdp and tp.

    Raises:
        LayoutError: a size below 1, or `within_host` names something else than model axes, each once.
    """

    pp: int = 1
    sdp: int = 1
    tp: int = 1
    min_replicas: int = 1
    within_host: tuple[str, ...] = ("tp",)

    def __post_init__(self) -> None:
        for name in (*MODEL_AXES, "min_replicas"):
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise LayoutError(f"`{name}` must be an integer of at least 1, but is {size!r} instead.")
        given: object = self.within_host
        named = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else ("",)
        ordered = tuple(axis for axis in MODEL_AXES if axis in named)
        if len(ordered) != len(named):
            names = ", ".join(MODEL_AXES)
            raise LayoutError(f"`within_host` must be a tuple of some of {names}, each once, but is {given!r} instead.")
        object.__setattr__(self, "within_host", ordered)

    @property
    def unit(self) -> int:
        """Seats in a replica group."""
        return self.pp * self.sdp * self.tp
