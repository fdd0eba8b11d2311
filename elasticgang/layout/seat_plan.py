"""The plan of one generation: which member has which seat.

Pure data: `planner.py` makes plans.

SEAT-1  A plan is immutable, and plans with equal fields have equal digests, in every process and Python version.
SEAT-2  Ranks are numbered along `AXES`, `tp` fastest, so that the ranks of a tp group are adjacent.
SEAT-3  A member has at most one seat, and is never both seated and a spare.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, NamedTuple

from elasticgang.layout.axes import FAMILIES, Axes, group_of, group_within, groups_over, groups_within


class Member(NamedTuple):
    """One incarnation of a rank process, and the host it runs on."""

    id: str
    host: str


class ModelCoordinates(NamedTuple):
    """The part of the model in a seat: its indices along `MODEL_AXES`. Seats with equal model coordinates hold the same
    part."""

    pp: int
    sdp: int
    tp: int


@dataclass(frozen=True)
class Plan:
    """`shape`: sizes of pp, rdp, sdp, tp. `seats`: the seated members in rank order. `spares`: member ids, the longest
    waiting first. `views`: those of the layout."""

    shape: tuple[int, int, int, int]
    seats: tuple[Member, ...]
    spares: tuple[str, ...] = ()
    views: tuple[Axes, ...] = ()

    @property
    def size(self) -> int:
        """The number of seats."""
        return len(self.seats)

    @cached_property
    def ranks(self) -> Mapping[str, int]:
        """The rank of each seated member, by its id; in rank order, and read-only."""
        return MappingProxyType({member.id: rank for rank, member in enumerate(self.seats)})

    def coordinates(self, member_id: str) -> dict[str, int]:
        """The index of the member's seat along each of `AXES` (SEAT-2).

        Raises:
            KeyError: the member has no seat: it is a spare, or unknown.
        """
        rank = self.ranks[member_id]
        pp, rdp, sdp, tp = self.shape
        return {
            "pp": rank // (rdp * sdp * tp) % pp,
            "rdp": self.replica_group(rank),
            "sdp": rank // tp % sdp,
            "tp": rank % tp,
        }

    def part_of(self, member_id: str) -> ModelCoordinates:
        """The part of the model in the member's seat.

        Raises:
            KeyError: the member has no seat: it is a spare, or unknown.
        """
        rank = self.ranks[member_id]
        _, rdp, sdp, tp = self.shape
        return ModelCoordinates(rank // (rdp * sdp * tp), rank // tp % sdp, rank % tp)

    def replica_group(self, rank: int) -> int:
        """The coordinate `rdp` of a rank."""
        _, rdp, sdp, tp = self.shape
        return rank // (sdp * tp) % rdp

    def groups(self, family: str) -> tuple[tuple[int, ...], ...]:
        """The ranks of each gang of a family or further axis, in rank order. Every rank is in exactly one gang.

        Raises:
            ValueError: no family or axis has this name.
        """
        if family in FAMILIES:
            return groups_over(self.shape, FAMILIES[family])
        return groups_within(self.shape, self._view(family), family)

    def group_of(self, family: str, rank: int) -> tuple[int, ...]:
        """The one of `groups(family)` with `rank` in it. Takes a time that grows with that gang alone.

        Raises:
            ValueError: no family or axis has this name.
        """
        if family in FAMILIES:
            return group_of(self.shape, FAMILIES[family], rank)
        return group_within(self.shape, self._view(family), family, rank)

    def _view(self, family: str) -> Axes:
        for axes in self.views:
            if family in axes.dim_names:
                return axes
        known = dict.fromkeys((*FAMILIES, *(name for axes in self.views for name in axes.dim_names)))
        raise ValueError(f"`family` must be one of {', '.join(known)}, but is {family!r} instead.")

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits, equal for equal plans (SEAT-1)."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            "shape": list(self.shape),
            "seats": [[member.id, member.host] for member in self.seats],
            "spares": list(self.spares),
        }
        return {**data, "views": [axes.to_json() for axes in self.views]} if self.views else data

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Plan:
        """Raises KeyError, TypeError or ValueError: `data` is not a plan, or violates SEAT-3."""
        pp, rdp, sdp, tp = map(int, data["shape"])
        seats = tuple([Member(id, host) for id, host in data["seats"]])
        spares = tuple(map(str, data["spares"]))
        if min(pp, rdp, sdp, tp) < 1 or math.prod((pp, rdp, sdp, tp)) != len(seats):
            raise ValueError(f"A plan of shape {(pp, rdp, sdp, tp)} must not have {len(seats)} seats.")
        if len({*spares, *(member.id for member in seats)}) != len(seats) + len(spares):
            raise ValueError("A member must appear once in a plan.")
        views = tuple(map(Axes.from_json, data.get("views", ())))
        if any(axes.size != pp * sdp * tp for axes in views):
            raise ValueError(f"A plan of shape {(pp, rdp, sdp, tp)} must not have the views {views}.")
        return Plan((pp, rdp, sdp, tp), seats, spares, views)

    def __reduce__(self) -> tuple[type[Plan], tuple[Any, ...]]:
        """Pickle without cached values: a read-only mapping cannot be pickled."""
        return Plan, (self.shape, self.seats, self.spares, self.views)
