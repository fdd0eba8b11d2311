"""A gang without processes: every other rank is imagined to do exactly what this one does."""

from __future__ import annotations

import enum
from collections import defaultdict, deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from elasticgang.collectives.collective import BitwiseOperation, Collective, ReduceOperation, check_ranks
from elasticgang.collectives.dtypes import WIDENED
from elasticgang.collectives.table import TABLE, compose, single_messages
from elasticgang.collectives.work import Work
from elasticgang.errors import InvalidOperationError
from elasticgang.gang import torch_registry
from elasticgang.gang.bans import Bans
from elasticgang.gang.base import CheckedGang, Gang, check_objects
from elasticgang.gang.torch_process_group import GangProcessGroup
from elasticgang.integers import integer_from


class FakeGang(CheckedGang):
    """Simulates a gang of `size` ranks that all do the same. For single-process runs and tests.

    Where another rank's part is not known from this one's (what a broadcast from, or a scatter by, another rank would
    bring), tensors keep what they hold.
    """

    is_fake = True

    def __init__(self, device: torch.device | str, *, rank: int = 0, size: int = 1) -> None:
        num_ranks, own = integer_from(1, size), integer_from(0, rank)
        if num_ranks is None:
            raise ValueError(f"`size` must be an integer of at least 1, but is {size!r} instead.")
        if own is None or own >= num_ranks:
            raise ValueError(
                f"`rank` must be an integer of at least 0 and less than `size` ({size}), but is {rank!r} instead."
            )
        try:
            device = torch.device(device)
        except (RuntimeError, TypeError):
            raise ValueError(f"`device` must be a device of torch, but is {device!r} instead.") from None
        if device.type == "meta":
            raise ValueError("`device` must not be of type `meta`.")
        self._device, self._rank, self._size = device, own, num_ranks
        self._origin, self._ranks = self, tuple(range(num_ranks))  # the gang it was made out of first, its ranks there
        self._closed = False
        self.bans = Bans()  # of a job of one process, where it has one
        self._process_group: GangProcessGroup | None = None
        self._sent: defaultdict[tuple[int, int], deque[Tensor]] = defaultdict(deque)

    def __repr__(self) -> str:
        described = f"{self.description!r}, " if self.description else ""
        return f"FakeGang({described}rank {self._rank} of {self._size})"

    def ranks_in(self, root: Gang) -> list[int] | None:
        """The gang's ranks, as ranks of `root`; None if the two have no common origin."""
        if self._size == 1:
            return [root.rank]
        if isinstance(root, FakeGang) and self._origin is root._origin and set(self._ranks) <= set(root._ranks):
            return [root._ranks.index(rank) for rank in self._ranks]
        return list(range(root.size)) if self._size == root.size else None

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def supports_process_group(self) -> bool:
        return True

    def close(self) -> None:
        self._closed = True
        if self._process_group is not None:
            torch_registry.unregister(self._process_group)

    def create_gang(self, ranks: Sequence[int]) -> FakeGang | None:
        self._check_allowed("create_gang")
        ranks = check_ranks(ranks, self._size)
        if self._rank not in ranks:
            return None
        gang = FakeGang(self._device, rank=ranks.index(self._rank), size=len(ranks))
        gang.bans = self.bans
        gang._origin, gang._ranks = self._origin, tuple(self._ranks[rank] for rank in ranks)
        return gang

    def as_process_group(self) -> ProcessGroup:
        self._check_open()
        if self._process_group is None:
            self._process_group = GangProcessGroup(self)
            is_alone = self._size == 1 and self._origin is self
            alone = [dist.get_rank() if dist.is_initialized() else 0]
            torch_registry.register(self._process_group, alone if is_alone else self._ranks)
        return self._process_group

    def barrier(self) -> None:
        self._check_allowed("barrier")

    def broadcast_objects(self, objects: list[object], source_rank: int = 0) -> None:
        self._check_allowed("broadcast_objects")
        check_objects(objects)
        self._check_rank("source_rank", source_rank)

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidOperationError("The gang is closed.")

    def _check_allowed(self, call: str) -> None:
        """BAN-1, for the gangs of a manager."""
        self._check_open()
        name = self.description or "of one process"
        self.bans.check_work(name, self._size)
        self.bans.check_step(name, call)

    def _start(self, collective: Collective) -> Work:
        self._check_allowed(collective.call)
        with torch.no_grad():
            if TABLE[collective.call].is_message:
                for message in single_messages(collective):
                    self._exchange(message)
            else:
                simulate(collective, self._rank, self._size)
        return Work()

    def _exchange(self, message: Collective) -> None:
        if message.call == "send":
            self._sent[message.peer, message.tag].append(message.inputs[0].clone())
        else:
            self._receive(message)

    def _receive(self, collective: Collective) -> None:
        """Receive what this rank has sent to the peer, because every rank does the same. From any source, it receives
        from the lowest rank with a message."""
        peers = range(self._size) if collective.call == "recv_anysource" else [collective.peer]
        peer = next((peer for peer in peers if self._sent[peer, collective.tag]), None)
        if peer is None:
            source = f"rank {collective.peer}" if len(peers) == 1 else "any rank"
            raise InvalidOperationError(
                f"`recv` from {source} under tag {collective.tag} would wait forever: every rank of a "
                "fake gang does the same, and this one has sent nothing there."
            )
        collective.outputs[0].copy_(self._sent[peer, collective.tag].popleft())
        if collective.call == "recv_anysource":
            collective.outputs[1].fill_(peer)


def simulate(collective: Collective, rank: int, size: int) -> None:
    """Write the outputs of a collective in which all ranks do the same. Not for messages."""
    basic, last = compose(collective, rank, size)
    if basic.call == "all_reduce":
        _reduce(basic.outputs[0], basic.op, size)
    elif basic.call in ("all_gather", "all_to_all"):
        source = basic.inputs[0 if basic.call == "all_gather" else rank]
        for output in basic.outputs:
            output.copy_(source.reshape(output.shape))
    if last is not None:
        last()


def _reduce(tensor: Tensor, op: enum.Enum, size: int) -> None:
    """Reduce `size` equal tensors. One is left unchanged. So are those of MIN, MAX, BAND and BOR, and all bools."""
    if tensor.dtype is torch.bool or size == 1:
        return
    if tensor.dtype in WIDENED:
        wide = tensor.to(torch.int64)
        _reduce(wide, op, size)
        tensor.copy_(wide)
    elif op is ReduceOperation.SUM:
        tensor.mul_(size)
    elif op is ReduceOperation.PRODUCT:
        tensor.pow_(size)
    elif op is BitwiseOperation.BXOR and size % 2 == 0:
        tensor.zero_()
