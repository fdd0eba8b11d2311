"""Data about a generation: reports, records, and the other answers to a request.

Pure data: `next_record.py` decides which record follows.

RECORD-1  Equal records have equal digests, on every host and in every Python version. The digest covers every field but
    itself.
RECORD-2  An agent parses only the part of a record that it needs: among the seats, those of its own members.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from elasticgang.layout import Axes, ParallelLayout, Plan
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.record_form import RecordForm, canonical_json, parse_lines, spans_of, spans_of_agent

PROTOCOL = 29

ACTIVE, LEARNER, SPARE = _STATUSES = "active", "learner", "spare"

_STATUS_OF = dict(enumerate(_STATUSES))
_NUM_ANCESTORS = 16
# Of the text as it is sent (`RecordForm.num_sent_bytes`). A message has at most 16 MiB, of which the rest is for what
# else it says.
MAX_RECORD_BYTES = (16 << 20) - (64 << 10)

Model: TypeAlias = "tuple[int, int, int]"  # coordinates along pp, sdp and tp


class RecordRef(NamedTuple):
    """Names a record. A generation's number alone does not distinguish two chains of records."""

    generation: int
    digest: str


NO_RECORD = RecordRef(0, "")


class CheckpointRef(NamedTuple):
    """Names a durable checkpoint. `digest`: of its manifest. The attempt alone does not distinguish checkpoints of two
    jobs, or of two directories."""

    attempt: Attempt
    digest: str


class FormerState(NamedTuple):
    """State of `attempt` that a member keeps aside for its peers: the part `model` of the layout with this number."""

    attempt: Attempt
    layout: int
    model: Model


class Holder(NamedTuple):
    """A member that keeps its part `model`, of the layout with this number, for peers that sit at other parts."""

    member: str
    layout: int
    model: Model


@dataclass(frozen=True)
class MemberReport:
    """One live member, as its agent reports it.

    `holds`: the model coordinates (pp, sdp, tp) of the state in `tip` and `pending`; None without state. `layout`: the
    number of the layout that they are of, among those of the job. `former`: what it keeps aside besides.
    `entered`: the last generation it entered; 0 before the first. `active`: it votes in that generation.
    `address`: where its peers fetch state, "host:port", and further ones behind commas. `draining`: it leaves as soon
    as the rules allow.
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
    layout: int = 0
    former: FormerState | None = None


@dataclass(frozen=True)
class Report:
    """One agent's request for the next generation.

    `newest_record`: the newest record it knows. `newest_commit`: the highest attempt it knows to be committed.
    `exited`: its own members of the recorded generation that have died or left. `checkpoint`: the newest durable
    checkpoint that a member can load. `num_seats`: how many seats it requests for its members; None for all; the
    others are spares. `num_ranks`: how many ranks it runs, without spares; 0 if unknown. `num_starting`: how many more
    ranks it is starting, for which the layout in force is kept. `address`: where the other agents reach it,
    "host:port". `min_agents`: how many agents the first generation waits for. `max_agents`: how many agents may have
    active or learning seats; 0 for no limit. `settings`: what all agents must have alike besides, by name, as its first
    rank has it.
    """

    agent: str
    host: str
    job: str
    layout: ParallelLayout
    newest_record: RecordRef
    members: tuple[MemberReport, ...]
    newest_commit: Attempt | None = None
    exited: tuple[str, ...] = ()
    checkpoint: CheckpointRef | None = None
    num_seats: int | None = None
    num_ranks: int = 0
    num_starting: int = 0
    address: str = ""
    min_agents: int = 1
    max_agents: int = 0
    protocol: int = PROTOCOL
    settings: tuple[tuple[str, str], ...] = ()


class CutOff(NamedTuple):
    """An agent that is left out of a generation, and the first few of the `peers` in it to which its path is broken."""

    agent: str
    peers: tuple[str, ...]


class Span(NamedTuple):
    """Members of an agent with consecutive ranks: `num_seats` of its seats, from number `first` on. Or spares."""

    agent: str
    first: int
    num_seats: int
    status: str


class Seat(NamedTuple):
    """A member's place. `address`: as `MemberReport` has it. `status` is active, learner or spare; its rank and
    coordinates are in the plan."""

    member: str
    agent: str
    host: str
    local_rank: int
    address: str
    status: str


@dataclass(frozen=True)
class Record:
    """One agreed generation.

    `layout`: the one in force, of `layouts`, those that the job declares; () stands for `layout` alone. `holders`: if
    nobody holds some part of `committed` in this layout, those that keep one of another layout.
    `parent`: the digest of the record before it, "" for the first. `ancestors`: digests of some records before that,
    newest first. `seats`: grouped by agent, in the order of `agents`; every member in `plan` has one. `addresses`:
    those of `agents`, in their order. `dead_agents`: agents of the generation before that were declared lost.
    `draining_members`: members that leave. `rolled_forward`: `committed` was in doubt until this record. `rolled_back`:
    a later attempt was or may have been committed, but no whole copy of it is left. `checkpoint`: the digest of the
    manifest of the durable checkpoint of `committed` that all members load; "" if a member holds the state. `saved`:
    the newest durable checkpoint that is known to be complete, of `committed` or earlier; None: there is none.
    `cut_off`: agents whose members are spares because they and others do not reach each other (NEXT-10).
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
    checkpoint: str = ""
    saved: CheckpointRef | None = None
    ancestors: tuple[str, ...] = ()
    dead_agents: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    draining_members: tuple[str, ...] = ()
    layouts: tuple[ParallelLayout, ...] = ()
    holders: tuple[Holder, ...] = ()
    cut_off: tuple[CutOff, ...] = ()
    digest: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.layouts:
            object.__setattr__(self, "layouts", (self.layout,))
        if not self.digest:
            object.__setattr__(self, "digest", self.form.digest)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """RECORD-2: parse the seats and the plan of a received record on first use."""
            if name not in ("seats", "plan") or "form" not in vars(self):
                raise AttributeError(name)
            vars(self).update(_seats_and_plan(self))
            return vars(self)[name]

    @cached_property
    def form(self) -> RecordForm:
        lines: dict[str, list[Any]] = {agent: [""] for agent in self.agents}
        places: dict[str, tuple[str, int, int]] = {}
        for seat in self.seats:
            line = lines[seat.agent]
            line[0] = seat.host
            places[seat.member] = seat.agent, len(line) - 1, _STATUSES.index(seat.status)
            line.append((seat.member, seat.local_rank, seat.address))
        order = spans_of([places[member] for member in (*self.plan.ranks, *self.plan.spares)])
        return RecordForm(self.tops(order), {agent: canonical_json(line) for agent, line in lines.items()}, order)

    @cached_property
    def text(self) -> str:
        """The canonical text (RECORD-1)."""
        return self.form.text

    def has_agent(self, agent: str) -> bool:
        return agent in self._agents

    @cached_property
    def _agents(self) -> frozenset[str]:
        return frozenset(self.agents)

    def seat(self, member: str) -> Seat | None:
        return self._seats_by_member.get(member)

    @cached_property
    def _seats_by_member(self) -> dict[str, Seat]:
        return {seat.member: seat for seat in self.seats}

    @cached_property
    def _seats_by_agent(self) -> dict[str, tuple[Seat, ...]]:
        found: dict[str, list[Seat]] = {}
        for seat in self.seats:
            found.setdefault(seat.agent, []).append(seat)
        return {agent: tuple(seats) for agent, seats in found.items()}

    def seats_of(self, agent: str) -> tuple[Seat, ...]:
        """The seats of its members (RECORD-2)."""
        if "seats" in vars(self):
            return self._seats_by_agent.get(agent, ())
        line = self.form.lines.get(agent)
        if line is None:
            return ()
        if agent not in self._parsed_seats:
            spans = _spans(spans_of_agent(agent, self.form.order_text))
            self._parsed_seats[agent] = _seats(agent, json.loads(line), spans)
        return self._parsed_seats[agent]

    @cached_property
    def _parsed_seats(self) -> dict[str, tuple[Seat, ...]]:
        """By agent, of those that were asked for (RECORD-2)."""
        return {}

    @cached_property
    def spans(self) -> list[Span]:
        """All places, ranks first, in their order. Raises KeyError, TypeError or ValueError: they are invalid."""
        return _spans(self.form.order)

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

    def hosts_out_of_reach(self, agent: str) -> tuple[str, ...]:
        """Of an agent that is left out: the hosts of the first few to which its path is broken. Otherwise ()."""
        peers = next((peers for away, peers in self.cut_off if away == agent), ())
        return tuple(sorted({self.addresses_by_agent[peer].rpartition(":")[0] for peer in peers}))

    @cached_property
    def addresses_by_agent(self) -> dict[str, str]:
        """Empty if the record has none."""
        return dict(zip(self.agents, self.addresses, strict=False))

    def members(self, status: str) -> tuple[str, ...]:
        return tuple(seat.member for seat in self.seats if seat.status == status)

    def groups_of(self, members: Collection[str]) -> int:
        """How many replica groups contain one of `members`."""
        return len({self.plan.coordinates(member)["rdp"] for member in members if member in self.plan.ranks})

    def model_coordinates(self, member: str) -> Model:
        return self.plan.part_of(member)

    def part_of(self, seat: Seat) -> Model | None:
        """The part of the model in `seat`; None for a spare."""
        return None if seat.status == SPARE else self.model_coordinates(seat.member)

    @property
    def in_force(self) -> int:
        """The number of `layout` among `layouts`."""
        return self.layouts.index(self.layout)

    def holder(self, member: str) -> Holder | None:
        """What `member` keeps for its peers; None: nothing."""
        return self._holders_by_member.get(member)

    @cached_property
    def _holders_by_member(self) -> dict[str, Holder]:
        return {holder.member: holder for holder in self.holders}

    @cached_property
    def declared(self) -> ParallelLayout:
        """The layout as the job declares it, with its fallback."""
        return _declared(self.layouts)

    @property
    def shape(self) -> tuple[int, ...]:
        found: tuple[int, ...] = vars(self).get("_shape") or self.plan.shape
        return found

    def head(self) -> dict[str, Any]:
        """Every field but the agents, their addresses and the seats."""
        return {
            "job": self.job,
            "generation": self.generation,
            "parent": self.parent,
            "layouts": list(map(layout_to_json, self.layouts)),
            "in_force": self.in_force,
            "holders": self.holders,
            "shape": self.shape,
            "committed": self.committed,
            "rolled_forward": self.rolled_forward,
            "rolled_back": self.rolled_back,
            "checkpoint": self.checkpoint,
            "saved": self.saved,
            "ancestors": self.ancestors,
            "dead_agents": self.dead_agents,
            "draining_members": self.draining_members,
            "cut_off": self.cut_off,
        }

    def tops(self, order: Sequence[str]) -> tuple[str, str, str]:
        """The first lines of its text."""
        head = canonical_json({**self.head(), "spans": len(order)})
        return head, canonical_json(self.agents), canonical_json(self.addresses)

    @staticmethod
    def from_text(text: str) -> Record:
        """Raises KeyError, TypeError or ValueError: `text` is not a record. Invalid seats raise on first use."""
        head, agents, addresses, *rest = text.split("\n")
        names = tuple(map(str, json.loads(agents)))
        lines, order = dict(zip(names, rest, strict=False)), rest[len(names) :]
        data = json.loads(head)
        if len(lines) < len(names) or len(order) != data.pop("spans"):
            raise ValueError("a record lacks a line, or has one too many")
        form = RecordForm((head, agents, addresses), lines, order)
        return Record.from_form(data, names, tuple(map(str, json.loads(addresses))), form)

    @staticmethod
    def from_form(
        head: Mapping[str, Any], agents: tuple[str, ...], addresses: tuple[str, ...], form: RecordForm
    ) -> Record:
        """Raises KeyError, TypeError or ValueError: `head` is not one. Invalid seats raise on first use."""
        layouts = tuple(map(layout_from_json, head["layouts"]))
        fields = {
            "job": str(head["job"]),
            "generation": int(head["generation"]),
            "parent": str(head["parent"]),
            "layouts": layouts,
            "layout": _numbered(layouts, head["in_force"]),
            "holders": tuple(_holder(*each) for each in head["holders"]),
            "agents": agents,
            "committed": Attempt(*head["committed"]),
            "rolled_forward": bool(head["rolled_forward"]),
            "rolled_back": bool(head["rolled_back"]),
            "checkpoint": str(head["checkpoint"]),
            "saved": checkpoint_from_json(head["saved"]),
            "ancestors": tuple(map(str, head["ancestors"])),
            "dead_agents": tuple(map(str, head["dead_agents"])),
            "addresses": addresses,
            "draining_members": tuple(map(str, head["draining_members"])),
            "cut_off": tuple(CutOff(str(agent), tuple(map(str, peers))) for agent, peers in head["cut_off"]),
            "digest": form.digest,
            "form": form,
            "_shape": tuple(map(int, head["shape"])),
        }
        record = object.__new__(Record)
        vars(record).update(fields)
        return record


@functools.lru_cache(64)
def _declared(layouts: tuple[ParallelLayout, ...]) -> ParallelLayout:
    """Remembered: most records of a job have the same."""
    return replace(layouts[0], fallback=layouts[1:])


def _seats_and_plan(record: Record) -> dict[str, Any]:
    """Raises KeyError, TypeError or ValueError: they are invalid."""
    form = record.form
    spans_by_agent: dict[str, list[Span]] = {agent: [] for agent in form.lines}
    for span in record.spans:
        spans_by_agent[span.agent].append(span)
    lines = zip(form.lines, parse_lines(form.lines.values()), strict=True)
    seats_of = {agent: _seats(agent, line, spans_by_agent[agent]) for agent, line in lines}
    in_order: list[Seat] = []
    for agent, first, count, _ in record.spans:
        in_order += seats_of[agent][first : first + count]
    size = math.prod(record.shape)
    plan = {
        "shape": record.shape,
        "seats": [(seat.member, seat.host) for seat in in_order[:size]],
        "spares": [seat.member for seat in in_order[size:]],
    }
    planned = replace(Plan.from_json(plan), views=record.layout.views)
    return {"seats": tuple(itertools.chain.from_iterable(seats_of.values())), "plan": planned}


def _spans(lines: Collection[str]) -> list[Span]:
    return [Span(agent, first, count, _STATUS_OF[status]) for agent, first, count, status in parse_lines(lines)]


def _seats(agent: str, line: Any, spans: Sequence[Span]) -> tuple[Seat, ...]:
    """A member without a place is a spare, of an agent that is one too many."""
    host, *rows = line
    statuses = [SPARE] * len(rows)
    for _, first, count, status in spans:
        if not 0 <= first < first + count <= len(rows):
            raise ValueError("a span has places for members that the agent does not have")
        statuses[first : first + count] = [status] * count
    return tuple(
        [
            Seat(member, agent, host, local_rank, address, status)
            for (member, local_rank, address), status in zip(rows, statuses, strict=True)
        ]
    )


@dataclass(frozen=True)
class Undecided:
    """No record may follow from the proposal: every agent requests again, except the `refused` (agent id, reason)."""

    reason: str
    refused: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Unrecoverable:
    """The committed state is lost for good and there is no checkpoint: the job stops."""

    reason: str


def layout_to_json(layout: ParallelLayout) -> dict[str, Any]:
    data = {**vars(layout), "within_host": list(layout.within_host)}
    del data["views"], data["fallback"]
    if layout.views:
        data["views"] = [axes.to_json() for axes in layout.views]
    if layout.fallback:
        data["fallback"] = list(map(layout_to_json, layout.fallback))
    return data


def layout_from_json(data: dict[str, Any]) -> ParallelLayout:
    """Raises KeyError, TypeError or ValueError when `data` is not a layout."""
    return _layout_of(canonical_json(data))


@lru_cache(maxsize=64)
def _layout_of(text: str) -> ParallelLayout:
    """The reports and records of a job name the same few layouts: each is checked once."""
    return _checked_layout(json.loads(text))


def _checked_layout(data: dict[str, Any]) -> ParallelLayout:
    views = tuple(map(Axes.from_json, data.get("views", ())))
    fallback = tuple(map(_checked_layout, data.get("fallback", ())))
    within_host = tuple(data["within_host"])
    return ParallelLayout(**{**data, "within_host": within_host, "views": views, "fallback": fallback})


def _numbered(layouts: Sequence[ParallelLayout], number: object) -> ParallelLayout:
    """Raises ValueError: there is none of this number."""
    if not isinstance(number, int) or not 0 <= number < len(layouts):
        raise ValueError(f"{number!r:.200} is not the number of one of {len(layouts)} layouts")
    return layouts[number]


def _holder(member: object, layout: int, model: Sequence[int]) -> Holder:
    """Raises TypeError or ValueError: they name no holder."""
    pp, sdp, tp = model
    return Holder(str(member), int(layout), (int(pp), int(sdp), int(tp)))


def report_to_json(report: Report) -> dict[str, Any]:
    """Most members are in the same state, so each state is written once."""
    states = list(dict.fromkeys(map(_state, report.members)))
    members = [(m.id, m.local_rank, m.address, m.holds, m.former, states.index(_state(m))) for m in report.members]
    return {**vars(report), "layout": layout_to_json(report.layout), "members": members, "states": states}


_State: TypeAlias = "tuple[Attempt | None, Attempt | None, int, bool, bool, int]"


def _state(member: MemberReport) -> _State:
    return member.tip, member.pending, member.entered, member.active, member.draining, member.layout


def _state_from_json(tip: Any, pending: Any, entered: Any, active: Any, draining: Any, layout: Any) -> _State:
    attempts = attempt_from_json(tip), attempt_from_json(pending)
    return *attempts, int(entered), bool(active), bool(draining), int(layout)


def report_from_json(data: dict[str, Any]) -> Report:
    """Raises KeyError, TypeError or ValueError when `data` is not a report."""
    rest = {name: value for name, value in data.items() if name != "states"}
    states = {
        number: _state_from_json(tip, pending, entered, active, draining, layout)
        for number, (tip, pending, entered, active, draining, layout) in enumerate(data["states"])
    }
    members = []
    for id, local_rank, address, holds, former, state in data["members"]:
        tip, pending, entered, active, draining, layout = states[state]
        members.append(
            MemberReport(
                *(str(id), int(local_rank), str(address), tip, pending, _model(holds), entered, active, draining),
                layout=layout,
                former=_former(former),
            )
        )
    return Report(
        **{
            **rest,
            "layout": layout_from_json(data["layout"]),
            "members": tuple(members),
            "newest_commit": attempt_from_json(data["newest_commit"]),
            "newest_record": RecordRef(int(data["newest_record"][0]), str(data["newest_record"][1])),
            "exited": tuple(data["exited"]),
            "checkpoint": checkpoint_from_json(data["checkpoint"]),
            "settings": tuple((str(name), str(value)) for name, value in data["settings"]),
        }
    )


def member_from_json(data: dict[str, Any]) -> MemberReport:
    return MemberReport(
        **{
            **data,
            "tip": attempt_from_json(data["tip"]),
            "pending": attempt_from_json(data["pending"]),
            "holds": _model(data["holds"]),
            "former": _former(data["former"]),
        }
    )


def _former(data: Sequence[Any] | None) -> FormerState | None:
    if data is None:
        return None
    attempt, layout, (pp, sdp, tp) = data
    return FormerState(Attempt(*map(int, attempt)), int(layout), (int(pp), int(sdp), int(tp)))


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


def checkpoint_from_json(data: Sequence[Any] | None) -> CheckpointRef | None:
    """Raises TypeError or ValueError when `data` names no checkpoint."""
    if data is None:
        return None
    attempt, digest = attempt_from_json(data[0]), data[1]
    if attempt is None or not isinstance(digest, str) or not digest or len(data) != 2:
        raise ValueError(f"{data!r:.200} names no checkpoint")
    return CheckpointRef(attempt, digest)
