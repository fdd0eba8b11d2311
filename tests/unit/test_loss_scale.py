"""Scaled gradients: the rule of torch's own scaler, and what a step with an overflow does."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import elasticgang as eg
from elasticgang.train.loss_scale import next_state

OPTIONS: dict[str, Any] = {"init_scale": 2.0**13, "growth_interval": 2}


def scaler(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{**OPTIONS, **options})


def torchs(sound: list[bool], **options: Any) -> dict[str, Any]:
    """The state of torch's scaler after it has itself looked at the gradients of several steps."""
    parameter, own = torch.nn.Parameter(torch.zeros(2)), scaler(**options)
    optim = torch.optim.SGD([parameter], lr=0.0)
    for is_sound in sound:
        own.scale(torch.zeros(()))  # so that it has a scale
        parameter.grad = torch.tensor([1.0, 1.0 if is_sound else math.inf])
        own.step(optim)
        own.update()
    return own.state_dict()


@given(sound=st.lists(st.booleans(), max_size=12), interval=st.integers(1, 3), scale=st.sampled_from([1.0, 2.0**127]))
def test_the_scale_follows_torchs_rule(sound: list[bool], interval: int, scale: float) -> None:
    options = {"growth_interval": interval, "init_scale": scale}
    state = scaler(**options).state_dict()
    for is_sound in sound:
        state = next_state(state, overflows=not is_sound)
    assert state == torchs(sound, **options)


def train(max_norm: float | None = None, overflowing: tuple[int, ...] = (1, 4)) -> tuple[torch.Tensor, dict[str, Any]]:
    manager = eg.join()
    parameter, own = torch.nn.Parameter(torch.ones(3)), scaler()
    optim = eg.Optimizer(manager, torch.optim.SGD([parameter], lr=0.125), scaler=own)
    manager.register_state(parameter=torch.nn.ParameterList([parameter]), optim=optim, scaler=own)
    for step in manager.steps(7):
        with step:
            loss = (parameter * torch.tensor([1.0, 2.0, 4.0])).sum()
            own.scale(loss * (math.inf if step.index in overflowing else 1.0)).backward()  # type: ignore[no-untyped-call]
            assert optim.step(weight=1.0, max_norm=max_norm)
            assert parameter.grad is None
    torch.distributed.destroy_process_group()
    return parameter.detach(), own.state_dict()


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_a_step_with_an_overflow_commits_and_is_not_applied(max_norm: float | None) -> None:
    """All else is as without a scaler: the scale is a power of two, so that nothing is rounded."""
    found, state = train(max_norm)
    gradient = torch.tensor([1.0, 2.0, 4.0])
    if max_norm is not None:
        gradient *= max_norm / (torch.linalg.vector_norm(gradient) + 1e-6)
    expected = torch.ones(3)
    for _ in range(5):
        expected -= 0.125 * gradient
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0.0)
    assert state == torchs([index not in (1, 4) for index in range(7)])


def test_a_parameter_without_elements_does_not_overflow() -> None:
    """As the shard of a rank that has no row."""
    manager = eg.join()
    empty, full, own = torch.nn.Parameter(torch.ones(0, 2)), torch.nn.Parameter(torch.ones(1)), scaler()
    optim = eg.Optimizer(manager, torch.optim.SGD([empty, full], lr=0.125), scaler=own)
    manager.register_state(parameters=torch.nn.ParameterList([empty, full]), optim=optim, scaler=own)
    for step in manager.steps(1):
        with step:
            own.scale(empty.sum() + full.sum()).backward()  # type: ignore[no-untyped-call]
            assert optim.step(weight=1.0)
    assert full.item() == 0.875


def test_a_scaler_that_is_not_registered_is_refused() -> None:
    manager = eg.join()
    parameter = torch.nn.Parameter(torch.ones(1))
    optim = eg.Optimizer(manager, torch.optim.SGD([parameter], lr=0.1), scaler=scaler())
    manager.register_state(optim=optim)

    def step_once() -> None:
        for step in manager.steps(1):
            with step:
                optim.step(weight=1.0)

    with pytest.raises(eg.InvalidOperationError, match="register the scaler"):
        step_once()
    torch.distributed.destroy_process_group()


def test_16_bit_parameters_are_refused() -> None:
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
    with pytest.raises(ValueError, match="float32 parameters"):
        eg.Optimizer(eg.join(), torch.optim.SGD([parameter], lr=0.1), scaler=scaler())


def test_a_scaler_that_is_turned_off_does_nothing() -> None:
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
    eg.Optimizer(eg.join(), torch.optim.SGD([parameter], lr=0.1), scaler=scaler(enabled=False))
