"""Groups of some of the ranks, meshes, and what a rank can ask about where it is."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.integration.programs.catalog import Values, program


def _sum(group: dist.ProcessGroup | None = None) -> float:
    dist.all_reduce(tensor := torch.tensor(float(2 ** dist.get_rank())), group=group)
    return tensor.item()


def _is_member(group: Any) -> bool:
    return group is not None and group != dist.GroupMember.NON_GROUP_MEMBER


@program(any_size=True)
def where_am_i() -> Values:
    assert int(os.environ["RANK"]) == dist.get_rank()
    assert int(os.environ["WORLD_SIZE"]) == dist.get_world_size()
    assert os.environ["MASTER_ADDR"]
    assert dist.is_available()
    assert dist.is_initialized()
    world = dist.group.WORLD
    assert world is not None
    return {
        "rank": dist.get_rank(),
        "size": dist.get_world_size(),
        "of the group": (world.rank(), world.size(), dist.get_rank(world)),
        "ranks": dist.get_process_group_ranks(world),
        "of None": dist.get_process_group_ranks(None),
        "global": dist.get_global_rank(world, 1),
        "local": dist.get_group_rank(world, 1),
    }


@program(any_size=True)
def group_of_some_ranks() -> Values:
    ranks = [0, 2]
    group = dist.new_group(ranks, timeout=timedelta(seconds=30), group_desc="evens")
    if dist.get_rank() not in ranks:
        return {"member": _is_member(group), "rank": dist.get_rank(group)}
    assert isinstance(group, dist.ProcessGroup)
    values = {
        "sum": _sum(group),
        "rank": dist.get_rank(group),
        "size": dist.get_world_size(group),
        "ranks": dist.get_process_group_ranks(group),
        "global": dist.get_global_rank(group, 1),
        "local": dist.get_group_rank(group, 2),
        "desc": group.group_desc,
    }
    dist.destroy_process_group(group)
    return values


@program(any_size=True)
def groups_one_after_the_other() -> Values:
    """Each of all ranks, used and left at once."""
    sums = []
    for _ in range(3):
        group = dist.new_group(list(range(dist.get_world_size())))
        sums.append(_sum(group))
        dist.destroy_process_group(group)
    return {"sums": sums}


@program()
def groups_of_two_and_three_left_at_once() -> Values:
    """Unused. The ranks are in different numbers of them. Over torch's own Gloo, they wait for each other before: it
    fails if one leaves while another is still connecting."""
    for ranks in ([0, 1], [1, 2, 3], [0, 3], [0, 1, 2]) * 2:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            if dist.get_backend(group) == "gloo":
                dist.barrier(group)
            dist.destroy_process_group(group)
    return {"sum": _sum(dist.new_group())}


@program()
def groups_of_gloo_by_name() -> Values:
    everyone, pair = dist.new_group(backend="gloo"), dist.new_group([0, 2], backend="gloo")
    return {"everyone": _sum(everyone), "pair": _sum(pair) if _is_member(pair) else None}


@program()
def ranks_of_the_group() -> Values:
    """As roots and partners, in place of those of the default group."""
    group = dist.new_group([1, 3])
    if not _is_member(group):
        return {}
    rank = dist.get_rank()
    dist.reduce(reduced := torch.full((2,), float(rank)), group=group, group_dst=1)
    dist.broadcast(sent := torch.full((2,), float(rank)), group=group, group_src=1)
    gathered = [torch.empty(2), torch.empty(2)] if rank == 3 else None
    dist.gather(sent + rank, gathered, group=group, group_dst=1)
    dist.scatter(part := torch.empty(2), [sent, -sent] if rank == 3 else None, group=group, group_src=1)
    source = None
    if rank == 1:
        dist.send(sent, group=group, group_dst=1)
    else:
        source = dist.recv(torch.empty(2), group=group)
    reduced = reduced if rank == 3 else sent
    return {"reduced": reduced, "sent": sent, "gathered": gathered, "part": part, "source": source}


@program()
def groups_that_overlap() -> Values:
    ranks = [[0, 1, 2], [1, 2, 3], [3, 0], [2]]
    groups = [dist.new_group(each) for each in ranks]
    return {"sums": [_sum(group) for each, group in zip(ranks, groups, strict=True) if dist.get_rank() in each]}


if torch.__version__ < "2.14":  # which counts such a group on its members alone: the next `new_group` hangs

    @program()
    def group_that_only_its_members_make() -> Values:
        if dist.get_rank() in (1, 3):
            group = dist.new_group([1, 3], use_local_synchronization=True)
            return {"sum": _sum(group)}
        return {}


@program()
def order_of_a_groups_ranks() -> Values:
    """Sorted, as torch sorts them."""
    group: Any = dist.new_group([3, 1, 0])
    if dist.get_rank() == 2:
        return {}
    return {"rank": dist.get_rank(group), "ranks": dist.get_process_group_ranks(group)}


@program()
def subgroups_of_equal_size() -> Values:
    mine, groups = dist.new_subgroups(2)
    return {"sum": _sum(mine), "number": len(groups), "ranks": dist.get_process_group_ranks(mine)}


@program()
def subgroups_by_enumeration() -> Values:
    mine, groups = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    return {"sum": _sum(mine), "number": len(groups), "ranks": dist.get_process_group_ranks(mine)}


@program()
def group_that_is_split() -> Values:
    group = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    return {"sum": _sum(group)}


@program()
def sub_group_of_objects() -> Values:
    group = dist.new_group([1, 2, 3])
    if dist.get_rank() == 0:
        return {}
    found: list[Any] = [None] * 3
    dist.all_gather_object(found, f"rank {dist.get_rank()}", group=group)
    objects = [dist.get_rank()]
    dist.broadcast_object_list(objects, group_src=1, group=group)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, ["a", "b", "c"], src=1, group=group)
    return {"found": found, "objects": objects, "mine": mine}


@program(any_size=True)
def mesh_of_one_dimension() -> Values:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return {
        "sum": _sum(mesh.get_group()),
        "named": _sum(mesh.get_group("dp")),
        "rank": mesh.get_local_rank(),
        "size": mesh.size(),
        "coordinate": tuple(mesh.get_coordinate() or ()),
        "ranks": mesh.mesh.tolist(),
    }


@program()
def mesh_of_two_dimensions() -> Values:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    flat = mesh["dp", "tp"]._flatten("all")
    return {
        "dp": _sum(mesh["dp"].get_group()),
        "tp": _sum(mesh.get_group("tp")),
        "flat": _sum(flat.get_group()),
        "flat ranks": flat.mesh.tolist(),
        "again": _sum(mesh["all"].get_group()),
        "coordinate": tuple(mesh.get_coordinate() or ()),
        "local": (mesh.get_local_rank("dp"), mesh.get_local_rank("tp")),
        "all": [len(mesh.get_all_groups()), mesh.ndim, tuple(mesh.shape)],
        "slice": mesh["tp"].mesh.tolist(),
    }


@program()
def mesh_of_given_ranks() -> Values:
    mesh = DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("a", "b"))
    return {"a": _sum(mesh.get_group("a")), "b": _sum(mesh.get_group("b")), "ranks": mesh["b"].mesh.tolist()}


@program()
def mesh_from_groups() -> Values:
    rank = dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mesh = DeviceMesh.from_group(
        [columns[rank % 2], rows[rank // 2]], "cpu", torch.tensor([[0, 1], [2, 3]]), mesh_dim_names=("dp", "tp")
    )
    return {"dp": _sum(mesh.get_group("dp")), "tp": _sum(mesh.get_group("tp"))}


@program()
def mesh_of_three_dimensions() -> Values:
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    return {
        "pp": _sum(mesh.get_group("pp")),
        "dp": _sum(mesh.get_group("dp")),
        "tp": _sum(mesh.get_group("tp")),
        "dp and tp": _sum(mesh["dp", "tp"]._flatten().get_group()),
    }
