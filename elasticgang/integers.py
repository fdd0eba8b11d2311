"""Integer arguments: accepts integers of Python and numpy, and refuses bools. Pure."""

from __future__ import annotations

import operator


def integer(value: object) -> int | None:
    """`value` as an int; None if it is a bool or not an integer."""
    if isinstance(value, bool) or getattr(getattr(value, "dtype", None), "kind", None) == "b":  # numpy's, before 2.3
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]  # raises TypeError without `__index__`
    except TypeError:
        return None


def integer_from(least: int, value: object) -> int | None:
    """`value` as an int of at least `least`; otherwise None."""
    number = integer(value)
    return number if number is not None and number >= least else None


def required_integer(name: str, value: object, least: int | None = None) -> int:
    """The argument `name` as an int. Raises ValueError: it is not an integer, or is below `least`."""
    number = integer(value)
    if number is None:
        raise ValueError(f"`{name}` must be an integer, but is {value!r} instead.")
    if least is not None and number < least:
        raise ValueError(f"`{name}` must be at least {least}, but is {number} instead.")
    return number
