"""torch's `ProcessGroup` over whatever runs collectives: what DDP, FSDP2, DTensor and functional collectives take.

TORCHGROUP-1  Every collective is written once: its form in `torch_calls.py`, its policy in `_submit`. It takes what
    torch's own method takes, by position or by keyword, with the same meaning.
TORCHGROUP-2  `rank()` and `size()` are asked for at every call, by C++ too, so that a group may change both beneath its
    users.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from elasticgang.collectives import torch_calls
from elasticgang.collectives.backend_name import BACKEND_NAME
from elasticgang.collectives.torch_calls import Call
from elasticgang.collectives.torch_methods import CollectiveMethods, TorchWork
from elasticgang.comm import torch_backend
from elasticgang.gang import compiled
from elasticgang.gang.base import Gang

torch_backend.register()  # torch looks a group's devices up by its backend's name


class GangProcessGroup(CollectiveMethods, dist.ProcessGroup):  # type: ignore[misc]  # names that torch fixes
    """A gang as a process group. It stays the gang's own through all generations: rank and size are the gang's.

    Of a poisoned gang, collectives complete with outputs as the gang's do, except that barriers, and integers that are
    moved and not reduced (torch's object collectives), raise `StepAborted`.
    """

    def __init__(self, gang: Gang) -> None:
        super().__init__(gang.rank, gang.size)  # type: ignore[call-arg]  # torch's stub lacks this form
        self._gang = gang
        self._timeout_s: float | None = None  # the gang's

    @property
    def gang(self) -> Gang:
        return self._gang

    def rank(self) -> int:
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
        """For collectives that are started by this group from now on, and have no timeout of their own."""
        self._timeout_s = torch_calls.seconds(timeout)

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> dist.ProcessGroup | None:
        """See `new_group`, which this is."""
        pg = self.new_group(ranks, group_name=group_name or "", group_desc=group_desc)
        if pg is not None and timeout is not None:
            pg.set_timeout(timeout)
        return pg

    def new_group(self, ranks: Sequence[int], **options: Any) -> dist.ProcessGroup | None:
        """What `torch.distributed.new_group` calls on a default group; other options than `group_name` are the
        gang's."""
        compiled.note(self._gang)  # a mesh is made out of it, or whatever else counts in its ranks
        gang = self._gang.create_gang(ranks)
        if gang is None:
            return None
        pg = GangProcessGroup(gang)  # which torch registers itself
        pg._set_group_name(options["group_name"])
        pg._set_group_desc(options.get("group_desc") or BACKEND_NAME)
        return pg

    def shutdown(self) -> None:
        """Does nothing: the gang lives as long as its owner wants."""

    def abort(self) -> None:
        """Does nothing: see `shutdown`."""

    def __repr__(self) -> str:
        return f"GangProcessGroup({self._gang!r})"

    def _submit(self, call: Call) -> TorchWork:
        call = torch_calls.with_default_timeout(call, self._timeout_s)
        return TorchWork([self._gang.start(part) for part in call.parts], call)
