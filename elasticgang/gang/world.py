"""Gangs' process groups in torch's registry: what lets `torch.distributed`, DeviceMesh and DTensor find them.

V1  The default group is set here only when there is none, or when it is a gang's: a group of the user's stays.
    So does an elastic gang's that the user chose.
V2  A gang's group is registered once, under a name of its own; which ranks it has is written anew with each generation.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, _unregister_process_group
from torch.distributed import distributed_c10d

from elasticgang.errors import InvalidOperationError
from elasticgang.gang.base import Gang
from elasticgang.gang.torch_group import BACKEND_NAME, GangProcessGroup

_numbers = itertools.count()
_world = distributed_c10d._world


def enter(pg: GangProcessGroup, ranks: Sequence[int]) -> None:
    """Make `pg` known to torch, as the group of these ranks of the default group."""
    mapping = {rank: index for index, rank in enumerate(ranks)}
    if pg in _world.pg_map:
        _world.pg_group_ranks[pg] = mapping
        return
    name = distributed_c10d.GroupName(f"{BACKEND_NAME}-{next(_numbers)}")
    pg._set_group_name(name)
    pg._set_group_desc(BACKEND_NAME)
    distributed_c10d._register_pg_in_world(
        pg,
        backend_name=BACKEND_NAME,
        store=HashStore(),
        group_name=name,
        backend_config=f"cpu:{BACKEND_NAME}",
        rank_mapping=mapping,
    )


def leave(pg: GangProcessGroup) -> None:
    """Make torch forget `pg`, and the default group if it is that one."""
    if pg not in _world.pg_map:
        return
    if _world.default_pg is pg:
        distributed_c10d._update_default_pg(None)
    tag = _world.pg_to_tag.pop(pg)
    _world.tags_to_pg.pop(tag, None)
    for registered in (_world.pg_map, _world.pg_group_ranks, _world.pg_backend_config):
        del registered[pg]
    _unregister_process_group(_world.pg_names.pop(pg))


def follow_root(root: GangProcessGroup, gangs: Collection[Gang]) -> bool:
    """When a generation begins: make `root`, of one of these `gangs`, the default group, and tell torch its rank.

    Another one of `gangs` stays the default group, since the user made it so. Returns False where a group that is no
    gang's is the default one: it stays, and follows nothing.
    """
    present = _world.default_pg
    if present is not None and not isinstance(present, GangProcessGroup):
        return False
    is_chosen = present is not None and present in _world.pg_map and present.gang in gangs
    distributed_c10d._update_default_pg(present if is_chosen else root)
    return True


def set_default(pg: dist.ProcessGroup) -> None:
    """Make `pg`, whose ranks every mesh counts in, the default group.

    Raises:
        InvalidOperationError: there is another one that is not a gang's.
    """
    present = _world.default_pg
    if present is pg:
        return
    if present is not None and not isinstance(present, GangProcessGroup):
        raise InvalidOperationError(
            f"torch's default process group is another one, of {present.size()} ranks (the gang has {pg.size()}); "
            "destroy it first, or make the gangs from it."
        )
    distributed_c10d._update_default_pg(pg)
