"""The queries of torch about a process group: its devices, and the abilities of its backend.

torch's own process group answers them from its C++ backends. A process group of this package has none: it is its own
backend.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import ProcessGroup, Store

from elasticgang.errors import NotSupportedError


class GroupBackend:
    """The result of `pg._get_backend(device)`. Answers as Gloo's backend does."""

    supports_abort_hooks = False
    supports_coalescing = False
    supports_completion_hooks = False
    supports_shrinking = False
    supports_time_estimate = False
    supports_window = False

    def __init__(self, pg: Any) -> None:
        self._pg = pg

    @property
    def supports_splitting(self) -> bool:
        return type(self._pg).split_group is not BackendQueries.split_group

    @property
    def supports_reconfigure(self) -> bool:
        return bool(self._pg.supports_reconfigure)

    def get_reconfigure_handle(self) -> str:
        return str(self._pg.get_reconfigure_handle())

    def reconfigure(self, opts: Any) -> Any:
        return self._pg.reconfigure(opts)

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def rank(self) -> int:
        return int(self._pg.rank())

    def size(self) -> int:
        return int(self._pg.size())

    def name(self) -> str:
        return str(self._pg.getBackendName())

    getBackendName = name

    def __repr__(self) -> str:
        return f"GroupBackend({self._pg!r})"


class BackendQueries:
    """A mixin that answers the queries. `_served` names the device types of the group."""

    supports_abort_hooks = False
    supports_completion_hooks = False
    supports_reconfigure = False
    supports_window = False
    use_pg_for_symm_mem_rendezvous = False

    def _served(self) -> Sequence[str]:
        return ("cpu",)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self._served()]

    def _get_backend(self, device: torch.device) -> GroupBackend:
        """Raises RuntimeError, as torch does: the group does not serve `device`."""
        kind = torch.device(device).type
        if kind not in self._served():
            raise RuntimeError(f"No backend type associated with device type {kind}")
        return GroupBackend(self)

    def _has_hooks(self) -> bool:
        return False

    def register_pre_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        """Torch has hooks of its calls since 2.15. Those of this package's groups are not calls of torch's.

        Raises:
            NotSupportedError: `hook` would never be called.
        """
        raise NotSupportedError(
            f"{type(self).__name__} calls no hooks before or after a collective: wrap the group's methods instead."
        )

    register_post_hook = register_pre_hook

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> ProcessGroup | None:
        """The group of some of the ranks; None on the others. Call it on every rank.

        Raises:
            NotSupportedError: groups of this kind cannot be split.
        """
        raise NotSupportedError(f"{type(self).__name__} cannot be split: make the other group as this one was made.")

    def merge_remote_group(
        self,
        store: Store,
        size: int,
        timeout: timedelta = timedelta(minutes=30),
        group_name: str | None = None,
        group_desc: str | None = None,
    ) -> ProcessGroup:
        """Raises NotSupportedError."""
        raise NotSupportedError(f"{type(self).__name__} cannot be merged with another group.")
