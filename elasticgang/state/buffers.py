"""The buffers of a registered module, which forward may replace, add and remove, and its mode.

BUFFERS-1  A dropped step puts back the very tensors that a module had as its buffers when the step began, and their
    values. A module that has replaced one also gets back its own numbers, strings and None from then: they may say what
    the tensor was, such as the length of a cache.
BUFFERS-2  A buffer takes a value of another shape or dtype, or one that it has not, as a new tensor in its place, also
    where the module has the former one under other names. Any other value is copied into the tensor that is there.
BUFFERS-3  A dropped step puts back the mode of each module, `train()` or `eval()`. Otherwise an evaluation that a loss
    of the step cuts off would leave them in `eval()`, and the step that is tried again would train without dropout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from elasticgang.errors import WireError
from elasticgang.state.dtensor import local
from elasticgang.torch_private import own_buffers

_PLAIN = (int, float, complex, str, bool, type(None))
_OF_TORCH = frozenset(vars(nn.Module()))  # attributes that every module has


class _Held(NamedTuple):
    """What one module had as its buffers."""

    module: nn.Module
    tensors: dict[str, Tensor | None]
    not_persistent: set[str]
    attributes: dict[str, Any]
    training: bool

    def put_back(self) -> None:
        if self.module.training != self.training:
            self.module.training = self.training  # BUFFERS-3
        tensors, not_persistent = own_buffers(self.module)
        if tensors.keys() == self.tensors.keys() and all(tensors[key] is self.tensors[key] for key in tensors):
            return
        tensors.clear()
        tensors.update(self.tensors)
        not_persistent.clear()
        not_persistent.update(self.not_persistent)
        vars(self.module).update(self.attributes)


class HeldBuffers:
    """The tensors that a module and those in it have as buffers now (BUFFERS-1), and modes (BUFFERS-3). The values
    of the tensors are not held."""

    def __init__(self, module: nn.Module) -> None:
        self._held = list(map(_hold, module.modules()))

    def put_back(self) -> None:
        for held in self._held:
            held.put_back()


def _hold(module: nn.Module) -> _Held:
    tensors, not_persistent = own_buffers(module)
    own = vars(module).items() if tensors else ()
    attributes = {key: value for key, value in own if type(value) in _PLAIN and key not in _OF_TORCH}
    return _Held(module, dict(tensors), set(not_persistent), attributes, module.training)


class Buffers:
    """Those of `module`, by the names that `name_of` makes of its own. `present`: those that are tensors, without
    further names of a tensor."""

    def __init__(self, module: nn.Module, name_of: Callable[[str], str], present: Mapping[str, Tensor]) -> None:
        self._module, self._name_of, self._present = module, name_of, present

    def has(self, name: str) -> bool:
        """Also if it is None, or another name of a tensor."""
        return name in self._places()

    def check(self, names: Iterable[str]) -> None:
        """Raises WireError: `load` has no place for a buffer of these names."""
        for name in names:
            if name not in self._present:
                self._place(name)

    def load(self, values: Mapping[str, Tensor]) -> None:
        """BUFFERS-2. Raises WireError: the module has no place for one."""
        for name, value in values.items():
            own = self._present.get(name)
            if own is not None and _is_alike(value, own):
                part = local(own)
                once(part, part).copy_(once(local(value), part))
            else:
                self._replace(name, value.detach(), values.keys())

    def _replace(self, name: str, value: Tensor, given: Collection[str]) -> None:
        """`given`: the names that get values of their own."""
        module, attribute = self._place(name)
        tensors, _ = own_buffers(module)
        former = tensors.get(attribute)
        device = value.device if former is None else former.device
        if former is None and (parameter := next(self._module.parameters(), None)) is not None:
            device = parameter.device
        made = value.to(device, copy=True)
        if attribute not in tensors:
            module.register_buffer(attribute, made, persistent=False)  # forward makes it, so that none need be saved
        for key, (other, own) in self._places().items():
            of_other, _ = own_buffers(other)
            if key == name or (former is not None and of_other[own] is former and key not in given):
                of_other[own] = made

    def _place(self, name: str) -> tuple[nn.Module, str]:
        """The module that has the buffer, or has a place for it, and its attribute there. Raises WireError."""
        if (found := self._places().get(name)) is not None:
            return found
        attribute = name.rpartition(".")[2]
        for path, module in self._module.named_modules():
            if self._name_of(_join(path, attribute)) == name and not hasattr(module, attribute):
                return module, attribute
        raise WireError(f"only the source's module has the buffer {name!r}, and this rank's has no place for it")

    def _places(self) -> dict[str, tuple[nn.Module, str]]:
        """Also of buffers that are None, and under all names."""
        return {
            self._name_of(_join(path, attribute)): (module, attribute)
            for path, module in self._module.named_modules(remove_duplicate=False)
            for attribute in own_buffers(module)[0]
        }


def _join(path: str, attribute: str) -> str:
    return f"{path}.{attribute}" if path else attribute


def _is_alike(value: Tensor, own: Tensor) -> bool:
    one, other = local(value), local(own)
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def once(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor` without the dimensions in which `like` is expanded: torch copies into no tensor that repeats memory."""
    for dim, (size, stride) in enumerate(zip(like.shape, like.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
