"""The part of a tensor that is on this rank: of a DTensor its shard, of any other the tensor itself."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from elasticgang.torch_private import like_dtensor, shard, stored_values


def local(tensor: Tensor) -> Tensor:
    """The same memory, detached."""
    part = shard(tensor) if isinstance(tensor, DTensor) else tensor
    return part.detach()


def locally(tree: Any) -> Any:
    """`tree` with the local part of each DTensor in its place."""
    if isinstance(tree, DTensor):
        return local(tree)
    if isinstance(tree, dict):
        return {key: locally(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map(locally, tree))
    return tree


def like(part: Any, parameter: Tensor) -> Any:
    """`part` as something of `parameter`: sharded as it is, if it is of the same local shape."""
    if not (isinstance(parameter, DTensor) and isinstance(part, Tensor)):
        return part
    if part.shape != shard(parameter).shape:
        return part
    return like_dtensor(part, parameter)


def stored(tensor: Tensor, *, summed: bool = False) -> Tensor:
    """The local part, of which a sparse tensor stores only some elements. `summed`: each of them once, which is a copy
    where the tensor has parts of one that are yet to be added."""
    part = local(tensor)
    if not part.is_sparse:
        return part
    return stored_values(part.coalesce() if summed else part)


def replicating_dims(tensor: Tensor | None) -> list[tuple[str, int]]:
    """The dimensions of a DTensor's mesh along which all ranks have the same elements: their names and sizes."""
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    return [(names[dim], mesh.size(dim)) for dim, placed in enumerate(tensor.placements) if placed.is_replicate()]
