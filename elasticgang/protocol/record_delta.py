"""A record as what changed since the one before: for one lost rank of thousands, the line of its agent.

Pure. What stays is taken from the record before, by its number there.

DELTA-EXACT  What is made of a delta has the digest that the delta names, or is refused.
DELTA-SENT   `delta_of` returns a delta only if `apply_delta` makes the same record of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from elasticgang.protocol.record import Record
from elasticgang.protocol.record_form import RecordForm, canonical_json, digest_of_line

_NEW = -1
_MAX_SHARE = 0.5  # of the record: a larger delta takes an agent longer than the whole record


def delta_of(parent: Record, child: Record) -> dict[str, Any] | None:
    """None when `child` does not follow `parent`, or is better sent whole."""
    if child.parent != parent.digest or child.ancestors != parent.ancestor_digests():
        return None
    form, before = child.form, parent.form
    lines = {
        str(number): line for number, (agent, line) in enumerate(form.lines.items()) if before.lines.get(agent) != line
    }
    order = _changes(before.order, form.order)
    if sum(map(len, (*lines.values(), *order[1]))) > _MAX_SHARE * len(child.text):
        return None
    head, parent_head = child.head(), parent.head()
    addresses = dict(zip(parent.agents, parent.addresses, strict=False))
    delta = {
        "digest": child.digest,
        "head": {
            name: value
            for name, value in head.items()
            if name != "ancestors" and canonical_json(value) != canonical_json(parent_head[name])
        },
        "agents": None if child.agents == parent.agents else _changes(parent.agents, child.agents),
        "addresses": {
            str(number): address
            for number, (agent, address) in enumerate(zip(child.agents, child.addresses, strict=False))
            if addresses.get(agent) != address
        },
        "lines": lines,
        "order": order,
    }
    try:
        return delta if apply_delta(parent, delta).text == child.text else None
    except ValueError:
        return None


def apply_delta(parent: Record, delta: dict[str, Any]) -> Record:
    """Raises ValueError, KeyError, TypeError or IndexError when `delta` is none of `parent`."""
    before = parent.form
    agents = parent.agents
    if delta["agents"] is not None:
        runs, new_agents = delta["agents"]
        agents = tuple(_changed(parent.agents, runs, list(map(str, new_agents))))
    addresses = parent.addresses
    if delta["agents"] is not None or delta["addresses"]:
        known = dict(zip(parent.agents, parent.addresses, strict=False))
        by_number = [known.get(agent, "") for agent in agents] if parent.addresses or delta["addresses"] else []
        for number, address in delta["addresses"].items():
            by_number[int(number)] = str(address)
        addresses = tuple(by_number)
    new = {agents[int(number)]: _line(line) for number, line in delta["lines"].items()}
    lines, digests = {**before.lines, **new}, {**before.line_digests}
    digests.update((agent, digest_of_line(line)) for agent, line in new.items())
    if agents is not parent.agents:
        lines = {agent: lines[agent] for agent in agents}
        digests = {agent: digests[agent] for agent in agents}
    runs, new_spans = delta["order"]
    order = _changed(before.order, runs, list(map(_line, new_spans)))
    head = {**parent.head(), **delta["head"], "ancestors": parent.ancestor_digests()}
    tops = (
        canonical_json({**head, "spans": len(order)}),
        before.tops[1] if agents is parent.agents else canonical_json(agents),
        before.tops[2] if addresses is parent.addresses else canonical_json(addresses),
    )
    record = Record.from_form(head, agents, addresses, RecordForm(tops, lines, order, digests))
    if record.digest != delta["digest"]:
        raise ValueError("a delta does not make the record that it names")
    return record


def _line(text: Any) -> str:
    if not isinstance(text, str) or "\n" in text:
        raise ValueError("a line of a record is expected")
    return text


def _changes(before: Sequence[str], after: Iterable[str]) -> tuple[list[list[int]], list[str]]:
    """`after` as runs of `before`, and what is new."""
    index = {name: number for number, name in enumerate(before)}
    names = list(after)
    return _runs([index.get(name, _NEW) for name in names]), [name for name in names if name not in index]


def _changed(before: Sequence[str], runs: Iterable[Sequence[int]], new: Sequence[str]) -> list[str]:
    names: list[str] = []
    num_taken = 0
    for start, length in runs:
        if start == _NEW and 0 < length <= len(new) - num_taken:
            names += new[num_taken : num_taken + length]
            num_taken += length
        elif start >= 0 and 0 < length <= len(before) - start:
            names += before[start : start + length]
        else:
            raise ValueError("a delta names what is not in the record before")
    return names


def _runs(numbers: Iterable[int]) -> list[list[int]]:
    """[start, length] of what counts up by one; [-1, length] of what is new."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and (number == runs[-1][0] if _NEW in (number, runs[-1][0]) else number == sum(runs[-1])):
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return runs
