"""Checkpoints of pipelines: saved by the stages of one layout, loaded by those of another."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import elasticgang as eg
from elasticgang.checkpoint import listing, plan
from elasticgang.checkpoint.capture import capture
from elasticgang.checkpoint.digest import digest_of
from elasticgang.checkpoint.export import export
from elasticgang.checkpoint.loader import read_state
from elasticgang.checkpoint.locations import storage_at
from elasticgang.checkpoint.manifest import MANIFEST
from elasticgang.checkpoint.placed import Seated
from elasticgang.checkpoint.saved_objects import ModelMismatch
from elasticgang.errors import CheckpointError
from elasticgang.protocol.coverage import Coverage
from tests.integration.checkpoint_writer import commit_of, save_captured

NUM_LAYERS = 4
EMBEDDING = torch.arange(64.0).view(16, 4)


def weight(layer: int) -> Tensor:
    return torch.arange(6.0).view(3, 2) + 10 * layer


def stages_of(num_stages: int) -> list[range]:
    edges = [NUM_LAYERS * stage // num_stages for stage in range(num_stages + 1)]
    return [range(first, last) for first, last in itertools.pairwise(edges)]


def state_of(
    layers: Sequence[int], embedding: Tensor | None = None, *, seen: int = 7, groups: int = 1, zero: bool = False
) -> dict[str, Any]:
    """The registered state of a stage that has `layers` and, if given, an `embedding`. What the optimizer keeps is 100
    times as large. With two `groups`, the even layers are in the first one. `zero`: its values are to be loaded."""
    parameters = {f"layers.{layer}": weight(layer) for layer in layers}
    if embedding is not None:
        parameters["embedding"] = embedding.clone()
    if zero:
        parameters = {name: torch.zeros_like(tensor) for name, tensor in parameters.items()}
    owned = list(parameters.values())
    members: list[list[int]] = [[] for _ in range(groups)]
    for number, name in enumerate(parameters):
        members[int(name[-1]) % groups if name != "embedding" else 0].append(number)
    moments = {number: {"exp_avg": tensor * 100, "step": torch.tensor(3.0)} for number, tensor in enumerate(owned)}
    param_groups = [{"lr": 0.1 * (number + 1), "params": each} for number, each in enumerate(members)]
    return {
        "parameters": {"model": parameters},
        "buffers": {"model": {"table": torch.zeros(3) if zero else torch.full((3,), 5.0)}},
        "optimizers": {"optim": {"state": {} if zero else moments, "param_groups": param_groups}},
        "others": {"counter": {"seen": 0 if zero else seen}},
        "owned": {"optim": owned},
        "keys": {"model": {name: name for name in (*parameters, "table")}},
    }


def save(root: Path, states: Sequence[dict[str, Any]], writers: int = 1) -> None:
    """One state to a stage, each by so many ranks."""
    layout = eg.ParallelLayout(pp=len(states))
    for stage, number in reversed([(stage, number) for stage in range(len(states)) for number in range(writers)]):
        captured = capture(states[stage], Seated(layout, (stage, 0, 0)), number, writers)
        assert captured is not None
        commit = commit_of(10, [f"{each}-0-0" for each in range(len(states))], {"pp": len(states)})
        save_captured(root, captured, commit if (stage, number) == (0, 0) else None)


def load_and_cover(
    root: Path, state: dict[str, Any], stage: int, num_stages: int
) -> tuple[dict[str, Any], Coverage | None]:
    (found,) = listing.scan(storage_at(root))
    assert found.manifest is not None, found.problem
    seated = Seated(eg.ParallelLayout(pp=num_stages), (stage, 0, 0))
    return read_state(found.folder, found.manifest, state, seated)


def load(root: Path, state: dict[str, Any], stage: int, num_stages: int) -> dict[str, Any]:
    return load_and_cover(root, state, stage, num_stages)[0]


def check(read: dict[str, Any], expected: dict[str, Any]) -> None:
    parameters = expected["parameters"]["model"]
    found = read["large"]["parameters"]["model"]
    assert found.keys() == parameters.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in parameters.items())
    assert torch.equal(read["small"]["buffers"]["model"]["table"], torch.full((3,), 5.0))
    assert read["small"]["others"] == expected["others"]
    optimizer, wanted = read["large"]["optimizers"]["optim"], expected["optimizers"]["optim"]
    assert optimizer["param_groups"] == wanted["param_groups"]
    assert optimizer["state"].keys() == wanted["state"].keys()
    for number, kept in wanted["state"].items():
        assert torch.equal(optimizer["state"][number]["exp_avg"], kept["exp_avg"])
        assert optimizer["state"][number]["step"] == 3


# PLACED-1, PLACED-2
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("after", [1, 2, 3, 4])
@pytest.mark.parametrize("before", [1, 2, 3, 4])
def test_any_pipeline_loads_what_another_has_saved(tmp_path: Path, before: int, after: int, groups: int) -> None:
    """With two groups and four stages, each stage has an empty group."""
    save(tmp_path, [state_of(layers, groups=groups) for layers in stages_of(before)])
    for stage, layers in enumerate(stages_of(after)):
        read = load(tmp_path, state_of(layers, groups=groups, zero=True), stage, after)
        check(read, state_of(layers, groups=groups))
    export(tmp_path, tmp_path / "weights.pt")
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert weights.keys() == {"table", *(f"layers.{layer}" for layer in range(NUM_LAYERS))}
    assert all(torch.equal(weights[f"layers.{layer}"], weight(layer)) for layer in range(NUM_LAYERS))


# COVERAGE-1
def test_a_stage_of_another_pipeline_knows_all_names(tmp_path: Path) -> None:
    save(tmp_path, [state_of([0, 1]), state_of([2, 3])])
    everywhere = {"model.table", "the optimizer 'optim'", "the registered object 'counter'"}
    _, coverage = load_and_cover(tmp_path, state_of([2], zero=True), 2, 4)
    assert coverage is not None
    assert coverage.names == tuple(sorted({*everywhere, *(f"model.layers.{layer}" for layer in range(NUM_LAYERS))}))
    assert coverage.present == {*everywhere, "model.layers.2"}
    assert load_and_cover(tmp_path, state_of([2, 3], zero=True), 1, 2)[1] is None
    assert load_and_cover(tmp_path, state_of(range(NUM_LAYERS), zero=True), 0, 1)[1] is None


# LOADER-3
@pytest.mark.parametrize("writers", [1, 3])
def test_a_tensor_that_two_stages_have_alike_is_loaded_once(
    tmp_path: Path, writers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several writers of a stage cut it elsewhere than those of the other."""
    monkeypatch.setattr(plan, "MIN_SHARE_BYTES", 1)
    save(tmp_path, [state_of([0], EMBEDDING), state_of([1, 2, 3], EMBEDDING)], writers)
    (found,) = listing.scan(storage_at(tmp_path))
    assert found.manifest is not None
    cuts = [{piece.start for piece in each.pieces} for each in found.manifest.tensors if "model.emb" in each.name]
    assert (cuts[0] == cuts[1]) == (writers == 1)
    whole = range(NUM_LAYERS)
    check(load(tmp_path, state_of(whole, EMBEDDING, zero=True), 0, 1), state_of(whole, EMBEDDING))
    export(tmp_path, tmp_path / "weights.pt")
    assert torch.equal(torch.load(tmp_path / "weights.pt", weights_only=True)["embedding"], EMBEDDING)


# LOADER-3
@pytest.mark.parametrize("writers", [1, 3])
@pytest.mark.parametrize("other", [EMBEDDING + 1, EMBEDDING[:, :3]], ids=["values", "shape"])
def test_a_tensor_that_two_stages_have_differently_is_refused(
    tmp_path: Path, other: Tensor, writers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "MIN_SHARE_BYTES", 1)
    save(tmp_path, [state_of([0], EMBEDDING), state_of([1, 2, 3], other)], writers)
    why = r"two stages have different tensors of the name model.embedding \(model.embedding@pp=0 and .*@pp=1 differ\)"
    with pytest.raises(ModelMismatch, match=why):
        load(tmp_path, state_of(range(NUM_LAYERS), EMBEDDING, zero=True), 0, 1)
    with pytest.raises(CheckpointError, match=why):
        export(tmp_path, tmp_path / "weights.pt")
    check(load(tmp_path, state_of([0], EMBEDDING, zero=True), 0, 2), state_of([0], EMBEDDING))


# LOADER-2
def test_a_name_that_no_stage_has_is_refused(tmp_path: Path) -> None:
    save(tmp_path, [state_of([0, 1]), state_of([2, 3])])
    with pytest.raises(
        ModelMismatch, match=r"the parameter model.layers.4 of this job.* is not in it, which is of pp=2"
    ):
        load(tmp_path, state_of(range(5), zero=True), 0, 1)
    with pytest.raises(ModelMismatch, match=r"model.layers.3 is in it, and this job's model has none of that name"):
        load(tmp_path, state_of(range(3), zero=True), 0, 1)


# MERGE-1
def test_registered_objects_that_stages_have_differently_are_refused(tmp_path: Path) -> None:
    save(tmp_path, [state_of([0, 1]), state_of([2, 3], seen=8)])
    with pytest.raises(
        ModelMismatch, match=r"object 'counter' differs between the seats 0-0-0 and 1-0-0 .*\(seen: 7 and"
    ):
        load(tmp_path, state_of(range(NUM_LAYERS), zero=True), 0, 1)
    check(load(tmp_path, state_of([2, 3], zero=True), 1, 2), state_of([2, 3], seen=8))


def test_parameters_of_one_group_that_were_in_groups_of_other_settings_are_refused(tmp_path: Path) -> None:
    save(tmp_path, [state_of(layers, groups=2) for layers in stages_of(2)])
    with pytest.raises(
        ModelMismatch, match="in one group of this job's optimizer 'optim', and in groups with other set"
    ):
        load(tmp_path, state_of(range(NUM_LAYERS), zero=True), 0, 1)


def test_a_parameter_that_no_module_has_cannot_move_between_stages(tmp_path: Path) -> None:
    """It is known by its number."""
    states = [state_of([0, 1]), state_of([2, 3])]
    for state in states:
        state["owned"]["optim"] = [tensor.clone() for tensor in state["owned"]["optim"]]
    save(tmp_path, states)
    with pytest.raises(ModelMismatch, match="its optimizer 'optim' knows parameters by numbers"):
        load(tmp_path, state_of(range(NUM_LAYERS), zero=True), 0, 1)
    check(load(tmp_path, state_of([2, 3], zero=True), 1, 2), state_of([2, 3]))


def test_a_checkpoint_of_format_1_is_loaded_by_the_same_stages(tmp_path: Path) -> None:
    """Its optimizers know parameters by numbers. Other stages are told why they cannot load it."""
    save(tmp_path, [state_of(layers) for layers in stages_of(2)])
    (found,) = listing.scan(storage_at(tmp_path))
    file = Path(found.path) / MANIFEST
    content = json.loads(file.read_text())
    del content["digest"]
    content["format"] = 1
    for place, objects in content["objects"].items():
        entries = dict(map(tuple, objects["optimizers"]["dict"][0][1]["dict"]))
        names = [f"model.layers.{layer}" for layer in stages_of(2)[int(place[0])]]
        (group,) = entries["param_groups"]
        assert ["params", names] in group["dict"]
        group["dict"] = [[key, value if key != "params" else [0, 1]] for key, value in group["dict"]]
        entries["state"]["dict"] = [[names.index(name), kept] for name, kept in entries["state"]["dict"]]
    rest = b'",' + json.dumps(content).encode()[1:]
    file.write_bytes(b'{"digest":"' + digest_of(rest).encode() + rest)
    for stage, layers in enumerate(stages_of(2)):
        check(load(tmp_path, state_of(layers, zero=True), stage, 2), state_of(layers))
    with pytest.raises(ModelMismatch, match=r"knows parameters by numbers, which depend on the stage .its format is 1"):
        load(tmp_path, state_of(range(NUM_LAYERS), zero=True), 0, 1)
