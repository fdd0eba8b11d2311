"""An all-reduce of a few numbers by recursive doubling: each rank sends O(log size) messages.

EXCHANGE-1  Every rank gets the same sum, bit by bit: both partners of a round add the same two partial sums.
EXCHANGE-2  The sum contains the numbers of every rank exactly once. A rank whose exchange fails gets no sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from elasticgang.collectives.collective import Collective

DIRECT_SIZE = 7  # up to this size, each rank sends to all others at once: one round is faster than three


class Round(NamedTuple):
    """One round with `peer`. `adds`: add the received partial sum to the own one; otherwise replace the own one."""

    peer: int
    sends: bool
    receives: bool
    adds: bool


def rounds(rank: int, size: int) -> Iterator[Round]:
    """The rounds of `rank` of `size`: recursive doubling among the first 2**k ranks. Each further rank sends its
    numbers to a partner among them beforehand, and receives the sum from it afterwards."""
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
    """The work of one exchange: sums `c.inputs[0]` over the ranks of `pg` into `c.outputs[0]`.

    `wait` performs all rounds on the calling thread. Only one exchange at a time may run on a group: the messages of
    all of them have the same tag.
    """

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
                total = total + part if each.adds else part  # EXCHANGE-1
        c.outputs[0].copy_(total)

    def get_future(self) -> Any:
        raise RuntimeError("an exchange has no future")
