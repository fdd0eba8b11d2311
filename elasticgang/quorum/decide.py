"""The next record: who is in the next generation, in which seat, and which step is committed.

Pure: equal inputs give equal records on every host; `agent.py` performs what is decided here.

D1  A record is derived from its parent and one proposal; generations are numbered by this chain alone (R2).
D2  A proposal that may miss somebody who knows more is void, and everyone asks again.
D3  A seat is active only if its member holds, or can apply, the committed attempt for the seat's model coordinates.
D4  State from before the first committed step carries no samples: without a holder it is designated anew, under a new
    attempt, so that a holder of the former one does not match and heals.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from elasticgang.errors import LayoutError
from elasticgang.layout import Axes, Member, ParallelLayout, Plan, plan
from elasticgang.quorum.commit import Action, Attempt, Standing, action, resolve

PROTOCOL = 1

ACTIVE, LEARNER, SPARE = "active", "learner", "spare"


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
    holds: tuple[int, int, int] | None = None
    entered: int = 0
    active: bool = False


@dataclass(frozen=True)
class Report:
    """What one agent brings to the lighthouse.

    `seen`: generation of the newest record it knows; `known`: the highest attempt it has heard committed; `gone`:
    members of the recorded generation that it knows to have died or left; `checkpoint`: the newest durable checkpoint
    that its members can load.
    """

    agent: str
    host: str
    job: str
    coordinator: str
    layout: ParallelLayout
    seen: int
    members: tuple[MemberReport, ...]
    known: Attempt | None = None
    gone: tuple[str, ...] = ()
    checkpoint: Attempt | None = None
    protocol: int = PROTOCOL


@dataclass(frozen=True)
class Seat:
    """A member's place. `status` is active, learner or spare; its rank and coordinates are in the plan."""

    member: str
    agent: str
    host: str
    local_rank: int
    address: str
    status: str


@dataclass(frozen=True)
class Record:
    """One agreed generation. `parent` is the digest of the record before, "" for the first.

    `rolled_forward`: `committed` was in doubt until this record. `lowered`: it is below the parent's, because nobody
    is left who holds that; the members load the checkpoint.
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
    digest: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.digest:
            object.__setattr__(self, "digest", hashlib.sha256(canonical(self.to_json()).encode()).hexdigest()[:16])

    def seat(self, member: str) -> Seat | None:
        return next((seat for seat in self.seats if seat.member == member), None)

    def members(self, status: str) -> tuple[str, ...]:
        return tuple(seat.member for seat in self.seats if seat.status == status)

    def model_coordinates(self, member: str) -> tuple[int, int, int]:
        return model_coordinates(self.plan, member)

    def to_json(self) -> dict[str, Any]:
        return {
            "job": self.job,
            "generation": self.generation,
            "parent": self.parent,
            "layout": layout_to_json(self.layout),
            "plan": self.plan.to_json(),
            "seats": [asdict(seat) for seat in self.seats],
            "agents": list(self.agents),
            "committed": list(self.committed),
            "rolled_forward": self.rolled_forward,
            "lowered": self.lowered,
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> Record:
        """Raises KeyError, TypeError or ValueError when `data` is not a record."""
        return Record(
            job=str(data["job"]),
            generation=int(data["generation"]),
            parent=str(data["parent"]),
            layout=layout_from_json(data["layout"]),
            plan=Plan.from_json(data["plan"]),
            seats=tuple(Seat(**seat) for seat in data["seats"]),
            agents=tuple(data["agents"]),
            committed=Attempt(*data["committed"]),
            rolled_forward=bool(data["rolled_forward"]),
            lowered=bool(data["lowered"]),
        )


@dataclass(frozen=True)
class Void:
    """The proposal decides nothing; everyone asks again, but for `refused` (agent id -> why), who must not."""

    reason: str
    refused: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Lost:
    """The committed state is gone for good and there is no checkpoint: the job stops."""

    reason: str


def next_record(record: Record | None, proposal: Sequence[Report]) -> Record | Void | Lost:
    """The record that follows `record` (None: the job has none yet) when the agents of `proposal` go on together."""
    reports = sorted(proposal, key=lambda report: report.agent)
    void = _mismatched(record, reports) or _outdated(record, reports) or _without_witness(record, reports)
    if void is not None:
        return void
    members = [member for report in reports for member in report.members]
    try:
        planned = plan(
            [Member(member.id, report.host) for report in reports for member in report.members],
            reports[0].layout,
            record.plan if record is not None else None,
        )
    except LayoutError as error:
        return Void(str(error))
    truth = _committed(record, reports, members)
    if not isinstance(truth, _Truth):
        return truth
    generation = 1 if record is None else record.generation + 1
    seats = tuple(
        Seat(member.id, report.agent, report.host, member.local_rank, member.address, truth.status(planned, member))
        for report in reports
        for member in report.members
    )
    return Record(
        job=reports[0].job,
        generation=generation,
        parent="" if record is None else record.digest,
        layout=reports[0].layout,
        plan=planned,
        seats=seats,
        agents=tuple(report.agent for report in reports),
        committed=truth.committed,
        rolled_forward=truth.rolled_forward,
        lowered=truth.lowered,
    )


@dataclass(frozen=True)
class _Truth:
    """`designated`: nobody holds the state yet; the `rdp = 0` seats of the new plan become its holders."""

    committed: Attempt
    rolled_forward: bool = False
    lowered: bool = False
    designated: bool = False

    def status(self, planned: Plan, member: MemberReport) -> str:
        if member.id not in planned.ranks:
            return SPARE
        if self.designated:
            return ACTIVE if planned.coordinates(member.id)["rdp"] == 0 else LEARNER
        return ACTIVE if _holds(member, self.committed, model_coordinates(planned, member.id)) else LEARNER


def _mismatched(record: Record | None, reports: Sequence[Report]) -> Void | None:
    """D2: agents of another job, layout, protocol or coordinator are refused; the record says which is right."""
    if not reports:
        return Void("nobody asked")
    if len({report.agent for report in reports}) != len(reports):
        return Void("an agent appears twice")
    wanted: dict[str, object] = {"protocol": PROTOCOL}
    wanted["job"] = record.job if record is not None else _most_common(report.job for report in reports)
    wanted["layout"] = record.layout if record is not None else _most_common(report.layout for report in reports)
    refused = tuple(
        (report.agent, f"its {what} is {getattr(report, what)!r}, but the job's is {right!r}")
        for report in reports
        for what, right in wanted.items()
        if getattr(report, what) != right
    )
    if refused:
        return Void("refused " + "; ".join(f"{agent}: {why}" for agent, why in refused), refused)
    if len({report.coordinator for report in reports}) > 1:
        return Void("the agents know different incarnations of the coordinator; those with an old one reconnect")
    return None


def _most_common(values: Iterable[Any]) -> Any:
    counted: dict[str, tuple[int, Any]] = {}
    for value in values:
        counted[repr(value)] = (counted.get(repr(value), (0, value))[0] + 1, value)
    return min(counted.items(), key=lambda item: (-item[1][0], item[0]))[1][1]


def _outdated(record: Record | None, reports: Sequence[Report]) -> Void | None:
    """D2: a report older than the record it is part of is the ghost of a call that timed out."""
    generation = record.generation if record is not None else 0
    for report in reports:
        if report.seen > generation:
            return Void(f"agent {report.agent} knows generation {report.seen}, but the record is of {generation}")
        if record is not None and report.agent in record.agents and report.seen < generation:
            return Void(f"the report of agent {report.agent} is of generation {report.seen}, before {generation}")
    return None


def _without_witness(record: Record | None, reports: Sequence[Report]) -> Void | None:
    """D2: without a witness of the recorded generation, what was committed in it may be unknown here."""
    if record is None:
        return None
    if any(_is_witness(record, member) for report in reports for member in report.members):
        return None
    living = _may_live(record, reports)
    if not living:
        return None
    return Void(f"no witness of generation {record.generation} is here, but {', '.join(living)} may live")


def _is_active(record: Record, member: MemberReport) -> bool:
    """Active by the record, or a learner that became active within its generation."""
    seat = record.seat(member.id)
    if seat is None or seat.status == SPARE:
        return False
    return seat.status == ACTIVE or (member.active and member.entered == record.generation)


def _is_witness(record: Record, member: MemberReport) -> bool:
    """It knows what its vote led to: an active member that is torn does not, unless it never entered the generation."""
    return _is_active(record, member) and (member.tip is not None or member.entered < record.generation)


def _may_live(record: Record, reports: Sequence[Report], model: tuple[int, int, int] | None = None) -> list[str]:
    """Members of the record that are neither present nor known to be gone: those that may have taken part in its
    generation, or those that may hold the model coordinates `model`. Learners and spares may hold any, from before."""
    accounted = {member.id for report in reports for member in report.members}
    accounted.update(gone for report in reports for gone in report.gone)
    absent = [seat for seat in record.seats if seat.member not in accounted]
    if model is None:
        return [seat.member for seat in absent if seat.status != SPARE]
    return [seat.member for seat in absent if seat.status != ACTIVE or record.model_coordinates(seat.member) == model]


def _committed(
    record: Record | None, reports: Sequence[Report], members: Sequence[MemberReport]
) -> _Truth | Void | Lost:
    generation = 1 if record is None else record.generation + 1
    if record is None:
        return _Truth(Attempt(0, generation), designated=True)
    fate = resolve(
        record.committed,
        record.generation,
        [Standing(member.tip, member.pending, _is_active(record, member)) for member in members],
        [report.known for report in reports if report.known is not None],
    )
    missing = [
        model
        for model in itertools.product(range(record.layout.pp), range(record.layout.sdp), range(record.layout.tp))
        if not any(_holds(member, fate.committed, model) for member in members)
    ]
    if not missing:
        return _Truth(fate.committed, fate.rolled_forward)
    for model in missing:
        if living := _may_live(record, reports, model):
            return Void(f"nobody here holds {_name(fate.committed)}, but {', '.join(living)} may")
    if fate.rolled_forward:  # nobody is left who has the rest of what was in doubt, and nobody here has applied it
        dropped = [replace(m, pending=None) if m.pending == fate.committed else m for m in members]
        return _committed(record, reports, dropped)
    if fate.committed.step == 0:
        return _Truth(Attempt(0, generation), designated=True)
    checkpoint = max((report.checkpoint for report in reports if report.checkpoint is not None), default=None)
    if checkpoint is not None:
        return _Truth(checkpoint, lowered=True)
    return Lost(f"no live member holds {_name(fate.committed)} and there is no checkpoint")


def _holds(member: MemberReport, committed: Attempt, model: tuple[int, ...]) -> bool:
    return member.holds == model and action(member.tip, member.pending, committed) is not Action.HEAL


def _name(attempt: Attempt) -> str:
    return f"step {attempt.step} of generation {attempt.generation}"


def model_coordinates(planned: Plan, member: str) -> tuple[int, int, int]:
    """Which part of the model sits in `member`'s seat: its (pp, sdp, tp)."""
    coordinates = planned.coordinates(member)
    return coordinates["pp"], coordinates["sdp"], coordinates["tp"]


def canonical(data: Any) -> str:
    """JSON with one spelling for equal data."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def layout_to_json(layout: ParallelLayout) -> dict[str, Any]:
    data = {**asdict(layout), "within_host": list(layout.within_host)}
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
            "gone": tuple(data["gone"]),
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
