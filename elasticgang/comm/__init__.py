"""Process groups that live in a subprocess, reconfigure in place and are aborted by a kill.

Light to import, because comm processes are forked from what is imported here: the public names come on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elasticgang.comm.arena import Arena
    from elasticgang.comm.backends import ProcessGroupGloo, ProcessGroupNCCL, create_process_group
    from elasticgang.comm.client import CommProcess, GroupSpec
    from elasticgang.comm.forkserver import ForkServer
    from elasticgang.comm.mesh import extend_device_mesh
    from elasticgang.comm.nccl import ProcessGroupIsolatedNCCL
    from elasticgang.comm.process_group import ProcessGroupIsolatedGloo
    from elasticgang.comm.supply import CommSupply
    from elasticgang.comm.swallowing import ManagedProcessGroup, SwallowingProcessGroup
    from elasticgang.comm.work import CommWork

_HOMES = {
    "Arena": "arena",
    "CommProcess": "client",
    "CommSupply": "supply",
    "CommWork": "work",
    "ForkServer": "forkserver",
    "GroupSpec": "client",
    "ManagedProcessGroup": "swallowing",
    "ProcessGroupGloo": "backends",
    "ProcessGroupIsolatedGloo": "process_group",
    "ProcessGroupIsolatedNCCL": "nccl",
    "ProcessGroupNCCL": "backends",
    "SwallowingProcessGroup": "swallowing",
    "create_process_group": "backends",
    "extend_device_mesh": "mesh",
}

__all__ = [
    "Arena",
    "CommProcess",
    "CommSupply",
    "CommWork",
    "ForkServer",
    "GroupSpec",
    "ManagedProcessGroup",
    "ProcessGroupGloo",
    "ProcessGroupIsolatedGloo",
    "ProcessGroupIsolatedNCCL",
    "ProcessGroupNCCL",
    "SwallowingProcessGroup",
    "create_process_group",
    "extend_device_mesh",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'elasticgang.comm' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"elasticgang.comm.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
