"""The torch.distributed backend "elasticgang": `init_process_group("elasticgang")`, `new_group`, `init_device_mesh`.

Its groups are static: their collectives run in one comm process for all groups. A lost peer is an error in every group
at once; to go on, reconfigure the groups, or destroy the process group and initialize it again.

They implement torch 2.15's interface for reconfigurable groups: `init_process_group("elasticgang",
enable_reconfigure=True)`, and `supports_reconfigure`, `get_reconfigure_handle` and `reconfigure` of a group.

These groups also serve `torch.distributed.monitored_barrier`, which by itself refuses every backend but "gloo".

Imports little, because torch imports it wherever elasticgang is installed (entry point `torch.backends`). The rest is
imported with the first group.
"""

from __future__ import annotations

import functools
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from elasticgang.collectives.backend_name import BACKEND_NAME

if TYPE_CHECKING:
    from elasticgang.comm.static_group import StaticProcessGroup


def register() -> None:
    """Register the backend with torch. Idempotent; does nothing if torch was built without torch.distributed."""
    import torch.distributed as dist

    if dist.is_available() and BACKEND_NAME not in dist.Backend.backend_list:
        from elasticgang.torch_private import skip_flight_recorder

        skip_flight_recorder(BACKEND_NAME)
        dist.Backend.register_backend(BACKEND_NAME, _create, extended_api=True, devices=["cpu"])
        _serve_monitored_barrier()


def _serve_monitored_barrier() -> None:
    """Wrap torch's function, which checks the backend's name: a Python group with its own monitored barrier performs
    that. For all other groups nothing changes."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    from elasticgang.torch_private import is_outside

    theirs: Any = distributed_c10d.monitored_barrier
    base: Any = dist.ProcessGroup  # torch's stubs lack the method

    @functools.wraps(theirs)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        pg: Any = dist.group.WORLD if group is None else group
        own = getattr(type(pg), "monitored_barrier", None)
        if own in (None, base.monitored_barrier) or is_outside(group):
            theirs(group, timeout, wait_all_ranks)
            return
        if isinstance(timeout, float):  # as torch does
            warnings.warn(
                "Please specify timeout arg as a timedelta. "
                f"Converting current value of {timeout} assuming it represents seconds",
                stacklevel=2,
            )
            timeout = timedelta(seconds=timeout)
        pg.monitored_barrier(timeout, wait_all_ranks)

    dist.monitored_barrier = distributed_c10d.monitored_barrier = monitored_barrier


def _create(options: Any, backend_options: Any) -> StaticProcessGroup:
    from elasticgang.comm.static_group import StaticProcessGroup

    timeout = options.timeout.total_seconds()
    connects = not getattr(options, "enable_reconfigure", False)  # torch has it since 2.15
    return StaticProcessGroup(options.store, options.group_rank, options.group_size, timeout, connects=connects)
