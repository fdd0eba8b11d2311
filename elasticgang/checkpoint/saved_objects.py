"""What the seats of a checkpoint have saved beside the bytes of tensors, put together for a seat of any layout.

Pure: trees of JSON in which `{"tensor": name}` stands for a tensor (`names.py`). All names are without the axes along
which the reader's layout differs.

MERGE-1  What several stages have saved under one name is used only if it is the same. Of the seats of one stage the
    first counts: ranks may differ in what forward changes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from elasticgang.checkpoint.manifest import Manifest
from elasticgang.checkpoint.names import FROZEN, replace_names, tensor_names, without_axes
from elasticgang.errors import CheckpointError
from elasticgang.layout import MODEL_AXES

PER_PARAMETER = ("params", "param_names")  # the entries of a parameter group that are no settings of all of it


class ModelMismatch(CheckpointError):
    """The checkpoint is of another model, or of a layout that this one cannot load."""


class Merged:
    """Entries of several stages by key (MERGE-1). `what`: what an entry is, for messages."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._found: dict[Any, tuple[str, Any]] = {}  # the first seat that has it, and what it has saved

    def add(self, place: str, key: Any, saved: Any) -> None:
        """Raises ModelMismatch: another stage has saved something else."""
        first, known = self._found.setdefault(key, (place, saved))
        if not _is_same(known, saved):
            raise ModelMismatch(
                f"{self._what} {key!r} differs between the seats {first} and {place} (pp-sdp-tp) that have saved it "
                f"({_first_difference(known, saved)}): only a job of the same stages can load it"
            )

    def __contains__(self, key: object) -> bool:
        return key in self._found

    def __iter__(self) -> Iterator[Any]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __getitem__(self, key: Any) -> Any:
        return self._found[key][1]


@dataclass(frozen=True)
class SavedOptimizer:
    """`settings`: those of the parameter group of each parameter, by its name. `state`: what the optimizer keeps of
    each parameter that has any, and its other state by the keys of these. `groups`: the settings of the groups of the
    first seat. `rest`: the other entries of its state dict."""

    settings: Merged
    state: Merged
    rest: Merged
    groups: list[Any]


class SavedObjects:
    """`tensors`: the names of parameters and buffers. `buffers`: of these, with the module of each, and its name there.
    `frozen`: of the tensors, the parameters that required no gradients. `others`: the registered objects."""

    def __init__(self, manifest: Manifest, place: str, other_axes: Collection[str]) -> None:
        """`place`: "pp-sdp-tp" of the reader. `other_axes`: the axes along which its layout differs.

        Raises:
            ModelMismatch: MERGE-1; or no seat has what the reader needs.
            INVALID: the manifest is.
        """
        self.tensors: set[str] = set()
        self.frozen: set[str] = set()
        self.buffers: dict[str, tuple[str, str]] = {}
        self.others = Merged("the registered object")
        self.optimizers: dict[str, SavedOptimizer] = {}
        seats = list(_seats_for(manifest, place, other_axes))
        if not seats:
            raise ModelMismatch(f"it was saved with the layout {manifest.layout}, and has nothing of the seat {place}")
        for saved, objects in seats:
            here = {
                kind: replace_names(spec, lambda name: without_axes(name, other_axes)) for kind, spec in objects.items()
            }
            self.tensors |= {*tensor_names(here["parameters"]), *tensor_names(here["buffers"])}
            self.frozen |= {*tensor_names(here.get(FROZEN, []))}
            for owner, of_module in _entries(here["buffers"]).items():
                self.buffers |= {spec["tensor"]: (owner, key) for key, spec in _entries(of_module).items()}
            for name, spec in _entries(here["others"]).items():
                self.others.add(saved, name, spec)
            for name, spec in _entries(here["optimizers"]).items():
                self._add_optimizer(saved, name, _entries(spec), is_of_other_stages="pp" in other_axes)

    def _add_optimizer(self, place: str, name: str, spec: Mapping[Any, Any], *, is_of_other_stages: bool) -> None:
        groups = [_entries(group) for group in spec["param_groups"]]
        if is_of_other_stages and any(type(key) is int for group in groups for key in group["params"]):
            raise ModelMismatch(
                f"its optimizer {name!r} knows parameters by numbers, which depend on the stage (its format is 1, or "
                "no registered module has them): only a job of the same stages can load it"
            )
        settings = [{key: value for key, value in group.items() if key not in PER_PARAMETER} for group in groups]
        if name not in self.optimizers:
            of = f"of the optimizer {name!r}"
            self.optimizers[name] = SavedOptimizer(
                Merged(f"the parameter group {of} with"),
                Merged(f"the state {of} for"),
                Merged(f"the entry {of},"),
                settings,
            )
        found = self.optimizers[name]
        for group, of_group in zip(groups, settings, strict=True):
            for parameter in group["params"]:
                found.settings.add(place, parameter, of_group)
        for key, of_parameter in _entries(spec["state"]).items():
            found.state.add(place, key, of_parameter)
        for key, value in spec.items():
            if key not in ("state", "param_groups"):
                found.rest.add(place, key, value)


def others_of_stages(manifest: Manifest, is_wanted: Callable[[str], bool]) -> Merged:
    """The registered objects with wanted names, from one seat of each stage, with the names of tensors without axes.

    Raises:
        ModelMismatch: MERGE-1.
        INVALID: the manifest is.
    """
    found = Merged("the registered object")
    for saved, objects in _seats_for(manifest, min(manifest.objects), MODEL_AXES):
        for name, spec in _entries(objects["others"]).items():
            if is_wanted(name):
                found.add(saved, name, replace_names(spec, lambda each: without_axes(each, MODEL_AXES)))
    return found


def _seats_for(manifest: Manifest, place: str, other_axes: Collection[str]) -> Iterator[tuple[str, Any]]:
    """The objects of the seats with the coordinates of `place`, but along `other_axes`: one seat of each stage."""
    own = place.split("-")
    alike = [index for index, axis in enumerate(MODEL_AXES) if axis not in other_axes]
    stages: set[str] = set()
    for saved, objects in sorted(manifest.objects.items()):
        found = saved.split("-")
        if len(found) == len(own) and all(found[index] == own[index] for index in alike) and found[0] not in stages:
            stages.add(found[0])
            yield saved, objects


def _entries(spec: Any) -> dict[Any, Any]:
    """The entries of a dict in such a tree."""
    return dict(map(tuple, spec["dict"]))


def _first_difference(one: Any, other: Any, path: str = "") -> str:
    """Where two such trees first differ, and what they have there."""
    pairs: dict[Any, tuple[Any, Any]] = {}
    kind = next((kind for kind in ("dict", "tuple") if isinstance(one, dict) and kind in one), "")
    if kind and isinstance(other, dict) and kind in other:
        if kind == "tuple":
            return _first_difference(one[kind], other[kind], path)
        mine, theirs = _entries(one), _entries(other)
        if mine.keys() == theirs.keys():
            pairs = {key: (value, theirs[key]) for key, value in mine.items()}
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = dict(enumerate(zip(one, other, strict=True)))
    for at, (first, second) in pairs.items():
        if not _is_same(first, second):
            return _first_difference(first, second, f"{path}.{at}")
    return f"{path.removeprefix('.') or 'all of it'}: {one!r:.80} and {other!r:.80}"


def _is_same(one: Any, other: Any) -> bool:
    """Whatever the order of the entries of dicts. NaN is itself."""
    return bool(one == other) or json.dumps(_ordered(one)) == json.dumps(_ordered(other))


def _ordered(spec: Any) -> Any:
    if isinstance(spec, list):
        return list(map(_ordered, spec))
    if not isinstance(spec, dict):
        return spec
    if "dict" in spec:
        return {
            "dict": sorted(([key, _ordered(value)] for key, value in spec["dict"]), key=lambda entry: repr(entry[0]))
        }
    return {kind: _ordered(value) for kind, value in spec.items()}
