"""The small state of the registered objects: what a step may change before its apply, at three moments.

"Small" state is buffers, registered objects, and settings of optimizers. It has other values when the script gets a
step from its loop, when the step begins, and after the forward.

SMALLSTATE-1  The settings of an optimizer, such as its learning rate, are small state: all that its parameter groups
    have beside the parameters. The script may set them in a step, before `optim.step`, and a learner that heals there
    applies the step with those of its source. They are no part of the large state, because holders of one attempt may
    differ in them while a step runs. Groups that share a tensor, as that of a learning rate which was given for all of
    them, share it in a rank that has healed too: a schedule with a function for each group sets it to what the last of
    them returns.
SMALLSTATE-2  Of a DTensor in small state a rank sends its part, and tells that it is one. The healer takes it into a
    DTensor that is placed like its own one in the same place of the state. Where it has none, it refuses the state.
SMALLSTATE-3  A step that is tried again begins with the same small state: the loop's code before `with step:` has run
    for it in the first try. What that code changes once more is put back, and code that leaves itself out misses
    nothing.
SMALLSTATE-4  A checkpoint has the small state from when the script got the step: a job that goes on at it runs the
    loop's code before `with step:`, for the first time. So does what moves to another layout: of its holders, some may
    have begun the step, and others not.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from elasticgang.state import staging
from elasticgang.state.buffers import HeldBuffers
from elasticgang.state.dtensor import Part, placed_like
from elasticgang.state.optimizer_settings import check_num_groups, copy_of, groups_of, set_settings, settings_of
from elasticgang.state.registered_objects import RegisteredObjects
from elasticgang.state.serialization import unflatten


class SmallState:
    """Of `objects`. `begun`: a copy from the beginning of the step, to which a dropped step goes back, and which
    learners get. `written`: a mark behind all changes of the state until that copy, also of large state: a stream of
    its own may read it afterwards (PINNED-2). `is_again`: the next step was begun before, on that copy, and dropped."""

    def __init__(self, objects: RegisteredObjects) -> None:
        self._objects = objects
        self.begun: dict[str, Any] = {}
        self._held: list[HeldBuffers] = []  # with it
        self._reached: dict[str, Any] = {}  # a copy from when the script got the step; {}: not known
        self.is_again = False
        self.written: Any = None

    # -- of an attempt at a step

    def reach(self) -> None:
        """The script is about to get a step (SMALLSTATE-4)."""
        if not self.is_again:
            self._reached = self.copy()

    def begin(self) -> None:
        """A step begins: keep the state as it is, or as it was when the step was begun before (SMALLSTATE-3)."""
        if self.is_again:
            self.put_back()
        self.keep()  # also without state: this rank's may be designated (RECOVERY-3)
        self.is_again = False

    def put_back(self) -> None:
        """The step is dropped: the next one is the same."""
        for held in self._held:  # BUFFERS-1
            held.put_back()
        self.load(self.begun)
        self.is_again = True

    def forget(self) -> None:
        """The next step is not one that was dropped: it is another one, or the state was loaded since."""
        self.is_again, self._reached = False, {}

    def keep(self) -> None:
        """Keep the state as it is now, as that from which the step began."""
        self.begun = self.copy()
        self._held = list(map(HeldBuffers, self._objects.modules.values()))
        self.written = staging.device.mark()

    def replaced(self) -> None:
        """The objects or their state are others now."""
        self.forget_reached()
        self.keep()

    def forget_reached(self) -> None:
        """What `reach` has kept lacks an object, or is of another state."""
        self._reached = {}

    @property
    def to_save(self) -> dict[str, Any]:
        """What a checkpoint and another layout get of it (SMALLSTATE-4)."""
        return self._reached or self.begun or self.copy()

    def changed_buffers(self) -> list[str]:
        """The names of the plain buffers of floating-point numbers that have changed since the step began."""
        former = self.begun.get("buffers", {})
        return [
            f"{name}.{key}"
            for name in self._objects.modules
            for key, buffer in self._objects.buffers(name).items()
            if buffer.is_floating_point() and not isinstance(buffer, DTensor)
            if key in former.get(name, {}) and not torch.equal(former[name][key], buffer)
        ]

    # -- its values

    def live(self) -> dict[str, Any]:
        """The state as it is now, in the memory of the objects."""
        found = self._objects
        return {
            "buffers": {name: found.buffers(name) for name in found.modules},
            "others": {name: item.state_dict() for name, item in found.others.items()},
            "settings": {name: list(map(settings_of, groups_of(item))) for name, item in found.optimizers.items()},
        }

    def copy(self) -> dict[str, Any]:
        live = self.live()
        return {
            "buffers": {
                name: {key: buffer.detach().clone() for key, buffer in of_module.items()}
                for name, of_module in live["buffers"].items()
            },
            "others": copy.deepcopy(live["others"]),
            "settings": copy_of(live["settings"]),
        }

    def load(self, small: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, values in small["buffers"].items():
                self._objects.places_of_buffers(name).load(values)
            for name, groups in small.get("settings", {}).items():  # no checkpoint has them here
                for group, settings in zip(groups_of(self._objects.optimizers[name]), groups, strict=False):
                    set_settings(group, settings)
        for name, state in small["others"].items():
            self._objects.others[name].load_state_dict(copy.deepcopy(state))

    def placed(self, spec: Any, tensors: Sequence[Tensor], divided: Sequence[int]) -> dict[str, Any]:
        """A peer's small state as this rank's (SMALLSTATE-2). `spec`, `tensors`: as of `flatten`. `divided`: which of
        the tensors are local parts of DTensors there. Raises as `check`."""
        parts: list[Any] = list(tensors)
        for number in divided:
            parts[number] = Part(parts[number])
        small: dict[str, Any] = unflatten(spec, parts)
        own = self.live()
        for kind, what in (("buffers", "the buffers of"), ("others", "the state of")):
            small[kind] = {
                name: placed_like(tree, own[kind].get(name), f"{what} {name!r}") for name, tree in small[kind].items()
            }
        self.check(small)
        return small

    def check(self, small: dict[str, Any]) -> None:
        """Raises KeyError, TypeError, AttributeError or WireError: it is no small state of these objects."""
        for name, values in small["buffers"].items():
            self._objects.places_of_buffers(name).check(values)
        for name in small["others"]:
            self._objects.others[name]
        for name, groups in small.get("settings", {}).items():
            check_num_groups(name, groups, self._objects.optimizers[name])
