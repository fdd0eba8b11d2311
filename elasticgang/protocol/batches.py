"""Divides what is to be sent among messages of a bounded size. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

MAX_SENT_CHARS = 1 << 20  # JSON has up to 12 bytes for each, and a message at most 16 MiB

_T = TypeVar("_T")


def in_batches(items: Sequence[_T], num_chars: Callable[[_T], int]) -> Iterator[tuple[_T, ...]]:
    """`items` in as many messages as needed: `MAX_SENT_CHARS` in each, or one item."""
    begin, size = 0, 0
    for number, item in enumerate(items):
        num = num_chars(item)
        if number > begin and size + num > MAX_SENT_CHARS:
            yield tuple(items[begin:number])
            begin, size = number, 0
        size += num
    if items:
        yield tuple(items[begin:])
