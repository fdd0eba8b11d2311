"""Where the tensors of a rank lie in those of the model, and what they are called in a checkpoint.

PLACED-1  A name stands for one tensor of the whole model. Behind `@` it says which seats have written it: a stage of
    the pipeline, and for a plain tensor every axis that divides the model, because each seat may have another one. Of
    the axes that divide a DTensor it says nothing. A reader with another division leaves out the axes that differ.
    The dims of a layout's views stand for the model axes that they factorise.
PLACED-2  What an optimizer keeps of a parameter is called by the parameter's name, and not by its number among those of
    the optimizer, which depends on the stage.
PLACED-3  The keys of each module's state dict are saved, in the names of the whole model, and which tensor each is:
    tied tensors have several keys, and buffers that are not persistent have none.
PLACED-4  So are the names of the parameters that require no gradients: a script may freeze some in a step that the job
    which loads them does not run (LOADED-1).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from elasticgang.checkpoint.manifest import DTYPES, TensorEntry
from elasticgang.checkpoint.names import FROZEN, replace_names
from elasticgang.errors import NotSupportedError
from elasticgang.layout import MODEL_AXES, Axes, ParallelLayout
from elasticgang.protocol.record import Model
from elasticgang.state.dtensor import local
from elasticgang.state.serialization import flatten
from elasticgang.torch_private import local_block

MODULE_KINDS = ("parameters", "buffers")
KINDS = (*MODULE_KINDS, "optimizers", "others")
KEYS = "keys"
_REPLICATED = "replicated"  # a placement: every seat has the same


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


def place(name: str, tensor: Tensor, seated: Seated) -> Placed:
    """Raises NotSupportedError: checkpoints cannot hold such a tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES or tensor.layout is not _STRIDED:
        raise NotSupportedError(f"a checkpoint cannot hold {name}: it is {dtype}, {tensor.layout}")
    if not isinstance(tensor, DTensor):
        shape = tuple(tensor.shape)
        scope = seated.scope()
        start = (0,) * len(shape)
        return Placed(f"{name}{scope}", tensor.detach(), dtype, shape, start, scope or _REPLICATED, True)
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    names = mesh.mesh_dim_names or ()
    block = None if coordinate is None else local_block(tensor)
    if coordinate is None or block is None:
        raise NotSupportedError(f"a checkpoint cannot hold {name}: it is a DTensor of {tensor.placements}")
    covered, alike = _extent(name, tensor, seated)
    shape, start = block
    part = local(tensor)
    if tuple(part.shape) != shape:
        raise NotSupportedError(f"a checkpoint cannot hold {name}: its shard is {list(part.shape)}, not {list(shape)}")
    is_owner = not any(coordinate[dim] for dim in alike)
    placement = ", ".join(f"{names[dim] if names else dim}: {each}" for dim, each in enumerate(tensor.placements))
    return Placed(f"{name}{seated.scope(covered)}", part, dtype, tuple(tensor.shape), start, placement, is_owner)


def is_plain(entry: TensorEntry) -> bool:
    """Whether the tensor was saved as a plain one."""
    return entry.placement == _REPLICATED or entry.placement.startswith("@")


def _extent(name: str, tensor: DTensor, seated: Seated) -> tuple[tuple[str, ...], list[int]]:
    """The model axes over which a DTensor is placed, and the dims of its mesh along which one rank saves for all.

    Raises:
        NotSupportedError: it is sharded over a part of an axis.
    """
    mesh, placements = tensor.device_mesh, tensor.placements
    names = mesh.mesh_dim_names or ()
    alike = [dim for dim, placed in enumerate(placements) if placed.is_replicate() and names[dim : dim + 1] != ("rdp",)]
    several = [dim for dim in range(len(names)) if mesh.size(dim) > 1]
    sharded = tuple(names[dim] for dim in several if not placements[dim].is_replicate())
    if (covered := _covered(tuple(names[dim] for dim in several), seated)) is not None:
        return covered, alike
    if (covered := _covered(sharded, seated)) is not None:
        return covered, []
    raise NotSupportedError(
        f"a checkpoint cannot hold {name}: it is sharded over {', '.join(sharded)}, a part of a model axis. Let its "
        "mesh have the dims of the view that are the rest of the axis, too, and replicate or shard it along them"
    )


@functools.lru_cache(256)
def _covered(dims: tuple[str, ...], seated: Seated) -> tuple[str, ...] | None:
    """The model axes along which the ranks of a mesh differ: all of its `dims`, of the layout or its views, together.
    None: they are a part of an axis."""
    layout, (pp, sdp, tp) = seated.layout, seated.model
    grid = Axes((layout.tp, layout.sdp, layout.pp), ("tp", "sdp", "pp"))
    own = tp + layout.tp * (sdp + layout.sdp * pp)
    seats = {own}
    for dim in dims:
        axes = next((axes for axes in (grid, *layout.views) if dim in axes.dim_names), None)
        if axes is not None:
            seats = {seat for group in axes.rank_groups(dim) if seats & set(group) for seat in group}
    groups = {axis: next(group for group in grid.rank_groups(axis) if own in group) for axis in MODEL_AXES}
    covered = tuple(axis for axis, group in groups.items() if seats >= set(group))
    return covered if math.prod(len(groups[axis]) for axis in covered) == len(seats) else None


_STRIDED = Tensor().layout


def place_state(
    state: Mapping[str, Any], seated: Seated, *, has_objects: bool = True
) -> tuple[dict[str, Any], dict[str, list[Placed]]]:
    """Of each kind of `state`, the trees of `RegisteredState.tree`: the objects, as `name_tensors` returns them but
    with the names of a checkpoint, and this rank's blocks of the tensors. Without `has_objects` there are no objects:
    one writer of a place writes them, and the step is held while they are made.

    Raises:
        TypeError, NotSupportedError: a checkpoint cannot hold the state.
    """
    names = names_of_owned(state)
    optimizers = {name: _by_name(saved, names[name]) for name, saved in state["optimizers"].items()}  # PLACED-2
    objects, placed = {}, {}
    of_modules: dict[str, str] = {}
    for kind in KINDS:
        spec, tensors = name_tensors(optimizers if kind == "optimizers" else state[kind])
        found = {name: place(name, tensor, seated) for name, tensor in tensors.items()}
        known = {name: each.name for name, each in found.items()}
        if has_objects:
            objects[kind] = replace_names(spec, known.__getitem__)
        placed[kind] = list(found.values())
        if kind in MODULE_KINDS:
            of_modules |= known
    if has_objects:
        objects[KEYS] = _keys(state[KEYS], of_modules)
        objects[FROZEN] = [  # PLACED-4
            {"tensor": of_modules[f"{owner}.{key}"]}
            for owner, of_module in state["parameters"].items()
            for key, parameter in of_module.items()
            if not parameter.requires_grad
        ]
    return objects, placed


def _keys(keys: Mapping[str, Mapping[str, str]], names: Mapping[str, str]) -> Any:
    """PLACED-3. `names`: in the checkpoint, of the modules' tensors."""
    found = {
        owner: {key: names[f"{owner}.{name}"] for key, name in of_module.items() if f"{owner}.{name}" in names}
        for owner, of_module in keys.items()
    }
    return {
        "dict": [
            [owner, {"dict": [[key, {"tensor": name}] for key, name in of_module.items()]}]
            for owner, of_module in found.items()
        ]
    }


def names_of_owned(state: Mapping[str, Any]) -> dict[str, list[str | int]]:
    """The names of each optimizer's parameters, in the order of its state dict. One that no registered module has is
    called by its number in that order."""
    names: dict[int, str] = {}
    for owner, of_module in state["parameters"].items():
        for key, parameter in of_module.items():
            names.setdefault(id(parameter), f"{owner}.{key}")
    return {
        name: [names.get(id(parameter), number) for number, parameter in enumerate(parameters)]
        for name, parameters in state["owned"].items()
    }


def _by_name(optimizer: Mapping[str, Any], names: Sequence[str | int]) -> dict[str, Any]:
    """The state dict of an optimizer with the names of its parameters in place of their numbers."""

    def named(key: Any) -> Any:
        return names[key] if type(key) is int and 0 <= key < len(names) else key

    groups = [{**group, "params": list(map(named, group["params"]))} for group in optimizer["param_groups"]]
    state = {named(key): of_parameter for key, of_parameter in optimizer["state"].items()}
    return {**optimizer, "state": state, "param_groups": groups}


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
