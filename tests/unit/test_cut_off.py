"""Which agents are left out, because they and others do not reach each other (CUT-1, CUT-2)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Mapping

import pytest

from elasticgang.protocol.cut_off import broken_paths, find_cut_off


def left_out(unreached: Mapping[str, str], in_turn: str, needed: Collection[str] = ()) -> dict[str, str]:
    """`unreached`, and what is found, with the peers of each agent as one text."""
    found = find_cut_off(unreached, in_turn, lambda: lambda agent: agent not in needed)
    return {agent: "".join(peers) for agent, peers in found.items()}


# CUT-1
@pytest.mark.parametrize(
    ("unreached", "found"),
    [
        ({}, {}),
        ({"a": "x"}, {}),  # it takes part no more
        ({"a": "b"}, {"b": "a"}),  # in one direction
        ({"b": "a"}, {"b": "a"}),
        ({"a": "bcd"}, {"a": "bcd"}),  # one that reaches nobody, whoever it is
        ({"b": "a", "c": "a", "d": "a"}, {"a": "bcd"}),
        ({"d": "abc"}, {"d": "abc"}),
        ({"a": "cd", "b": "cd"}, {"d": "ab", "c": "ab"}),  # two halves: those that are first in turn stay
        ({"a": "bcd", "b": "cd", "c": "d"}, {"d": "a", "c": "a", "b": "a"}),
        ({"a": "b", "b": "c", "c": "d"}, {"c": "d", "b": "a"}),
    ],
)
def test_the_agents_that_reach_the_fewest_others_are_left_out(unreached: dict[str, str], found: dict[str, str]) -> None:
    assert left_out(unreached, "abcd") == found


# CUT-1
def test_of_two_agents_the_one_that_comes_later_in_turn_is_left_out() -> None:
    assert left_out({"a": "b"}, "ba") == {"a": "b"}


# CUT-2
def test_nobody_is_left_out_whom_the_others_need() -> None:
    assert left_out({"a": "bcd"}, "abcd", needed="a") == {"d": "a", "c": "a", "b": "a"}
    assert left_out({"a": "b"}, "abcd", needed="ab") == {}
    assert left_out({"a": "b", "c": "d"}, "abcd", needed="ab") == {}


# CUT-1
def test_those_that_stay_reach_each_other_and_no_other_could_stay_too() -> None:
    chance = random.Random(5)
    for _ in range(500):
        agents = [chr(ord("a") + number) for number in range(chance.randint(2, 8))]
        pairs = [pair for pair in itertools.combinations(agents, 2) if chance.random() < 0.3]
        unreached: dict[str, list[str]] = {}
        for one, other in pairs:
            here, there = (one, other) if chance.random() < 0.5 else (other, one)
            unreached.setdefault(here, []).append(there)
        paths = broken_paths(unreached, agents)
        gone = find_cut_off(unreached, agents, lambda: lambda _: True)
        stay = set(agents) - gone.keys()
        assert stay
        assert not any(paths.get(agent, set()) & stay for agent in stay)
        for agent, peers in gone.items():
            assert peers == tuple(sorted(paths[agent] & stay))
            assert peers
