"""Gangs: sets of ranks that act collectively."""

from elasticgang.collectives.collective import ReduceOperation
from elasticgang.collectives.work import Work
from elasticgang.errors import GangError
from elasticgang.gang.base import Gang
from elasticgang.gang.elastic import ElasticGang
from elasticgang.gang.fake import FakeGang
from elasticgang.gang.gangs import (
    Gangs,
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
    set_gangs,
)
from elasticgang.gang.grid import GangGrid
from elasticgang.gang.mesh import set_default_process_group
from elasticgang.gang.process_group import ProcessGroupGang

__all__ = [
    "ElasticGang",
    "FakeGang",
    "Gang",
    "GangError",
    "GangGrid",
    "Gangs",
    "ProcessGroupGang",
    "ReduceOperation",
    "Work",
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
]
