"""A gang as torch's `ProcessGroup`, for DDP, FSDP2, DTensor and functional collectives.

TORCHGROUP-1  Every collective is implemented once: its signature in `torch_calls.py`, its policy in `_submit`. It
    accepts the arguments of torch's own method, by position or by keyword, with the same meaning.
TORCHGROUP-2  Every call of `rank()` and `size()`, from C++ too, reads the gang's present values, which may change while
    the group is in use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elasticgang.collectives import torch_arguments, torch_calls
from elasticgang.collectives.backend_name import BACKEND_NAME
from elasticgang.collectives.torch_calls import Call
from elasticgang.collectives.torch_methods import CollectiveMethods, TorchWork
from elasticgang.collectives.work import Work
from elasticgang.comm import torch_backend
from elasticgang.errors import StepAborted
from elasticgang.gang import compiled
from elasticgang.gang.base import CheckedGang, Gang
from elasticgang.gang.message_batch import SINGLE, MessageBatch

torch_backend.register()  # torch finds a group's devices by its backend's name


class GangProcessGroup(CollectiveMethods, dist.ProcessGroup):  # type: ignore[misc]  # names that torch fixes
    """A gang as a process group. It belongs to the gang in all generations and has the gang's rank and size.

    If the gang is poisoned, collectives complete like the gang's. Barriers, and collectives that move integers without
    reducing them (torch's object collectives), raise `StepAborted`.
    """

    def __init__(self, gang: Gang) -> None:
        super().__init__(gang.rank, gang.size)  # type: ignore[call-arg]  # torch's stub lacks this form
        self._gang = gang
        self._timeout_s: float | None = None  # None: the gang's
        self._batch: MessageBatch | None = None

    @property
    def gang(self) -> Gang:
        return self._gang

    def rank(self) -> int:
        """TORCHGROUP-2."""
        rank = self._gang.rank
        compiled.note_if_tracing(self._gang)
        return rank

    def size(self) -> int:
        size = self._gang.size
        compiled.note_if_tracing(self._gang)
        return size

    getRank = rank  # what C++ callers, such as DDP's reducer, look for
    getSize = size

    def getBackendName(self) -> str:
        return BACKEND_NAME

    def _served(self) -> Sequence[str]:
        return (self._gang.device.type,)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later collectives of this group without one of their own."""
        self._timeout_s = torch_arguments.seconds(timeout)

    @contextlib.contextmanager
    def batched_messages(self) -> Iterator[Callable[[], None]]:
        """Within it, sends and receives are collected. The function that it gives starts them all at once, as the end
        of the context does, every other collective, and a wait for one of them (MESSAGES-1). For one thread."""
        batch = self._batch = MessageBatch(self._gang)
        try:
            yield batch.start
            batch.start()
        finally:
            self._batch = None

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> dist.ProcessGroup | None:
        """Same as `new_group`."""
        pg = self.new_group(ranks, group_name=group_name or "", group_desc=group_desc)
        if pg is not None and timeout is not None:
            pg.set_timeout(timeout)
        return pg

    def new_group(self, ranks: Sequence[int], **options: Any) -> dist.ProcessGroup | None:
        """`torch.distributed.new_group` calls this on the default group. Of the options it uses only `group_name` and
        `group_desc`; the gang determines the others."""
        compiled.note(self._gang)  # the caller, a mesh for example, numbers ranks by this gang
        gang = self._gang.create_gang(ranks)
        if gang is None:
            return None
        pg = GangProcessGroup(gang)  # torch registers it
        pg._set_group_name(options["group_name"])
        pg._set_group_desc(options.get("group_desc") or BACKEND_NAME)
        return pg

    def shutdown(self) -> None:
        """Does nothing: the gang's owner closes it."""

    def abort(self) -> None:
        """Does nothing: see `shutdown`."""

    def __repr__(self) -> str:
        return f"GangProcessGroup({self._gang!r})"

    def _submit(self, call: Call) -> TorchWork:
        """TORCHGROUP-1."""
        call = torch_calls.with_default_timeout(call, self._timeout_s)
        if self._batch is not None:
            if all(part.call in SINGLE for part in call.parts):
                return self._batch.add(call)
            self._batch.start()
        if not call.is_barrier or self._gang.device.type == "cpu":
            return TorchWork([self._gang.start(part) for part in call.parts], call)
        call = torch_calls.barrier_on(call, self._gang.device)
        return _DeviceBarrier([self._gang.start(part) for part in call.parts], call, self._gang)


class _DeviceBarrier(TorchWork):
    """A barrier, whose `wait` blocks the host until the device has passed it."""

    def __init__(self, works: Sequence[Work], call: Call, gang: Gang) -> None:
        super().__init__(works, call)
        self._gang = gang

    def wait(self, timeout: timedelta | None = None) -> bool:
        """See `TorchWork.wait`."""
        super().wait(timeout)
        if isinstance(self._gang, CheckedGang):
            self._gang.await_device()
            if self._gang.is_poisoned:
                raise StepAborted("the generation ended before all ranks had reached the barrier")
        return True
