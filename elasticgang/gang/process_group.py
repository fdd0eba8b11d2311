"""A static gang over a process group of torch.distributed, for jobs without a manager.

PGGANG-1  Making gangs from a gang is collective over that gang alone. Its ranks may be in different numbers of other
    groups, and may have made them in different orders.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.futures import Future

from elasticgang.collectives.collective import Collective, check_ranks
from elasticgang.collectives.preparation import start_prepared
from elasticgang.collectives.table import TABLE
from elasticgang.collectives.work import Work, follow, waited_for
from elasticgang.environment import JOIN, elastic_job
from elasticgang.errors import GangError, InvalidOperationError, NotSupportedError
from elasticgang.gang import torch_registry
from elasticgang.gang.base import CheckedGang, Gang, check_objects, create_one_of
from elasticgang.gang.objects import broadcast_pickled
from elasticgang.gang.torch_process_group import GangProcessGroup
from elasticgang.torch_private import new_group, outside_graphs, world

_DEFAULT_TIMEOUT = timedelta(minutes=15)
_num_splits: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()


class ProcessGroupGang(CheckedGang):
    """Wraps `pg`, whose ranks are the gang's. `timeout`: of the collectives of gangs that are made from it.

    `pg` may also be a group that torch.distributed does not know, as those of `elasticgang.comm`: then no gangs or
    meshes can be made from it, and `close` leaves it to its owner.
    """

    def __init__(self, pg: ProcessGroup, device: torch.device | str, *, timeout: timedelta = _DEFAULT_TIMEOUT) -> None:
        self._pg = pg
        self._device = torch.device(device)
        self._timeout = timeout
        self._closed = False
        self._is_torchs = pg in world.pg_map  # torch made it, or registered it, and may end it

    @classmethod
    def create_default_process_group(
        cls, device: torch.device | str, *, timeout: timedelta | None = None, high_priority: bool = False
    ) -> ProcessGroupGang:
        """Initialize torch's default process group (NCCL on CUDA, Gloo on the CPU) from the environment that torchrun
        sets, and wrap it.

        `timeout`: of the collectives of this gang and of gangs made from it; None for 15 minutes. `high_priority`: run
        NCCL on high-priority streams.

        Raises:
            ValueError: `device` is neither a CPU nor a CUDA device, or `timeout` is not above 0.
            NotSupportedError: torch was built without torch.distributed.
            InvalidOperationError: the default process group is initialized already.
            GangError: it could not be initialized.
        """
        device = _device(device)
        if not dist.is_available():
            raise NotSupportedError("torch.distributed is not available.")
        job = elastic_job()
        torch_registry.drop_fake_default()
        if dist.is_initialized():
            root = f"; in the elastic job {job} it is that of `manager.gangs.root`" if job is not None else ""
            raise InvalidOperationError(f"The default process group is initialized already{root}.")
        if job is not None:
            raise InvalidOperationError(
                f"This process is a rank of the elastic job {job}, whose default process group is made in the first "
                f"step: {JOIN}."
            )
        options: dict[str, Any] = {}
        if device.type == "cuda":
            device = torch.device("cuda", device.index or 0)
            options["device_id"] = device  # initialize NCCL now, not at the first collective
            # 2 (CleanUpOnly in ProcessGroupNCCL.hpp) aborts the communicators and keeps the process. 3, torch's
            # default, and 1, fairseq2's choice, end the process when a peer is lost.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")
            if high_priority:
                from torch.distributed import ProcessGroupNCCL

                options["pg_options"] = ProcessGroupNCCL.Options(is_high_priority_stream=True)
        backend = "nccl" if device.type == "cuda" else "gloo"
        timeout = _checked(timeout) or _DEFAULT_TIMEOUT
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*options._timeout was specified.*")
                dist.init_process_group(backend, timeout=timeout, **options)
        except (RuntimeError, ValueError) as exc:
            raise GangError(f"the default process group could not be initialized: {exc}") from exc
        pg = dist.group.WORLD
        assert pg is not None
        return cls(pg, device, timeout=timeout)

    @property
    def rank(self) -> int:
        return self._pg.rank()

    @property
    def size(self) -> int:
        return self._pg.size()

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def supports_process_group(self) -> bool:
        return True

    @property
    @outside_graphs
    def is_poisoned(self) -> bool:
        if isinstance(self._pg, GangProcessGroup):
            return self._pg.gang.is_poisoned
        errored = getattr(self._pg, "errored", None)  # of torchft's groups
        return errored is not None and errored() is not None

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._pg in world.pg_map:
                dist.destroy_process_group(self._pg)

    def as_process_group(self) -> ProcessGroup:
        self._check_open()
        return self._pg

    def create_gang(self, ranks: Sequence[int]) -> Gang | None:
        self._check_open()
        return self.split([check_ranks(ranks, self.size)], "gang")

    def split(
        self,
        groups: Sequence[Sequence[int]],
        name: str,
        *,
        timeout: timedelta | None = None,
        backend: str | None = None,
        pg_options: Any = None,
    ) -> Gang | None:
        """Make one gang for each of `groups`, disjoint sets of ranks, and return this rank's; None if the rank is in
        none. Call it on every rank of this gang.

        `timeout`, `backend`: None for this gang's. `pg_options`: of the backend; Gloo has none. If the process group
        belongs to a gang, that gang makes the others, without these options.

        Raises:
            InvalidOperationError: the gang is closed.
            NotSupportedError: torch.distributed does not know the process group.
            GangError: the gang could not be made.
        """
        self._check_open()
        if isinstance(self._pg, GangProcessGroup):
            return create_one_of(self._pg.gang, groups, name)
        if not self._is_torchs:
            raise NotSupportedError(
                f"no gangs can be made from a gang over {self._pg!r}, which torch.distributed does not know: make the "
                "other group as this one was made."
            )
        timeout = _checked(timeout) or self._timeout
        groups = [sorted(group) for group in groups]
        own = dist.get_backend(self._pg)
        backend = backend or own
        try:
            default = dist.group.WORLD
            if backend == own == "nccl" and default is not None and default.bound_device_id is not None:
                # NCCL that was initialized eagerly splits communicators, together with all the parent's ranks.
                pg = dist.distributed_c10d.split_group(
                    self._pg, groups, timeout=timeout, pg_options=pg_options, group_desc=name
                )
            else:
                pg = self._new_group(groups, name, timeout, backend, pg_options)
        except (RuntimeError, ValueError) as exc:
            raise GangError(f"the {name} gangs {groups} could not be made: {exc}") from exc
        if pg is None:
            return None
        gang = ProcessGroupGang(pg, self._device, timeout=timeout)
        gang.description = name
        return gang

    def _new_group(
        self, groups: Sequence[Sequence[int]], desc: str, timeout: timedelta, backend: str, pg_options: Any
    ) -> ProcessGroup | None:
        """As `torch.distributed.new_group`, but with a name of its own (PGGANG-1). torch's names contain the number of
        groups of a rank, or the number of calls: if only some ranks call it, ranks with another number wait
        forever."""
        split = _num_splits[self._pg] = _num_splits.get(self._pg, 0) + 1
        mine = next((group for group in groups if self.rank in group), None)
        if mine is None:
            return None
        parent = dist.get_process_group_ranks(self._pg)
        made: ProcessGroup = new_group(
            [parent[rank] for rank in mine],
            mine.index(self.rank),
            backend,
            f"{self._pg.group_name}.{split}.{mine[0]}",
            backend_options=pg_options,
            timeout=timeout,
            group_desc=desc,
        )
        return made

    @outside_graphs
    def barrier(self) -> None:
        self._check_open()
        device_ids = [self._device.index] if self._device.type == "cuda" else None
        _translated("barrier", lambda: dist.barrier(group=self._pg, device_ids=device_ids))

    @outside_graphs
    def broadcast_objects(self, objects: list[object], source_rank: int = 0) -> None:
        self._check_open()
        check_objects(objects)
        source_rank = self._check_rank("source_rank", source_rank)
        broadcast_pickled(self, objects, source_rank, lambda collective: self._start(collective).wait())

    def _check_open(self) -> None:
        owned = isinstance(self._pg, GangProcessGroup)  # its gang ends it
        if self._closed or (self._is_torchs and not owned and self._pg not in world.pg_map):
            raise InvalidOperationError("The gang is closed.")

    @outside_graphs  # GANG-5
    def _start(self, collective: Collective) -> Work:
        self._check_open()

        def issue(taken: Collective) -> Work:
            work, last = _translated(taken.call, lambda: TABLE[taken.call].issue(self._pg, taken))
            return _TorchsWork(taken.call, work, self._device).then(last)

        return start_prepared(collective, self._device, issue)


def _checked(timeout: timedelta | None) -> timedelta | None:
    given: object = timeout
    if given is not None and (not isinstance(given, timedelta) or given <= timedelta(0)):
        raise ValueError(f"`timeout` must be a timedelta above 0, but is {timeout!r} instead.")
    return timeout


def _device(given: torch.device | str) -> torch.device:
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"`device` must be a torch.device of type `cpu` or `cuda`, but is {given!r} instead.")
    return device


def _translated(call: str, perform: Callable[[], Any]) -> Any:
    """Call `perform`, and raise a RuntimeError of torch as a GangError."""
    try:
        return perform()
    except GangError:  # from a group of this package
        raise
    except RuntimeError as exc:
        raise GangError(f"`{call}` failed: {exc}") from exc


class _TorchsWork(Work):
    """A work of torch's process group, with its errors as GangErrors."""

    def __init__(self, call: str, work: Any, device: torch.device) -> None:
        self._call, self._work, self._device = call, work, device

    def _wait(self, timeout: float | None) -> bool:
        given = () if timeout is None else (timedelta(seconds=timeout),)
        _translated(self._call, lambda: self._work.wait(*given))
        return True

    def _future(self) -> Future[Any]:
        if self._device.type == "cpu":
            return waited_for(lambda: self._wait(None))
        future: Future[Any] = _translated(self._call, self._work.get_future)
        return follow(future, lambda future: _translated(self._call, future.value))
