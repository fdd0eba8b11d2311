"""Integer arguments: accepts integers of Python and numpy, and refuses bools. Pure."""

from __future__ import annotations

import operator


def integer(value: object) -> int | None:
    """`value` as an int; None if it is a bool or not an integer."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # raises TypeError without `__index__`
    except TypeError:
        return None


def integer_from(least: int, value: object) -> int | None:
    """`value` as an int of at least `least`; otherwise None."""
    number = integer(value)
    return number if number is not None and number >= least else None
