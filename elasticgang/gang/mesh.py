"""Gangs as a `torch.distributed.DeviceMesh`, and a mesh as gangs.

A mesh is a snapshot: its ranks are those of one generation. Its groups are the gangs' own, and have the gangs' rank and
size in every generation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from elasticgang.errors import InvalidOperationError, NotSupportedError
from elasticgang.gang import compiled, torch_registry
from elasticgang.gang.base import Gang
from elasticgang.gang.elastic import ElasticGang
from elasticgang.gang.fake import FakeGang
from elasticgang.gang.process_group import ProcessGroupGang
from elasticgang.gang.torch_process_group import GangProcessGroup
from elasticgang.layout import AXES, FAMILIES
from elasticgang.torch_private import world

_OF_DATA_PARALLELISM = frozenset(
    {"ddp", "dp_replicate", "dp_shard", "dp_shard_cp", "fsdp", "hsdp", "replicate", "shard"}
)  # names of data-parallel dimensions in torch's documentation and torchtitan: a gang of that name reduces no gradient


def device_mesh(root: Gang, gangs: Mapping[str, Gang]) -> DeviceMesh:
    """A mesh with one dimension for each of `gangs`, by name and in their order. `root` contains all of their ranks.

    Raises:
        ValueError: `gangs` is empty, or they are not the axes of one grid.
        InvalidOperationError: torch's default process group is not `root`'s.
    """
    if not gangs:
        raise ValueError("a mesh must have at least one dimension, but there are none.")
    for gang in gangs.values():
        compiled.note(gang)
    groups = {name: gang.as_process_group() for name, gang in gangs.items()}
    ranks = {name: _ranks(gang, root) for name, gang in gangs.items()}
    mesh = _grid(root.rank, ranks)
    default = root.as_process_group()
    if isinstance(default, GangProcessGroup):
        torch_registry.register(default, range(root.size))
    torch_registry.set_default(default)
    for name, group in groups.items():
        if isinstance(group, GangProcessGroup):
            torch_registry.register(group, ranks[name])
    if len(groups) == 1:
        (group,) = groups.values()
        return DeviceMesh.from_group(group, root.device.type, mesh_dim_names=tuple(groups))
    return DeviceMesh.from_group(list(groups.values()), root.device.type, mesh, mesh_dim_names=tuple(groups))


def set_default_process_group(gang: Gang) -> None:
    """Make `gang`'s process group torch's default one. `torch.distributed` uses it where no group is given,
    `torch.distributed.new_group` splits it, and a mesh numbers ranks by it. In an elastic job it is that of
    `manager.gangs.root` from the first step on, unless this function has chosen another gang of the job.

    Raises:
        InvalidOperationError: there is a default process group that does not belong to a gang; or there is any, and
            `gang` is a fake one.
    """
    torch_registry.set_default(gang.as_process_group())


def gang_of_mesh(mesh: DeviceMesh, dims: Sequence[str], name: str, device: torch.device) -> Gang:
    """The gang along `dims` of `mesh`. Several dims are flattened (once) to a dimension `name` by torch. Call it on
    every rank."""
    dims = [dim for dim in mesh.mesh_dim_names or () if dim in dims]  # the only order that torch accepts
    sizes = [mesh[dim].size() for dim in dims]
    if math.prod(sizes) == 1:
        return FakeGang(device)
    wide = [dim for dim, size in zip(dims, sizes, strict=True) if size > 1]
    if math.prod(sizes) == dist.get_world_size():
        return ProcessGroupGang(dist.group.WORLD, device)  # type: ignore[arg-type]
    if len(wide) == 1:
        return ProcessGroupGang(mesh.get_group(wide[0]), device)
    return ProcessGroupGang(mesh[tuple(wide)]._flatten(f"elasticgang_{name}").get_group(), device)


def axes_of_mesh(mesh: DeviceMesh, dims: Mapping[str, str]) -> dict[str, str]:
    """The dimension of `mesh` for each of `AXES`: by `dims`, or of the same name. The other dimensions are further
    axes, under their names and in their order."""
    names = mesh.mesh_dim_names
    if not names:
        raise ValueError(
            f"the dimensions of the mesh must have names, but those of the shape {list(mesh.shape)} have none; give "
            "`mesh_dim_names` when making it."
        )
    for axis, dim in dims.items():
        if axis not in AXES:
            raise ValueError(
                f"dimensions must be given for some of {', '.join(AXES)}, but one is for {axis!r} instead."
            )
        if dim not in names:
            raise ValueError(f"`{axis}` must be one of the mesh's dimensions {list(names)}, but is {dim!r} instead.")
    of_axis = {**{axis: axis for axis in AXES if axis in names}, **dims}
    further = [name for name in names if name not in of_axis.values()]
    unclear = [name for name in further if name in FAMILIES or name in _OF_DATA_PARALLELISM]
    if len(set(of_axis.values())) < len(of_axis):
        raise ValueError(f"each dimension of the mesh must be one gang, but {of_axis} names one of them twice.")
    if unclear:
        raise ValueError(
            f"the mesh's dimensions {list(names)} must say which gangs they are, but {unclear[0]!r} does not; name it: "
            f"`from_device_mesh(mesh, rdp={unclear[0]!r})` if its ranks hold the same parameters, sdp= if they hold "
            "parts of them."
        )
    return {**of_axis, **{name: name for name in further}}


def _ranks(gang: Gang, root: Gang) -> list[int]:
    """The ranks of `gang`, numbered as in the default group."""
    if isinstance(gang, ElasticGang):
        return list(gang.ranks)
    if isinstance(gang, ProcessGroupGang) and (group := gang.as_process_group()) in world.pg_map:
        return dist.get_process_group_ranks(group)
    if isinstance(gang, FakeGang) and (ranks := gang.ranks_in(root)) is not None:
        return ranks
    raise NotSupportedError(f"The ranks of {type(gang).__name__} of size {gang.size} in its root are not known.")


def _grid(me: int, ranks: Mapping[str, Sequence[int]]) -> torch.Tensor:
    """The ranks of the mesh: along each dimension they have the offsets of this rank's own gang."""
    names = list(ranks)
    mesh = torch.full((1,) * len(names), me, dtype=torch.int, device="cpu")
    for index, name in enumerate(names):
        shape = [1] * len(names)
        shape[index] = len(ranks[name])
        mesh = mesh + (torch.tensor(ranks[name], dtype=torch.int, device="cpu") - me).view(shape)
    if len(set(mesh.flatten().tolist())) != mesh.numel() or int(mesh.min()) < 0:
        found = ", ".join(f"{name} has {list(group)}" for name, group in ranks.items())
        raise ValueError(
            f"the gangs of a mesh must be axes of one grid, but {found}"
            f" on rank {me} instead; `dp` lies along `rdp` and `sdp`, and `root` along all."
        )
    return mesh


def refuse_foreign_default() -> None:
    """Raise InvalidOperationError if there is no default process group, by which a mesh numbers its ranks."""
    if not dist.is_initialized():
        raise InvalidOperationError("A mesh's gangs need the default process group that the mesh was made with.")
