"""The environment of scripts written for torchrun: torch's default process group, RANK, WORLD_SIZE, MASTER_ADDR.

TORCHENV-1  From the first generation on, `torch.distributed` is initialised, and its default group is the root gang's,
    with the rank and size of each generation. After the loop it keeps the last rank and size; its collectives raise.
TORCHENV-2  A default group that the script has made stays, with one warning: its rank and size do not follow the job.
"""

from __future__ import annotations

import logging
import os

import torch.distributed as dist

from elasticgang.gang import Gangs, torch_registry
from elasticgang.gang.torch_process_group import GangProcessGroup

log = logging.getLogger("elasticgang")


class TorchEnvironment:
    """Belongs to the training thread of one rank."""

    def __init__(self) -> None:
        self._has_warned = False

    def follow(self, gangs: Gangs, master_host: str) -> None:
        """Update the environment for a new generation (TORCHENV-1, TORCHENV-2). `gangs`: its gangs. `master_host`: the
        host of the root's rank 0."""
        root = gangs.root
        os.environ.update(RANK=str(root.rank), WORLD_SIZE=str(root.size), MASTER_ADDR=master_host)
        if not dist.is_available():
            return
        group = root.as_process_group()
        assert isinstance(group, GangProcessGroup)
        if not torch_registry.follow_root(group, [gangs[name] for name in gangs]) and not self._has_warned:
            self._has_warned = True
            log.warning(
                "torch's default process group is one that this script made: its rank and size do not follow the job; "
                "leave out `init_process_group`, the default group is that of `manager.gangs.root`"
            )
