"""`elasticgang plan`: prints what the planner does when ranks or hosts are lost and return. Starts no process."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence

from elasticgang.errors import LayoutError
from elasticgang.layout import Member, ParallelLayout, Plan, plan
from elasticgang.layout.plan_change import PlanChange, change_plan, layout_filled

MAX_RANKS = 100_000  # which take some seconds
_MAX_NAMED = 8
_NAME = re.compile(r"host(0|[1-9]\d*)(?:/rank(0|[1-9]\d*))?", re.ASCII)


class Fleet:
    """The ranks of all hosts, and which of them are there."""

    def __init__(self, num_hosts: int, num_ranks: int) -> None:
        """Raises ValueError: there are more than `MAX_RANKS`."""
        if num_hosts * num_ranks > MAX_RANKS:
            raise ValueError(
                f"a plan is of at most {MAX_RANKS:,} ranks, but --hosts {num_hosts} times --ranks-per-host {num_ranks} "
                f"are {num_hosts * num_ranks:,}"
            )
        self._num_ranks = num_ranks
        self._present: dict[str, Member] = {}
        for host in range(num_hosts):
            self.add(f"host{host}")

    def members(self) -> list[Member]:
        return list(self._present.values())

    def add(self, name: str) -> None:
        """Raises ValueError: it is no name, or is there already, or is one too many."""
        for member in self._named(name):
            if member.id in self._present:
                raise ValueError(f"--join {name}: {member.id} is there already")
            self._present[member.id] = member
        if len(self._present) > MAX_RANKS:
            raise ValueError(f"--join {name}: a plan is of at most {MAX_RANKS:,} ranks")

    def remove(self, name: str) -> None:
        """Raises ValueError: it is no name, or is not there."""
        found = [member for member in self._named(name) if member.id in self._present]
        if not found:
            raise ValueError(f"--kill {name}: it is not there")
        for member in found:
            del self._present[member.id]

    def _named(self, name: str) -> list[Member]:
        self.check(name)
        host, _, rank = name.partition("/")
        numbers = [rank] if rank else [f"rank{number}" for number in range(self._num_ranks)]
        return [Member(f"{host}/{number}", host) for number in numbers]

    def check(self, name: str) -> None:
        """Raises ValueError: it is no name of a rank or a host."""
        match = _NAME.fullmatch(name)
        if match is None or (match[2] and int(match[2]) >= self._num_ranks):
            raise ValueError(
                f"ranks are named host0 to hostN for all ranks of a host, or host0/rank0 to host0/rank"
                f"{self._num_ranks - 1} for one, but {name!r} was given"
            )


def explore(
    fleet: Fleet, layout: ParallelLayout, actions: Sequence[tuple[str, str]], max_replicas: int | None
) -> Iterator[tuple[str, Plan | PlanChange]]:
    """The plan at the start, and what each of `actions` makes of it: "kill" or "join", and names with commas between.

    Raises:
        LayoutError: too few ranks are left; no further action is tried.
        ValueError: a name is wrong.
    """
    for _, names in actions:
        for name in names.split(","):
            fleet.check(name)
    in_force = layout_filled(layout, fleet.members())
    seats = None if max_replicas is None else max_replicas * layout.unit // in_force.unit
    current = plan(fleet.members(), in_force, max_replicas=seats)
    yield "at the start", current
    for action, names in actions:
        for name in names.split(","):
            fleet.remove(name) if action == "kill" else fleet.add(name)
        what = f"--{action} {names}"
        try:
            change = change_plan(fleet.members(), layout, current, max_replicas=max_replicas)
        except LayoutError as exc:
            raise LayoutError(f"{what}: {exc} The job waits for them.") from exc
        yield what, change
        current = change.plan


def lines_of(
    what: str, found: Plan | PlanChange, layout: ParallelLayout, state_bytes: int | None = None
) -> Iterator[str]:
    """`layout`: as the job declares it. `state_bytes`: of one whole copy of the training state."""
    if isinstance(found, Plan):
        yield f"{what}: {_size(found, layout)}"
        return
    yield f"{what}: {_size(found.plan, layout)}"
    if found.left:
        yield f"  gone: {_names(found.left)}"
    if found.waiting:
        yield f"  lose their seat and wait as spares: {_names(found.waiting)}"
    if found.lost:
        parts = _names(f"({_part(part)})" for part in found.lost)
        yield f"  LOST: no rank holds {parts}; the job goes back to its newest checkpoint, or ends"
    if found.moved is not None:
        yield from _move(found, state_bytes)
        return
    if not found.fetching:
        yield "  nobody fetches state"
        return
    yield f"  fetch state: {len(found.fetching)}"
    for member, part in list(found.fetching.items())[:_MAX_NAMED]:
        at = found.plan.coordinates(member)
        number = found.sources[part]
        source = f"from {number} holder{'s' * (number != 1)}" if number else "from a checkpoint"
        yield f"    {member} takes rdp={at['rdp']}, {_part(part)} and heals {source}"
    if len(found.fetching) > _MAX_NAMED:
        yield f"    and {len(found.fetching) - _MAX_NAMED} more"


def _move(found: PlanChange, state_bytes: int | None) -> Iterator[str]:
    """What is fetched when the layout changes."""
    assert found.moved is not None
    yield f"  the job takes the layout {found.layout.text}"
    if found.lost:
        return
    copies = f"{float(found.moved):.2f} of the {found.held} copies of the state that the seats then hold"
    size = "" if state_bytes is None else f", about {int(found.moved * state_bytes):,} bytes"
    yield f"  fetch state from the former seats: {len(found.fetching)} ranks, {copies}{size}"
    for member, part in list(found.fetching.items())[:_MAX_NAMED]:
        yield f"    {member} takes rdp={found.plan.coordinates(member)['rdp']}, {_part(part)}"
    if len(found.fetching) > _MAX_NAMED:
        yield f"    and {len(found.fetching) - _MAX_NAMED} more"


def as_json(what: str, found: Plan | PlanChange) -> str:
    return json.dumps({"after": what, **({"plan": found.to_json()} if isinstance(found, Plan) else found.to_json())})


def _size(plan: Plan, layout: ParallelLayout) -> str:
    pp, rdp, sdp, tp = plan.shape
    is_first = (pp, sdp, tp) == (layout.pp, layout.sdp, layout.tp)
    of = "" if is_first else f" in a fallback of {layout.options[0].text}"
    spares = f"{len(plan.spares)} spare{'s' * (len(plan.spares) != 1)}"
    return f"{rdp} replica group{'s' * (rdp != 1)} of {pp * sdp * tp} (pp={pp}, sdp={sdp}, tp={tp}){of}, {spares}"


def _part(part: Sequence[int]) -> str:
    return "pp={}, sdp={}, tp={}".format(*part)


def _names(names: Iterable[str]) -> str:
    found = list(names)
    rest = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
    return ", ".join(found[:_MAX_NAMED]) + rest
