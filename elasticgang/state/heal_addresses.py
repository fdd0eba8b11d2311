"""The addresses at which a rank serves its state, as its peers know them.

HEALADDR-1  The text of a rank has the address on its host's main network first, and then one for each interface of
    `--heal-interfaces`, if any. A peer on another host asks those of the interfaces, a stripe from each, and the first
    one only once one of these has failed. A peer on the same host asks the first one.
HEALADDR-2  A rank asks the holders on its host first. Of the others, different ranks begin with different ones.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence


def to_text(main: str, of_interfaces: Sequence[str]) -> str:
    return ",".join([main, *of_interfaces])


def stripes(sources: Sequence[str], here: str) -> tuple[list[str], int]:
    """HEALADDR-1, HEALADDR-2. The addresses of `sources` (texts), in the order in which to ask them, and how many of
    them are to be asked at once. `here`: the text of the rank that asks."""
    near = [source for source in sources if host_of(source) == host_of(here)]
    far = [source for source in sources if host_of(source) != host_of(here)]
    first_far = zlib.crc32(here.encode()) % max(1, len(far))
    sources = [*near, *far[first_far:], *far[:first_far]]
    mains = [source.split(",")[0] for source in sources]
    first, last = [], []
    for source, main in zip(sources, mains, strict=True):
        of_interfaces = source.split(",")[1:]
        if not of_interfaces or host_of(main) == host_of(here):
            first.append([main])
        else:
            first.append(of_interfaces)
            last += [main] if main not in of_interfaces else []
    # One of each holder, then a second one of each.
    turns = itertools.chain.from_iterable(itertools.zip_longest(*first))
    striped = [address for address in turns if address is not None]
    return striped + last, len(striped)


def main_first(source: str) -> list[str]:
    """The addresses of `source` (a text), in the order in which to ask them for little: the ranks must reach each other
    on the main network anyway, and an interface that is down would cost the time limit of a path."""
    return source.split(",")


def host_of(text: str) -> str:
    return text.split(",")[0].rpartition(":")[0]
