"""`elasticgang.testing`: every place that it names is one place in the runtime, and actions come and go."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

import elasticgang
from elasticgang import testing


def reached_in(source: str) -> list[str]:
    return [
        ast.literal_eval(node.args[0])
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "reached"
    ]


def test_the_runtime_reaches_each_place_at_one_line() -> None:
    package = Path(elasticgang.__file__).parent
    found = Counter(place for path in package.rglob("*.py") for place in reached_in(path.read_text()))
    assert found == Counter(list(testing.PLACES))


def test_actions_run_in_order_until_their_block_ends() -> None:
    ran: list[str] = []
    with testing.fail_at("applied", lambda: ran.append("first")):
        with testing.fail_at("applied", lambda: ran.append("second")):
            testing.reached("applied")
        testing.reached("entered")
        testing.reached("applied")
    testing.reached("applied")
    assert ran == ["first", "second", "first"]


def test_what_an_action_raises_leaves_the_place() -> None:
    def fail() -> None:
        raise OSError("no space")

    with testing.fail_at("serving", fail), pytest.raises(OSError, match="no space"):
        testing.reached("serving")


def test_an_unknown_place_is_refused_with_the_places_there_are() -> None:
    with pytest.raises(ValueError, match=r"`place` must be one of .*votes_received.*, but is 'voted' instead"):
        testing.fail_at("voted")
