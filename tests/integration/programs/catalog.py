"""The programs, and what they share.

A program is a function as a user writes it for four ranks: it takes nothing, or the process group to use, uses
`torch.distributed` as it finds it, and returns values by name.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Values = dict[str, Any]
TOPICS = ("collectives", "checkpoints", "compiled", "ddp", "groups", "messages", "pipelines", "sharding")
MODULES = tuple(f"tests.integration.programs.{topic}" for topic in TOPICS)
_F = TypeVar("_F", bound=Callable[..., Values])


@dataclass(frozen=True)
class Program:
    """`rtol`: how far its values may differ from Gloo's, relative to their size. `any_size`: three ranks may run it.
    `beyond_gloo`: Gloo refuses it, elasticgang does not; it checks its own values."""

    topic: str
    name: str
    function: Callable[..., Values]
    rtol: float
    any_size: bool
    beyond_gloo: bool


_programs: dict[str, Program] = {}


def program(*, rtol: float = 0.0, any_size: bool = False, beyond_gloo: bool = False) -> Callable[[_F], _F]:
    def register(function: _F) -> _F:
        topic = function.__module__.rpartition(".")[2]
        name = f"{topic}.{function.__name__}"
        assert name not in _programs, name
        _programs[name] = Program(topic, name, function, rtol, any_size, beyond_gloo)
        return function

    return register


def programs() -> dict[str, Program]:
    """By name, in the order in which they run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch itself: torch.distributed.optim compiles by jit
        for module in MODULES:
            importlib.import_module(module)
    return dict(_programs)


# -- what several topics use


def mlp(width: int = 8) -> nn.Sequential:
    """The same on every rank."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 4))


def batch(step: int, part: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.randn(4, 6, generator=generator), torch.randn(4, 4, generator=generator)


def train(
    module: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, steps: int = 3, part: int = -1
) -> Values:
    """Some steps; the losses, and the parameters in the end. `part`: of the data; by default each rank has its own."""
    optimizer = optimizer or torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    part = dist.get_rank() if part < 0 else part
    losses = []
    for step in range(steps):
        inputs, targets = batch(step, part)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(module(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, **parameters(module)}


def parameters(module: nn.Module) -> Values:
    return {name: whole(parameter.detach()) for name, parameter in module.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    """A DTensor gathered, any other as it is."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def gather_numbers(values: Iterable[float]) -> list[list[float]]:
    """Of every rank, in rank order."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, list(values))
    return found
