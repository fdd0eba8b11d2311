"""The torch.distributed backend "elasticgang": `init_process_group("elasticgang")`, `new_group`, `init_device_mesh`.

Its groups are static: their collectives run in a comm process beside this one, one for all groups. A lost peer is an
error in every group at once; to go on, destroy the process group and initialize it anew.

Light to import, because torch does so whenever it is imported where elasticgang is installed (entry point
`torch.backends`): the rest is imported when a group is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elasticgang.comm.static_group import StaticProcessGroup

NAME = "elasticgang"


def register() -> None:
    """Make the backend known to torch. Idempotent; does nothing where torch has no torch.distributed."""
    import torch.distributed as dist

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def _create(options: Any, backend_options: Any) -> StaticProcessGroup:
    from elasticgang.comm.static_group import StaticProcessGroup

    return StaticProcessGroup(options.store, options.group_rank, options.group_size, options.timeout.total_seconds())
