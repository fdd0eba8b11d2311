"""Tests that take minutes, and more layouts of a kind: they run with ELASTICGANG_EXHAUSTIVE=1."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

IS_EXHAUSTIVE = "ELASTICGANG_EXHAUSTIVE" in os.environ
exhaustive = pytest.mark.skipif(not IS_EXHAUSTIVE, reason="set ELASTICGANG_EXHAUSTIVE=1")


def always_without(names: Iterable[str], exhaustively: Collection[str]) -> list[Any]:
    """`names` as pytest's parameters. Those that are in `exhaustively` run only with ELASTICGANG_EXHAUSTIVE=1."""
    found = list(names)
    if unknown := set(exhaustively).difference(found):
        raise ValueError(f"no such case: {', '.join(sorted(unknown))}")
    return [pytest.param(name, marks=exhaustive) if name in exhaustively else name for name in found]
