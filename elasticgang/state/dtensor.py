"""Local parts of tensors: the shard of a DTensor on this rank; for any other tensor the tensor itself."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from elasticgang.errors import WireError
from elasticgang.torch_private import like_dtensor, shard, stored_values


def local(tensor: Tensor) -> Tensor:
    """The local part: the same memory, detached."""
    part = shard(tensor) if isinstance(tensor, DTensor) else tensor
    return part.detach()


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of the parameter's gradient, as its `grad_dtype` tells, also while it has none."""
    dtype: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return dtype or parameter.dtype


def local_gradient(parameter: Tensor) -> Tensor | None:
    """This rank's part of the gradient, laid out as the parameter is: the gradient of a DTensor may have other
    placements, such as a partial sum. Then it is redistributed, by collectives of the parameter's mesh."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        gradient = gradient.redistribute(placements=parameter.placements)
    return local(gradient)


def is_laid_out(gradient: Tensor, parameter: Tensor) -> bool:
    """Whether the gradient has the placements of the parameter, if both are DTensors."""
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        return gradient.placements == parameter.placements
    return True


def lay_out_gradient(parameter: Tensor) -> None:
    """Lay out the gradient of a DTensor as the parameter is, so that `local_gradient` needs no collectives."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor) and not is_laid_out(gradient, parameter):
        parameter.grad = gradient.redistribute(placements=parameter.placements)


def locally(tree: Any) -> Any:
    """`tree` with each DTensor replaced by its local part."""
    if isinstance(tree, DTensor):
        return local(tree)
    if isinstance(tree, dict):
        return {key: locally(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return list(map(locally, tree))
    if isinstance(tree, tuple):  # as it is sent, also if it has names
        return tuple(map(locally, tree))
    return tree


def like(part: Any, parameter: Tensor) -> Any:
    """`part` as a DTensor that is sharded like `parameter`, if both have the same local shape; otherwise `part`."""
    if not (isinstance(parameter, DTensor) and isinstance(part, Tensor)):
        return part
    if part.shape != shard(parameter).shape:
        return part
    return like_dtensor(part, parameter)


class Part(NamedTuple):
    """The local part of a DTensor of a peer."""

    tensor: Tensor


def placed_like(tree: Any, own: Any, path: str) -> Any:
    """`tree` with each `Part` as a DTensor that is placed like the one in the same place of `own`. `path`: what both
    are called.

    Raises:
        WireError: one of both has a DTensor where the other has none, or another part of one.
    """
    if isinstance(tree, Part):
        if isinstance(own, DTensor) and shard(own).shape == tree.tensor.shape:
            return like_dtensor(tree.tensor, own)
        here = f"{list(shard(own).shape)}" if isinstance(own, DTensor) else "no DTensor"
        raise WireError(f"{path} is a DTensor at the source, whose part is {list(tree.tensor.shape)}, and {here} here")
    if isinstance(tree, Tensor) and isinstance(own, DTensor):
        raise WireError(f"{path} is no DTensor at the source, but one here")
    if isinstance(tree, dict):
        mine = own if isinstance(own, dict) else {}
        return {key: placed_like(value, mine.get(key), f"{path}[{key!r}]") for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        items = own if isinstance(own, list | tuple) else ()
        padded = [*items[: len(tree)], *([None] * (len(tree) - len(items)))]
        return type(tree)(placed_like(*each, f"{path}[{at}]") for at, each in enumerate(zip(tree, padded, strict=True)))
    return tree


def stored(tensor: Tensor, *, summed: bool = False) -> Tensor:
    """The stored elements of the local part: all of them, or the values of a sparse tensor. `summed`: with duplicates
    of a sparse tensor added up, which copies if there are any."""
    part = local(tensor)
    if not part.is_sparse:
        return part
    return stored_values(part.coalesce() if summed else part)


def replicating_dims(tensor: Tensor | None) -> list[tuple[str, int]]:
    """The name and size of each mesh dimension along which a DTensor is replicated."""
    if not isinstance(tensor, DTensor):
        return []
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    return [(names[dim], mesh.size(dim)) for dim, placed in enumerate(tensor.placements) if placed.is_replicate()]


def is_first_replica(tensor: Tensor | None) -> bool:
    """Whether no rank before this one has the same elements along the mesh of a DTensor."""
    if not isinstance(tensor, DTensor):
        return True
    place = tensor.device_mesh.get_coordinate() or [0] * tensor.device_mesh.ndim
    return all(at == 0 for at, placed in zip(place, tensor.placements, strict=True) if placed.is_replicate())
