"""The timeline of one generation change: its cause, joined, left and moved members, attempts in doubt, and phase times.

Pure: `agent.py` passes the events in, with CLOCK_MONOTONIC seconds. Each change is reported once, when it is over.

CHANGE-1  A change is over once every seated rank of this host knows of a step committed in its generation and the exit
    that caused it is complete, so that its status is known; or when the next generation begins, or when the job ends.
CHANGE-2  A phase ends with the slowest rank of this host. A phase that did not take place on this host is None. The
    first one, `leave`, begins when the agent knows the cause: how long it took to be known, an agent cannot tell.
CHANGE-3  If members of other agents have left and none of this one, the cause is elsewhere, and names them: what a rank
    only noticed (an effect) is not it, and an agent may know of none. What another agent says of its own end stays.
CHANGE-4  The end of another agent and a hang of a rank here do not hide each other, whichever is noticed first: the
    cause names both. An agent may exit because its ranks waited for the one that hangs until its grace period ended.
CHANGE-5  The first record of an agent is the start of the job only if it is the first of the job. Otherwise the agent
    joins, and of its members alone it knows that they are new.
CHANGE-6  If the agent has killed all its ranks because the host was cut off, that is the cause, and not the exit of one
    of them, also if it is noticed first: a rank may end itself before its agent sees that the lease is over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.record import SPARE, Record

# Who or what ends a generation. No fault is behind the planned ones.
CAUSES = ("start", "join", "drain", "left", "killed", "failed", "hung", "agent_lost", "abort", "elsewhere")
PLANNED = frozenset({"start", "join", "drain", "left"})
PHASES = ("leave", "abort", "quorum", "resolve", "configure", "heal", "first_commit")
MAX_BESIDE = 4
_START = ("the job starts", "start")
_JOIN = ("this host joins", "join")
_ELSEWHERE = ("a change elsewhere", "elsewhere")
WAITS_TO_JOIN = ("a rank waits to join", "join")
_CUT_OFF = ("this host lost its connection to the coordinator", "agent_lost")


@dataclass
class _RankTimeline:
    """When one rank completed each phase on its way into the generation."""

    began: float
    aborted: float
    agreed: float
    resolved: float
    configured: float
    healed: float | None = None
    committed: float | None = None


@dataclass
class _Cause:
    """`kind`: one of `CAUSES`. `exiting`: the member whose exit it is, until that is complete. `is_effect`: a rank has
    only noticed that the generation is over (CHANGE-3). `beside`: further causes (CHANGE-4). `leaver`: the member that
    has left before the last step. `agents`: those whose own end it is."""

    text: str
    kind: str
    at: float | None
    is_root: bool = False
    exiting: str | None = None
    is_effect: bool = False
    beside: tuple[str, ...] = ()
    leaver: str | None = None
    agents: tuple[str, ...] = ()

    @property
    def may_be_beside(self) -> bool:
        """CHANGE-4. An effect is no cause of its own."""
        return self.kind == "hung" or (self.kind == "abort" and not self.is_effect and bool(self.agents))


@dataclass
class _GenerationChange:
    """`before`: None for the first record of this agent. `own`: the members of this agent; `here`: those of them that
    are no spares."""

    before: Record | None
    record: Record
    cause: _Cause
    in_doubt: tuple[Attempt, ...]
    here: frozenset[str]
    own: frozenset[str]
    timelines: dict[str, _RankTimeline] = field(default_factory=dict)


class ChangeReporter:
    """The generation changes that one agent sees."""

    def __init__(self) -> None:
        self._record: Record | None = None
        self._cause: _Cause | None = None
        self._pending: dict[str, Attempt] = {}
        self._change: _GenerationChange | None = None

    def caused(
        self,
        cause: str,
        kind: str,
        at: float,
        *,
        is_root: bool = False,
        exiting: str | None = None,
        is_effect: bool = False,
        leaver: str | None = None,
        agents: tuple[str, ...] = (),
    ) -> None:
        """Why the present generation ends. The first cause counts, but a root cause (a death) replaces its effects (a
        lost peer). `kind`: one of `CAUSES`. `exiting`: the member that has begun to exit; `exited` follows.
        `is_effect`: a rank has only noticed that the generation is over (CHANGE-3). `leaver`: the member that has left
        before the last step; `failed` may follow. `agents`: those whose own end it is."""
        found, known = _Cause(cause, kind, at, is_root, exiting, is_effect, leaver=leaver, agents=agents), self._cause
        if known is None:
            self._cause = found
            return
        first, other = known, found
        if is_root and not known.is_root:
            found.at, found.is_effect, found.beside = min(at, known.at or at), False, known.beside
            first, other = found, known
        if first.may_be_beside and other.may_be_beside and "hung" in (first.kind, other.kind):  # CHANGE-4
            named = dict.fromkeys((*first.beside, other.text))
            first.beside = tuple(text for text in named if text != first.text)[:MAX_BESIDE]
        self._cause = first

    def cut_off(self, at: float) -> None:
        """CHANGE-6. What ended the generation before that, such as a death whose exit is complete, stays the cause."""
        known = self._cause
        if self._record is not None and (known is None or not known.is_root or known.exiting is not None):
            self._cause = _Cause(*_CUT_OFF, at, is_root=True)

    def failed(self, member: str, cause: str, exiting: str | None) -> None:
        """The script of `member` has failed: `cause` is why the member had left."""
        if self._change is not None and self._change.cause.leaver == member:
            self._change.cause.text, self._change.cause.exiting = cause, exiting

    def exited(self, member: str, cause: str, kind: str) -> Iterator[dict[str, Any]]:
        """The exit of `member` is complete: `cause` and `kind` say how it ended."""
        for known in (self._cause, None if self._change is None else self._change.cause):
            if known is not None and known.exiting == member:
                known.text, known.kind, known.exiting = cause, kind, None
        yield from self._end_if_over()

    def agent_lost(self, agent: str, at: float) -> None:
        """The agent is dead: a root cause, unless the present cause names the agent already."""
        is_named = self._cause is not None and agent in self._cause.agents
        if self._record is not None and self._record.seats_of(agent) and not is_named:
            self.caused(f"agent {agent} is lost", "agent_lost", at, is_root=True, agents=(agent,))

    def agent_left(self, agent: str, at: float) -> None:
        """The agent has ended in order. Whatever ended the generation before that is the cause, unless it is this: the
        coordinator ends the generation of an agent that says goodbye, and names it."""
        if self._record is None or not self._record.seats_of(agent):
            return
        self.caused(f"agent {agent} has left", "left", at, agents=(agent,))
        if self._cause is not None and self._cause.kind == "abort" and self._cause.text == f"agent {agent} has left":
            self._cause.kind = "left"

    def requested(self, member: str, pending: Attempt | None) -> None:
        """`member` has left its generation, in doubt about `pending`."""
        self._pending.pop(member, None)
        if pending is not None:
            self._pending[member] = pending

    def agreed(self, record: Record, agent: str) -> Iterator[dict[str, Any]]:
        """A record is agreed. `agent`: this agent."""
        yield from self.ended()
        first = _JOIN if record.parent else _START  # CHANGE-5
        cause = self._cause or _Cause(*(_ELSEWHERE if self._record else first), None)
        if (cause.is_effect or self._cause is None) and (left := self._left_elsewhere(record, agent)):
            cause = _Cause(left, "elsewhere", cause.at)
        elif self._cause is None and self._joins_here(record, agent):
            cause = _Cause(*WAITS_TO_JOIN, None)
        in_doubt = tuple(sorted(set(self._pending.values())))
        seats = record.seats_of(agent)
        here = frozenset(seat.member for seat in seats if seat.status != SPARE)
        own = frozenset(seat.member for seat in seats)
        self._change = _GenerationChange(self._record, record, cause, in_doubt, here, own)
        self._record, self._cause = record, None
        self._pending.clear()

    def _joins_here(self, record: Record, agent: str) -> bool:
        """A rank of `agent` is new: an agent without a rank in the generation announces none."""
        before = self._record
        return before is not None and any(before.seat(seat.member) is None for seat in record.seats_of(agent))

    def _left_elsewhere(self, record: Record, agent: str) -> str:
        """CHANGE-3. Empty: nobody, or a member of `agent` too."""
        before = () if self._record is None else self._record.seats
        stay = {seat.member for seat in record.seats}
        left = [seat for seat in before if seat.member not in stay]
        if not left or any(seat.agent == agent for seat in left):
            return ""
        first, *others = left
        more = f" and {len(others)} more" if others else ""
        return f"rank {first.local_rank} of agent {first.agent}{more} left"

    def entered(self, member: str, generation: int, times: Mapping[str, float]) -> None:
        if self._change is not None and self._change.record.generation == generation:
            names = ("began", "aborted", "agreed", "resolved", "configured")
            self._change.timelines[member] = _RankTimeline(**{name: times[name] for name in names})

    def healed(self, member: str, generation: int, at: float) -> None:
        if (timeline := self._timeline(member, generation)) is not None:
            timeline.healed = at

    def committed(self, member: str, attempt: Attempt, at: float) -> Iterator[dict[str, Any]]:
        if (timeline := self._timeline(member, attempt.generation)) is None or self._change is None:
            return
        timeline.committed = timeline.committed or at
        yield from self._end_if_over()

    def _end_if_over(self) -> Iterator[dict[str, Any]]:
        """CHANGE-1."""
        change = self._change
        if change is None or change.cause.exiting is not None:
            return
        committed = {member for member, timeline in change.timelines.items() if timeline.committed is not None}
        if change.timelines and committed >= change.here:
            yield from self.ended()

    def ended(self) -> Iterator[dict[str, Any]]:
        """End the change under way, and report it as far as it came."""
        change, self._change = self._change, None
        if change is not None:
            yield describe(change)

    def _timeline(self, member: str, generation: int) -> _RankTimeline | None:
        if self._change is None or self._change.record.generation != generation:
            return None
        return self._change.timelines.get(member)


def describe(change: _GenerationChange) -> dict[str, Any]:
    """The change as plain data."""
    before, record = change.before, change.record
    old = {} if before is None else {seat.member: seat for seat in before.seats}
    new = {seat.member: seat for seat in record.seats}
    places = {} if before is None else _places(before)
    joined = set(new) - set(old) if before is not None or not record.parent else change.own  # CHANGE-5
    moved = [
        {"member": member, "from": places[member], "to": place}
        for member, place in _places(record).items()
        if member in old and places[member] != place
    ]
    return {
        "generation": record.generation,
        "digest": record.digest,
        "parent": record.parent,
        **layouts_of(record),
        "layout_before": None if before is None or before.layout == record.layout else before.layout.text,
        "num_holders": len(record.holders),
        "cause": "; also ".join((change.cause.text, *change.cause.beside)),
        "kind": change.cause.kind,
        "left": sorted(set(old) - set(new)),
        "joined": sorted(joined),
        "moved": moved,
        "in_doubt": [
            {"step": attempt.step, "generation": attempt.generation, "outcome": _outcome(attempt, record)}
            for attempt in change.in_doubt
        ],
        "committed": list(record.committed),
        "checkpoint": record.committed.step if record.checkpoint else None,
        **_times(change),
    }


def layouts_of(record: Record) -> dict[str, str | None]:
    """The layout in force, and as `fallback_of` the first one, if that is another."""
    first = record.layouts[0]
    return {"layout": record.layout.text, "fallback_of": None if record.layout == first else first.text}


def name_layout(event: Mapping[str, Any]) -> str:
    """The layout of an event, and of what it is a fallback."""
    fallback_of = event.get("fallback_of")
    return f"{event['layout']}, a fallback of {fallback_of}" if fallback_of else f"{event['layout']}"


def _places(record: Record) -> dict[str, dict[str, int] | None]:
    """Each member's model coordinates; None for a spare. A replica group with another number has not moved."""
    return {
        seat.member: dict(zip(("pp", "sdp", "tp"), record.model_coordinates(seat.member), strict=True))
        if seat.member in record.plan.ranks
        else None
        for seat in record.seats
    }


def _outcome(attempt: Attempt, record: Record) -> str:
    if attempt != record.committed:
        return "dropped"
    return "rolled forward" if record.rolled_forward else "applied"


def _times(change: _GenerationChange) -> dict[str, Any]:
    """CHANGE-2. "phases_ms" in milliseconds; "began_at": when the first phase began, as CLOCK_MONOTONIC seconds."""
    timelines, caused_at = list(change.timelines.values()), change.cause.at
    if not timelines:
        return {"began_at": caused_at, "phases_ms": dict.fromkeys(PHASES)}
    newcomers = change.record.generation == 1 or caused_at is None
    survivors = [timeline for timeline in timelines if newcomers or timeline.began >= (caused_at or 0.0)] or timelines
    began = max(timeline.began for timeline in survivors)
    aborted = max(timeline.aborted for timeline in survivors)
    agreed = max(timeline.agreed for timeline in timelines)
    resolved = max(timeline.resolved for timeline in timelines)
    configured = max(timeline.configured for timeline in timelines)
    healed = [timeline.healed for timeline in timelines if timeline.healed is not None]
    committed = [timeline.committed for timeline in timelines if timeline.committed is not None]
    found = {
        "leave": None if caused_at is None else began - caused_at,
        "abort": aborted - began,
        "quorum": agreed - aborted,
        "resolve": resolved - agreed,
        "configure": configured - resolved,
        "heal": max(healed) - configured if healed else None,
        "first_commit": min(committed) - configured if committed else None,
    }
    phases = {name: None if s is None else round(max(0.0, s) * 1e3, 1) for name, s in found.items()}
    return {"began_at": round(began if caused_at is None else caused_at, 4), "phases_ms": phases}


def is_planned(change: Mapping[str, Any]) -> bool:
    """Whether the job, or the operator, wanted the change."""
    return change["kind"] in PLANNED or (change["kind"] == "elsewhere" and not change["left"])


def format_change(change: Mapping[str, Any], counts: Mapping[str, int]) -> str:
    """A change in one line. `counts`: seats by status."""
    seats = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    parts = [f"generation {change['generation']} ({change['cause']}): {seats}"]
    parts += [f"{len(change[what])} {what}" for what in ("left", "joined", "moved") if change[what]]
    if change["layout_before"]:
        parts.append(f"takes the layout {name_layout(change)}, in place of {change['layout_before']}")
    parts += [f"step {doubt['step']} in doubt was {doubt['outcome']}" for doubt in change["in_doubt"]]
    if change["checkpoint"] is not None:
        does = "tries" if change["phases_ms"]["first_commit"] is None else "continues at"
        parts.append(f"{does} the checkpoint of step {change['checkpoint']}")
    spent = {name: ms for name, ms in change["phases_ms"].items() if ms is not None}
    if spent and "first_commit" in spent:
        times = ", ".join(f"{name} {ms:.0f}" for name, ms in spent.items() if name != "heal" and ms >= 0.5)
        parts.append(f"{sum(ms for name, ms in spent.items() if name != 'heal'):.0f} ms ({times})")
    return "; ".join(parts)
