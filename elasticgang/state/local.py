"""The part of a tensor that is on this rank: of a DTensor its shard, of any other the tensor itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """The same memory, detached."""
    part: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
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
    if part.shape != parameter._local_tensor.shape:
        return part
    return DTensor(part, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def num_replicas(tensor: Tensor) -> int:
    """On how many ranks of its mesh each element of a DTensor is."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = [tensor.device_mesh.size(dim) for dim, placed in enumerate(tensor.placements) if placed.is_replicate()]
    return int(torch.tensor(sizes).prod()) if sizes else 1
