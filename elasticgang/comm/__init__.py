"""Process groups in a subprocess, which are reconfigured in place and aborted by a kill.

The public names are imported on first use, because comm processes are forked from a process that imports this package.

It also has all names of `torchft.process_group`. Where a class of this package replaces torchft's, the name is of that
class.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchft.process_group import (
        FakeProcessGroupWrapper,
        ProcessGroup,
        ProcessGroupBabyXCCL,
        ProcessGroupDummy,
        ProcessGroupWrapper,
        ProcessGroupXCCL,
        create_store_client,
        trigger_nccl_fr_trace_through_pipe,
    )

    from elasticgang.comm.arena import Arena
    from elasticgang.comm.comm_process import CommProcess, GroupSpec
    from elasticgang.comm.error_swallowing import SwallowingProcessGroup
    from elasticgang.comm.error_swallowing import SwallowingProcessGroup as ErrorSwallowingProcessGroupWrapper
    from elasticgang.comm.in_process import ProcessGroupGloo, ProcessGroupNCCL, create_process_group
    from elasticgang.comm.isolated import ProcessGroupIsolated as ProcessGroupBaby
    from elasticgang.comm.isolated import ProcessGroupIsolatedGloo
    from elasticgang.comm.isolated import ProcessGroupIsolatedGloo as ProcessGroupBabyGloo
    from elasticgang.comm.managed_group import ManagedProcessGroup
    from elasticgang.comm.mesh import extend_device_mesh
    from elasticgang.comm.nccl import ProcessGroupIsolatedNCCL
    from elasticgang.comm.nccl import ProcessGroupIsolatedNCCL as ProcessGroupBabyNCCL
    from elasticgang.comm.standby_pool import StandbyPool
    from elasticgang.comm.work import CommWork
    from elasticgang.process.forkserver import ForkServer

_HOMES = {
    "Arena": "elasticgang.comm.arena",
    "CommProcess": "elasticgang.comm.comm_process",
    "StandbyPool": "elasticgang.comm.standby_pool",
    "CommWork": "elasticgang.comm.work",
    "ForkServer": "elasticgang.process.forkserver",
    "GroupSpec": "elasticgang.comm.comm_process",
    "ManagedProcessGroup": "elasticgang.comm.managed_group",
    "ProcessGroupGloo": "elasticgang.comm.in_process",
    "ProcessGroupIsolatedGloo": "elasticgang.comm.isolated",
    "ProcessGroupIsolatedNCCL": "elasticgang.comm.nccl",
    "ProcessGroupNCCL": "elasticgang.comm.in_process",
    "SwallowingProcessGroup": "elasticgang.comm.error_swallowing",
    "create_process_group": "elasticgang.comm.in_process",
    "extend_device_mesh": "elasticgang.comm.mesh",
}
_OF_TORCHFT = {
    "ErrorSwallowingProcessGroupWrapper": "elasticgang.comm.error_swallowing:SwallowingProcessGroup",
    "FakeProcessGroupWrapper": "torchft.process_group:FakeProcessGroupWrapper",
    "ProcessGroup": "torchft.process_group:ProcessGroup",
    "ProcessGroupBaby": "elasticgang.comm.isolated:ProcessGroupIsolated",
    "ProcessGroupBabyGloo": "elasticgang.comm.isolated:ProcessGroupIsolatedGloo",
    "ProcessGroupBabyNCCL": "elasticgang.comm.nccl:ProcessGroupIsolatedNCCL",
    "ProcessGroupBabyXCCL": "torchft.process_group:ProcessGroupBabyXCCL",
    "ProcessGroupDummy": "torchft.process_group:ProcessGroupDummy",
    "ProcessGroupWrapper": "torchft.process_group:ProcessGroupWrapper",
    "ProcessGroupXCCL": "torchft.process_group:ProcessGroupXCCL",
    "create_store_client": "torchft.process_group:create_store_client",
    "trigger_nccl_fr_trace_through_pipe": "torchft.process_group:trigger_nccl_fr_trace_through_pipe",
}

__all__ = [
    "Arena",
    "CommProcess",
    "CommWork",
    "ErrorSwallowingProcessGroupWrapper",
    "FakeProcessGroupWrapper",
    "ForkServer",
    "GroupSpec",
    "ManagedProcessGroup",
    "ProcessGroup",
    "ProcessGroupBaby",
    "ProcessGroupBabyGloo",
    "ProcessGroupBabyNCCL",
    "ProcessGroupBabyXCCL",
    "ProcessGroupDummy",
    "ProcessGroupGloo",
    "ProcessGroupIsolatedGloo",
    "ProcessGroupIsolatedNCCL",
    "ProcessGroupNCCL",
    "ProcessGroupWrapper",
    "ProcessGroupXCCL",
    "StandbyPool",
    "SwallowingProcessGroup",
    "create_process_group",
    "create_store_client",
    "extend_device_mesh",
    "trigger_nccl_fr_trace_through_pipe",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        home, attribute = _HOMES[name], name
    elif name in _OF_TORCHFT:
        home, _, attribute = _OF_TORCHFT[name].partition(":")
    else:
        raise AttributeError(f"module 'elasticgang.comm' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_OF_TORCHFT})
