"""The objects that a rank's script has registered, and the copy of their small state.

"Small" state is what a step may change before its apply (buffers, registered objects, and settings of optimizers);
"large" state is parameters and the rest of optimizers' state.

REGISTERED-1  Parameters and buffers are known by the names that they have in the whole model, in every rank and layout:
    those of the registered module, or what a function makes of these where a stage of a pipeline has others.
REGISTERED-2  A module's state dict may have several keys for one tensor, and none for a buffer. Which tensor each key
    is, in the names of REGISTERED-1, is found out when the module is registered, because a state dict may run hooks. A
    tensor that a hook has put in the place of another is the one with the same memory, or else of its key and shape: a
    warning then says that its values are not what the hook makes of them.
REGISTERED-4  What `get_extra_state` of a module returns is small state, as that of a registered object. The object is
    called by the module's key in the state dict of the whole model (REGISTERED-1), so that it finds its stage. The
    script can register no object under such a name, which has a colon.
REGISTERED-6  The settings of an optimizer, such as its learning rate, are small state: all that its parameter groups
    have beside the parameters. The script may set them in a step, before `optim.step`, and a learner that heals there
    applies the step with those of its source. They are no part of the large state, because holders of one attempt may
    differ in them while a step runs.
REGISTERED-7  Of a DTensor in small state a rank sends its part, and tells that it is one. The healer takes it into a
    DTensor that is placed like its own one in the same place of the state. Where it has none, it refuses the state.
REGISTERED-9  A step changes no parameter before its apply: what a learner reads meanwhile, and what a dropped step
    leaves, would be no committed state. The version of a parameter counts the changes; those of `.data` are not seen.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from elasticgang.protocol.form import Form
from elasticgang.state import memory_reserve, staging
from elasticgang.state.buffers import Buffers, HeldBuffers, once
from elasticgang.state.dtensor import Part, local, locally, placed_like
from elasticgang.state.heal_targets import HealTargets
from elasticgang.state.loaded import Loaded, Settings
from elasticgang.state.memory_reserve import MemoryReserve
from elasticgang.state.optimizer_settings import (
    check_num_groups,
    copy_of,
    groups_of,
    own_settings,
    parameters_of,
    set_settings,
    settings_of,
    with_settings,
    without_settings,
)
from elasticgang.state.optimizer_state import keep_dtypes, placed
from elasticgang.state.serialization import flatten, unflatten
from elasticgang.state.state_form import form_of_module, form_of_optimizer

log = logging.getLogger("elasticgang")

_T = TypeVar("_T")
_EXTRA_KEY = "_extra_state"
EXTRA = ":"  # between the name of a module and the key of an extra state in it


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


class _ExtraState:
    """The extra state of one module (REGISTERED-4)."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self) -> dict[str, Any]:
        return {"extra_state": self._module.get_extra_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._module.set_extra_state(state_dict["extra_state"])


class RegisteredState:
    """`snapshot`: the small state from the beginning of the step. `written`: a mark behind all changes of the state
    until then, after which a stream of its own may read it (PINNED-2). `reserve`: memory for what is received and is
    not there yet."""

    def __init__(self, reserve: MemoryReserve | None = None) -> None:
        self.reserve = reserve
        self._modules: dict[str, nn.Module] = {}
        self._name_of: dict[str, Callable[[str], str]] = {}  # of the modules whose names may not be the model's
        self._parameters: dict[str, dict[str, nn.Parameter]] = {}
        self._keys: dict[str, dict[str, str]] = {}  # REGISTERED-2
        self._optimizers: dict[str, Stateful] = {}
        self._others: dict[str, Stateful] = {}
        self._forms: dict[str, Form] = {}  # by the name of the object, of those that `form` has read
        self._loaded = Loaded((), {}, {})
        self._has_begun = False  # a step: what is loaded from now on replaces no settings of the script
        self._versions: dict[str, list[int]] = {}  # of the parameters, as of `changed_parameter`
        self.snapshot: dict[str, Any] = {}
        self.is_again = False  # the next step was begun before, on the snapshot, and dropped (SNAPSHOT-5)
        self._reached: dict[str, Any] = {}  # the small state from when the script got the step, for a checkpoint
        self._held: list[HeldBuffers] = []  # with the snapshot
        self.written: Any = None

    def register(self, name_of: Callable[[str], str] | None = None, /, **objects: object) -> None:
        """`name_of`: returns the whole model's name of a parameter or buffer from the one in its module.

        Raises:
            ValueError: two of a module get the same name, or an object of this name is registered already, or the name
                has a colon (REGISTERED-4).
            TypeError: an object cannot be saved.
        """
        self._reached = {}  # it lacks these objects
        for name, item in objects.items():
            if name in self._modules or name in self._optimizers or name in self._others:
                raise ValueError(f"a state named {name!r} is registered already")
            if EXTRA in name:
                raise ValueError(f"the name of a state must have no {EXTRA!r}, but {name!r} has one")
            if not (hasattr(item, "state_dict") and hasattr(item, "load_state_dict")):
                raise TypeError(f"{name} ({type(item).__name__}) must have state_dict() and load_state_dict()")
            if isinstance(item, nn.Module):
                if name_of is not None:
                    self._name_of[name] = functools.cache(name_of)  # it may read the layout, which changes before this
                flatten(dict(item.named_buffers()))  # raises now and not when a peer heals
                extra = self._extra_states(name, item)
                self._parameters[name] = self._named(name, item.named_parameters())
                self._keys[name] = self._keys_of(name, item)
                self._modules[name] = item
                self._others |= extra
                if any(staging.device.holds(local(each)) for each in self._parameters[name].values()):
                    staging.prepare()  # PINNED-5
            elif hasattr(item, "param_groups"):
                if not _is_as_torchs(item):
                    raise TypeError(
                        f"{name} ({type(item).__name__}) has `param_groups`, so that its state dict must have `state` "
                        "and `param_groups`, as that of torch's optimizers"
                    )
                self._optimizers[name] = item
            else:
                flatten(item.state_dict())  # raises now and not when a peer heals
                self._others[name] = item

    def unregister(self, names: Sequence[str]) -> None:
        """Forget the objects of these names."""
        for name in names:
            for extra in [other for other in self._others if other.startswith(f"{name}{EXTRA}")]:
                del self._others[extra]
            of_modules = (self._modules, self._name_of, self._parameters, self._keys)
            for objects in (*of_modules, self._optimizers, self._others, self._forms):
                objects.pop(name, None)
        self._reached = {}
        self.keep_snapshot()

    def _named(self, module: str, found: Iterable[tuple[str, _T]]) -> dict[str, _T]:
        """REGISTERED-1."""
        name_of = self._name_of.get(module)
        named: dict[str, _T] = {}
        for own, item in found:
            name = own if name_of is None else name_of(own)
            if name in named:
                raise ValueError(
                    f"`names` must give each tensor of {module!r} a name of its own, but two have {name!r}"
                )
            named[name] = item
        return named

    def _buffers(self, name: str) -> Buffers:
        module = self._modules[name]
        return Buffers(module, self._name_of.get(name, str), self._named(name, module.named_buffers()))

    def _extra_states(self, name: str, module: nn.Module) -> dict[str, Stateful]:
        """REGISTERED-4. Raises TypeError: one cannot be sent."""
        own = {
            f"{prefix}{'.' * bool(prefix)}_extra_state": _ExtraState(each)
            for prefix, each in module.named_modules()
            if type(each).get_extra_state is not nn.Module.get_extra_state
        }
        for key, extra in own.items():
            try:
                flatten(extra.state_dict())
            except TypeError as exc:
                raise TypeError(
                    f"{key!r} of {name!r}, as get_extra_state returns it, must be made of tensors, numbers, strings, "
                    f"lists and dicts: {exc}"
                ) from exc
        return {f"{name}{EXTRA}{key}": extra for key, extra in self._named(name, own.items()).items()}

    def _keys_of(self, name: str, module: nn.Module) -> dict[str, str]:
        """REGISTERED-2. What is neither a parameter nor a buffer, such as extra state, has no name."""
        named: dict[str, torch.Tensor] = {**self._parameters[name], **self._named(name, module.named_buffers())}
        name_of = self._name_of.get(name, str)
        try:
            found = module.state_dict(keep_vars=True)
        except Exception as exc:  # of a hook, for example one that communicates
            log.warning("an export of %r will have the names of its tensors: no state dict (%s)", name, exc)
            return {key: key for key in named}
        names = {id(tensor): key for key, tensor in named.items()}
        keys: dict[str, str] = {}
        unknown, computed = [], []
        for own, item in found.items():
            key = name_of(own)
            if (known := names.get(id(item)) or _in_memory_of(item, named)) is not None:
                keys[key] = known
            elif isinstance(item, Tensor) and key in named and named[key].shape == item.shape:
                keys[key] = key
                if item.numel() and not item.is_meta:
                    computed.append(key)
            elif isinstance(item, Tensor) and own.rpartition(".")[2] != _EXTRA_KEY:
                unknown.append(key)
        if computed:
            log.warning(
                "an export of %r will have the module's own values of %s: a hook of its state dict puts other tensors "
                "there, copies or computed ones",
                name,
                ", ".join(computed),
            )
        if unknown:
            log.warning(
                "an export of %r will lack %s: a hook of its state dict makes that of no one tensor of the module",
                name,
                ", ".join(unknown),
            )
        return keys

    def is_registered(self, item: object) -> bool:
        kinds = (self._modules, self._optimizers, self._others)
        return any(item is each for of_kind in kinds for each in of_kind.values())

    def of_class(self, kind: type[_T]) -> list[_T]:
        return [each for each in self._others.values() if isinstance(each, kind)]

    def reach_step(self) -> None:
        """SNAPSHOT-6: the script is about to get the next step, of which a checkpoint may be saved."""
        if not self.is_again:
            self._reached = self.small(cloned=True)

    def begin_step(self) -> None:
        self._has_begun = True
        if self.is_again:
            self.restore()
        self.keep_snapshot()  # also without state: this rank's may be designated (RECOVERY-3)
        self.is_again = False
        for name, module in self._modules.items():
            if not any(isinstance(parameter, DTensor) for parameter in self._parameters[name].values()):
                self._parameters[name] = self._named(
                    name, module.named_parameters()
                )  # FSDP replaces them while it is gathered
        self._count_versions()

    def forget_step(self) -> None:
        """The next step is not one that was dropped: it is another one, or the state was loaded since."""
        self.is_again, self._reached = False, {}

    def _count_versions(self) -> None:
        self._versions = {name: _versions(of_module.values()) for name, of_module in self._parameters.items()}

    def changed_parameter(self) -> str | None:
        """The name of a parameter that was changed since the step began (REGISTERED-9), or since it was dropped, if
        any."""
        for name, of_module in self._parameters.items():
            before, now = self._versions.get(name), _versions(of_module.values())
            if before is not None and now != before:
                key = next(key for key, *both in zip(of_module, before, now, strict=True) if both[0] != both[1])
                return f"{key!r} of {name!r}"
        return None

    def unlike_loaded(self) -> tuple[list[str], list[str]]:
        """As `Loaded.unlike`, of what was loaded last."""
        return self._loaded.unlike(self._parameters, self._own_settings)

    def _own_settings(self) -> Settings:
        is_scheduled = any(isinstance(each, ReduceLROnPlateau) for each in self._others.values())
        return {
            f"{what} of {name!r}": (description, value)
            for name, optimizer in self._optimizers.items()
            for what, description, value in own_settings(optimizer, is_scheduled=is_scheduled)
        }

    def drop_gradients(self) -> None:
        """Of what the optimizers train."""
        for optimizer in self._optimizers.values():
            for parameter in parameters_of(optimizer):
                parameter.grad = None

    def without(self, parameters: Sequence[Tensor]) -> list[int]:
        """The numbers of those of `parameters` that are in no registered module or object."""
        held = {id(each) for of_module in self._parameters.values() for each in of_module.values()}
        left = [number for number, each in enumerate(parameters) if id(each) not in held]
        if not left:
            return []
        tensors = list(_tensors_in([item.state_dict() for item in self._others.values()]))
        return [number for number in left if not any(is_same_memory(parameters[number], each) for each in tensors)]

    def keep_snapshot(self) -> None:
        self.snapshot = self.small(cloned=True)
        self._held = list(map(HeldBuffers, self._modules.values()))
        self.written = staging.device.mark()

    def changed_buffers(self) -> list[str]:
        """The names of the plain buffers of floating-point numbers that have changed since the snapshot."""
        former = self.snapshot.get("buffers", {})
        return [
            f"{name}.{key}"
            for name, module in self._modules.items()
            for key, buffer in self._named(name, module.named_buffers()).items()
            if buffer.is_floating_point() and not isinstance(buffer, DTensor)
            if key in former.get(name, {}) and not torch.equal(former[name][key], buffer)
        ]

    def restore(self) -> None:
        for held in self._held:  # BUFFERS-1
            held.put_back()
        self.load_small(self.snapshot)
        self._count_versions()
        self.is_again = True

    def load(self, state: dict[str, Any]) -> None:
        """All of it: the step in which this rank heals may be dropped, so the snapshot is of it too."""
        is_of_peer = "frozen" not in state  # with whom the settings are compared (ALIKE-2)
        own = {} if is_of_peer or self._has_begun else self._own_settings()
        self._load_large(state["large"], state["small"].get("settings", {}))
        self.load_small(state["small"])
        if not is_of_peer:
            self._loaded = Loaded(state["frozen"], own, self._own_settings() if own else {})
        self.keep_snapshot()
        self._reached = {}  # of another state

    def placed(self, spec: Any, tensors: Sequence[Tensor], divided: Sequence[int]) -> dict[str, Any]:
        """A peer's small state as this rank's (REGISTERED-7). `spec`, `tensors`: as of `flatten`. `divided`: which of
        the tensors are local parts of DTensors there. Raises as `check_small`."""
        parts: list[Any] = list(tensors)
        for number in divided:
            parts[number] = Part(parts[number])
        small: dict[str, Any] = unflatten(spec, parts)
        own = self.small(cloned=False)
        for kind, what in (("buffers", "the buffers of"), ("others", "the state of")):
            small[kind] = {
                name: placed_like(tree, own[kind].get(name), f"{what} {name!r}") for name, tree in small[kind].items()
            }
        self.check_small(small)
        return small

    def check_small(self, small: dict[str, Any]) -> None:
        """Raises KeyError, TypeError, AttributeError or WireError: it is no small state of these objects."""
        for name, values in small["buffers"].items():
            self._buffers(name).check(values)
        for name in small["others"]:
            self._others[name]
        for name, groups in small.get("settings", {}).items():
            check_num_groups(name, groups, self._optimizers[name])

    def targets(
        self, in_place: bool, spec: Any, shapes: list[Any], num_chunks: int | None, former: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """As `HealTargets.find`."""
        found = HealTargets(self.large(), self._optimizers, self.reserve)
        return found.find(in_place, spec, shapes, num_chunks, former)

    @property
    def num_bytes(self) -> int:
        """The size of the local parameters."""
        return sum(local(each).nbytes for of_module in self._parameters.values() for each in of_module.values())

    @property
    def model(self) -> str:
        """Names, shapes and dtypes of all parameters, in short. A DTensor counts as a whole."""
        found = [
            (name, key, tuple(parameter.shape), str(parameter.dtype), parameter.numel())
            for name, of_module in self._parameters.items()
            for key, parameter in of_module.items()
        ]
        digest = hashlib.blake2b(repr(sorted(found)).encode(), digest_size=4).hexdigest()
        return f"{len(found)} parameters of {sum(size for *_, size in found)} elements ({digest})"

    @property
    def form(self) -> Form:
        """Of all objects (`state_form.py`). Read it before the first step, and when others are registered."""
        names = {
            id(each): f"{key} of {name!r}"
            for name, parameters in self._parameters.items()
            for key, each in parameters.items()
        }
        for name in self._modules.keys() - self._forms.keys():
            self._forms[name] = tuple(form_of_module(name, self._parameters[name], self._keys[name].values()))
        for name in self._optimizers.keys() - self._forms.keys():
            self._forms[name] = tuple(form_of_optimizer(name, self._optimizers[name], names))
        kinds = (self._modules, self._others, self._optimizers)
        objects = [(f"the object {name!r}", "registered") for of_kind in kinds for name in of_kind]
        found = [self._forms[name] for name in (*self._modules, *self._optimizers)]
        return (*objects, *(item for of_object in found for item in of_object))

    @property
    def optimizer_bytes(self) -> int:
        """How much of a `MemoryReserve` the local state of optimizers takes. 0: an optimizer cannot say."""
        try:
            states = [locally(optimizer.state_dict()) for optimizer in self._optimizers.values()]
        except Exception as exc:  # of the script's class
            log.debug("the size of the state of optimizers is not known: %r", exc)
            return 0
        return sum(memory_reserve.room_for(tensor) for tensor in _tensors_in(states) if staging.is_on_host(tensor))

    def small(self, *, cloned: bool) -> dict[str, Any]:
        """The small state: buffers, registered objects and settings of optimizers, which forward and the code around it
        change."""
        buffers = {
            name: {
                key: buffer.detach().clone() if cloned else buffer
                for key, buffer in self._named(name, module.named_buffers()).items()
            }
            for name, module in self._modules.items()
        }
        others = {name: item.state_dict() for name, item in self._others.items()}
        settings = {name: list(map(settings_of, groups_of(item))) for name, item in self._optimizers.items()}
        return {
            "buffers": buffers,
            "others": copy.deepcopy(others) if cloned else others,
            "settings": copy_of(settings) if cloned else settings,
        }

    def load_small(self, small: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, values in small["buffers"].items():
                self._buffers(name).load(values)
            for name, groups in small.get("settings", {}).items():  # no checkpoint has them here
                for group, settings in zip(groups_of(self._optimizers[name]), groups, strict=False):
                    set_settings(group, settings)
        for name, state in small["others"].items():
            self._others[name].load_state_dict(copy.deepcopy(state))

    def large(self) -> dict[str, Any]:
        """The large state: the local parts, without settings (REGISTERED-6). "owned": the parameters of each optimizer,
        by their numbers among all of the registered modules; -1 if they are in none (HEALTARGETS-2)."""
        parameters = {
            name: {key: local(parameter) for key, parameter in of_module.items()}
            for name, of_module in self._parameters.items()
        }
        optimizers = {name: without_settings(locally(item.state_dict())) for name, item in self._optimizers.items()}
        every = [id(each) for of_module in self._parameters.values() for each in of_module.values()]
        numbers = {parameter: number for number, parameter in reversed(list(enumerate(every)))}
        owned = {
            name: [numbers.get(id(each), -1) for each in parameters_of(item)] for name, item in self._optimizers.items()
        }
        return {"parameters": parameters, "optimizers": optimizers, "owned": owned}

    def tree(self) -> dict[str, Any]:
        """All state, with DTensors: the large state, and the snapshot of the small state (SNAPSHOT-6). "owned": the
        parameters of each optimizer, in the order of its state dict. "keys": as REGISTERED-2 has them.
        "has_buffer": whether a module has a buffer of that name, which may be None, or another name of one."""
        small, optimizers = self._reached or self.snapshot or self.small(cloned=True), self._optimizers.items()
        settings = small["settings"]
        owned = {name: parameters_of(optimizer) for name, optimizer in optimizers}
        return {
            "parameters": self._parameters,
            "optimizers": {name: with_settings(item.state_dict(), settings.get(name, ())) for name, item in optimizers},
            "buffers": small["buffers"],
            "others": small["others"],
            "owned": owned,
            "keys": self._keys,
            "has_buffer": lambda module, name: self._buffers(module).has(name),
        }

    def _load_large(self, large: dict[str, Any], settings: dict[str, list[dict[str, Any]]]) -> None:
        """`settings`: those that `large` lacks, by optimizer and group (REGISTERED-6)."""
        writer = staging.Writer()
        with torch.no_grad():
            for name, parameters in large["parameters"].items():
                present = self._parameters[name]
                for key, value in parameters.items():
                    own = local(present[key])
                    if not is_same_memory(value, own):  # received in place
                        writer.copy(once(own, own), once(value, own))
        for name, state in large["optimizers"].items():
            optimizer = self._optimizers[name]
            ours = placed(with_settings(state, settings.get(name, ())), optimizer, writer)
            optimizer.load_state_dict(ours)
            keep_dtypes(name, ours["state"], optimizer)
        writer.finish()


def _is_as_torchs(optimizer: Stateful) -> bool:
    """Whether its state dict has the form of torch's optimizers, as far as is known."""
    try:
        return {"state", "param_groups"} <= optimizer.state_dict().keys()
    except Exception as exc:  # of the script's class
        log.debug("the form of the state of an optimizer is not known: %r", exc)
        return True


def is_extra_state(name: str) -> bool:
    """Whether a registered object of this name is the extra state of a module (REGISTERED-4)."""
    return EXTRA in name


def _tensors_in(tree: Any) -> Iterator[Tensor]:
    """Whatever else there is."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors_in(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _tensors_in(value)


def _in_memory_of(item: Any, named: dict[str, Tensor]) -> str | None:
    """REGISTERED-2. The name of the tensor that has the same memory as `item` of a state dict."""
    if not isinstance(item, Tensor):
        return None
    mine = local(item)
    if mine.numel() and not mine.is_meta:
        for name, tensor in named.items():
            own = local(tensor)
            if own.dtype == mine.dtype and own.device == mine.device and is_same_memory(own, mine):
                return name
    return None


def _versions(parameters: Collection[Tensor]) -> list[int]:
    """How often torch has seen each of them change."""
    try:
        return [each._version for each in parameters]
    except RuntimeError:  # torch does not count for those that were made in inference mode
        return [0 if each.is_inference() else each._version for each in parameters]


def is_same_memory(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride() and one.shape == other.shape
