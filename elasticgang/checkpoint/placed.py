"""Where the tensors of a rank lie in those of the model, and what they are called in a checkpoint.

PLACED-1  A name stands for one tensor of the whole model. A DTensor's says nothing of the ranks, so that any other
    division can load it. A plain tensor's says the seat wherever a layout divides the model, because each seat may have
    another one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from elasticgang.checkpoint.manifest import DTYPES
from elasticgang.errors import NotSupportedError
from elasticgang.layout import MODEL_AXES, ParallelLayout
from elasticgang.protocol.record import Model
from elasticgang.state.dtensor import local
from elasticgang.state.serialization import flatten
from elasticgang.torch_private import local_block


def place_name(model: Model) -> str:
    """What a part of the model is called in names of files: "pp-sdp-tp"."""
    return "-".join(map(str, model))


@dataclass(frozen=True)
class Seated:
    """The seat whose state is saved or loaded."""

    layout: ParallelLayout
    model: Model

    @property
    def place(self) -> str:
        return place_name(self.model)

    def scope(self, covered: Sequence[str] = ()) -> str:
        """PLACED-1: what a name says of the seat. `covered`: the axes over which DTensors divide the tensor."""
        coordinates = dict(zip(("pp", "sdp", "tp"), self.model, strict=True))
        own = [
            f"{axis}={coordinates[axis]}"
            for axis in sorted(MODEL_AXES)
            if getattr(self.layout, axis) > 1 and axis not in covered
        ]
        return f"@{','.join(own)}" if own else ""


@dataclass(frozen=True)
class Placed:
    """A rank's block of a tensor. `is_owner`: no other rank of the replica group saves the same block."""

    name: str
    tensor: Tensor
    dtype: str
    whole: tuple[int, ...]
    start: tuple[int, ...]
    placement: str
    is_owner: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)


DIVIDING_AXES = ("sdp", "tp")  # seats along them have the same names of tensors; stages of `pp` have others
_SCOPED = re.compile(r"(.*)@((?:pp|sdp|tp)=\d+(?:,(?:pp|sdp|tp)=\d+)*)", re.DOTALL)


def without_axes(name: str, axes: Collection[str]) -> str:
    """`name` without what it says of the seat along `axes`."""
    found = _SCOPED.fullmatch(name)
    if found is None:
        return name
    kept = [each for each in found[2].split(",") if each.partition("=")[0] not in axes]
    return f"{found[1]}@{','.join(kept)}" if kept else found[1]


def place(name: str, tensor: Tensor, seated: Seated) -> Placed:
    """Raises NotSupportedError: checkpoints cannot hold such a tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES or tensor.layout is not _STRIDED:
        raise NotSupportedError(f"a checkpoint cannot hold {name}: it is {dtype}, {tensor.layout}")
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        scope = seated.scope()
        start = (0,) * len(shape)
        return Placed(f"{name}{scope}", tensor.detach(), dtype, shape, start, scope or "replicated", True)
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    names = mesh.mesh_dim_names or ()
    if coordinate is None or not all(isinstance(each, Shard | Replicate) for each in tensor.placements):
        raise NotSupportedError(f"a checkpoint cannot hold {name}: it is a DTensor of {tensor.placements}")
    covered = [axis for dim, axis in enumerate(names) if mesh.size(dim) > 1]
    alike = [
        dim
        for dim, placed in enumerate(tensor.placements)
        if placed.is_replicate() and names[dim : dim + 1] != ("rdp",)
    ]
    shape, start = local_block(tensor)
    part = local(tensor)
    if tuple(part.shape) != shape:
        raise NotSupportedError(f"a checkpoint cannot hold {name}: its shard is {list(part.shape)}, not {list(shape)}")
    is_owner = not any(coordinate[dim] for dim in alike)
    placement = ", ".join(f"{names[dim] if names else dim}: {each}" for dim, each in enumerate(tensor.placements))
    return Placed(f"{name}{seated.scope(covered)}", part, dtype, tuple(tensor.shape), start, placement, is_owner)


_STRIDED = Tensor().layout


def name_tensors(tree: object) -> tuple[Any, dict[str, Tensor]]:
    """`tree` as JSON-serializable data in which `{"tensor": name}` stands for a tensor, and the tensors by name: the
    path to each.

    Raises:
        TypeError: as `serialization.flatten`.
        NotSupportedError: two tensors have the same path.
    """
    spec, tensors = flatten(tree)
    found: dict[str, Tensor] = {}
    named = _rename(spec, (), tensors, found)
    return named, found


def _rename(spec: Any, path: tuple[str, ...], tensors: Sequence[Tensor], found: dict[str, Tensor]) -> Any:
    if isinstance(spec, list):
        return [_rename(item, (*path, str(index)), tensors, found) for index, item in enumerate(spec)]
    if not isinstance(spec, dict):
        return spec
    if "tensor" in spec:
        name = ".".join(path)
        if name in found:
            raise NotSupportedError(f"a checkpoint cannot hold two tensors of the name {name}")
        found[name] = tensors[spec["tensor"]]
        return {"tensor": name}
    if "tuple" in spec:
        return {"tuple": _rename(spec["tuple"], path, tensors, found)}
    return {"dict": [[key, _rename(value, (*path, str(key)), tensors, found)] for key, value in spec["dict"]]}


def replace_names(spec: Any, names: dict[str, str]) -> Any:
    """`spec` with each tensor's name replaced."""
    if isinstance(spec, list):
        return [replace_names(item, names) for item in spec]
    if not isinstance(spec, dict):
        return spec
    if "tensor" in spec:
        return {"tensor": names[spec["tensor"]]}
    if "tuple" in spec:
        return {"tuple": replace_names(spec["tuple"], names)}
    return {"dict": [[key, replace_names(value, names)] for key, value in spec["dict"]]}


def tensor_names(spec: Any) -> Iterator[str]:
    """The names in `spec`, in order."""
    if isinstance(spec, list):
        for item in spec:
            yield from tensor_names(item)
    elif isinstance(spec, dict):
        if "tensor" in spec:
            yield str(spec["tensor"])
        elif "tuple" in spec:
            yield from tensor_names(spec["tuple"])
        else:
            for _, value in spec["dict"]:
                yield from tensor_names(value)
