"""What is said and agreed about a generation: reports, records, and the other answers to a question.

Pure, and only data: `decide.py` says which record follows.

D0  Equal records have equal digests, on every host and in every Python version; the digest covers all but itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

from elasticgang.layout import Axes, ParallelLayout, Plan
from elasticgang.quorum.commit import Attempt

PROTOCOL = 5

ACTIVE, LEARNER, SPARE = "active", "learner", "spare"

_NUM_ANCESTORS = 16

Model: TypeAlias = "tuple[int, int, int]"  # coordinates along pp, sdp and tp


class Seen(NamedTuple):
    """A record, by name. A generation's number alone does not tell two chains apart."""

    generation: int
    digest: str


NOTHING_SEEN = Seen(0, "")


@dataclass(frozen=True)
class MemberReport:
    """One live member, as its agent reports it.

    `holds`: the model coordinates (pp, sdp, tp) of the state in `tip` and `pending`; None when it holds none.
    `entered`: the last generation it acted on; 0 before the first. `active`: it votes in that generation.
    `address`: where its peers fetch state, "host:port".
    """

    id: str
    local_rank: int
    address: str
    tip: Attempt | None = None
    pending: Attempt | None = None
    holds: Model | None = None
    entered: int = 0
    active: bool = False


@dataclass(frozen=True)
class Report:
    """What one agent brings to the lighthouse.

    `seen`: the newest record it knows; `known`: the highest attempt it has heard committed; `gone`: its own members of
    the recorded generation that have died or left; `lost`: agents that it has found dead with all of their members,
    for good (see `roster.HostLost`); `checkpoint`: the newest durable checkpoint that its members can load;
    `num_seats`: for how many of its members it asks a seat, all if None; those beyond are spares;
    `num_ranks`: how many it is to have, spares apart, 0 if unknown.
    `address`: where the other agents reach it, "host:port". `min_agents`: how many the first generation waits for;
    `max_agents`: how many may have active or learning seats, 0 for any number.
    """

    agent: str
    host: str
    job: str
    coordinator: str
    layout: ParallelLayout
    seen: Seen
    members: tuple[MemberReport, ...]
    known: Attempt | None = None
    gone: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    checkpoint: Attempt | None = None
    num_seats: int | None = None
    num_ranks: int = 0
    address: str = ""
    min_agents: int = 1
    max_agents: int = 0
    protocol: int = PROTOCOL


class Seat(NamedTuple):
    """A member's place. `status` is active, learner or spare; its rank and coordinates are in the plan."""

    member: str
    agent: str
    host: str
    local_rank: int
    address: str
    status: str


@dataclass(frozen=True)
class Record:
    """One agreed generation. `parent` is the digest of the record before, "" for the first; `ancestors` are those of
    some before that, newest first.

    `addresses`: of `agents`, in their order.
    `lost`: agents of the generation before that are held to be dead, each with the agent by whose word; `away`: those
    that have taken part, are not here, and may live.
    `rolled_forward`: `committed` was in doubt until this record. `lowered`: something after it was committed, or may
    have been, of which no whole copy is left.
    """

    job: str
    generation: int
    parent: str
    layout: ParallelLayout
    plan: Plan
    seats: tuple[Seat, ...]
    agents: tuple[str, ...]
    committed: Attempt
    rolled_forward: bool = False
    lowered: bool = False
    ancestors: tuple[str, ...] = ()
    lost: tuple[tuple[str, str], ...] = ()
    away: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    digest: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.digest:
            object.__setattr__(self, "digest", digest_of(self.text))

    @cached_property
    def text(self) -> str:
        """Its canonical JSON."""
        return canonical(self.to_json())

    def seat(self, member: str) -> Seat | None:
        return self._seats_by_member.get(member)

    @cached_property
    def _seats_by_member(self) -> dict[str, Seat]:
        return {seat.member: seat for seat in self.seats}

    @property
    def name(self) -> Seen:
        return Seen(self.generation, self.digest)

    def builds_on(self, seen: Seen) -> bool:
        """Whether `seen` is this record or one of the last before it."""
        line = (self.digest, *self.line_before())
        back = self.generation - seen.generation
        return seen == NOTHING_SEEN or (0 <= back < len(line) and line[back] == seen.digest)

    def line_before(self) -> tuple[str, ...]:
        """The digests of some records before this one, newest first."""
        return (self.parent, *self.ancestors)[:_NUM_ANCESTORS] if self.parent else ()

    @property
    def loads(self) -> bool:
        """Whether `committed` is a checkpoint that all load, for want of members that hold all of it."""
        held = {self.model_coordinates(member) for member in self.members(ACTIVE)} if self.lowered else set()
        return self.lowered and len(held) < self.layout.unit

    def members(self, status: str) -> tuple[str, ...]:
        return tuple(seat.member for seat in self.seats if seat.status == status)

    def model_coordinates(self, member: str) -> Model:
        return model_coordinates(self.plan, member)

    def to_json(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "generation": self.generation,
            "parent": self.parent,
            "layout": layout_to_json(self.layout),
            "plan": self.plan.to_json(),
            "seats": [list(seat) for seat in self.seats],
            "agents": list(self.agents),
            "committed": list(self.committed),
            "rolled_forward": self.rolled_forward,
            "lowered": self.lowered,
            "ancestors": list(self.ancestors),
            "lost": [list(pair) for pair in self.lost],
            "away": list(self.away),
            "addresses": list(self.addresses),
        }

    @staticmethod
    def from_text(text: str) -> Record:
        """`text`: canonical JSON of a record. Raises as `from_json`."""
        record = Record.from_json(json.loads(text), digest_of(text))
        vars(record)["text"] = text
        return record

    @staticmethod
    def from_json(data: dict[str, Any], digest: str = "") -> Record:
        """`digest`: that of `data`, if it is known. Raises KeyError, TypeError or ValueError when it is no record."""
        return Record(
            job=str(data["job"]),
            generation=int(data["generation"]),
            parent=str(data["parent"]),
            layout=layout_from_json(data["layout"]),
            plan=Plan.from_json(data["plan"]),
            seats=tuple(map(Seat._make, data["seats"])),
            agents=tuple(data["agents"]),
            committed=Attempt(*data["committed"]),
            rolled_forward=bool(data["rolled_forward"]),
            lowered=bool(data["lowered"]),
            ancestors=tuple(map(str, data["ancestors"])),
            lost=tuple((str(agent), str(by)) for agent, by in data["lost"]),
            away=tuple(map(str, data["away"])),
            addresses=tuple(map(str, data["addresses"])),
            digest=digest,
        )


@dataclass(frozen=True)
class Void:
    """The proposal decides nothing; everyone asks again, but for `refused` (agent id -> why), who must not. `absent`:
    agents that must come, or be found lost."""

    reason: str
    refused: tuple[tuple[str, str], ...] = ()
    absent: tuple[str, ...] = ()


@dataclass(frozen=True)
class Lost:
    """The committed state is gone for good and there is no checkpoint: the job stops."""

    reason: str


def model_coordinates(planned: Plan, member: str) -> Model:
    """Which part of the model sits in `member`'s seat: its (pp, sdp, tp)."""
    coordinates = planned.coordinates(member)
    return coordinates["pp"], coordinates["sdp"], coordinates["tp"]


def digest_of(text: str) -> str:
    """Of a record's canonical JSON."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def canonical(data: Any) -> str:
    """JSON with one spelling for equal data."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def layout_to_json(layout: ParallelLayout) -> dict[str, Any]:
    data = {**vars(layout), "within_host": list(layout.within_host)}
    del data["views"]
    return {**data, "views": [axes.to_json() for axes in layout.views]} if layout.views else data


def layout_from_json(data: dict[str, Any]) -> ParallelLayout:
    """Raises KeyError, TypeError or ValueError when `data` is not a layout."""
    views = tuple(map(Axes.from_json, data.get("views", ())))
    return ParallelLayout(**{**data, "within_host": tuple(data["within_host"]), "views": views})


def report_to_json(report: Report) -> dict[str, Any]:
    return {**asdict(report), "layout": layout_to_json(report.layout)}


def report_from_json(data: dict[str, Any]) -> Report:
    """Raises KeyError, TypeError or ValueError when `data` is not a report."""
    members = tuple(member_from_json(member) for member in data["members"])
    return Report(
        **{
            **data,
            "layout": layout_from_json(data["layout"]),
            "members": members,
            "known": attempt_from_json(data["known"]),
            "seen": Seen(int(data["seen"][0]), str(data["seen"][1])),
            "gone": tuple(data["gone"]),
            "lost": tuple(data["lost"]),
            "checkpoint": attempt_from_json(data["checkpoint"]),
        }
    )


def member_from_json(data: dict[str, Any]) -> MemberReport:
    holds = data["holds"]
    if holds is not None:
        pp, sdp, tp = holds
        holds = int(pp), int(sdp), int(tp)
    return MemberReport(
        **{
            **data,
            "tip": attempt_from_json(data["tip"]),
            "pending": attempt_from_json(data["pending"]),
            "holds": holds,
        }
    )


def attempt_from_json(data: Sequence[int] | None) -> Attempt | None:
    if data is None:
        return None
    step, generation = data
    return Attempt(int(step), int(generation))
