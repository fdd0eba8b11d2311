"""The objects that a rank's script has registered, and the names of their tensors.

REGISTERED-1  Parameters and buffers are known by the names that they have in the whole model, in every rank and layout:
    those of the registered module, or what a function makes of these where a stage of a pipeline has others.
REGISTERED-2  A module's state dict may have several keys for one tensor, and none for a buffer. Which tensor each key
    is, in the names of REGISTERED-1, is found out when the module is registered, because a state dict may run hooks. A
    tensor that a hook has put in the place of another is the one with the same memory, or else of its key and shape: a
    warning then says that its values are not what the hook makes of them.
REGISTERED-4  What `get_extra_state` of a module returns is small state, as that of a registered object. The object is
    called by the module's key in the state dict of the whole model (REGISTERED-1), so that it finds its stage. The
    script can register no object under such a name, which has a colon.
REGISTERED-9  A step changes no parameter before its apply: what a learner reads meanwhile, and what a dropped step
    leaves, would be no committed state. The version of a parameter counts the changes; those of `.data` are not seen.
"""

from __future__ import annotations

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
from elasticgang.state.buffers import Buffers
from elasticgang.state.dtensor import local, locally
from elasticgang.state.loaded import Settings
from elasticgang.state.optimizer_settings import own_settings, parameters_of
from elasticgang.state.serialization import flatten
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


class RegisteredObjects:
    """By the names that the script has given them. `keys`: as REGISTERED-2 has them. `others`: what is neither a module
    nor an optimizer, and the extra states of modules (REGISTERED-4)."""

    def __init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}
        self._name_of: dict[str, Callable[[str], str]] = {}  # of the modules whose names may not be the model's
        self.parameters: dict[str, dict[str, nn.Parameter]] = {}
        self.keys: dict[str, dict[str, str]] = {}
        self.optimizers: dict[str, Stateful] = {}
        self.others: dict[str, Stateful] = {}
        self._forms: dict[str, Form] = {}  # by the name of the object, of those that `form` has read
        self._versions: dict[str, list[int]] = {}  # of the parameters, as of `changed_parameter`

    def register(self, name_of: Callable[[str], str] | None = None, /, **objects: object) -> None:
        """`name_of`: returns the whole model's name of a parameter or buffer from the one in its module.

        Raises:
            ValueError: two of a module get the same name, or an object of this name is registered already, or the name
                has a colon (REGISTERED-4).
            TypeError: an object cannot be saved.
        """
        for name, item in objects.items():
            if name in self.modules or name in self.optimizers or name in self.others:
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
                self.parameters[name] = self._named(name, item.named_parameters())
                self.keys[name] = self._keys_of(name, item)
                self.modules[name] = item
                self.others |= extra
                if any(staging.device.holds(local(each)) for each in self.parameters[name].values()):
                    staging.prepare()  # PINNED-5
            elif hasattr(item, "param_groups"):
                if not _is_as_torchs(item):
                    raise TypeError(
                        f"{name} ({type(item).__name__}) has `param_groups`, so that its state dict must have `state` "
                        "and `param_groups`, as that of torch's optimizers"
                    )
                self.optimizers[name] = item
            else:
                flatten(item.state_dict())  # raises now and not when a peer heals
                self.others[name] = item

    def unregister(self, names: Sequence[str]) -> None:
        """Forget the objects of these names."""
        for name in names:
            for extra in [other for other in self.others if other.startswith(f"{name}{EXTRA}")]:
                del self.others[extra]
            of_modules = (self.modules, self._name_of, self.parameters, self.keys)
            for objects in (*of_modules, self.optimizers, self.others, self._forms):
                objects.pop(name, None)

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

    def buffers(self, name: str) -> dict[str, Tensor]:
        """Those of the module `name`, by the names of REGISTERED-1."""
        return self._named(name, self.modules[name].named_buffers())

    def places_of_buffers(self, name: str) -> Buffers:
        """Where the module `name` has its buffers now."""
        return Buffers(self.modules[name], self._name_of.get(name, str), self.buffers(name))

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
        named: dict[str, torch.Tensor] = {**self.parameters[name], **self._named(name, module.named_buffers())}
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
        kinds = (self.modules, self.optimizers, self.others)
        return any(item is each for of_kind in kinds for each in of_kind.values())

    def of_class(self, kind: type[_T]) -> list[_T]:
        return [each for each in self.others.values() if isinstance(each, kind)]

    def begin_step(self) -> None:
        for name, module in self.modules.items():
            if not any(isinstance(parameter, DTensor) for parameter in self.parameters[name].values()):
                self.parameters[name] = self._named(
                    name, module.named_parameters()
                )  # FSDP replaces them while it is gathered
        self.count_versions()

    def count_versions(self) -> None:
        """Changes of parameters count from now on, for `changed_parameter`."""
        self._versions = {name: _versions(of_module.values()) for name, of_module in self.parameters.items()}

    def changed_parameter(self) -> str | None:
        """The name of a parameter that was changed since the step began (REGISTERED-9), or since it was dropped, if
        any."""
        for name, of_module in self.parameters.items():
            before, now = self._versions.get(name), _versions(of_module.values())
            if before is not None and now != before:
                key = next(key for key, *both in zip(of_module, before, now, strict=True) if both[0] != both[1])
                return f"{key!r} of {name!r}"
        return None

    def own_settings(self) -> Settings:
        """Of the optimizers, as the script has set them."""
        is_scheduled = any(isinstance(each, ReduceLROnPlateau) for each in self.others.values())
        return {
            f"{what} of {name!r}": (description, value)
            for name, optimizer in self.optimizers.items()
            for what, description, value in own_settings(optimizer, is_scheduled=is_scheduled)
        }

    def drop_gradients(self) -> None:
        """Of what the optimizers train."""
        for optimizer in self.optimizers.values():
            for parameter in parameters_of(optimizer):
                parameter.grad = None

    def without(self, parameters: Sequence[Tensor]) -> list[int]:
        """The numbers of those of `parameters` that are in no registered module or object."""
        held = {id(each) for of_module in self.parameters.values() for each in of_module.values()}
        left = [number for number, each in enumerate(parameters) if id(each) not in held]
        if not left:
            return []
        tensors = list(_tensors_in([item.state_dict() for item in self.others.values()]))
        return [number for number in left if not any(is_same_memory(parameters[number], each) for each in tensors)]

    @property
    def num_bytes(self) -> int:
        """The size of the local parameters."""
        return sum(local(each).nbytes for of_module in self.parameters.values() for each in of_module.values())

    @property
    def model(self) -> str:
        """Names, shapes and dtypes of all parameters, in short. A DTensor counts as a whole."""
        found = [
            (name, key, tuple(parameter.shape), str(parameter.dtype), parameter.numel())
            for name, of_module in self.parameters.items()
            for key, parameter in of_module.items()
        ]
        digest = hashlib.blake2b(repr(sorted(found)).encode(), digest_size=4).hexdigest()
        return f"{len(found)} parameters of {sum(size for *_, size in found)} elements ({digest})"

    @property
    def form(self) -> Form:
        """Of all objects (`state_form.py`). Read it before the first step, and when others are registered."""
        names = {
            id(each): f"{key} of {name!r}"
            for name, parameters in self.parameters.items()
            for key, each in parameters.items()
        }
        for name in self.modules.keys() - self._forms.keys():
            self._forms[name] = tuple(form_of_module(name, self.parameters[name], self.keys[name].values()))
        for name in self.optimizers.keys() - self._forms.keys():
            self._forms[name] = tuple(form_of_optimizer(name, self.optimizers[name], names))
        kinds = (self.modules, self.others, self.optimizers)
        objects = [(f"the object {name!r}", "registered") for of_kind in kinds for name in of_kind]
        found = [self._forms[name] for name in (*self.modules, *self.optimizers)]
        return (*objects, *(item for of_object in found for item in of_object))

    @property
    def optimizer_bytes(self) -> int:
        """How much of a `MemoryReserve` the local state of optimizers takes. 0: an optimizer cannot say."""
        try:
            states = [locally(optimizer.state_dict()) for optimizer in self.optimizers.values()]
        except Exception as exc:  # of the script's class
            log.debug("the size of the state of optimizers is not known: %r", exc)
            return 0
        return sum(memory_reserve.room_for(tensor) for tensor in _tensors_in(states) if staging.is_on_host(tensor))


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
