"""Registers gangs' process groups with torch, so that `torch.distributed`, DeviceMesh and DTensor find them.

REGISTRY-1  This module sets the default group only if there is none, or if it belongs to a gang: a group that the user
    has made stays, and so does one of an elastic gang that the user has chosen. A fake gang's group is replaced by any
    other, also by torch's own, and replaces none.
REGISTRY-2  A gang's group is registered once, under a unique name. Each generation updates its ranks.
REGISTRY-3  The group of a real gang has no store. torch's functions that return a group's store return one that raises,
    because a store of this process alone would let each rank go on alone.
REGISTRY-4  DTensor keeps no mesh of an earlier generation, whose groups have ended and in which this rank had another
    place, for an equal one of this generation: it forgets all when a generation begins, and again before objects are
    built for another seat, because code that used the former ones may have run since.
REGISTRY-5  What torch's `new_group` and meshes make of an elastic gang ends with the generation. It stays registered
    until another generation has ended in which such groups were made, because a script may destroy it there. Then it
    is removed; otherwise each generation would leave some for good.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed import distributed_c10d

from elasticgang.collectives.backend_name import BACKEND_NAME
from elasticgang.errors import InvalidOperationError
from elasticgang.gang.base import Gang
from elasticgang.gang.torch_process_group import GangProcessGroup
from elasticgang.torch_private import forget_meshes, register_in_world, set_default_group, unregister_group, world

_numbers = itertools.count()


class _NoStore(Store):
    """REGISTRY-3."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise InvalidOperationError(
            "A gang's process group has no store. Exchange objects by `torch.distributed.all_gather_object` or "
            "`broadcast_object_list`, or connect to a `TCPStore` of your own."
        )

    set = get = add = append = check = wait = compare_set = multi_get = multi_set = clone = _refuse
    num_keys = delete_key = list_keys = queue_push = queue_pop = queue_len = _refuse
    getNumKeys = deleteKey = _refuse  # what a `PrefixStore` calls


def register(pg: GangProcessGroup, ranks: Sequence[int]) -> None:
    """Register `pg` with torch, as the group of these ranks of the default group (REGISTRY-2)."""
    mapping = {rank: index for index, rank in enumerate(ranks)}
    if pg in world.pg_map:
        world.pg_group_ranks[pg] = mapping
        return
    name = distributed_c10d.GroupName(f"{BACKEND_NAME}-{next(_numbers)}")
    pg._set_group_name(name)
    pg._set_group_desc(pg.gang.description or BACKEND_NAME)
    register_in_world(
        pg,
        backend_name=BACKEND_NAME,
        store=HashStore() if pg.gang.is_fake else _NoStore(),
        group_name=name,
        backend_config=f"cpu:{BACKEND_NAME}",
        rank_mapping=mapping,
    )


def unregister(pg: GangProcessGroup) -> None:
    """Remove `pg` from torch's registry, also as the default group."""
    if pg not in world.pg_map:
        return
    if world.default_pg is pg:
        _make_default(None)
    for tag in (world.pg_to_tag.pop(pg), ""):
        if pg in (tagged := world.tags_to_pg.get(tag, [])):
            tagged.remove(pg)
        if tag and not tagged:
            world.tags_to_pg.pop(tag, None)
    world.pg_coalesce_state.pop(pg, None)
    for registered in (world.pg_map, world.pg_group_ranks, world.pg_backend_config):
        del registered[pg]
    unregister_group(world.pg_names.pop(pg))


def unregister_all_of(gang: Gang) -> None:
    """Remove all groups of `gang` that torch has registered (REGISTRY-5)."""
    for pg in [pg for pg in world.pg_map if isinstance(pg, GangProcessGroup) and pg.gang is gang]:
        unregister(pg)


def follow_root(root: GangProcessGroup, gangs: Collection[Gang]) -> bool:
    """When a generation begins, make `root`, the group of one of these `gangs`, the default group (REGISTRY-1).

    If the user has made another one of `gangs` the default, that stays. Returns False if the default group belongs to
    no gang: it stays, and does not follow the job.
    """
    forget_meshes()  # REGISTRY-4
    present = world.default_pg
    if present is not None and not isinstance(present, GangProcessGroup):
        return False
    is_chosen = present is not None and present in world.pg_map and present.gang in gangs
    _make_default(present if is_chosen else root)
    return True


def forget_former_seat() -> None:
    """REGISTRY-4: call it before objects are built for another seat."""
    forget_meshes()


def set_default(pg: dist.ProcessGroup) -> None:
    """Make `pg` the default group, by which every mesh numbers its ranks (REGISTRY-1).

    Raises:
        InvalidOperationError: there is another default group that belongs to no gang; or one that belongs to a real
            gang, and `pg` to a fake one.
    """
    present = world.default_pg
    if present is pg:
        return
    stays = not isinstance(present, GangProcessGroup) or (_is_fake(pg) and not _is_fake(present))
    if present is not None and stays:
        raise InvalidOperationError(
            f"torch's default process group is another one, of {present.size()} ranks (the gang has {pg.size()}); "
            "destroy it first, or make the gangs from it."
        )
    _make_default(pg)


def drop_fake_default() -> None:
    """Remove the default group if it belongs to a fake gang."""
    if _is_fake(world.default_pg):
        _make_default(None)


def _is_fake(pg: dist.ProcessGroup | None) -> bool:
    return isinstance(pg, GangProcessGroup) and pg.gang.is_fake


def _make_default(pg: dist.ProcessGroup | None) -> None:
    """Set the default group. While it belongs to a fake gang, torch's `init_process_group`, which raises if there is a
    default group, is wrapped to drop it first."""
    set_default_group(pg)
    by_ranks = world.tags_to_pg.setdefault("", [])  # functional collectives look up a list of ranks there
    if pg in world.pg_map and pg not in by_ranks:
        by_ranks.insert(0, pg)  # first, so that every rank finds it before other groups of the same ranks
    present, wanted = _torch_init_process_group, _init_process_group
    if not _is_fake(pg):
        present, wanted = wanted, present
    modules: tuple[Any, ...] = (dist, distributed_c10d)
    for module in modules:
        if module.init_process_group is present:  # a wrapper that another library has installed stays
            module.init_process_group = wanted


_torch_init_process_group = distributed_c10d.init_process_group


@functools.wraps(_torch_init_process_group)
def _init_process_group(*args: Any, **kwargs: Any) -> None:
    drop_fake_default()
    _torch_init_process_group(*args, **kwargs)
