"""Lists in messages. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def shortened(names: Sequence[str], most: int) -> str:
    """`a, b and 3 more`: at most so many of `names`."""
    num_more = len(names) - most
    return ", ".join(names[:most]) + (f" and {num_more} more" if num_more > 0 else "")
