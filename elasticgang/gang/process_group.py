"""A gang over a process group of torch.distributed: static, for jobs that no manager runs.

PGGANG-1  Making gangs out of a gang is collective over that gang alone, and needs nothing else to be alike on its
    ranks: not the number of groups that they are in, nor the order in which they are in others.
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
from elasticgang.gang.torch_process_group import GangProcessGroup
from elasticgang.torch_private import new_group

_DEFAULT_TIMEOUT = timedelta(minutes=15)
_num_splits: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()


class ProcessGroupGang(CheckedGang):
    """Wraps `pg`, whose ranks are the gang's. `timeout`: of the collectives of the gangs that are made out of it."""

    def __init__(self, pg: ProcessGroup, device: torch.device | str, *, timeout: timedelta = _DEFAULT_TIMEOUT) -> None:
        self._pg = pg
        self._device = torch.device(device)
        self._timeout = timeout
        self._closed = False

    @classmethod
    def create_default_process_group(
        cls, device: torch.device | str, *, timeout: timedelta | None = None, high_priority: bool = False
    ) -> ProcessGroupGang:
        """Initialize torch's default process group (NCCL on CUDA, Gloo on the CPU) from the environment that torchrun
        sets, and wrap it.

        `timeout`: of a collective, of this gang and of those made out of it; None is 15 minutes. `high_priority`: NCCL
        on high-priority streams.

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
            # 2, ProcessGroupNCCL.hpp's CleanUpOnly: abort the communicators and go on. 3, torch's default, and 1,
            # fairseq2's choice, end the whole process when a peer is lost.
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
    def is_poisoned(self) -> bool:
        if isinstance(self._pg, GangProcessGroup):
            return self._pg.gang.is_poisoned
        errored = getattr(self._pg, "errored", None)  # of torchft's groups
        return errored is not None and errored() is not None

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if dist.is_initialized():  # the default group takes all others with it
                dist.destroy_process_group(self._pg)

    def as_process_group(self) -> ProcessGroup:
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
        """The gang of the one of `groups`, disjoint sets of ranks, that this rank is in; None if it is in none. Called
        on every rank of this gang.

        `timeout`: None is this gang's. `backend`: None is this gang's. `pg_options`: of the backend; Gloo has none.
        Where the process group is a gang's own, that gang makes them, and has no such options.

        Raises:
            InvalidOperationError: the gang is closed.
            GangError: the gang could not be made.
        """
        self._check_open()
        if isinstance(self._pg, GangProcessGroup):
            return create_one_of(self._pg.gang, groups, name)
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
        return None if pg is None else ProcessGroupGang(pg, self._device, timeout=timeout)

    def _new_group(
        self, groups: Sequence[Sequence[int]], desc: str, timeout: timedelta, backend: str, pg_options: Any
    ) -> ProcessGroup | None:
        """As `torch.distributed.new_group`, under a name of ours. The names that it makes count the groups that a rank
        is in, or all calls of all ranks: called by some ranks only, those with another count wait for ever
        (PGGANG-1)."""
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

    def barrier(self) -> None:
        self._check_open()
        device_ids = [self._device.index] if self._device.type == "cuda" else None
        _translated("barrier", lambda: dist.barrier(group=self._pg, device_ids=device_ids))

    def broadcast_objects(self, objects: list[object], source_rank: int = 0) -> None:
        self._check_open()
        check_objects(objects)
        self._check_rank("source_rank", source_rank)
        _translated(
            "broadcast_objects",
            lambda: dist.broadcast_object_list(objects, group=self._pg, group_src=source_rank, device=self._device),
        )

    def _check_open(self) -> None:
        owned = isinstance(self._pg, GangProcessGroup)  # by a gang that needs no default group
        if self._closed or not (owned or dist.is_initialized()):  # the default group has taken all others with it
            raise InvalidOperationError("The gang is closed.")

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
    """torch's RuntimeError as ours."""
    try:
        return perform()
    except GangError:  # of a group that is ours
        raise
    except RuntimeError as exc:
        raise GangError(f"`{call}` failed: {exc}") from exc


class _TorchsWork(Work):
    """A work of torch's, with its errors as ours."""

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
