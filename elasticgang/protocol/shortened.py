"""Messages that stay short, and few. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def shortened(names: Sequence[str], most: int) -> str:
    """`a, b and 3 more`: at most so many of `names`."""
    num_more = len(names) - most
    return ", ".join(names[:most]) + (f" and {num_more} more" if num_more > 0 else "")


def has_line(num: int) -> bool:
    """Whether what happens for the `num`-th time in a row gets a line: the first, second, fourth and so on."""
    return num & (num - 1) == 0
