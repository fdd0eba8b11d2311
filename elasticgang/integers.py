"""What counts as an integer in an argument: Python's own and numpy's, and no bool. Pure."""

from __future__ import annotations

import operator


def integer(value: object) -> int | None:
    """`value` as an int; None when it is a bool, or no integer."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # it raises TypeError for what has no `__index__`
    except TypeError:
        return None


def integer_from(least: int, value: object) -> int | None:
    """`value` as an int of at least `least`; otherwise None."""
    number = integer(value)
    return number if number is not None and number >= least else None
