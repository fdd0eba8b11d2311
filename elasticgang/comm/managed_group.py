"""The data-parallel process group of a manager of elasticgang or torchft.

It is for code that takes a process group and divides by its size: the size is the number of active members.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed import ReduceOp
from torch.futures import Future
from torchft.process_group import ProcessGroup

from elasticgang.collectives.collective import Collective, ReduceOperation
from elasticgang.collectives.table import TORCH_OPERATIONS, start_mean
from elasticgang.collectives.torch_calls import Call
from elasticgang.collectives.torch_methods import CollectiveMethods, TorchWork
from elasticgang.collectives.work import Work
from elasticgang.comm.error_swallowing import MISUSE, swallowing
from elasticgang.errors import GangError
from elasticgang.torch_private import device_types, wrapped_group

if TYPE_CHECKING:
    from elasticgang.gang import Gang, Gangs


class Manager(Protocol):
    """The part of `elasticgang.QuorumManager` that a `ManagedProcessGroup` uses."""

    @property
    def gangs(self) -> Gangs: ...

    @property
    def num_active(self) -> int: ...

    @property
    def error(self) -> GangError | None: ...


class ManagedProcessGroup(CollectiveMethods, ProcessGroup):  # type: ignore[misc]  # names that torch fixes
    """The data-parallel gang of a manager as a process group, whose size is the number of active members along
    `gangs.dp`. Learners also take part; by convention they contribute zeros. An error ends the manager's generation,
    and collectives then return as those of its gangs do.

    For torchft's `Manager` it is equivalent to torchft's `ManagedProcessGroup`: its size is `num_participants()`, and
    the manager performs all-reduces. Errors of the other collectives are also reported to the manager, and swallowed as
    by a `SwallowingProcessGroup`.
    """

    def __new__(cls, manager: Any) -> ManagedProcessGroup:
        is_torchfts = cls is ManagedProcessGroup and hasattr(manager, "num_participants")
        kind = _OfTorchft if is_torchfts else cls
        made: ManagedProcessGroup = super().__new__(kind)
        return made

    def __init__(self, manager: Any) -> None:
        """`manager`: a `Manager`, or torchft's."""
        super().__init__(0, 1)
        self._manager: Any = manager

    @property
    def _ours(self) -> Manager:
        manager: Manager = self._manager
        return manager

    def rank(self) -> int:
        return self._ours.gangs.dp.rank

    def size(self) -> int:
        gangs = self._ours.gangs
        return max(1, self._ours.num_active * gangs.dp.size // gangs.root.size)

    getRank = rank
    getSize = size

    def _num_members(self) -> int:
        return self._ours.gangs.dp.size  # learners too

    def _served(self) -> Sequence[str]:
        return (self._ours.gangs.dp.device.type,)

    def getBackendName(self) -> str:
        return "elasticgang-managed"

    def errored(self) -> Exception | None:
        """The error that ended the manager's generation; None without one."""
        return self._ours.error

    def __repr__(self) -> str:
        return f"ManagedProcessGroup({self._ours.gangs.dp!r})"

    def _submit(self, call: Call) -> TorchWork:
        gang = self._ours.gangs.dp
        return TorchWork([self._start(gang, part) for part in call.parts], call)

    def _start(self, gang: Gang, collective: Collective) -> Work:
        if collective.op is ReduceOperation.MEAN:
            return start_mean(gang.start, collective, self.size())
        return gang.start(collective)


class _OfTorchft(ManagedProcessGroup):
    """The group of torchft's manager, as the last quorum configured it."""

    def rank(self) -> int:
        return int(self._configured().rank())

    def size(self) -> int:
        return int(self._manager.num_participants())

    getRank = rank
    getSize = size

    def _num_members(self) -> int:
        return int(self._configured().size())  # healing members too

    def _served(self) -> Sequence[str]:
        return device_types(self._configured()) or ("cpu",)

    def getBackendName(self) -> str:
        return str(self.parent.getBackendName())

    @property
    def parent(self) -> ProcessGroup:
        """The manager's group."""
        pg: ProcessGroup = wrapped_group(self._manager)
        return pg

    def errored(self) -> Exception | None:
        """The error reported to the manager in this step; None without one."""
        error = self._manager.errored()
        found: Exception | None = error.original_exception if error else self.parent.errored()
        return found

    def __repr__(self) -> str:
        return f"ManagedProcessGroup({self.parent!r})"

    def _configured(self) -> Any:
        """The innermost group: torchft's wrappers do not know their rank."""
        pg = self.parent
        while not isinstance(pg, CollectiveMethods) and (wrapped := wrapped_group(pg)) is not None:
            pg = wrapped
        return pg

    def _report(self, configuration: object, error: Exception) -> None:
        self._manager.report_error(error)

    def _perform(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not call.is_barrier and all(part.call == "all_reduce" for part in call.parts):
            return TorchWork([self._all_reduce(part) for part in call.parts], call)
        self._manager.wait_quorum()
        error, work = self._manager.errored(), None
        why: Exception | None = error.original_exception if error else None
        if why is None:
            try:
                work = getattr(self.parent, name)(*args, **kwargs)
            except MISUSE:
                raise
            except Exception as failure:
                self._report(None, failure)
                why = failure
        if why is None and work is None:  # it has blocked until the end
            return None
        return swallowing(self, None, call, work, why)

    def _all_reduce(self, part: Collective) -> Work:
        operation: ReduceOp = TORCH_OPERATIONS[part.op]
        return _OfManager(self._manager.allreduce(part.outputs[0], reduce_op=operation))


class _OfManager(Work):
    """A work of torchft's manager. Its own future does not complete before a `wait`."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._waited: Future[bool] | None = None

    def _wait(self, timeout: float | None) -> bool:
        """False when an error was reported to the manager."""
        with self._lock:
            return bool(self._work.wait())

    def _future(self) -> Future[bool]:
        if self._waited is None:
            self._waited = Future()
            if torch.accelerator.is_available():  # torchft's work must be waited for on the stream that made it
                self._finish()
            else:
                threading.Thread(target=self._finish, name="managed-future", daemon=True).start()
        return self._waited

    def _finish(self) -> None:
        assert self._waited is not None
        try:
            self._waited.set_result(self._wait(None))
        except Exception as error:
            self._waited.set_exception(error)  # type: ignore[arg-type]  # torch's annotation is wrong
