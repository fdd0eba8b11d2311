"""What a module's `get_extra_state` returns goes where its buffers go (REGISTERED-4)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import elasticgang as eg
from elasticgang.checkpoint.export import export
from elasticgang.checkpoint.saved_objects import ModelMismatch
from elasticgang.protocol.commit import Attempt
from elasticgang.state import SnapshotServer
from tests.integration.saving import Rank, same

ATTEMPT = Attempt(3, 1)


class Scaled(nn.Linear):
    """Keeps a scale for its output, as layers of 8 bits do, and a history of it, outside of parameters and buffers."""

    def __init__(self) -> None:
        super().__init__(4, 2)
        self.scale, self.history = torch.ones(2), [1.0]

    def get_extra_state(self) -> dict[Any, Any]:
        return {"scale": self.scale, "history": self.history, 0: None}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.scale, self.history = state["scale"], state["history"]

    def scaled_by(self, factor: float) -> None:
        self.scale = self.scale * factor
        self.history = [*self.history, factor]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Scaled()
        self.inner = nn.Sequential(nn.Linear(2, 2), Scaled())
        self.register_buffer("running", torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layer(inputs).sum()
        return output


def extra(model: nn.Module) -> str:
    return repr([each.get_extra_state() for each in model.modules() if isinstance(each, Scaled)])


def scale(model: nn.Module, factor: float) -> None:
    for each in model.modules():
        if isinstance(each, Scaled):
            each.scaled_by(factor)


# REGISTERED-4
def test_extra_state_is_healed_and_a_dropped_step_does_not_change_it() -> None:
    source, learner = (SnapshotServer("127.0.0.1", "job", None) for _ in range(2))
    theirs, mine = Model(), Model()
    source.register(model=theirs)
    learner.register(model=mine)
    scale(theirs, 0.5)
    expected = extra(theirs)
    source.begin(ATTEMPT)
    scale(theirs, 0.25)  # the forward of the step
    assert learner.heal([source.address], ATTEMPT)
    assert extra(mine) == expected
    source.registered.restore()
    assert extra(theirs) == expected
    source.close()
    learner.close()


def test_extra_state_is_saved_and_loaded(tmp_path: Path) -> None:
    rank = Rank(tmp_path, model=Model())
    rank.enter(("a0",))
    rank.train(10)
    scale(rank.model, 3.0)
    expected = extra(rank.model)
    rank.begin().close()
    loaded = Rank(tmp_path, model=Model())
    loaded.enter(("a0",))
    assert extra(loaded.model) != expected
    assert loaded.load(10)
    assert extra(loaded.model) == expected
    assert same(loaded, rank)
    loaded.close()


def test_extra_state_of_another_module_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    rank = Rank(tmp_path, model=Model())
    rank.enter(("a0",))
    rank.train(10).begin().close()
    other = Rank(tmp_path, model=Model())
    other.enter(("a0",))
    other.server.unregister(["model"])
    inner = other.model.get_submodule("inner")
    assert isinstance(inner, nn.Sequential)
    inner[1] = nn.Linear(4, 2)
    with torch.no_grad():
        before = [each.clone() for each in other.model.parameters()]
    other.server.register(model=other.model)
    with pytest.raises(ModelMismatch, match=r"registered object 'model:inner\.1\._extra_state'"):
        other.load(10)
    assert all(map(torch.equal, before, other.model.parameters()))
    other.close()


# LOADER-4
def test_a_checkpoint_without_extra_state_leaves_what_there_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Scaled, "get_extra_state", nn.Module.get_extra_state)
        rank = Rank(tmp_path, model=Model())
        rank.enter(("a0",))
        rank.train(10).begin().close()
    loaded = Rank(tmp_path, model=Model())
    loaded.enter(("a0",))
    scale(loaded.model, 7.0)
    expected = extra(loaded.model)
    assert loaded.load(10)
    assert extra(loaded.model) == expected
    assert "has no extra state of modules" in caplog.text
    assert torch.equal(loaded.model.get_parameter("layer.weight"), rank.model.get_parameter("layer.weight"))
    loaded.close()


def test_extra_state_that_cannot_be_sent_is_refused_at_once() -> None:
    class Odd(Scaled):
        def get_extra_state(self) -> dict[Any, Any]:
            return {"of": object()}

    server = SnapshotServer()
    with pytest.raises(TypeError, match=r"'0\._extra_state' of 'model', as .* is of object"):
        server.register(model=nn.Sequential(Odd()))
    server.register(model=Model())
    server.unregister(["model"])
    server.register(model=Model())
    server.close()


class WithTensor(Scaled):
    def get_extra_state(self) -> Any:
        return self.scale

    def set_extra_state(self, state: Any) -> None:
        self.scale = state


def exported(directory: Path, name: str) -> dict[str, Any]:
    export(directory, output := directory / name)
    found: dict[str, Any] = load_file(output) if output.suffix == ".safetensors" else torch.load(output)
    return found


def saved(directory: Path, model: nn.Module) -> None:
    rank = Rank(directory, model=model)
    rank.enter(("a0",))
    rank.train(10)
    scale(model, 3.0)
    rank.begin().close()


# REGISTERED-4
def test_an_export_for_torch_has_extra_state(tmp_path: Path) -> None:
    saved(tmp_path, trained := Model())
    loaded = Model()
    loaded.load_state_dict(exported(tmp_path, "weights.pt"), strict=True)
    assert extra(loaded) == extra(trained) != extra(Model())
    assert torch.equal(loaded.layer.weight, trained.layer.weight)


# REGISTERED-4
def test_an_export_as_safetensors_has_the_extra_state_that_is_a_tensor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Model()
    model.inner = nn.Sequential(nn.Linear(2, 2), WithTensor())
    saved(tmp_path, model)
    found = exported(tmp_path, "weights.safetensors")
    assert found.keys() == model.state_dict().keys() - {"layer._extra_state"}
    assert torch.equal(found["inner.1._extra_state"], torch.full((2,), 3.0))
    assert "safetensors files hold tensors alone: layer._extra_state is left out" in caplog.text


# INTERCHANGE-1
def test_weights_are_loaded_into_a_module_with_extra_state(tmp_path: Path) -> None:
    saved(tmp_path, trained := Model())
    (tmp_path / "out").mkdir()
    export(tmp_path, tmp_path / "out" / "weights.safetensors")
    model = Model()
    eg.load_weights(model, tmp_path / "out")
    assert torch.equal(model.layer.weight, trained.layer.weight)
    assert extra(model) == extra(Model())


# REGISTERED-4
def test_no_object_has_the_name_of_an_extra_state() -> None:
    server = SnapshotServer()
    for item in (Counter(), nn.Linear(1, 1)):
        with pytest.raises(ValueError, match="the name of a state must have no ':', but 'metrics:train' has one"):
            server.register(**{"metrics:train": item})
    server.register(**{"metrics.train": Counter()})
    server.close()


# REGISTERED-4
def test_a_checkpoint_with_an_object_whose_name_has_a_colon_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they were saved before such names were refused."""
    with monkeypatch.context() as patch:
        patch.setattr(
            "elasticgang.state.registered_objects.EXTRA", ";"
        )  # of the extra state of `model`, which has none
        rank = Rank(tmp_path, model=Replacing(lambda state: None))
        rank.server.register(**{"metrics:train": Counter()})
        rank.enter(("a0",))
        rank.train(10).begin().close()
    assert exported(tmp_path, "weights.pt").keys() == {*SAME}


class Counter:
    def state_dict(self) -> dict[str, Any]:
        return {"count": 1, "total": 2.0}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Replacing(nn.Module):
    """Whose state dict has other tensors than the module, by a hook."""

    running: Tensor

    def __init__(self, change: Callable[[dict[str, Any]], object]) -> None:
        super().__init__()
        self.layer, self._change = nn.Linear(4, 2), change
        self.register_buffer("running", torch.zeros(3))
        self.register_state_dict_post_hook(lambda module, state, prefix, metadata: change(state))  # type: ignore[no-untyped-call]

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layer(inputs).sum()
        return output


def renamed(state: dict[str, Any]) -> None:
    state["kernel"] = state.pop("layer.weight").detach()


def copied(state: dict[str, Any]) -> None:
    state |= {key: tensor.detach().clone() for key, tensor in state.items()}


def halved(state: dict[str, Any]) -> None:
    state["layer.weight"] = state["layer.weight"].detach().half()


def scaled(state: dict[str, Any]) -> None:
    state["layer.weight"] = state["layer.weight"].detach() * 2


def split(state: dict[str, Any]) -> None:
    weight = state.pop("layer.weight")
    state |= {"first": weight[:1], "second": weight[1:]}


SAME = ("layer.weight", "layer.bias", "running")


# REGISTERED-2
@pytest.mark.parametrize(
    ("change", "keys", "warning"),
    [
        (renamed, {"kernel": "layer.weight", "layer.bias": "layer.bias", "running": "running"}, ""),
        (
            copied,
            {key: key for key in SAME},
            "will have the module's own values of running, layer.weight, layer.bias: a",
        ),
        (halved, {key: key for key in SAME}, "will have the module's own values of layer.weight: a hook"),
        (scaled, {key: key for key in SAME}, "will have the module's own values of layer.weight: a hook"),
        (split, {"layer.bias": "layer.bias", "running": "running"}, "will lack first, second: a hook"),
    ],
)
def test_a_hook_that_replaces_tensors_loses_no_key_of_one_of_them(
    change: Callable[[dict[str, Any]], object],
    keys: dict[str, str],
    warning: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved(tmp_path, model := Replacing(change))
    found = exported(tmp_path, "weights.pt")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert found.keys() == keys.keys()
    assert all(torch.equal(found[key], tensors[name]) for key, name in keys.items())
    assert f"an export of 'model' {warning}" in caplog.text if warning else "an export of" not in caplog.text
