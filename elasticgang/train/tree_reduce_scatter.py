"""The reduce-scatter of `fully_shard` along the summation tree, for `ShardedDataParallel(reduction="reproducible")`.

The ranks of an sdp gang compute consecutive slots at one time. Their number is a power of two, so that these slots are
one node of the tree over all slots (`summation_tree.py`). Each rank gets its part of all these slots' gradients, and
adds them as one rank with `sdp=1` does that computes the slots one after the other.

SCATTER-1  The gradients of a run of slots are added along the tree, in the dtype of the parameters: not rounded to
    another one, and not in the order in which a reduce-scatter of the process group adds.
SCATTER-2  A parameter is reduced once in a slot: by one backward. Otherwise `fully_shard` would add a sum over the
    ranks to another one, while one rank adds all gradients of a slot first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from elasticgang.errors import InvalidOperationError
from elasticgang.layout import ParallelLayout
from elasticgang.train.summation_tree import insert, total_of


class TreeReduceScatter:
    """For `FSDPModule.set_custom_reduce_scatter`: reduces the gradients of one module, without those of `fully_shard`
    modules inside it. It has the methods of torch's private class `ReduceScatter`."""

    def __init__(self, name: str, dtypes: set[torch.dtype]) -> None:
        """`name`: of the module, for messages. `dtypes`: of its trainable parameters."""
        self._name, self._dtypes = name or "the whole module", dtypes
        self._has_reduced = False

    def begin_slot(self) -> None:
        self._has_reduced = False

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Raises InvalidOperationError: SCATTER-1."""
        if dtype not in self._dtypes:
            wanted = ", ".join(sorted(map(str, self._dtypes)))
            raise InvalidOperationError(
                f'`reduction="reproducible"` must add gradients in the dtype of the parameters ({wanted}), but '
                f"`fully_shard` of {self._name} adds those of the ranks in {dtype}, where `sdp` would decide what is "
                f"rounded: give its MixedPrecisionPolicy `reduce_dtype={wanted}`."
            )
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Blocks until the exchange is done, or queued on a device's stream.

        Raises:
            InvalidOperationError: SCATTER-2.
        """
        if self._has_reduced:
            raise InvalidOperationError(
                'with `reduction="reproducible"` and `sdp`, `fully_shard` must reduce a gradient once in a slot, but '
                f"reduces that of {self._name} again: call it and `backward` once in a slot, of the sum of the losses."
            )
        self._has_reduced = True
        received = torch.empty_like(input_tensor)
        dist.all_to_all_single(received, input_tensor, group=group)
        add_along_tree(received.view(group.size(), -1), output_tensor)


def add_along_tree(parts: Tensor, output: Tensor) -> None:
    """The sum of the rows of `parts`, in the order of their slots. `parts` is changed."""
    nodes: dict[range, Tensor] = {}
    for place, part in enumerate(parts):
        insert(nodes, range(place, place + 1), part, _add)
    output.copy_(total_of(nodes, _add))


def _add(left: Tensor, right: Tensor) -> None:
    left.add_(right)


def install(module: nn.Module) -> list[TreeReduceScatter]:
    """Let each `fully_shard` module in `module` reduce along the tree. Returns their reduce-scatters."""
    modules = dict(module.named_modules(remove_duplicate=False))
    dtypes: dict[str, set[torch.dtype]] = {}
    for name, parameter in module.named_parameters():
        owner = _owner(modules, name)
        if parameter.requires_grad and owner is not None:
            dtypes.setdefault(owner, set()).add(parameter.dtype)
    made = {name: TreeReduceScatter(name, found) for name, found in dtypes.items()}
    for name, scatter in made.items():
        cast(FSDPModule, modules[name]).set_custom_reduce_scatter(cast(Any, scatter))
    return list(made.values())


def check_layouts(layouts: Sequence[ParallelLayout]) -> None:
    """Raises ValueError: the slots that the ranks of an sdp gang compute at one time are no node of the tree."""
    for layout in layouts:
        if layout.sdp & (layout.sdp - 1):
            raise ValueError(
                f'with `reduction="reproducible"`, `sdp` must be a power of two, but is {layout.sdp} in '
                f"{layout.text!r}: gradients are added along a binary tree of slots, of which {layout.sdp} are no node."
            )


def check_is_sharded(module: nn.Module) -> None:
    """Raises ValueError: a trainable parameter is not sharded by `fully_shard`, so that the module would add its
    gradients over the sdp gang in an order of its own."""
    for name in unsharded(module):
        raise ValueError(
            f'with `reduction="reproducible"` and `sdp` greater than 1, `fully_shard` must shard every trainable '
            f"parameter over `sdp`, but does not shard {name}: its gradients would be added in another order than "
            "one rank adds them."
        )


def unsharded(module: nn.Module) -> list[str]:
    """The trainable parameters that `fully_shard` does not shard."""
    modules = dict(module.named_modules(remove_duplicate=False))
    return [
        name
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and not (_owner(modules, name) is not None and _is_divided(parameter))
    ]


def _owner(modules: dict[str, nn.Module], parameter: str) -> str | None:
    """The innermost `fully_shard` module around the parameter, by name."""
    path = parameter
    while path:
        path = path.rpartition(".")[0]
        if isinstance(modules.get(path), FSDPModule):
            return path
    return None


def _is_divided(parameter: Tensor) -> bool:
    if not isinstance(parameter, DTensor):
        return False
    names = parameter.device_mesh.mesh_dim_names or ("",) * len(parameter.placements)
    placed = zip(names, parameter.placements, strict=True)
    return any(name != "tp" and not (each.is_replicate() or each.is_partial()) for name, each in placed)
