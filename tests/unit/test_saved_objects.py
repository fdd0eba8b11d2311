"""What a seat of any layout takes of the objects that the seats of a checkpoint have saved."""

from __future__ import annotations

import math
from typing import Any

import pytest

from elasticgang.checkpoint.manifest import Manifest
from elasticgang.checkpoint.names import replace_names, stage_in, tensor_names, without_axes
from elasticgang.checkpoint.saved_objects import ModelMismatch, SavedObjects
from elasticgang.protocol.commit import Attempt


class Ref(str):
    """The name of a tensor."""


def tree(value: Any) -> Any:
    """As a tree of JSON."""
    if isinstance(value, Ref):
        return {"tensor": str(value)}
    if isinstance(value, dict):
        return {"dict": [[key, tree(each)] for key, each in value.items()]}
    return [tree(each) for each in value] if isinstance(value, list) else value


def seat(stage: int, layers: list[int], others: dict[str, Any] | None = None, **of_group: Any) -> dict[str, Any]:
    """The objects of a stage that has `layers`. `of_group`: settings of the optimizer's parameter group."""
    names = [f"model.{layer}" for layer in layers]
    state = {name: {"exp_avg": Ref(f"optim.state.{name}.exp_avg@pp={stage}"), "step": 3} for name in names}
    objects = {
        "parameters": {"model": {str(layer): Ref(f"model.{layer}@pp={stage}") for layer in layers}},
        "buffers": {"model": {}},
        "optimizers": {"optim": {"state": state, "param_groups": [{"lr": 0.1, "params": names, **of_group}]}},
        "others": others or {},
    }
    return {kind: tree(each) for kind, each in objects.items()}


def merged(*stages: dict[str, Any], place: str = "0-0-0", axes: tuple[str, ...] = ("pp",)) -> SavedObjects:
    objects = {f"{number}-0-0": each for number, each in enumerate(stages)}
    return SavedObjects(Manifest("", Attempt(1, 1), "", {"pp": len(stages)}, (), (), objects), place, axes)


# PLACED-2
def test_a_seat_of_other_stages_sees_what_all_of_them_have_saved() -> None:
    saved = merged(seat(0, [0, 1]), seat(1, [2, 3]))
    assert saved.tensors == {f"model.{layer}" for layer in range(4)}
    optimizer = saved.optimizers["optim"]
    assert set(optimizer.settings) == set(optimizer.state) == saved.tensors
    assert optimizer.state["model.2"] == tree({"exp_avg": Ref("optim.state.model.2.exp_avg"), "step": 3})
    assert optimizer.settings["model.3"] == {"lr": 0.1}


def test_a_seat_of_the_same_stages_sees_its_own() -> None:
    saved = merged(seat(0, [0, 1]), seat(1, [2, 3]), place="1-0-0", axes=())
    assert saved.tensors == {"model.2@pp=1", "model.3@pp=1"}
    with pytest.raises(ModelMismatch, match="has nothing of the seat 2-0-0"):
        merged(seat(0, [0]), seat(1, [1]), place="2-0-0", axes=())


# PLACED-4
def test_what_any_stage_had_frozen_is_known_by_the_names_of_the_whole_model() -> None:
    frozen = seat(0, [0, 1]) | {"frozen": [tree(Ref("model.1@pp=0"))]}
    assert merged(frozen, seat(1, [2])).frozen == {"model.1"}
    assert merged(seat(0, [0]), seat(1, [1])).frozen == set()  # of a checkpoint of an earlier version


# MERGE-1
def test_the_first_seat_of_a_stage_counts() -> None:
    objects = {place: seat(0, [0], {"loss": place}) for place in ("0-0-0", "0-1-0", "0-1-1")}
    manifest = Manifest("", Attempt(1, 1), "", {"sdp": 2, "tp": 2}, (), (), objects)
    assert SavedObjects(manifest, "0-0-0", ("sdp", "tp")).others["loss"] == "0-0-0"
    assert SavedObjects(manifest, "0-1-1", ()).others["loss"] == "0-1-1"
    assert SavedObjects(manifest, "0-1-1", ("tp",)).others["loss"] == "0-1-0"


# MERGE-1
@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        (
            seat(0, [0], {"seen": [1, 2]}),
            seat(1, [1], {"seen": [1, 3]}),
            r"object 'seen' .* 0-0-0 and 1-0-0 .*1: 2 and 3",
        ),
        (seat(0, [0], {"a": {"b": 1}}), seat(1, [1], {"a": {"b": None}}), r"registered object 'a' .*\(b: 1 and None\)"),
        (seat(0, [0], {"a": {"b": 1}}), seat(1, [1], {"a": {"c": 1}}), r"registered object 'a' .*'b'.* and .*'c'"),
        (seat(0, [0], {"a": [1]}), seat(1, [1], {"a": [1, 2]}), r"\(all of it: \[1\] and \[1, 2\]\)"),
        (seat(0, [0]), seat(1, [0], lr=0.2), r"the parameter group of the optimizer 'optim' with 'model.0' differs"),
    ],
    ids=["entry", "value", "key", "length", "setting"],
)
def test_what_stages_have_saved_differently_is_refused(one: Any, other: Any, why: str) -> None:
    with pytest.raises(ModelMismatch, match=why):
        merged(one, other)
    merged(one, other, axes=())  # the seat of a stage takes its own


def test_the_order_of_entries_does_not_count() -> None:
    """The states of splits are in the order in which a rank has read them."""
    saved = merged(
        seat(0, [0], {"splits": {0: ["a"], 1: {"b": 1, "c": 2}}}),
        seat(1, [1], {"splits": {1: {"c": 2, "b": 1}, 0: ["a"]}}),
    )
    assert saved.others["splits"] == tree({0: ["a"], 1: {"b": 1, "c": 2}})
    with pytest.raises(ModelMismatch, match=r"\(1.c: 2 and 3\)"):
        merged(seat(0, [0], {"splits": {0: 5, 1: {"c": 2}}}), seat(1, [1], {"splits": {1: {"c": 3}, 0: 5}}))


def test_not_a_number_equals_itself() -> None:
    saved = merged(seat(0, [0], {"best": float("nan")}), seat(1, [1], {"best": float("nan")}))
    assert math.isnan(saved.others["best"])


def test_names_of_parameters_are_no_settings_of_their_group() -> None:
    """torch keeps them for an optimizer that is made of `named_parameters`."""
    saved = merged(seat(0, [0], param_names=["0"]), seat(1, [0], param_names=["first"]))
    assert saved.optimizers["optim"].settings["model.0"] == {"lr": 0.1}


def test_other_stages_do_not_know_which_parameter_a_number_is() -> None:
    numbered = seat(0, [0], params=[0])
    assert 0 in merged(numbered, axes=("sdp",)).optimizers["optim"].settings
    with pytest.raises(ModelMismatch, match="optimizer 'optim' knows parameters by numbers, which depend on the stage"):
        merged(numbered)


def test_a_name_says_which_seat_has_written_it() -> None:
    assert without_axes("w@pp=1,sdp=0,tp=3", ("pp", "tp")) == "w@sdp=0"
    assert without_axes("w@pp=1", ("pp",)) == "w"
    assert without_axes("user@host.w", ("pp",)) == "user@host.w"
    assert [stage_in(name) for name in ("w@pp=1,tp=3", "w@tp=3", "w")] == ["pp=1", "", ""]
    assert list(tensor_names(replace_names([tree(Ref("a")), {"tuple": [tree(Ref("b"))]}], str.upper))) == ["A", "B"]
