"""elasticgang: gangs of ranks that go on while ranks die, hang, leave and come back.

The public names are imported on first use, so that `elasticgang run --help` and bad command lines are answered
without importing torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elasticgang.checkpoint.interchange import load_weights
    from elasticgang.comm import (
        CommProcess,
        ManagedProcessGroup,
        ProcessGroupIsolatedGloo,
        ProcessGroupIsolatedNCCL,
        SwallowingProcessGroup,
        create_process_group,
        extend_device_mesh,
    )
    from elasticgang.errors import (
        CheckpointError,
        CollectiveTimeoutError,
        DamagedStateError,
        DeviceError,
        ElasticGangError,
        EvictedError,
        GangError,
        GridTooLargeError,
        InternalError,
        InvalidOperationError,
        LayoutError,
        MembershipError,
        MismatchError,
        NotSupportedError,
        NoWorldError,
        OperationalError,
        PeerLostError,
        StaleGenerationError,
        StateLostError,
        StepAborted,
        UnhealedError,
    )
    from elasticgang.gang import (
        ElasticGang,
        FakeGang,
        Gang,
        GangGrid,
        Gangs,
        ProcessGroupGang,
        ReduceOperation,
        all_sum,
        broadcast_flag,
        create_fake_gangs,
        create_fsdp_gangs,
        create_parallel_gangs,
        get_current_gangs,
        get_default_device,
        get_default_gangs,
        get_world_size,
        maybe_get_current_gangs,
        raise_operational_gang_error,
        set_default_gangs,
        set_default_process_group,
        set_gangs,
    )
    from elasticgang.layout import Axes, Member, ModelCoordinates, ParallelLayout, Plan, plan
    from elasticgang.member.manager import QuorumManager
    from elasticgang.train import (
        DataLoader,
        DistributedDataParallel,
        GlobalBatch,
        Optimizer,
        PipelineParallel,
        ShardedDataParallel,
        StreamLoader,
        join,
    )

_HOMES = {
    "elasticgang.checkpoint.interchange": ("load_weights",),
    "elasticgang.comm": (
        "CommProcess",
        "ManagedProcessGroup",
        "ProcessGroupIsolatedGloo",
        "ProcessGroupIsolatedNCCL",
        "SwallowingProcessGroup",
        "create_process_group",
        "extend_device_mesh",
    ),
    "elasticgang.errors": (
        "CheckpointError",
        "CollectiveTimeoutError",
        "DamagedStateError",
        "DeviceError",
        "ElasticGangError",
        "EvictedError",
        "GangError",
        "GridTooLargeError",
        "InternalError",
        "InvalidOperationError",
        "LayoutError",
        "MembershipError",
        "MismatchError",
        "NoWorldError",
        "NotSupportedError",
        "OperationalError",
        "PeerLostError",
        "StaleGenerationError",
        "StateLostError",
        "StepAborted",
        "UnhealedError",
    ),
    "elasticgang.gang": (
        "ElasticGang",
        "FakeGang",
        "Gang",
        "GangGrid",
        "Gangs",
        "ProcessGroupGang",
        "ReduceOperation",
        "all_sum",
        "broadcast_flag",
        "create_fake_gangs",
        "create_fsdp_gangs",
        "create_parallel_gangs",
        "get_current_gangs",
        "get_default_device",
        "get_default_gangs",
        "get_world_size",
        "maybe_get_current_gangs",
        "raise_operational_gang_error",
        "set_default_gangs",
        "set_default_process_group",
        "set_gangs",
    ),
    "elasticgang.layout": ("Axes", "Member", "ModelCoordinates", "ParallelLayout", "Plan", "plan"),
    "elasticgang.member.manager": ("QuorumManager",),
    "elasticgang.train": (
        "DataLoader",
        "DistributedDataParallel",
        "GlobalBatch",
        "Optimizer",
        "PipelineParallel",
        "ShardedDataParallel",
        "StreamLoader",
        "join",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Axes",
    "CheckpointError",
    "CollectiveTimeoutError",
    "CommProcess",
    "DamagedStateError",
    "DataLoader",
    "DeviceError",
    "DistributedDataParallel",
    "ElasticGang",
    "ElasticGangError",
    "EvictedError",
    "FakeGang",
    "Gang",
    "GangError",
    "GangGrid",
    "Gangs",
    "GlobalBatch",
    "GridTooLargeError",
    "InternalError",
    "InvalidOperationError",
    "LayoutError",
    "ManagedProcessGroup",
    "Member",
    "MembershipError",
    "MismatchError",
    "ModelCoordinates",
    "NoWorldError",
    "NotSupportedError",
    "OperationalError",
    "Optimizer",
    "ParallelLayout",
    "PeerLostError",
    "PipelineParallel",
    "Plan",
    "ProcessGroupGang",
    "ProcessGroupIsolatedGloo",
    "ProcessGroupIsolatedNCCL",
    "QuorumManager",
    "ReduceOperation",
    "ShardedDataParallel",
    "StaleGenerationError",
    "StateLostError",
    "StepAborted",
    "StreamLoader",
    "SwallowingProcessGroup",
    "UnhealedError",
    "all_sum",
    "broadcast_flag",
    "create_fake_gangs",
    "create_fsdp_gangs",
    "create_parallel_gangs",
    "create_process_group",
    "extend_device_mesh",
    "get_current_gangs",
    "get_default_device",
    "get_default_gangs",
    "get_world_size",
    "join",
    "load_weights",
    "maybe_get_current_gangs",
    "plan",
    "raise_operational_gang_error",
    "set_default_gangs",
    "set_default_process_group",
    "set_gangs",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'elasticgang' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
