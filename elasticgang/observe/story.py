"""Tells events to a person: one line for each, and each generation change as a short story. Pure.

Control characters in an event, which a terminal would obey, are escaped.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from elasticgang.observe.change_report import PHASES, name_layout

Event = Mapping[str, Any]

DIED = "the agent ended without a word: it was killed, or its host went down"
_NUM_LINES = 10
_NUM_MEMBERS = 12  # of each kind, in a story
_MAX_VALUE = 120  # characters of a list, in a line
_HIDDEN = frozenset({"t", "wall", "event"})
_NOTABLE = frozenset({"hung", "warned", "signal", "data_worker_lost", "state_differs"})  # before a change, told with it
_PHASE_WORDS = {
    "leave": "until the ranks had left the old generation",
    "abort": "to end its collectives",
    "quorum": "to agree on who takes part",
    "resolve": "to decide the step in doubt",
    "configure": "to connect the new generation",
    "heal": "for the new ranks to fetch the state, beside the others' training",
    "first_commit": "for the first step",
}


def escape(line: str) -> str:
    if line.isprintable():
        return line
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in line)


def line_of(event: Event) -> str:
    """`09:55:16.123  exited  member=..., status=-9`."""
    details = ", ".join(f"{name}={_value(value)}" for name, value in event.items() if name not in _HIDDEN)
    return escape(f"{_clock(event)}  {event['event']}" + (f"  {details}" if details else ""))


class NoSuchChange(Exception):
    """The events have no change to that generation."""


@dataclass(frozen=True)
class _Change:
    """`began`: the event of its generation. `before`: the newest notable events since the generation before."""

    change: Event
    began: Event | None
    before: Sequence[Event]

    @property
    def generation(self) -> Any:
        return self.change.get("generation")


class _Log:
    """What stories need of the events, each of which is read once. Of a member, the first event of a name counts."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.changes: list[_Change] = []
        self.spawned: dict[str, Event] = {}
        self.exit_began: dict[str, Event] = {}
        self.exited: dict[str, Event] = {}
        self.successors: dict[str, Event] = {}  # the event of what was started in place of a member
        self.joined: dict[str, Event] = {}  # the change in which a member joined
        self.last: Event | None = None
        self.end: Event | None = None  # of the newest job
        self.has_word = False  # that it ends
        self._generations: dict[Any, tuple[Event, Sequence[Event]]] = {}
        self._notable: deque[Event] = deque(maxlen=_NUM_LINES)
        self._without_successor: defaultdict[Any, list[str]] = defaultdict(list)  # by local rank
        for event in events:
            self._add(event)

    def _add(self, event: Event) -> None:
        self.last = event
        match event["event"]:
            case "started":
                self.end, self.has_word = None, False
            case "spawned":
                self.spawned.setdefault(event["member"], event)
                for member in self._without_successor.pop(event["local_rank"], ()):
                    self.successors[member] = event
            case "exit_began":
                self.exit_began.setdefault(event["member"], event)
            case "exited":
                self._add_exit(event["member"], event)
            case "generation":
                self._generations[event["generation"]] = event, tuple(self._notable)
                self._notable.clear()
            case "generation_change":
                began, before = self._generations.get(event["generation"], (None, ()))
                self.changes.append(_Change(event, began, before))
                for member in event.get("joined", ()):
                    self.joined.setdefault(member, event)
            case "failed" | "ended":
                self.end = event
            case "exiting" | "signal":
                self.has_word = True
        if event["event"] in _NOTABLE:
            self._notable.append(event)

    def _add_exit(self, member: str, event: Event) -> None:
        if member not in self.exited and member in self.spawned:
            self._without_successor[self.spawned[member]["local_rank"]].append(member)
        self.exited.setdefault(member, event)


def tell(
    events: Iterable[Event],
    generation: int | None = None,
    incident: Callable[[int], Event | None] = lambda generation: None,
    is_alive: bool | None = None,
) -> Iterator[str]:
    """The generation changes that nobody planned, or that changed the layout; or that of one `generation`. Yields
    lines. `incident`: returns what the agent has left about one of them. `is_alive`: whether the agent runs; None:
    unknown.

    Raises:
        NoSuchChange
    """
    return map(escape, _tell(_Log(events), generation, incident, is_alive))


def _tell(
    log: _Log, generation: int | None, incident: Callable[[int], Event | None], is_alive: bool | None
) -> Iterator[str]:
    chosen = [each for each in log.changes if each.generation == generation]
    if generation is None:
        chosen = [each for each in log.changes if any(map(each.change.get, ("left", "in_doubt", "layout_before")))]
    elif not chosen:
        known = ", ".join(str(each.generation) for each in log.changes) or "none"
        raise NoSuchChange(f"there is no generation change {generation}; those of this host: {known}")
    for place, each in enumerate(chosen):
        if place:
            yield ""
        yield from _tell_change(each, log)
        found = incident(each.generation)
        if found is not None:
            yield from _tell_incident(found)
    end = _tell_end(log, is_alive) if generation is None else ""
    if end:
        yield ""
        yield end
    elif not chosen:
        yield "no rank was lost"


def _tell_end(log: _Log, is_alive: bool | None) -> str:
    """How the newest job of the log ended. Empty: it runs, it has finished, or the log cannot tell."""
    if log.end is not None:
        return f"{_clock(log.end)}  the job {log.end['event']}: {log.end.get('reason', '')}"
    return f"{_clock(log.last)}  {DIED}" if is_alive is False and log.last is not None and not log.has_word else ""


def _tell_change(found: _Change, log: _Log) -> Iterator[str]:
    change, began = found.change, found.began
    yield f"{_clock(began or change)}  generation {change['generation']} began: {change.get('cause', 'unknown')}"
    left = sorted(change.get("left", ()), key=lambda member: member not in log.exited)
    yield from _bounded((f"  {member} left{_end_of(member, log)}" for member in left), "left, on other hosts")
    for event in found.before:
        yield f"  before it: {line_of(event)}"
    for doubt in change.get("in_doubt", ()):
        yield f"  step {doubt['step']} was in doubt, and was {doubt['outcome']}"
    committed = change.get("committed") or (0, 0)
    yield f"  the job went on after {committed[0]} committed steps, with {_seats(began)}"
    if change.get("layout_before"):
        yield f"  the job took the layout {name_layout(change)}, in place of {change['layout_before']}"
    if change.get("num_holders"):
        yield f"  the state moved between the ranks in memory, from {change['num_holders']} that held it"
    if change.get("checkpoint") is not None:
        did = "tried" if (change.get("phases_ms") or {}).get("first_commit") is None else "loaded"
        yield f"  the ranks {did} the checkpoint of step {change['checkpoint']}"
    yield from _bounded((f"  {member} joined" for member in change.get("joined", ())), "joined")
    moves = (
        f"  {move['member']} moved from {_place(move['from'])} to {_place(move['to'])}"
        for move in change.get("moved", ())
    )
    yield from _bounded(moves, "moved")
    phases = change.get("phases_ms") or {}
    for name in PHASES:
        if phases.get(name):
            yield f"  {phases[name]:8.1f} ms {_PHASE_WORDS[name]}"
    for member in change.get("left", ()):
        yield from _return_of(member, log)


def _bounded(lines: Iterable[str], what: str) -> Iterator[str]:
    """At most `_NUM_MEMBERS`, and how many there are beside them."""
    found = list(lines)
    yield from found[:_NUM_MEMBERS]
    if len(found) > _NUM_MEMBERS:
        yield f"  and {len(found) - _NUM_MEMBERS} more {what}"


def _tell_incident(incident: Event) -> Iterator[str]:
    for lost in incident["lost"]:
        name = f"rank {lost['local_rank']} (process {lost['pid']})"
        if lost["stack"]:
            yield f"  {name} hung; its stack, innermost frame first:"
            yield from (f"    {line.strip()}" for line in lost["stack"].splitlines())
        if lost.get("traceback"):
            yield f"  the last lines of the traceback of {name}:"
            yield from (f"    | {line}" for line in lost["traceback"].splitlines()[-_NUM_LINES:])
        if lost["tail"]:
            yield f"  the last lines of {name}:"
            yield from (f"    | {line}" for line in lost["tail"][-_NUM_LINES:])
    groups: dict[str, list[str]] = {}
    names: dict[str, str] = {}
    for rank in incident["counters"]:
        for group, counts in rank["groups"].items():
            text = f"rank {rank['local_rank']} {counts['submitted']}/{counts['completed']}"
            groups.setdefault(group, []).append(text)
            names[group] = counts.get("gangs") or group[:8]  # an older agent wrote no names
    if groups:
        yield "  collectives begun/completed on this host when it began, by the gangs of a process group:"
        yield from (f"    {names[group]}: {', '.join(counts)}" for group, counts in groups.items())


def _end_of(member: str, log: _Log) -> str:
    exit, began = log.exited.get(member), log.exit_began.get(member)
    if exit is None:
        return ", on another host or before this log"
    status = exit.get("status", 0)
    how = f"killed by signal {-status}" if status < 0 else f"exited with code {status}"
    late = "" if began is None else f"; its memory was freed {1000 * (exit['t'] - began['t']):.0f} ms later"
    return f": process {exit.get('pid')}, {how}{late}"


def _return_of(member: str, log: _Log) -> Iterator[str]:
    """The member that the agent started in its place."""
    exit, started = log.exited.get(member), log.successors.get(member)
    if exit is None:
        return
    if started is None:
        yield f"  nothing was started in place of {member}"
        return
    after = 1000 * (started["t"] - exit["t"])
    joined = log.joined.get(started["member"])
    back = "and has not joined" if joined is None else f"and joined in generation {joined['generation']}"
    yield f"  {started['member']} was started in its place {after:.0f} ms after the exit, {back}"


def _seats(generation: Event | None) -> str:
    if generation is None:
        return "seats that this log does not have"
    counts = [(generation.get(status, 0), status) for status in ("active", "learner", "spare")]
    return ", ".join(f"{count} {status}" for count, status in counts if count) or "no seats"


def _place(at: Mapping[str, int] | None) -> str:
    return "a spare's wait" if at is None else " ".join(f"{axis}={index}" for axis, index in at.items())


def _value(value: Any) -> str:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    return f"[{len(value)} items]" if isinstance(value, list) and len(text) > _MAX_VALUE else text


def _clock(event: Event) -> str:
    wall = float(event.get("wall", 0.0))  # seconds since 1970
    return datetime.fromtimestamp(wall).isoformat(" ", "milliseconds")[11:]
