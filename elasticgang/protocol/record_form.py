"""The lines of a record's text, and the digest over them.

Pure. The lines: the head; the agents; their addresses; for each agent its host and its members, without their places;
the places in their order, as spans `[agent, first, count, status]` of an agent's members, ranks first, then spares. So
a lost rank changes the line of its agent and one span, and the other lines of a large job stay as they are. When all
learners become active, no line of an agent changes.

FORM-DIGEST  The digest covers each line by a digest of its own; the places together have one. A record that shares
             lines with the one before shares their digests, too.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True)


class RecordForm:
    """`tops`: the head, the agents and their addresses. `lines`, `line_digests`: by agent, in their order."""

    def __init__(
        self,
        tops: tuple[str, str, str],
        lines: Mapping[str, str],
        order: Sequence[str],
        line_digests: Mapping[str, bytes] | None = None,
    ) -> None:
        self.tops, self.lines, self.order = tops, lines, order
        if line_digests is not None:
            self.line_digests = line_digests

    @cached_property
    def line_digests(self) -> Mapping[str, bytes]:
        return {agent: digest_of_line(line) for agent, line in self.lines.items()}

    @cached_property
    def order_text(self) -> str:
        return "\n".join(self.order)

    @property
    def text(self) -> str:
        return "\n".join((*self.tops, *self.lines.values(), *self.order))

    @property
    def num_sent_bytes(self) -> int:
        """The size of the text in a JSON message, where its quotes, backslashes and ends of lines are escaped."""
        text = self.text
        return len(text) + sum(map(text.count, '"\\\n')) + len('""')

    @property
    def digest(self) -> str:
        """FORM-DIGEST"""
        head, agents, addresses = self.tops
        of_agents = hashlib.sha256(b"".join(self.line_digests.values())).digest()
        parts = (of_agents, *map(_digest_of_shared, (agents, addresses)), *map(digest_of_line, (head, self.order_text)))
        return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def digest_of_line(line: str) -> bytes:
    return hashlib.sha256(line.encode()).digest()


@lru_cache(maxsize=4)
def _digest_of_shared(line: str) -> bytes:
    """Of a line that a record usually shares with the one before."""
    return digest_of_line(line)


def canonical_json(data: Any) -> str:
    """JSON that is identical for equal data."""
    return _ENCODER.encode(data)


def spans_of(places: Iterable[tuple[str, int, int]]) -> list[str]:
    """The spans of (agent, number of the member among the agent's, its status), in the order of the places."""
    spans: list[tuple[str, int, int, int]] = []
    for agent, number, status in places:
        if spans and (agent, number, status) == (spans[-1][0], spans[-1][1] + spans[-1][2], spans[-1][3]):
            spans[-1] = (agent, spans[-1][1], spans[-1][2] + 1, status)
        else:
            spans.append((agent, number, 1, status))
    return list(map(canonical_json, spans))


def spans_of_agent(agent: str, order_text: str) -> list[str]:
    """Those of one agent, found without a look at each of the others."""
    start = f"[{canonical_json(agent)},"
    _, *found = f"\n{order_text}".split(f"\n{start}")
    return [start + rest.partition("\n")[0] for rest in found]


def parse_lines(lines: Collection[str]) -> list[Any]:
    """The data of each line. Raises ValueError: they are not JSON, or not one value each."""
    found: list[Any] = json.loads(f"[{','.join(lines)}]")
    if len(found) != len(lines):
        raise ValueError("a line of a record has not one value")
    return found
