"""Loads a checkpoint into the registered state of a rank.

LOADER-1  Nothing of the state changes before all of it is read and every digest is right.
LOADER-2  A tensor is read only after its name, shape and dtype are found to be the model's.
LOADER-3  Another layout loads a plain tensor only if all seats along the axes that differ have saved the same bytes. So
    does another pipeline load a tensor that two stages have, and what MERGE-1 says.
LOADER-4  A checkpoint without any extra state of modules, as versions before REGISTERED-4 wrote it, is loaded all the
    same: the modules keep theirs.
LOADER-5  What an optimizer keeps of a sharded parameter is sharded if it has the parameter's shape. Of a parameter with
    one element that may be a plain tensor too, such as a count: it is sharded if both were saved in the same placement.
LOADER-6  What a registered object has of a DTensor is read as the DTensor that this job's object has in the same place
    of its state. Where ranks hold parts of the model, an object that has none there is refused.
LOADER-7  A buffer that is a plain tensor takes the shape and dtype that it was saved with, also where this job's model
    has None: forward may have replaced it (BUFFERS-2).
LOADER-8  A checkpoint without the positions of samples, as versions before POSITION-1 wrote it, is loaded all the same:
    its steps were all of one size.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from elasticgang.checkpoint.block_reader import BlockReader, CheckpointReader
from elasticgang.checkpoint.manifest import INVALID, Manifest, TensorEntry
from elasticgang.checkpoint.names import without_axes
from elasticgang.checkpoint.placed import Seated, is_plain, name_tensors, names_of_owned, place
from elasticgang.checkpoint.saved_objects import PER_PARAMETER, ModelMismatch, SavedObjects, SavedOptimizer
from elasticgang.checkpoint.storage import Folder
from elasticgang.errors import CheckpointError
from elasticgang.layout import MODEL_AXES
from elasticgang.protocol.coverage import Coverage
from elasticgang.protocol.sample_positions import NAME as POSITIONS
from elasticgang.state.registered_objects import is_extra_state
from elasticgang.state.serialization import unflatten
from elasticgang.torch_private import like_dtensor

log = logging.getLogger("elasticgang")


def read_state(
    folder: Folder, manifest: Manifest, state: dict[str, Any], seated: Seated
) -> tuple[dict[str, Any], Coverage | None]:
    """The state of a seat, as `RegisteredState.load` takes it (LOADER-1). `state`: the live one, with DTensors. Also
    returns what there is, if other stages may have what this seat has not (COVERAGE-1).

    Raises:
        ModelMismatch: the first difference between the model and the checkpoint.
        CheckpointError: the checkpoint is corrupt, or cannot be read.
    """
    return state_of(CheckpointReader(folder, manifest, differing_axes(manifest, seated)), state, seated)


def differing_axes(manifest: Manifest, seated: Seated) -> list[str]:
    """The axes along which the layout of the seat differs from the manifest's."""
    return [axis for axis in MODEL_AXES if manifest.layout.get(axis, 1) != getattr(seated.layout, axis)]


def state_of(reader: BlockReader, state: dict[str, Any], seated: Seated) -> tuple[dict[str, Any], Coverage | None]:
    """As `read_state`, from any reader."""
    has_all = "pp" not in reader.other_axes or seated.layout.pp == 1  # of what `saved` has; not one of several stages
    try:
        saved = SavedObjects(reader.manifest, seated.place, reader.other_axes)
        lacking = _lacking_buffers(reader, saved, state) if has_all else {}
        present = _check_model(reader, saved.tensors - lacking.keys(), state, seated, has_all=has_all)
        _check_names("optimizer", set(saved.optimizers), set(state["optimizers"]), has_all=has_all)
        present_others = _without_unsaved(set(saved.others), state["others"])
        _check_names("registered object", set(saved.others), present_others, has_all=has_all)
        read = {kind: _read_like(reader, state[kind], seated) for kind in ("parameters", "buffers")}
        for name, (owner, key) in lacking.items():
            read["buffers"][owner][key] = reader.read_whole(name)
        entries = _Entries(reader)
        others = {
            name: _read_object(reader, unflatten(saved.others[name], entries), state["others"][name], seated)  # type: ignore[arg-type]
            for name in sorted(present_others)
        }
        frozen = _frozen(saved.frozen, state["parameters"], seated, reader.other_axes)
        optimizers = {
            name: _Optimizer(reader, name, state, saved.optimizers[name], seated).read(has_all=has_all)
            for name in state["optimizers"]
        }
    except CheckpointError:
        raise
    except INVALID as exc:
        raise CheckpointError(f"its manifest is invalid: {exc!r}") from exc
    loaded = {
        "small": {"buffers": read["buffers"], "others": others},
        "large": {"parameters": read["parameters"], "optimizers": optimizers},
        "frozen": frozen,
    }
    if has_all:
        return loaded, None
    names = _all_names(saved.tensors, saved.optimizers, saved.others)
    own = _all_names(present, state["optimizers"], present_others)
    return loaded, Coverage(tuple(sorted(names)), own)


def _all_names(tensors: Iterable[str], optimizers: Iterable[str], others: Iterable[str]) -> frozenset[str]:
    """Of tensors and objects, in words that are the same on all seats."""
    return frozenset(
        {
            *(without_axes(name, MODEL_AXES) for name in tensors),
            *(f"the optimizer {name!r}" for name in optimizers),
            *(f"the registered object {name!r}" for name in others),
        }
    )


def _check_names(what: str, saved: set[str], present: set[str], *, has_all: bool) -> None:
    if has_all and (unknown := sorted(saved - present)):
        raise ModelMismatch(f"it has the {what} {unknown[0]!r}, and this job has none of that name")
    if missing := sorted(present - saved):
        raise ModelMismatch(f"it has no {what} {missing[0]!r}, and this job has one")


def _without_unsaved(saved: set[str], present: Iterable[str]) -> set[str]:
    """LOADER-4, LOADER-8. The names of registered objects, of the extra state of modules only if `saved` has some of
    any."""
    present = set(present) - ({POSITIONS} - saved)
    extra = {name for name in present if is_extra_state(name)}
    if extra and not any(map(is_extra_state, saved)):
        log.warning("the checkpoint has no extra state of modules, so that they keep what they have: %s", min(extra))
        return present - extra
    return present


class Whole:
    """The tensors by name, for `unflatten`."""

    def __init__(self, reader: BlockReader) -> None:
        self._reader = reader

    def __getitem__(self, name: str) -> Tensor:
        return self._reader.read_whole(name)


def _check_model(
    reader: BlockReader, saved: set[str], state: dict[str, Any], seated: Seated, *, has_all: bool
) -> set[str]:
    """LOADER-2. Returns the names of the seat's tensors. Raises ModelMismatch with the first difference."""
    axes = reader.other_axes
    present: set[str] = set()
    for kind in ("parameters", "buffers"):
        for name, tensor in name_tensors(state[kind])[1].items():
            here = place(name, tensor, seated)
            known = without_axes(here.name, axes)
            present.add(known)
            if known not in saved:
                raise ModelMismatch(
                    f"{_what(kind)} {here.name} of this job's model is not in it"
                    + (f", which is of pp={reader.manifest.layout.get('pp', 1)}" if "pp" in axes else "")
                )
            entry = reader.entry(here.name)
            if kind == "buffers" and _is_plain_in_both(entry, tensor):  # LOADER-7
                continue
            if entry.shape != here.whole:
                raise ModelMismatch(f"{here.name} is {list(entry.shape)} in it, but {list(here.whole)} in this job")
            if entry.dtype != here.dtype:
                raise ModelMismatch(f"{here.name} is {entry.dtype} in it, but {here.dtype} in this job")
    if has_all and (absent := sorted(saved - present)):
        raise ModelMismatch(f"{absent[0]} is in it, and this job's model has none of that name")
    return present


def _frozen(
    saved: Collection[str], parameters: dict[str, dict[str, Tensor]], seated: Seated, axes: Collection[str]
) -> list[tuple[str, str]]:
    """The parameters, by module and name, that were saved as such that require no gradients."""
    if not saved:
        return []
    return [
        (owner, key)
        for owner, of_module in parameters.items()
        for key, tensor in of_module.items()
        if without_axes(place(f"{owner}.{key}", tensor, seated).name, axes) in saved
    ]


def _lacking_buffers(reader: BlockReader, saved: SavedObjects, state: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """LOADER-7: the buffers of `saved` that are None in this job's modules, or other names of one."""
    return {
        name: (owner, key)
        for name, (owner, key) in saved.buffers.items()
        if owner in state["buffers"]
        and key not in state["buffers"][owner]
        and is_plain(reader.entry(name))
        and state["has_buffer"](owner, key)
    }


def _what(kind: str) -> str:
    return {"parameters": "the parameter", "buffers": "the buffer"}[kind]


def _read_like(reader: BlockReader, tree: dict[str, Any], seated: Seated) -> dict[str, Any]:
    """The local parts of the tensors of `tree`, by object and name."""
    return {
        owner: {name: _read_placed(reader, f"{owner}.{name}", tensor, seated) for name, tensor in tensors.items()}
        for owner, tensors in tree.items()
    }


def _read_placed(reader: BlockReader, name: str, tensor: Tensor, seated: Seated) -> Tensor:
    here = place(name, tensor, seated)
    entry = reader.entry(here.name)
    if _is_plain_in_both(entry, tensor):
        return reader.read_whole(here.name)
    return reader.read(entry, here.start, here.shape)


def _is_plain_in_both(entry: TensorEntry, tensor: Tensor) -> bool:
    return not isinstance(tensor, DTensor) and is_plain(entry)


def _read_object(reader: BlockReader, tree: Any, live: Any, seated: Seated) -> Any:
    """The state of a registered object (LOADER-6). `live`: this job's own, or None where it has nothing."""
    if isinstance(tree, TensorEntry):
        if not isinstance(live, DTensor):
            if seated.layout.unit > 1 and not is_plain(tree):
                raise ModelMismatch(
                    f"{tree.name} is a DTensor in it, and no DTensor in this job's object before the first step"
                )
            return reader.read(tree, (0,) * len(tree.shape), tree.shape)
        here = place("", live, seated)
        if tree.shape != here.whole:
            raise ModelMismatch(f"{tree.name} is {list(tree.shape)} in it, but {list(here.whole)} in this job")
        return like_dtensor(reader.read(tree, here.start, here.shape), live)
    if isinstance(tree, dict):
        own = live if isinstance(live, dict) else {}
        return {key: _read_object(reader, value, own.get(key), seated) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        items = [*live[: len(tree)]] if isinstance(live, list | tuple) else []
        items += [None] * (len(tree) - len(items))
        return type(tree)(_read_object(reader, item, own, seated) for item, own in zip(tree, items, strict=True))
    return tree


class _Optimizer:
    """Reads the state of one optimizer. `_keys`: under what each of its parameters is known in `saved`."""

    def __init__(
        self, reader: BlockReader, name: str, state: dict[str, Any], saved: SavedOptimizer, seated: Seated
    ) -> None:
        self._reader, self._name, self._saved, self._seated = reader, name, saved, seated
        self._groups: list[dict[str, Any]] = state["optimizers"][name]["param_groups"]
        self._parameters: Sequence[Tensor] = state["owned"][name]
        self._names = names_of_owned(state)[name]
        self._keys = [each if each in saved.settings else number for number, each in enumerate(self._names)]

    def read(self, *, has_all: bool) -> dict[str, Any]:
        """Its state dict. `has_all`: it has all parameters that are saved. Raises ModelMismatch, CheckpointError."""
        self._check(has_all=has_all)
        saved = self._saved
        state = {
            number: self._read(saved.state[key], number) for number, key in enumerate(self._keys) if key in saved.state
        }
        state |= {key: self._read(saved.state[key]) for key in saved.state if key not in saved.settings}
        rest = {key: self._read(saved.rest[key]) for key in saved.rest}
        return {**rest, "state": state, "param_groups": list(map(self._group, range(len(self._groups))))}

    def _check(self, *, has_all: bool) -> None:
        saved, groups = self._saved, self._groups
        if "pp" not in self._reader.other_axes and len(saved.groups) != len(groups):
            raise ModelMismatch(f"its optimizer has {len(saved.groups)} parameter groups instead of {len(groups)}")
        if has_all and len(saved.settings) != len(self._keys):
            raise ModelMismatch(f"its optimizer has {len(saved.settings)} parameters instead of {len(self._keys)}")
        for name, key in zip(self._names, self._keys, strict=True):
            if key not in saved.settings:
                raise ModelMismatch(f"its optimizer {self._name!r} does not have the parameter {name}")

    def _group(self, number: int) -> dict[str, Any]:
        """A parameter group with the settings with which its parameters were saved."""
        live, groups = self._groups[number], self._saved.groups
        keys = [self._keys[each] for each in live["params"]]
        settings = [self._saved.settings[key] for key in keys] or groups[number : number + 1]
        for key, other in zip(keys, settings, strict=False):
            if other != settings[0]:
                raise ModelMismatch(
                    f"the parameters {keys[0]} and {key} are in one group of this job's optimizer {self._name!r}, and "
                    "in groups with other settings in it"
                )
        own = {name: live[name] for name in PER_PARAMETER if name in live}
        return {**live, **{name: self._read(value) for spec in settings[:1] for name, value in spec.items()}, **own}

    def _read(self, spec: Any, number: int | None = None) -> Any:
        """`number`: of the parameter that it is kept of (LOADER-5)."""
        return self._read_entries(unflatten(spec, _Entries(self._reader)), number)  # type: ignore[arg-type]

    def _read_entries(self, tree: Any, number: int | None) -> Any:
        if isinstance(tree, TensorEntry):
            start, shape = (0,) * len(tree.shape), tree.shape
            if number is not None and self._is_sharded(tree, number):
                here = place("", self._parameters[number], self._seated)
                start, shape = here.start, here.shape
            return self._reader.read(tree, start, shape)
        if isinstance(tree, dict):
            return {key: self._read_entries(value, number) for key, value in tree.items()}
        if isinstance(tree, list | tuple):
            return type(tree)(self._read_entries(item, number) for item in tree)
        return tree

    def _is_sharded(self, entry: TensorEntry, number: int) -> bool:
        """LOADER-5"""
        parameter, name = self._parameters[number], self._names[number]
        if not isinstance(parameter, DTensor) or tuple(parameter.shape) != entry.shape or not entry.shape:
            return False
        if math.prod(entry.shape) != 1 or not isinstance(name, str):
            return True
        return entry.placement == self._reader.entry(place(name, parameter, self._seated).name).placement


class _Entries:
    """The entries of tensors by name, for `unflatten`."""

    def __init__(self, reader: BlockReader) -> None:
        self._reader = reader

    def __getitem__(self, name: str) -> TensorEntry:
        return self._reader.entry(name)
