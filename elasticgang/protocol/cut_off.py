"""Which agents of a job are left out, because they and others do not reach each other. Pure.

CUT-1  Of two agents with a broken path between them at most one takes part: a generation with both would not connect.
    The agent with the most broken paths is left out first, and among equals the one that comes later in turn.
CUT-2  None is left out without which the others could not go on. If that leaves a broken path, nobody is left out: all
    try again, as if nothing were known of paths.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence


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
    unreached: Mapping[str, Collection[str]], in_turn: Sequence[str], leave_out: Callable[[str], bool]
) -> dict[str, tuple[str, ...]]:
    """Those that are left out of the agents `in_turn`, each with those that stay to which its path is broken.

    `leave_out`: leaves the agent out, besides those before. False: the others could not go on without it.
    """
    paths = broken_paths(unreached, frozenset(in_turn))
    turn = {agent: number for number, agent in enumerate(in_turn)}
    left = {agent: set(peers) for agent, peers in paths.items()}
    gone: list[str] = []
    needed: set[str] = set()
    while left:
        candidates = left.keys() - needed
        if not candidates:
            return {}
        agent = max(candidates, key=lambda agent: (len(left[agent]), turn[agent]))
        if not leave_out(agent):
            needed.add(agent)
            continue
        gone.append(agent)
        for peer in left.pop(agent):
            left[peer].discard(agent)
            if not left[peer]:
                del left[peer]
    stay = set(in_turn).difference(gone)
    for agent in sorted(gone, key=turn.__getitem__):
        if not paths[agent] & stay:  # those for which it was left out were, too
            stay.add(agent)
    return {agent: tuple(sorted(paths[agent] & stay)) for agent in gone if agent not in stay}
