"""The torch.distributed backend "elasticgang": `init_process_group("elasticgang")`, `new_group`, `init_device_mesh`.

Its groups are static: their collectives run in a comm process beside this one, one for all groups. A lost peer is an
error in every group at once; to go on, destroy the process group and initialize it anew.

Groups of ours also serve `torch.distributed.monitored_barrier`, which refuses every backend but the one named "gloo".

Light to import, because torch does so whenever it is imported where elasticgang is installed (entry point
`torch.backends`): the rest is imported when a group is made.
"""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from elasticgang.collectives.backend_name import BACKEND_NAME

if TYPE_CHECKING:
    from elasticgang.comm.static_group import StaticProcessGroup


def register() -> None:
    """Make the backend known to torch. Idempotent; does nothing where torch has no torch.distributed."""
    import torch.distributed as dist

    if dist.is_available() and BACKEND_NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND_NAME, _create, extended_api=True, devices=["cpu"])
        _serve_monitored_barrier()


def _serve_monitored_barrier() -> None:
    """torch's function goes by the backend's name. A group that is written in Python, with a monitored barrier of its
    own, performs that; for all others torch's function stays what it was."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    from elasticgang.torch_private import is_outside

    theirs: Any = distributed_c10d.monitored_barrier
    base: Any = dist.ProcessGroup  # torch's stubs lack the method

    @functools.wraps(theirs)
    def monitored_barrier(group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        pg: Any = dist.group.WORLD if group is None else group
        own = getattr(type(pg), "monitored_barrier", None)
        if own in (None, base.monitored_barrier) or is_outside(group):
            theirs(group, timeout, wait_all_ranks)
        else:
            pg.monitored_barrier(timeout, wait_all_ranks)

    dist.monitored_barrier = distributed_c10d.monitored_barrier = monitored_barrier


def _create(options: Any, backend_options: Any) -> StaticProcessGroup:
    from elasticgang.comm.static_group import StaticProcessGroup

    return StaticProcessGroup(options.store, options.group_rank, options.group_size, options.timeout.total_seconds())
