"""The sum of a few numbers over all ranks, by messages that grow with the logarithm of their number.

EXCHANGE-1  Every rank gets the same sum, bit by bit: two partners add up the same two parts.
EXCHANGE-2  Whoever has the sum has it of every rank: each number is in it once. A rank whose exchange breaks has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from elasticgang.collectives.collective import Collective

DIRECT_SIZE = 7  # so many ranks send to all others at once: one round is quicker than three


class Round(NamedTuple):
    """With `peer`. What a rank receives is added to its own part if it `adds`; else it takes the place of that."""

    peer: int
    sends: bool
    receives: bool
    adds: bool


def rounds(rank: int, size: int) -> Iterator[Round]:
    """What `rank` of `size` does: recursive doubling among the first 2**k ranks. Each rank beyond gives its part to one
    of those before, and gets the sum from it after."""
    num_paired = 1 << (size.bit_length() - 1)
    partner = rank + num_paired
    if rank >= num_paired:
        yield Round(rank - num_paired, sends=True, receives=False, adds=False)
        yield Round(rank - num_paired, sends=False, receives=True, adds=False)
        return
    if partner < size:
        yield Round(partner, sends=False, receives=True, adds=True)
    distance = 1
    while distance < num_paired:
        yield Round(rank ^ distance, sends=True, receives=True, adds=True)
        distance *= 2
    if partner < size:
        yield Round(partner, sends=True, receives=False, adds=False)


class Exchange:
    """Of `c.inputs[0]` into `c.outputs[0]`, over the process group `pg`. torch has no work of that kind: `wait`
    performs it, in one thread. One at a time on a group, since the messages of two have the same tag."""

    def __init__(self, pg: Any, c: Collective) -> None:
        self._pg, self._collective = pg, c

    def wait(self, timeout: timedelta | None = None) -> None:
        pg, c = self._pg, self._collective
        total = c.inputs[0].clone()
        for each in rounds(pg.rank(), pg.size()):
            part = torch.empty_like(total)
            works = [pg.recv([part], each.peer, c.tag)] if each.receives else []
            if each.sends:
                works.append(pg.send([total], each.peer, c.tag))
            for work in works:
                work.wait()
            if each.receives:
                total = total + part if each.adds else part  # EXCHANGE-1: the same two on both sides
        c.outputs[0].copy_(total)

    def get_future(self) -> Any:
        raise RuntimeError("an exchange has no future")
