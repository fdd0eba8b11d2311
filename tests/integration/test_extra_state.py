"""What a module's `get_extra_state` returns goes where its buffers go (REGISTERED-4)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
    source.restore()
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
