"""The sums over all seats of one generation: votes, and the totals of steps.

The ranks of one agent add up their numbers in a block of shared memory. The first of them exchanges the sums with the
first ranks of the other agents, and writes the outcome to the block (`protocol/sum_route.py`). With one agent no
message is sent.

SUMS-1  A rank has an outcome only if the numbers of every rank are in it. A part of the sum stays within `_collect` of
    the first rank of a host.
SUMS-2  Every rank gets the same sums, bit by bit: the numbers of a host are added in the order of its ranks, those of
    the hosts as in EXCHANGE-1.
SUMS-3  The first error of the generation on any rank of a host ends the waits of all its ranks (BLOCK-4). Every wait
    has the deadline of a collective.
SUMS-4  The hang detector sees a sum as a collective of all ranks. A rank counts it after it has published its numbers:
    one that stops before is the one that the others wait for.
SUMS-5  A rank that should have a block and has none does not enter the generation: it ends it after `NO_MEMORY_S`, so
    that generations do not follow each other at once while the agent has no descriptor.
SUMS-6  A sum of more than `_PART` numbers is added up in parts, each with how many numbers the whole sum has. If ranks
    sum different numbers of numbers, none of them gets a sum.
SUMS-7  A rank whose wait another one has ended waits up to `NOTICE_S` for the agent's notice, which is on its way: a
    comm process that a notice ends is halted and need not be killed (RENDEZVOUS-3).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from elasticgang.collectives.collective import Collective
from elasticgang.collectives.exchange import DIRECT_SIZE
from elasticgang.comm.comm_process import GroupSpec
from elasticgang.comm.group_set import Configuration
from elasticgang.errors import CollectiveTimeoutError, PeerLostError
from elasticgang.layout import RUNTIME_GANGS
from elasticgang.process.sum_block import MAX_VALUES, SumBlock, SumBlockEnded
from elasticgang.protocol.sum_route import SumRoute
from elasticgang.testing import reached

NO_MEMORY_S = 1.0
NOTICE_S = 0.02
_PART = MAX_VALUES - 2  # numbers


class Sums:
    """One rank's part. Its training thread alone uses it, except `end`."""

    def __init__(
        self,
        route: SumRoute,
        rank: int,
        name: str,
        exchange: GroupSpec | None,
        groups: Configuration,
        block: SumBlock | None,
        timeout_s: float,
    ) -> None:
        """`name`: of the sums, for the hang detector; the same on all ranks. `exchange`: the group of the first ranks
        of all agents, for one of them. `block`: for a `route` that has one."""
        self._route, self._name, self._exchange_group = route, name, exchange
        self._groups, self._block, self._timeout_s = groups, block, timeout_s
        self._row = route.local.index(rank)
        self._number = 0  # of the last sum in the block

    def check(self) -> GroupSpec | None:
        """The group to connect before the first sum, if this rank has one. Raises GangError (SUMS-5)."""
        if self._route.has_block and self._block is None:
            time.sleep(NO_MEMORY_S)
            raise PeerLostError(
                "this rank has no memory for its votes: its agent prints why, or this process has no free descriptor"
            )
        return self._exchange_group

    def connected(self) -> None:
        """The groups of the generation are connected."""
        if (counts := self._groups.comm.block) is not None and self._is_counted:
            counts.add(self._name, RUNTIME_GANGS[0])

    @property
    def _is_counted(self) -> bool:
        """SUMS-4. A group of all ranks counts its own collectives."""
        return self._exchange_group is None or self._exchange_group.name != self._name

    def end(self) -> None:
        """SUMS-3. Never blocks."""
        if self._block is not None:
            self._block.end()

    def close(self) -> None:
        """This rank has left the generation. Only `end` may be called after that."""
        if self._block is not None:
            self._block.close()

    def start(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Start to sum `values`. One sum at a time may be under way. The returned function waits for the sums. Both
        raise GangError: the generation has ended."""
        if self._block is None and self._exchange_group is None:
            return lambda: list(values)
        if len(values) <= _PART:
            return self._start(values)
        pending = self._start_part(values, 0)

        def wait() -> list[float]:
            sums = pending()
            for at in range(_PART, len(values), _PART):
                sums += self._start_part(values, at)()
            return sums

        return wait

    def _start_part(self, values: Sequence[float], at: int) -> Callable[[], list[float]]:
        """SUMS-6."""
        total = float(len(values))
        pending = self._start([*values[at : at + _PART], total, 1.0])

        def wait() -> list[float]:
            *sums, all_totals, num_ranks = pending()
            if all_totals != total * num_ranks:
                raise PeerLostError("the ranks sum different numbers of numbers")
            return sums

        return wait

    def _start(self, values: Sequence[float]) -> Callable[[], list[float]]:
        if self._groups.error is not None:
            raise self._groups.error
        counts = self._groups.comm.block if self._is_counted else None
        if self._block is None:
            collect = self._exchange(values)
        else:
            self._write(self._block, self._row, values)
            collect = self._collect
        if counts is not None:
            counts.submitted(self._name, False)  # SUMS-4
        reached("sum_published")

        def wait() -> list[float]:
            sums = collect()
            if counts is not None:
                counts.completed(self._name, False)
            return sums

        return wait

    def _write(self, block: SumBlock, row: int, values: Sequence[float]) -> None:
        self._number += 1
        block.write(row, self._number, values)
        reached("sum_written")
        block.publish(row, self._number)

    def _collect(self) -> list[float]:
        block, route, number = self._block, self._route, self._number
        assert block is not None
        deadline_s = time.monotonic() + self._timeout_s
        if len(route.firsts) > 1 and self._exchange_group is None:
            return self._read(block, block.outcome, deadline_s)
        rows = [self._read(block, row, deadline_s) for row in range(block.num_ranks)]
        if len({len(row) for row in rows}) > 1:  # a script's exception has left a step between two sums
            raise PeerLostError("the ranks of this host sum different numbers of numbers")
        sums = [sum(column) for column in zip(*rows, strict=True)]  # SUMS-2
        if self._exchange_group is not None:
            reached("sum_collected")
            sums = self._exchange(sums)()  # SUMS-1
            reached("sum_exchanged")
            block.write(block.outcome, number, sums)
            block.publish(block.outcome, number)
        return sums

    def _read(self, block: SumBlock, row: int, deadline_s: float) -> list[float]:
        """Raises GangError (SUMS-3)."""
        try:
            return block.read(row, self._number, deadline_s)
        except SumBlockEnded:
            why = "another rank of this host has ended the generation"
            raise self._groups.wait_error(NOTICE_S) or PeerLostError(why) from None  # SUMS-7
        except TimeoutError:
            local = self._route.local
            late = (
                f"rank {local[0]} has not got the sums of the other hosts"
                if row == block.outcome
                else f"rank {local[row]} has not added its numbers"
            )
            raise CollectiveTimeoutError(
                f"a sum over all ranks timed out after {self._timeout_s:g} seconds; {late}"
            ) from None

    def _exchange(self, values: Sequence[float]) -> Callable[[], list[float]]:
        """Sum over the first ranks of all agents."""
        group = self._exchange_group
        assert group is not None
        mine = torch.tensor(values, dtype=torch.float64, device="cpu")  # whatever the script's default is
        is_direct = group.size <= DIRECT_SIZE
        if is_direct:  # all messages cross at once, and all sum in the same order
            mine = mine.repeat(group.size, 1)
        sums = torch.empty_like(mine)
        call = "all_to_all" if is_direct else "exchange_sum"
        work = self._groups.start(group.name, Collective(call, (sums,), (mine,)))

        def wait() -> list[float]:
            work.wait(self._timeout_s)
            found: list[Any] = sums.tolist()
            return [sum(column) for column in zip(*found, strict=True)] if is_direct else found

        return wait
