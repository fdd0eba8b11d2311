"""A gang whose rank, size and process group change with each generation.

ELASTIC-1  The object stays the same in all generations. Only the manager's thread calls `bind`, and only between
    generations. Between two generations, and after the last one, rank and size keep their last values, and collectives
    raise.
ELASTIC-2  The first error poisons every gang of the rank; the owner of the binding does this. From then on until the
    next `bind`, tensor collectives return at once, and object and barrier calls raise `StepAborted`.
ELASTIC-3  No collective is captured in a CUDA graph: the graph would hold the communicator of one generation, and use
    it in the next one. A gang of one has none, but its graph would go on without the ranks that join.
ELASTIC-4  Barriers and object collectives have their tensors on the gang's device, because NCCL has no others. They end
    once the device has done them, and raise `StepAborted` if that has failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from elasticgang.collectives.collective import Collective, check_ranks
from elasticgang.collectives.work import Work
from elasticgang.errors import InvalidOperationError, NotSupportedError, StepAborted
from elasticgang.gang import compiled, torch_registry
from elasticgang.gang.bans import Bans
from elasticgang.gang.base import CheckedGang, check_objects
from elasticgang.gang.fake import simulate
from elasticgang.gang.objects import broadcast_pickled
from elasticgang.gang.torch_process_group import GangProcessGroup
from elasticgang.layout import text_of_ranks
from elasticgang.torch_private import outside_graphs


class Group(Protocol):
    """The process group of a gang in one generation, with its errors swallowed: `comm.SwallowingProcessGroup`."""

    @property
    def is_poisoned(self) -> bool:
        """Whether the generation is over for this rank."""

    def getBackendName(self) -> str: ...

    def check(self) -> None:
        """The device has done what was started: poison the generation if a collective has failed there."""

    def start(self, collective: Collective) -> Work:
        """Start a checked collective. An error poisons the generation, and the work's `wait` gives False
        (ELASTIC-2)."""


# Makes a group of some ranks of the generation, including this one, which lasts until the generation ends. Each of
# these ranks calls it with the same unique name. Raises GangError.
MakeGroup = Callable[[str, Sequence[int]], Group]


@dataclass(frozen=True)
class Binding:
    """The gang in one generation. `ranks`: as ranks of the generation. `group` and `make` are None for a gang of
    one."""

    rank: int
    ranks: tuple[int, ...]
    group: Group | None
    make: MakeGroup | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)


class ElasticGang(CheckedGang):
    """A gang of the current generation, made by the manager.

    `as_process_group` gives the same group in every generation; its rank and size are the gang's.
    """

    def __init__(
        self, name: str, device: torch.device, *, maker: ElasticGang | None = None, bans: Bans | None = None
    ) -> None:
        """`maker`: the gang whose `create_gang` made it, for one generation; its bans hold here too. `bans`: of the
        rank."""
        self._name = name
        self._maker = maker
        self.bans: Bans = maker.bans if maker is not None else bans or Bans()
        self.num_started = 0  # collectives, also on gangs that it made
        self._device = device
        self._binding: Binding | None = None  # the last one
        self._is_bound = False
        self._process_group: GangProcessGroup | None = None
        self._made: list[ElasticGang] = []
        self._ended: list[ElasticGang] = []  # of the last generation but one in which any were made (REGISTRY-5)
        self._num_made: Counter[tuple[int, ...]] = Counter()  # by their ranks
        self._closed = False

    def bind(self, binding: Binding | None) -> None:
        """Enter a generation; None: leave it (ELASTIC-1). Gangs that `create_gang` made end with the generation."""
        for gang in self._made:
            gang.bind(None)
            gang.close()
        if self._made:  # REGISTRY-5
            for gang in self._ended:
                gang._forget()
            self._ended, self._made = self._made, []
        self._num_made.clear()
        self._is_bound = binding is not None
        if binding is None:
            if self._binding is not None:
                self._binding = replace(self._binding, group=None, make=None)  # it keeps the whole generation
            return
        self._binding = binding
        if self._process_group is not None:
            torch_registry.register(self._process_group, binding.ranks)

    def __repr__(self) -> str:
        seat = "" if self._binding is None else f", rank {self._binding.rank} of {self._binding.size}"
        name = f"{self._name}: {self.description}" if self.description else self._name
        return f"ElasticGang({name!r}{seat}{'' if self._is_bound else ', in no generation'})"

    def _last(self) -> Binding:
        """The present binding, or the last one."""
        if self._binding is None:
            raise InvalidOperationError(
                f"The gang {self._name} is in no generation yet, so that it has no rank; use it inside `with step:`."
            )
        return self._binding

    def _require_bound(self, call: str) -> Binding:
        """The present binding, for a call that communicates.

        Raises:
            InvalidOperationError: there is none; or as `Bans.check_work` and `Bans.check_step`.
        """
        self.bans.check_work(self._name, self.size)
        if self._closed:
            ended = "is closed" if self._maker is None else "ended with its generation; make it anew in this one"
            raise InvalidOperationError(f"The gang {self._name} {ended}.")
        if not self._is_bound:
            raise InvalidOperationError(f"The gang {self._name} is in no generation; use it inside `with step:`.")
        self.bans.check_step(self._name, call)
        return self._last()

    @property
    def rank(self) -> int:
        return self._last().rank

    @property
    def size(self) -> int:
        return self._last().size

    @property
    @outside_graphs
    def is_poisoned(self) -> bool:
        group = None if self._binding is None else self._binding.group
        return group is not None and group.is_poisoned

    @property
    def group_kind(self) -> str:
        """The backend of the gang's data, such as "torchft-gloo"; "" for a gang of one, and between generations. Beyond
        fairseq2."""
        group = None if self._binding is None else self._binding.group
        return "" if group is None else group.getBackendName()

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def supports_process_group(self) -> bool:
        return True

    @property
    def ranks(self) -> tuple[int, ...]:
        """The gang's ranks, as ranks of `manager.gangs.root`."""
        return self._last().ranks

    def close(self) -> None:
        self._closed = True
        compiled.end(self)
        if self._maker is not None and self._process_group is not None:
            torch_registry.unregister(self._process_group)

    def _forget(self) -> None:
        """Remove the groups that torch has of this gang, and of those that it made."""
        for gang in (*self._made, *self._ended):
            gang._forget()
        torch_registry.unregister_all_of(self)

    def create_gang(self, ranks: Sequence[int]) -> ElasticGang | None:
        """See `Gang.create_gang`. The gang ends with the generation: make it again in the next one, or declare an axis
        in the layout.

        Raises:
            StepAborted: the generation has ended.
        """
        binding = self._require_bound("create_gang")
        ranks = check_ranks(ranks, binding.size)
        if binding.rank not in ranks:
            return None
        chosen = tuple(binding.ranks[rank] for rank in ranks)
        # Counted per set of ranks, so that these ranks choose the same name: with `use_local_synchronization`, torch
        # calls this on no other rank. Gangs that this one's maker has made count too: they may have its name.
        num_made = self._first_maker._num_made
        num_made[chosen] += 1
        gang = ElasticGang(f"{self._name}.{num_made[chosen]}", self._device, maker=self)
        group = None
        if len(chosen) > 1:
            assert binding.make is not None
            group = binding.make(f"{gang._name}:{text_of_ranks(chosen)}", chosen)
        gang.bind(Binding(ranks.index(binding.rank), chosen, group, binding.make))
        self._made.append(gang)
        return gang

    @property
    def _first_maker(self) -> ElasticGang:
        return self if self._maker is None else self._maker._first_maker

    def as_process_group(self) -> GangProcessGroup:
        binding = self._last()
        if self._process_group is None:
            self._process_group = GangProcessGroup(self)
            torch_registry.register(self._process_group, binding.ranks)
        return self._process_group

    @outside_graphs  # GANG-5
    def _start(self, collective: Collective) -> Work:
        binding = self._require_bound(collective.call)
        if self._device.type == "cuda" and _is_captured():  # ELASTIC-3
            raise NotSupportedError(
                f"a CUDA graph cannot hold the `{collective.call}` of the gang {self._name}: it would keep the "
                "communicator of this generation, and use it after the generation has ended. Capture what computes, "
                "and call collectives between the graphs."
            )
        gang: ElasticGang | None = self
        while gang is not None:
            gang.num_started += 1
            gang = gang._maker
        if binding.group is None:
            with torch.no_grad():
                simulate(collective, 0, 1)
            return Work()
        return binding.group.start(collective)

    @outside_graphs
    def barrier(self) -> None:
        self._require_bound("barrier")
        token = torch.zeros(1, device=self._device)  # ELASTIC-4
        self._perform(Collective("all_reduce", (token,), (token,)))

    @outside_graphs
    def broadcast_objects(self, objects: list[object], source_rank: int = 0) -> None:
        binding = self._require_bound("broadcast_objects")
        check_objects(objects)
        source_rank = self._check_rank("source_rank", source_rank)
        if binding.group is not None:
            broadcast_pickled(self, objects, source_rank, self._perform)

    def _perform(self, collective: Collective) -> None:
        """Run one collective to its end. Raises StepAborted: the generation has ended."""
        is_done = self._start(collective).wait()
        if is_done:
            self.await_device()
        if not is_done or self.is_poisoned:
            raise StepAborted(f"the generation ended before the gang {self._name} could {collective.call}")

    def await_device(self) -> None:
        """See `CheckedGang.await_device`. On the CPU, it does nothing."""
        if self._device.type != "cuda":
            return
        torch.cuda.current_stream(self._device).synchronize()
        group = None if self._binding is None else self._binding.group
        if group is not None:
            group.check()


def _is_captured() -> bool:
    """Whether the current stream's work goes into a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
