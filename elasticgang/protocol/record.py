"""Data about a generation: reports, records, and the other answers to a request.

Pure data: `next_record.py` decides which record follows.

RECORD-1  Equal records have equal digests, on every host and in every Python version. The digest covers every field but
    itself.
RECORD-2  An agent parses only the part of a record that it needs: among the seats, those of its own members.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from elasticgang.layout import Axes, ParallelLayout, Plan
from elasticgang.protocol.commit import Attempt

PROTOCOL = 10

ACTIVE, LEARNER, SPARE = _STATUSES = "active", "learner", "spare"

_STATUS_OF = dict(enumerate(_STATUSES))
_NUM_ANCESTORS = 16
_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True)

Model: TypeAlias = "tuple[int, int, int]"  # coordinates along pp, sdp and tp


class RecordRef(NamedTuple):
    """Names a record. A generation's number alone does not distinguish two chains of records."""

    generation: int
    digest: str


NO_RECORD = RecordRef(0, "")


@dataclass(frozen=True)
class MemberReport:
    """One live member, as its agent reports it.

    `holds`: the model coordinates (pp, sdp, tp) of the state in `tip` and `pending`; None without state.
    `entered`: the last generation it entered; 0 before the first. `active`: it votes in that generation.
    `address`: where its peers fetch state, "host:port". `draining`: it leaves as soon as the rules allow.
    """

    id: str
    local_rank: int
    address: str
    tip: Attempt | None = None
    pending: Attempt | None = None
    holds: Model | None = None
    entered: int = 0
    active: bool = False
    draining: bool = False


@dataclass(frozen=True)
class Report:
    """One agent's request for the next generation.

    `newest_record`: the newest record it knows. `newest_commit`: the highest attempt it knows to be committed.
    `exited`: its own members of the recorded generation that have died or left. `checkpoint`: the newest durable
    checkpoint that a member can load. `num_seats`: how many seats it requests for its members; None for all; the
    others are spares. `num_ranks`: how many ranks it runs, without spares; 0 if unknown. `address`: where the other
    agents reach it, "host:port". `min_agents`: how many agents the first generation waits for. `max_agents`: how many
    agents may have active or learning seats; 0 for no limit.
    """

    agent: str
    host: str
    job: str
    layout: ParallelLayout
    newest_record: RecordRef
    members: tuple[MemberReport, ...]
    newest_commit: Attempt | None = None
    exited: tuple[str, ...] = ()
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
    """One agreed generation.

    `parent`: the digest of the record before it, "" for the first. `ancestors`: digests of some records before that,
    newest first. `seats`: grouped by agent, in the order of `agents`; every member in `plan` has one. `addresses`:
    those of `agents`, in their order. `dead_agents`: agents of the generation before that were declared lost.
    `draining_members`: members that leave. `rolled_forward`: `committed` was in doubt until this record. `rolled_back`:
    a later attempt was or may have been committed, but no whole copy of it is left.
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
    rolled_back: bool = False
    ancestors: tuple[str, ...] = ()
    dead_agents: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    draining_members: tuple[str, ...] = ()
    digest: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.digest:
            object.__setattr__(self, "digest", digest_of(self.text))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """RECORD-2: parse the seats and the plan of a received record on first use."""
            if name not in ("seats", "plan") or "_lines" not in vars(self):
                raise AttributeError(name)
            vars(self).update(_seats_and_plan(self))
            return vars(self)[name]

    @cached_property
    def text(self) -> str:
        """The canonical text (RECORD-1): one line of JSON with every field but the seats, then one line for each agent,
        with its host and its members' seats."""
        places = {member: place for place, member in enumerate((*self.plan.ranks, *self.plan.spares))}
        lines: dict[str, list[Any]] = {agent: [""] for agent in self.agents}
        for seat in self.seats:
            line = lines[seat.agent]
            line[0] = seat.host
            status, place = _STATUSES.index(seat.status), places.get(seat.member)
            line.append((seat.member, seat.local_rank, seat.address, status, place))
        return "\n".join(map(canonical_json, (self._head(), *lines.values())))

    def seat(self, member: str) -> Seat | None:
        return self._seats_by_member.get(member)

    @cached_property
    def _seats_by_member(self) -> dict[str, Seat]:
        return {seat.member: seat for seat in self.seats}

    def seats_of(self, agent: str) -> tuple[Seat, ...]:
        """The seats of its members (RECORD-2)."""
        if "seats" in vars(self):
            return tuple([seat for seat in self.seats if seat.agent == agent])
        line = vars(self)["_lines"].get(agent)
        return () if line is None else _seats(agent, line)[0]

    @property
    def ref(self) -> RecordRef:
        return RecordRef(self.generation, self.digest)

    @property
    def prefix(self) -> str:
        """Of this generation's rendezvous keys (RULE-1)."""
        return f"{self.job}/{self.generation}/{self.digest}"

    def builds_on(self, ref: RecordRef) -> bool:
        """Whether `ref` is this record or one of its recent ancestors."""
        chain = (self.digest, *self.ancestor_digests())
        back = self.generation - ref.generation
        return ref == NO_RECORD or (0 <= back < len(chain) and chain[back] == ref.digest)

    def ancestor_digests(self) -> tuple[str, ...]:
        """The digests of some records before this one, newest first."""
        return (self.parent, *self.ancestors)[:_NUM_ANCESTORS] if self.parent else ()

    @property
    def loads_checkpoint(self) -> bool:
        """Whether `committed` is a checkpoint that all members load because no whole copy of it is in memory."""
        held = {self.model_coordinates(member) for member in self.members(ACTIVE)} if self.rolled_back else set()
        return self.rolled_back and len(held) < self.layout.unit

    def members(self, status: str) -> tuple[str, ...]:
        return tuple(seat.member for seat in self.seats if seat.status == status)

    def groups_of(self, members: Collection[str]) -> int:
        """How many replica groups contain one of `members`."""
        return len({self.plan.coordinates(member)["rdp"] for member in members if member in self.plan.ranks})

    def model_coordinates(self, member: str) -> Model:
        return model_coordinates(self.plan, member)

    def _head(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "generation": self.generation,
            "parent": self.parent,
            "layout": layout_to_json(self.layout),
            "shape": self.plan.shape,
            "agents": self.agents,
            "committed": self.committed,
            "rolled_forward": self.rolled_forward,
            "rolled_back": self.rolled_back,
            "ancestors": self.ancestors,
            "dead_agents": self.dead_agents,
            "addresses": self.addresses,
            "draining_members": self.draining_members,
        }

    @staticmethod
    def from_text(text: str) -> Record:
        """Raises KeyError, TypeError or ValueError: `text` is not a record. Invalid seats raise on first use."""
        head, *lines = text.split("\n")
        data = json.loads(head)
        agents = tuple(map(str, data["agents"]))
        fields = {
            "job": str(data["job"]),
            "generation": int(data["generation"]),
            "parent": str(data["parent"]),
            "layout": layout_from_json(data["layout"]),
            "agents": agents,
            "committed": Attempt(*data["committed"]),
            "rolled_forward": bool(data["rolled_forward"]),
            "rolled_back": bool(data["rolled_back"]),
            "ancestors": tuple(map(str, data["ancestors"])),
            "dead_agents": tuple(map(str, data["dead_agents"])),
            "addresses": tuple(map(str, data["addresses"])),
            "draining_members": tuple(map(str, data["draining_members"])),
            "digest": digest_of(text),
            "text": text,
            "_shape": data["shape"],
            "_lines": dict(zip(agents, lines, strict=True)),
        }
        record = object.__new__(Record)
        vars(record).update(fields)
        return record


def _seats_and_plan(record: Record) -> dict[str, Any]:
    """Raises KeyError, TypeError or ValueError: they are invalid."""
    read = vars(record)
    seats: list[Seat] = []
    placed: dict[int, Seat] = {}
    for agent, line in read["_lines"].items():
        its, places = _seats(agent, line)
        seats += its
        placed.update((place, seat) for seat, place in zip(its, places, strict=True) if place is not None)
    in_order = [placed[place] for place in range(len(placed))]
    size = math.prod(read["_shape"])
    plan = {
        "shape": read["_shape"],
        "seats": [(seat.member, seat.host) for seat in in_order[:size]],
        "spares": [seat.member for seat in in_order[size:]],
    }
    planned = Plan.from_json(plan)
    return {"seats": tuple(seats), "plan": replace(planned, views=record.layout.views)}


def _seats(agent: str, line: str) -> tuple[tuple[Seat, ...], tuple[int | None, ...]]:
    """The seats of an agent's line, and their places: ranks first, then the positions of the spares; None for a member
    that is not in the plan."""
    host, *rows = json.loads(line)
    seats = [
        Seat(member, agent, host, local_rank, address, _STATUS_OF[status])
        for member, local_rank, address, status, _ in rows
    ]
    return tuple(seats), tuple(row[4] for row in rows)


@dataclass(frozen=True)
class Undecided:
    """No record may follow from the proposal: every agent requests again, except the `refused` (agent id, reason)."""

    reason: str
    refused: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Unrecoverable:
    """The committed state is lost for good and there is no checkpoint: the job stops."""

    reason: str


def model_coordinates(planned: Plan, member: str) -> Model:
    """The part of the model in `member`'s seat: its (pp, sdp, tp)."""
    rank = planned.ranks[member]
    _, rdp, sdp, tp = planned.shape
    return rank // (rdp * sdp * tp), rank // tp % sdp, rank % tp


def digest_of(text: str) -> str:
    """The digest of a record's canonical text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def canonical_json(data: Any) -> str:
    """JSON that is identical for equal data."""
    return _ENCODER.encode(data)


def layout_to_json(layout: ParallelLayout) -> dict[str, Any]:
    data = {**vars(layout), "within_host": list(layout.within_host)}
    del data["views"]
    return {**data, "views": [axes.to_json() for axes in layout.views]} if layout.views else data


def layout_from_json(data: dict[str, Any]) -> ParallelLayout:
    """Raises KeyError, TypeError or ValueError when `data` is not a layout."""
    views = tuple(map(Axes.from_json, data.get("views", ())))
    return ParallelLayout(**{**data, "within_host": tuple(data["within_host"]), "views": views})


def report_to_json(report: Report) -> dict[str, Any]:
    """Most members are in the same state, so each state is written once."""
    states = list(dict.fromkeys(map(_state, report.members)))
    members = [(m.id, m.local_rank, m.address, m.holds, states.index(_state(m))) for m in report.members]
    return {**vars(report), "layout": layout_to_json(report.layout), "members": members, "states": states}


def _state(member: MemberReport) -> tuple[Attempt | None, Attempt | None, int, bool, bool]:
    return member.tip, member.pending, member.entered, member.active, member.draining


def report_from_json(data: dict[str, Any]) -> Report:
    """Raises KeyError, TypeError or ValueError when `data` is not a report."""
    rest = {name: value for name, value in data.items() if name != "states"}
    states = {
        number: (attempt_from_json(tip), attempt_from_json(pending), int(entered), bool(active), bool(draining))
        for number, (tip, pending, entered, active, draining) in enumerate(data["states"])
    }
    members = []
    for id, local_rank, address, holds, state in data["members"]:
        tip, pending, entered, active, draining = states[state]
        members.append(
            MemberReport(str(id), int(local_rank), str(address), tip, pending, _model(holds), entered, active, draining)
        )
    return Report(
        **{
            **rest,
            "layout": layout_from_json(data["layout"]),
            "members": tuple(members),
            "newest_commit": attempt_from_json(data["newest_commit"]),
            "newest_record": RecordRef(int(data["newest_record"][0]), str(data["newest_record"][1])),
            "exited": tuple(data["exited"]),
            "checkpoint": attempt_from_json(data["checkpoint"]),
        }
    )


def member_from_json(data: dict[str, Any]) -> MemberReport:
    return MemberReport(
        **{
            **data,
            "tip": attempt_from_json(data["tip"]),
            "pending": attempt_from_json(data["pending"]),
            "holds": _model(data["holds"]),
        }
    )


def _model(data: Sequence[int] | None) -> Model | None:
    if data is None:
        return None
    pp, sdp, tp = data
    return int(pp), int(sdp), int(tp)


def attempt_from_json(data: Sequence[int] | None) -> Attempt | None:
    if data is None:
        return None
    step, generation = data
    return Attempt(int(step), int(generation))
