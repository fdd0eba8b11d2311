"""The objects that a rank's script has registered, and the copy of their small state.

"Small" state is what forward changes (buffers and registered objects); "large" state is parameters and optimizer state.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from elasticgang.state.dtensor import like, local, locally
from elasticgang.state.serialization import flatten


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


class RegisteredState:
    """`snapshot`: the small state from the beginning of the step."""

    def __init__(self) -> None:
        self._modules: dict[str, nn.Module] = {}
        self._parameters: dict[str, dict[str, nn.Parameter]] = {}
        self._optimizers: dict[str, Stateful] = {}
        self._others: dict[str, Stateful] = {}
        self.snapshot: dict[str, Any] = {}

    def register(self, **objects: object) -> None:
        for name, item in objects.items():
            if name in self._modules or name in self._optimizers or name in self._others:
                raise ValueError(f"a state named {name!r} is registered already")
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
                raise TypeError(f"{name} ({type(item).__name__}) must have state_dict() and load_state_dict()")
            if isinstance(item, nn.Module):
                self._modules[name] = item
                self._parameters[name] = dict(item.named_parameters())
            elif hasattr(item, "param_groups"):
                self._optimizers[name] = item
            else:
                flatten(item.state_dict())  # raises now and not when a peer heals
                self._others[name] = item

    def unregister(self, names: Sequence[str]) -> None:
        """Forget the objects of these names."""
        for name in names:
            for objects in (self._modules, self._parameters, self._optimizers, self._others):
                objects.pop(name, None)
        self.keep_snapshot()

    def is_registered(self, item: object) -> bool:
        kinds = (self._modules, self._optimizers, self._others)
        return any(item is each for of_kind in kinds for each in of_kind.values())

    def begin_step(self) -> None:
        self.keep_snapshot()  # also without state: this rank's may be designated (RECOVERY-3)
        for name, module in self._modules.items():
            if not any(isinstance(parameter, DTensor) for parameter in self._parameters[name].values()):
                self._parameters[name] = dict(module.named_parameters())  # FSDP replaces them while it is gathered

    def keep_snapshot(self) -> None:
        self.snapshot = self.small(cloned=True)

    def restore(self) -> None:
        self.load_small(self.snapshot)

    def load(self, state: dict[str, Any]) -> None:
        """All of it: the step in which this rank heals may be dropped, so the snapshot is of it too."""
        self.load_small(state["small"])
        self._load_large(state["large"])
        self.keep_snapshot()

    @property
    def num_bytes(self) -> int:
        """The size of the local parameters."""
        return sum(local(each).nbytes for of_module in self._parameters.values() for each in of_module.values())

    def small(self, *, cloned: bool) -> dict[str, Any]:
        """The small state: buffers and registered objects, which forward and the code around it change."""
        buffers = {
            name: {key: buffer.detach().clone() if cloned else buffer for key, buffer in module.named_buffers()}
            for name, module in self._modules.items()
        }
        others = {name: item.state_dict() for name, item in self._others.items()}
        return {"buffers": buffers, "others": copy.deepcopy(others) if cloned else others}

    def load_small(self, small: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, buffers in small["buffers"].items():
                present = dict(self._modules[name].named_buffers())
                for key, value in buffers.items():
                    present[key].copy_(value)
        for name, state in small["others"].items():
            self._others[name].load_state_dict(copy.deepcopy(state))

    def large(self) -> dict[str, Any]:
        """The large state: the local parts."""
        parameters = {
            name: {key: local(parameter) for key, parameter in of_module.items()}
            for name, of_module in self._parameters.items()
        }
        optimizers = {name: locally(optimizer.state_dict()) for name, optimizer in self._optimizers.items()}
        return {"parameters": parameters, "optimizers": optimizers}

    def tree(self) -> dict[str, Any]:
        """All state, with DTensors: the large state, and the snapshot of the small state. "owned": the parameters of
        each optimizer, in the order of its state dict."""
        owned = {
            name: [parameter for group in optimizer.param_groups for parameter in group["params"]]  # type: ignore[attr-defined]
            for name, optimizer in self._optimizers.items()
        }
        return {
            "parameters": self._parameters,
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self._optimizers.items()},
            **(self.snapshot or self.small(cloned=True)),
            "owned": owned,
        }

    def _load_large(self, large: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, parameters in large["parameters"].items():
                present = self._parameters[name]
                for key, value in parameters.items():
                    local(present[key]).copy_(value)
        for name, state in large["optimizers"].items():
            optimizer = self._optimizers[name]
            optimizer.load_state_dict(_placed(state, optimizer))


def _placed(state: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """An optimizer's state, with DTensors for parameters that are DTensors."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    placed = {
        index: {key: like(value, parameters[index]) for key, value in of_parameter.items()}
        for index, of_parameter in state["state"].items()
        if isinstance(index, int)
    }
    return {**state, "state": {**state["state"], **placed}}
