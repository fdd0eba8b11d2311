"""Which agents of a job are left out, because they and others do not reach each other. Pure.

CUT-1  Of two agents with a broken path between them at most one takes part: a generation with both would not connect.
    The agent with the most broken paths is left out first, and among equals the one that comes later in turn.
CUT-2  None is left out without which the others could not go on. If that leaves a broken path, those that do not reach
    the first in turn are left out before the others, or the second, up to `_MAX_FIRST`. If each of these leaves a
    broken path, nobody is left out: all try again, as if nothing were known of paths.
REACHED  While some agents are left out of the newest record, because they and others do not reach each other (NEXT-10),
    the coordinator ends it at a step boundary, as for a joiner, once one of them and all that take part do. It does not
    before all of these have told it in their sessions whom they reach, such as after its restart.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

_MAX_FIRST = 4


def broken_paths(unreached: Mapping[str, Collection[str]], agents: Collection[str]) -> dict[str, set[str]]:
    """By agent: those of `agents` that it does not reach, or that do not reach it. Without those that have none."""
    found: dict[str, set[str]] = {}
    for agent, others in unreached.items():
        for other in others:
            if agent != other and agent in agents and other in agents:
                found.setdefault(agent, set()).add(other)
                found.setdefault(other, set()).add(agent)
    return found


def find_cut_off(
    unreached: Mapping[str, Collection[str]], in_turn: Sequence[str], begin: Callable[[], Callable[[str], bool]]
) -> dict[str, tuple[str, ...]]:
    """Those that are left out of the agents `in_turn`, each with those that stay to which its path is broken.

    `begin`: begins with all agents. What it returns leaves an agent out, besides those before. False: the others could
    not go on without it.
    """
    paths = broken_paths(unreached, frozenset(in_turn))
    turn = {agent: number for number, agent in enumerate(in_turn)}
    first = itertools.islice((agent for agent in in_turn if agent in paths), _MAX_FIRST)
    tried = (_leave_out(paths, turn, begin(), kept) for kept in (None, *first))
    gone = next((gone for gone in tried if gone is not None), [])
    stay = set(in_turn).difference(gone)
    for agent in sorted(gone, key=turn.__getitem__):
        if not paths[agent] & stay:  # those for which it was left out were, too
            stay.add(agent)
    return {agent: tuple(sorted(paths[agent] & stay)) for agent in gone if agent not in stay}


def any_comes_back(
    away: Collection[str], agents: Iterable[str], unreached_by: Callable[[str], Collection[str] | None]
) -> bool:
    """REACHED: whether one of those that are `away` and all other `agents` reach each other. `unreached_by`: None while
    it is not known."""
    back = {agent for agent in away if (unreached := unreached_by(agent)) is not None and not {*unreached} - {*away}}
    for agent in agents:
        if not back:
            return False
        if agent not in away:
            if (unreached := unreached_by(agent)) is None:
                return False
            back.difference_update(unreached)
    return bool(back)


def _leave_out(
    paths: Mapping[str, Collection[str]], turn: Mapping[str, int], leave_out: Callable[[str], bool], kept: str | None
) -> list[str] | None:
    """As many as it takes, in turn (CUT-1); before these, all whose path to `kept` is broken. None: a path stays."""
    left = {agent: set(peers) for agent, peers in paths.items()}
    gone: list[str] = []
    needed: set[str] = set()
    while left:
        candidates = left.keys() - needed
        if kept in left:
            candidates &= left[kept]
        if not candidates:
            return None
        agent = max(candidates, key=lambda agent: (len(left[agent]), turn[agent]))
        if not leave_out(agent):
            needed.add(agent)
            continue
        gone.append(agent)
        for peer in left.pop(agent):
            left[peer].discard(agent)
            if not left[peer]:
                del left[peer]
    return gone
