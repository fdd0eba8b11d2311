"""Makes reconfigurable process groups by name, and defines those that run in this process.

Isolated groups (`isolated.py`) can always be aborted. Of the in-process groups, NCCL can be aborted and Gloo cannot: in
torch 2.13 Gloo's `abort` does not wake waiting threads, so a lost peer costs the timeout of a collective.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torchft.process_group as torchft
from torchft.process_group import ProcessGroup

from elasticgang.collectives.torch_calls import Call
from elasticgang.collectives.torch_methods import CollectiveMethods, adapted
from elasticgang.comm.availability import check_available
from elasticgang.comm.isolated import ProcessGroupIsolatedGloo, _seconds
from elasticgang.comm.kinds import PROCESS_GROUPS
from elasticgang.comm.nccl import ProcessGroupIsolatedNCCL
from elasticgang.comm.nccl_settings import apply_nccl_settings, set_connect_timeout
from elasticgang.errors import InvalidOperationError, StaleGenerationError
from elasticgang.torch_private import device_types, new_gloo_group


class _InProcess(CollectiveMethods):
    """All collectives, with checks, on the torch group that the last `configure` made."""

    _pg: Any
    _place = (0, 1)  # rank and size; kept after an `abort`, which drops the group
    _was_configured = False

    def configure(
        self, store_addr: str, replica_id: str, rank: int, world_size: int, *args: Any, **options: Any
    ) -> None:
        """See torchft. Blocks until all ranks have connected, at most the timeout."""
        super().configure(store_addr, replica_id, rank, world_size, *args, **options)  # type: ignore[misc]
        self._place = rank, world_size
        self._was_configured = True

    def rank(self) -> int:
        return self._place[0]

    def size(self) -> int:
        return self._place[1]

    getRank = rank
    getSize = size
    _kind = "cpu"

    def _served(self) -> Sequence[str]:
        return [self._kind] if self._pg is None else device_types(self._pg)

    def _perform(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._pg is None and self._was_configured:
            raise StaleGenerationError("the process group was aborted; call `configure` first")
        if self._pg is None:
            raise InvalidOperationError("the process group is not configured; call `configure` first")
        return getattr(self._pg, name)(*args, **kwargs)


class ProcessGroupGloo(_InProcess, torchft.ProcessGroupGloo):  # type: ignore[misc]  # names that torch fixes
    """torchft's `ProcessGroupGloo`, plus the collectives that torchft refuses although torch's Gloo has them."""

    def __init__(self, timeout: timedelta | float = timedelta(seconds=60.0), host: str | None = None) -> None:
        """`host`: the address of this host that its connections use; None: that of the host's name. GLOO_SOCKET_IFNAME
        precedes both."""
        super().__init__(timeout)
        self._host = None if os.environ.get("GLOO_SOCKET_IFNAME") else host

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        if self._host is None:
            return super()._create_pg(store, rank, world_size)
        return new_gloo_group(store, rank, world_size, self._timeout, self._host)

    def _perform(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        work = super()._perform(name, call, args, kwargs)
        if work is None:  # it has blocked until the end
            return None
        return adapted(work, call, waits_in_thread=True)  # works of Gloo's messages and reduce-scatter have no future


class ProcessGroupNCCL(_InProcess, torchft.ProcessGroupNCCL):  # type: ignore[misc]  # names that torch fixes
    """torchft's `ProcessGroupNCCL`, which aborts its communicators, with all collectives."""

    abort_outlasts_kernels = True  # DATA-7
    _kind = "cuda"

    def __init__(self, timeout: timedelta = timedelta(seconds=60.0)) -> None:
        set_connect_timeout(os.environ, timeout.total_seconds())  # torchft would warn, and set it
        super().__init__(timeout)

    def configure(self, *args: Any, **options: Any) -> None:
        """See torchft. Blocks until all ranks have connected, at most the timeout. Raises NotSupportedError: a
        TORCH_NCCL_ variable has a value with which torch ends healthy ranks."""
        apply_nccl_settings(os.environ)  # SURVIVE-1
        super().configure(*args, **options)


def create_process_group(name: str, timeout: float | timedelta = 60.0, host: str | None = None) -> ProcessGroup:
    """Make an unconfigured group by its kind: "gloo", "nccl", "isolated-gloo", "isolated-nccl" or "dummy".

    `timeout`: seconds, for `configure` and for each collective. `host`: the address of this host that the connections
    of "gloo" use, unless GLOO_SOCKET_IFNAME is set; None: that of the host's name. The other kinds do not use it.

    Raises:
        ValueError: the kind is unknown, or `timeout` is not a number of seconds above 0.
        NotSupportedError: the kind is not available on this machine; the message says why.
    """
    if name not in list(_KINDS):  # a list, because `name` may be unhashable
        raise ValueError(f"`name` must be one of {', '.join(_KINDS)}, but is {name!r} instead.")
    if name in PROCESS_GROUPS:
        check_available(name)
    limit = timedelta(seconds=_seconds(timeout))
    return ProcessGroupGloo(limit, host) if name == "gloo" else _KINDS[name](limit)


_KINDS: dict[str, Callable[[timedelta], ProcessGroup]] = {
    "gloo": ProcessGroupGloo,
    "nccl": ProcessGroupNCCL,
    "isolated-gloo": ProcessGroupIsolatedGloo,
    "isolated-nccl": ProcessGroupIsolatedNCCL,
    "dummy": lambda timeout: torchft.ProcessGroupDummy(0, 1),
}
