"""A rule that is not ours, and the unit test that shows what it breaks: for what the simulation does not drive."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tests.unit.patches import Patch


class UnitMutant(NamedTuple):
    """`shown_by`: raises while the rule is that of `patches`, and not while it is ours."""

    patches: tuple[Patch, ...]
    shown_by: Callable[[], None]
