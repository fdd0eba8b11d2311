"""The training state of a rank: the registered objects, their small state, and their large state.

"Large" state is parameters and the state of optimizers but for their settings: what a step changes in its apply alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from elasticgang.state import staging
from elasticgang.state.buffers import once
from elasticgang.state.dtensor import local, locally
from elasticgang.state.heal_targets import HealTargets
from elasticgang.state.loaded import Loaded
from elasticgang.state.memory_reserve import MemoryReserve
from elasticgang.state.optimizer_settings import (
    keep_tensors,
    parameters_of,
    tensors_of,
    with_settings,
    without_settings,
)
from elasticgang.state.optimizer_state import keep_dtypes, placed
from elasticgang.state.registered_objects import RegisteredObjects, is_same_memory
from elasticgang.state.small_state import SmallState


class RegisteredState:
    """`reserve`: memory for what is received and is not there yet."""

    def __init__(self, reserve: MemoryReserve | None = None) -> None:
        self.reserve = reserve
        self.objects = RegisteredObjects()
        self.small = SmallState(self.objects)
        self._loaded = Loaded((), {}, {})
        self._has_begun = False  # a step: what is loaded from now on replaces no settings of the script

    def register(self, name_of: Callable[[str], str] | None = None, /, **objects: object) -> None:
        """As `RegisteredObjects.register`."""
        self.objects.register(name_of, **objects)
        self.small.forget_reached()

    def unregister(self, names: Sequence[str]) -> None:
        """As `RegisteredObjects.unregister`."""
        self.objects.unregister(names)
        self.small.replaced()

    def begin_step(self) -> None:
        self._has_begun = True
        self.small.begin()
        self.objects.begin_step()

    def restore(self) -> None:
        """The step is dropped. It has changed no large state."""
        self.small.put_back()
        self.objects.count_versions()

    def unlike_loaded(self) -> tuple[list[str], list[str]]:
        """As `Loaded.unlike`, of what was loaded last."""
        return self._loaded.unlike(self.objects.parameters, self.objects.own_settings)

    def load(self, state: dict[str, Any]) -> None:
        """All of it: the step in which this rank heals may be dropped, so the step begins from it too."""
        is_of_peer = "frozen" not in state  # with whom the settings are compared (ALIKE-2)
        own = {} if is_of_peer or self._has_begun else self.objects.own_settings()
        self._load_large(state["large"], state["small"].get("settings", {}))
        self.small.load(state["small"])
        if not is_of_peer:
            self._loaded = Loaded(state["frozen"], own, self.objects.own_settings() if own else {})
        self.small.replaced()

    def targets(
        self, in_place: bool, spec: Any, shapes: list[Any], num_chunks: int | None, former: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """As `HealTargets.find`."""
        found = HealTargets(self.large(), self.objects.optimizers, self.reserve)
        return found.find(in_place, spec, shapes, num_chunks, former)

    def large(self) -> dict[str, Any]:
        """The large state: the local parts, without settings (SMALLSTATE-1). "owned": the parameters of each optimizer,
        by their numbers among all of the registered modules; -1 if they are in none (HEALTARGETS-2)."""
        parameters = {
            name: {key: local(parameter) for key, parameter in of_module.items()}
            for name, of_module in self.objects.parameters.items()
        }
        items = self.objects.optimizers.items()
        optimizers = {name: without_settings(locally(item.state_dict())) for name, item in items}
        every = [id(each) for of_module in self.objects.parameters.values() for each in of_module.values()]
        numbers = {parameter: number for number, parameter in reversed(list(enumerate(every)))}
        owned = {name: [numbers.get(id(each), -1) for each in parameters_of(item)] for name, item in items}
        return {"parameters": parameters, "optimizers": optimizers, "owned": owned}

    def tree(self) -> dict[str, Any]:
        """All state, with DTensors: the large state, and `SmallState.to_save`. "owned": the
        parameters of each optimizer, in the order of its state dict. "keys": as REGISTERED-2 has them.
        "has_buffer": whether a module has a buffer of that name, which may be None, or another name of one."""
        small, optimizers = self.small.to_save, self.objects.optimizers.items()
        settings = small["settings"]
        owned = {name: parameters_of(optimizer) for name, optimizer in optimizers}
        return {
            "parameters": self.objects.parameters,
            "optimizers": {name: with_settings(item.state_dict(), settings.get(name, ())) for name, item in optimizers},
            "buffers": small["buffers"],
            "others": small["others"],
            "owned": owned,
            "keys": self.objects.keys,
            "has_buffer": lambda module, name: self.objects.places_of_buffers(module).has(name),
        }

    def _load_large(self, large: dict[str, Any], settings: dict[str, list[dict[str, Any]]]) -> None:
        """`settings`: those that `large` lacks, by optimizer and group (SMALLSTATE-1)."""
        writer = staging.Writer()
        with torch.no_grad():
            for name, parameters in large["parameters"].items():
                present = self.objects.parameters[name]
                for key, value in parameters.items():
                    own = local(present[key])
                    if not is_same_memory(value, own):  # received in place
                        writer.copy(once(own, own), once(value, own))
        for name, state in large["optimizers"].items():
            optimizer = self.objects.optimizers[name]
            ours = placed(with_settings(state, settings.get(name, ())), optimizer, writer)
            own_tensors = tensors_of(optimizer)
            optimizer.load_state_dict(ours)
            keep_tensors(optimizer, own_tensors)
            keep_dtypes(name, ours["state"], optimizer)
        writer.finish()
