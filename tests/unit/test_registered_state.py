"""The registered objects of one rank take the state of another one as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from elasticgang.state.registered_state import RegisteredState
from elasticgang.state.serialization import flatten, unflatten


def state_of(registered: RegisteredState) -> dict[str, Any]:
    return copy.deepcopy({"large": registered.large(), "small": registered.small(cloned=True)})


class Mixed(torch.optim.Optimizer):
    """Keeps state in other dtypes than its parameters, as 8-bit optimizers and those with master weights do."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {
                "step": torch.tensor(1.0),
                "master": parameter.float() + 1e-4,
                "codes": torch.full_like(parameter, 201, dtype=torch.uint8),
                "history": {"norms": [torch.tensor(1 / 3, dtype=torch.float64)]},
                "average": torch.ones_like(parameter),
            }


class Copied:
    """An optimizer whose state dict is a copy, so that its state can be changed by loading alone."""

    def __init__(self, optim: torch.optim.Optimizer) -> None:
        self.optim, self.param_groups = optim, optim.param_groups

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy(self.optim.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optim.load_state_dict(state)


def with_optimizer(wrap: Callable[[torch.optim.Optimizer], object] = lambda optim: optim) -> RegisteredState:
    model = nn.Linear(3, 2, dtype=torch.bfloat16)
    optim = Mixed(model.parameters())
    registered = RegisteredState()
    registered.register(model=model, optim=wrap(optim))
    return registered


def trained() -> RegisteredState:
    model = nn.Linear(3, 2, dtype=torch.bfloat16)
    optim = Mixed(model.parameters())
    optim.step()
    registered = RegisteredState()
    registered.register(model=model, optim=optim)
    return registered


# REGISTERED-5
def test_what_an_optimizer_keeps_has_the_dtype_of_the_source() -> None:
    state, registered = state_of(trained()), with_optimizer()
    registered.load(state)
    expected, found = (each["optimizers"]["optim"]["state"] for each in (state["large"], registered.large()))
    assert found.keys() == expected.keys() == {0, 1}
    for index in expected:
        history, same = expected[index].pop("history"), found[index].pop("history")
        assert (same["norms"][0].dtype, same) == (torch.float64, history)
        for key, tensor in expected[index].items():
            assert (found[index][key].dtype, found[index][key].tolist()) == (tensor.dtype, tensor.tolist()), key


# REGISTERED-5
def test_an_optimizer_that_converts_what_it_loads_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with_optimizer(Copied).load(state_of(trained()))
    assert "load_state_dict of 'optim' has converted state to another dtype than torch.float32" in caplog.text


class Schedule(NamedTuple):
    warm_up: int
    rate: float


def test_a_setting_with_names_is_sent_as_a_tuple_and_has_them_again() -> None:
    model, registered = nn.Linear(3, 2), RegisteredState()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    (group,) = optim.param_groups
    group["schedule"] = Schedule(5, 0.5)
    registered.register(optim=optim)
    registered.begin_step()
    spec, _ = flatten(registered.small(cloned=True)["settings"])
    received = unflatten(spec, [])
    assert received["optim"][0]["schedule"] == (5, 0.5)
    for settings in (received, registered.small(cloned=True)["settings"]):
        group["schedule"] = Schedule(6, 0.25)
        registered.load_small({"buffers": {}, "others": {}, "settings": settings})
        assert group["schedule"] == Schedule(5, 0.5)
        assert group["schedule"].rate == 0.5


@pytest.mark.parametrize("dropped", [True, False], ids=["a dropped step", "a heal"])
def test_a_buffer_that_is_expanded_takes_its_values(dropped: bool) -> None:
    module, registered = nn.Module(), RegisteredState()
    mask = torch.arange(3.0).view(3, 1).expand(3, 4)
    module.register_buffer("mask", mask)
    registered.register(model=module)
    registered.begin_step()
    state = state_of(registered)
    mask[:, :1] += 1
    registered.restore() if dropped else registered.load(state)
    assert mask.tolist() == [[float(row)] * 4 for row in range(3)]
    assert mask.stride() == (1, 0)
