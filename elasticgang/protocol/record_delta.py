"""A record as what changed since the one before: for one lost rank of thousands, a few numbers.

Pure. Members, agents and seats of the parent are numbers in a delta: they were sent once, in the record before.

DELTA-EXACT  What is made of a delta has the digest that the delta names, or is refused.
DELTA-SENT   `delta_of` returns a delta only if `apply_delta` makes the same record of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from elasticgang.protocol.record import Record, canonical_json

_STATUSES = ("active", "learner", "spare")
_NEW = -1

_COPIED = frozenset({"agents", "addresses", "ancestors"})

Row = tuple[str, int, str]  # member, local rank, address


def delta_of(parent: Record, child: Record) -> dict[str, Any] | None:
    """None when `child` does not follow `parent`, or is better sent whole."""
    if child.parent != parent.digest or child.ancestors != parent.ancestor_digests():
        return None
    head, parent_head = child._head(), parent._head()
    rows, parent_rows = _rows(child), _rows(parent)
    survivors = {seat.member for seat in child.seats}
    changed: dict[str, Any] = {}
    for number, agent in enumerate(child.agents):
        before = parent_rows.get(agent)
        kept = None if before is None else (before[0], [row for row in before[1] if row[0] in survivors])
        if kept != rows[agent]:
            changed[str(number)] = rows[agent]
    new_rows_of = {child.agents[int(number)] for number in changed}
    dropped = [
        index for index, seat in enumerate(parent.seats) if seat.member not in survivors or seat.agent in new_rows_of
    ]
    place = {member: index for index, member in enumerate(_in_order(parent))}
    statuses = {seat.member: seat.status for seat in parent.seats}
    addresses = dict(zip(parent.agents, parent.addresses, strict=False))
    delta = {
        "digest": child.digest,
        "head": {
            name: value
            for name, value in head.items()
            if name not in _COPIED and canonical_json(value) != canonical_json(parent_head[name])
        },
        "agents": _runs(_numbers(parent.agents, child.agents)),
        "new_agents": [agent for agent in child.agents if agent not in parent_rows],
        "addresses": {
            str(number): address
            for number, (agent, address) in enumerate(zip(child.agents, child.addresses, strict=False))
            if addresses.get(agent) != address
        },
        "rows": changed,
        "dropped": _spans(dropped),
        "order": _runs([place.get(member, _NEW) for member in _in_order(child)]),
        "new_order": [member for member in _in_order(child) if member not in place],
        "statuses": [
            [status, _spans([i for i, s in enumerate(child.seats) if s.status == status != statuses.get(s.member)])]
            for status in _STATUSES
        ],
    }
    try:
        return delta if apply_delta(parent, delta).text == child.text else None
    except ValueError:
        return None


def apply_delta(parent: Record, delta: dict[str, Any]) -> Record:
    """Raises ValueError, KeyError, TypeError or IndexError when `delta` is none of `parent`."""
    new_agents = iter(delta["new_agents"])
    agents = [
        next(new_agents, "") if i == _NEW else parent.agents[i] for i in _flat(delta["agents"], len(parent.agents))
    ]
    known = dict(zip(parent.agents, parent.addresses, strict=False))
    addresses = [known.get(agent, "") for agent in agents] if parent.addresses or delta["addresses"] else []
    for number, address in delta["addresses"].items():
        addresses[int(number)] = address
    rows = _rows(parent)
    dropped = set(_indices(delta["dropped"], len(parent.seats)))
    members = {seat.member for index, seat in enumerate(parent.seats) if index not in dropped}
    kept = {agent: (host, [row for row in own if row[0] in members]) for agent, (host, own) in rows.items()}
    for number, (host, own) in delta["rows"].items():
        kept[agents[int(number)]] = (host, [(row[0], row[1], row[2]) for row in own])
    statuses = {seat.member: seat.status for seat in parent.seats}
    flat = [row[0] for agent in agents for row in kept[agent][1]]
    for status, spans in delta["statuses"]:
        statuses.update((flat[index], status) for index in _indices(spans, len(flat)))
    before, new_order = _in_order(parent), iter(delta["new_order"])
    order = [next(new_order, "") if i == _NEW else before[i] for i in _flat(delta["order"], len(before))]
    places = {member: index for index, member in enumerate(order)}
    head = {**parent._head(), **delta["head"], "agents": agents, "addresses": addresses}
    head["ancestors"] = parent.ancestor_digests()
    lines: list[Any] = [head]
    for agent in agents:
        host, own = kept[agent]
        lines.append([host, *((*row, _STATUSES.index(statuses[row[0]]), places.get(row[0])) for row in own)])
    record = Record.from_text("\n".join(map(canonical_json, lines)))
    if record.digest != delta["digest"]:
        raise ValueError("a delta does not make the record that it names")
    return record


def _rows(record: Record) -> dict[str, tuple[str, list[Row]]]:
    """By agent: its host, and its members without their places."""
    rows: dict[str, tuple[str, list[Row]]] = {agent: ("", []) for agent in record.agents}
    for seat in record.seats:
        rows[seat.agent] = (seat.host, rows[seat.agent][1])
        rows[seat.agent][1].append((seat.member, seat.local_rank, seat.address))
    return rows


def _in_order(record: Record) -> list[str]:
    return [*record.plan.ranks, *record.plan.spares]


def _numbers(known: Sequence[str], names: Iterable[str]) -> list[int]:
    index = {name: number for number, name in enumerate(known)}
    return [index.get(name, _NEW) for name in names]


def _runs(numbers: Iterable[int]) -> list[list[int]]:
    """[start, length] of what counts up by one; [-1, length] of what is new."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and (
            (number == _NEW and runs[-1][0] == _NEW)
            or (number != _NEW and runs[-1][0] != _NEW and number == sum(runs[-1]))
        ):
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return runs


def _flat(runs: Iterable[Sequence[int]], size: int) -> list[int]:
    flat: list[int] = []
    for start, length in runs:
        if start == _NEW:
            flat += [_NEW] * length
        elif start >= 0 and start + length <= size:
            flat += range(start, start + length)
        else:
            raise ValueError("a delta names what is not in the record before")
    return flat


def _spans(indices: Iterable[int]) -> list[list[int]]:
    return _runs(indices)


def _indices(spans: Iterable[Sequence[int]], size: int) -> list[int]:
    return _flat(spans, size)
