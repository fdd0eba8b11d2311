"""Members -> who sits where in a generation.

Pure: equal members, layout and previous plan give equal plans on every host, in whatever order the members come.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from elasticgang.errors import LayoutError
from elasticgang.layout.grid import groups_over
from elasticgang.layout.layout import AXES, FAMILIES, ParallelLayout


@dataclass(frozen=True)
class Member:
    """One incarnation of a rank process, and the host it runs on."""

    id: str
    host: str


@dataclass(frozen=True)
class Plan:
    """Who sits where. `shape`: sizes of pp, rdp, sdp, tp; `seats`: the active members in rank order; `spares`: ids."""

    shape: tuple[int, int, int, int]
    seats: tuple[Member, ...]
    spares: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Active members."""
        return len(self.seats)

    @cached_property
    def ranks(self) -> Mapping[str, int]:
        """Rank of each active member, by its id."""
        return MappingProxyType({member.id: rank for rank, member in enumerate(self.seats)})

    def coordinates(self, member_id: str) -> dict[str, int]:
        """Index along each axis of the member's seat.

        Raises:
            KeyError: the member has no seat: it is a spare, or unknown.
        """
        rank = self.ranks[member_id]
        coordinates = {}
        for axis, size in zip(reversed(AXES), reversed(self.shape), strict=True):
            rank, coordinates[axis] = divmod(rank, size)
        return {axis: coordinates[axis] for axis in AXES}

    def groups(self, family: str) -> tuple[tuple[int, ...], ...]:
        """The ranks of each gang of the family, in rank order; a rank is in exactly one.

        Raises:
            ValueError: there is no such family.
        """
        if family not in FAMILIES:
            raise ValueError(f"`family` must be one of {', '.join(FAMILIES)}, but is {family!r} instead.")
        return groups_over(self.shape, FAMILIES[family])

    @cached_property
    def digest(self) -> str:
        """The same for equal plans in every process and Python version; 16 hexadecimal digits."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        return {
            "shape": list(self.shape),
            "seats": [[member.id, member.host] for member in self.seats],
            "spares": list(self.spares),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Plan:
        """Raises KeyError, TypeError or ValueError when `data` is not a plan."""
        pp, rdp, sdp, tp = map(int, data["shape"])
        seats = tuple(Member(str(id), str(host)) for id, host in data["seats"])
        return Plan((pp, rdp, sdp, tp), seats, tuple(map(str, data["spares"])))

    def __reduce__(self) -> tuple[type[Plan], tuple[Any, ...]]:
        return Plan, (self.shape, self.seats, self.spares)


def plan(members: Iterable[Member], layout: ParallelLayout, previous: Plan | None = None) -> Plan:
    """Seat `members`; survivors of `previous` move as little as possible.

    Raises:
        LayoutError: a member id appears twice, or fewer than `min_replicas` whole replica groups can be seated.
    """
    present = sorted(members, key=lambda member: (member.host, member.id))
    by_id = {member.id: member for member in present}
    if len(by_id) != len(present):
        raise LayoutError("`members` must have distinct ids.")
    replicas = len(present) // layout.unit
    if replicas < layout.min_replicas:
        raise LayoutError(f"{layout.min_replicas * layout.unit - len(present)} members are missing.")
    known = {member.id for member in previous.seats} if previous else set()
    waiting = (member for member in present if member.id not in known)
    seats = [by_id.get(member.id) or next(waiting, None) for member in (previous.seats if previous else ())]
    order = list(itertools.chain((member for member in seats if member is not None), waiting))
    size = replicas * layout.unit
    shape = (layout.pp, replicas, layout.sdp, layout.tp)
    return Plan(shape, tuple(order[:size]), tuple(member.id for member in order[size:]))
