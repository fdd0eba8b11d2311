"""Where a rank that heals receives the large state of a peer.

HEALTARGETS-1  A state that is received in place is in memory that no two of its tensors share.
HEALTARGETS-2  Parameters are paired by their places: those of a module in the buckets of gradients, and those of an
    optimizer in its state. So a state in which they have another order is refused.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from elasticgang.errors import WireError
from elasticgang.state import staging, transport
from elasticgang.state.buffers import once
from elasticgang.state.dtensor import local
from elasticgang.state.memory_reserve import MemoryReserve
from elasticgang.state.optimizer_settings import check_groups, parameters_of
from elasticgang.state.optimizer_state import is_number_of
from elasticgang.state.serialization import unflatten


class _Slot(NamedTuple):
    """Stands for a tensor that a peer has, by its number."""

    number: int


class HealTargets:
    """`own`: as of `RegisteredState.large`. `optimizers`: the registered ones. `reserve`: memory for new tensors."""

    def __init__(self, own: dict[str, Any], optimizers: Mapping[str, Any], reserve: MemoryReserve | None) -> None:
        self._own, self._optimizers, self._reserve = own, optimizers, reserve

    def find(
        self, in_place: bool, spec: Any, shapes: list[Any], num_chunks: int | None, former: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Where a peer's large state is received: for each tensor of its `spec` and `shapes`, this rank's tensor of the
        same name. What this rank has not, as an optimizer before its first step, is received in new tensors, which
        become its own (HEALTARGETS-1). `in_place`: otherwise in new tensors all. `former`: those of an earlier call
        with these shapes, to use again. Second: this rank's tensors of these names, shapes and dtypes, which nothing
        writes to but the heal.

        Raises:
            WireError: this is no state of the registered objects: names the first difference.
        """
        kinds = transport.check_shapes(shapes, num_chunks)
        slots = [_Slot(number) for number in range(len(kinds))]
        offered: dict[str, Any] = unflatten(spec, slots)  # type: ignore[arg-type]
        own = self._own
        for name, parameters in own["parameters"].items():
            _check_names(name, parameters, offered["parameters"][name])
        found: dict[int, Tensor] = {}
        _pair(offered, own, found)
        for name, parameters in offered["parameters"].items():
            for key, slot in parameters.items():
                shape, dtype = kinds[slot.number]
                if slot.number not in found:
                    raise WireError(f"this rank has no parameter {key!r} of {name!r}")
                offer = torch.empty(shape, dtype=dtype, device="meta")
                _check_alike(f"parameter {key!r} of {name!r}", offer, found[slot.number])
        if set(offered["optimizers"]) != set(own["optimizers"]):
            raise WireError(f"its optimizers are {sorted(offered['optimizers'])}, not {sorted(own['optimizers'])}")
        theirs, mine = _owned(offered), _owned(own)
        for name, state in offered["optimizers"].items():
            check_groups(name, state["param_groups"], self._optimizers[name])
            _check_order(name, theirs[name], mine[name])
        devices = self._devices_of(offered["optimizers"], kinds) if in_place else {}
        taken = _Intervals()
        targets: list[Tensor] = []
        fitting: list[Tensor | None] = []
        for number, (shape, dtype) in enumerate(kinds):
            present = found.get(number)
            if present is not None and not (_fits(present, shape, dtype) and (not in_place or taken.add(present))):
                present = None  # also where the heal of another tensor changes it
            fitting.append(present)
            if in_place and present is not None:
                targets.append(present)
            elif former:
                targets.append(former[number])
            elif number in devices:
                targets.append(torch.empty(tuple(shape), dtype=dtype, device=devices[number]))
            else:
                taken_from = None if self._reserve is None else self._reserve.take(shape, dtype)
                targets.append(transport.empty(shape, dtype) if taken_from is None else taken_from)
        return targets, fitting

    def _devices_of(self, offered: dict[str, Any], kinds: list[tuple[list[int], torch.dtype]]) -> dict[int, Any]:
        """The devices of large state in the shape of its parameter, which optimizers keep on the parameter's device, by
        the numbers of its tensors."""
        found: dict[int, Any] = {}
        for name, state in offered.items():
            parameters = parameters_of(self._optimizers[name])
            for index, of_parameter in state["state"].items():
                if not is_number_of(index, parameters):
                    continue
                part = local(parameters[index])
                for value in of_parameter.values() if isinstance(of_parameter, dict) else [of_parameter]:
                    if isinstance(value, _Slot):
                        shape, dtype = kinds[value.number]
                        is_large = part.numel() * dtype.itemsize > staging.CHUNK_BYTES
                        if is_large and shape == list(part.shape) and staging.device.holds(part):
                            found[value.number] = part.device
        return found


def _pair(offered: Any, own: Any, found: dict[int, Tensor]) -> None:
    """Add to `found` this rank's tensor for each slot of `offered`, by the place that both have in their trees."""
    if isinstance(offered, _Slot):
        if isinstance(own, Tensor):
            found[offered.number] = own
    elif isinstance(offered, dict) and isinstance(own, dict):
        for key, value in offered.items():
            _pair(value, own.get(key), found)
    elif isinstance(offered, list | tuple) and isinstance(own, list | tuple):
        for value, mine in zip(offered, own, strict=False):
            _pair(value, mine, found)


def _check_names(module: str, own: dict[str, Any], offered: dict[str, Any]) -> None:
    for key in own.keys() ^ offered.keys():
        whose = "this rank's" if key in own else "the source's"
        raise WireError(f"only {whose} {module!r} has the parameter {key!r}")
    for mine, theirs in zip(own, offered, strict=True):  # HEALTARGETS-2
        if mine != theirs:
            raise WireError(
                f"the parameters of {module!r} have another order at the source: {theirs!r} is where this rank has "
                f"{mine!r}. Make the modules in the same order in every process"
            )


def _owned(large: dict[str, Any]) -> dict[str, list[str]]:
    """What the parameters of each optimizer are called, in its order."""
    names = [f"{key!r} of {module!r}" for module, of_module in large["parameters"].items() for key in of_module]
    return {
        optimizer: [names[number] if number >= 0 else "in no module" for number in numbers]
        for optimizer, numbers in large["owned"].items()
    }


def _check_order(optimizer: str, offered: list[str], own: list[str]) -> None:
    """HEALTARGETS-2. Raises WireError."""
    for number, (theirs, mine) in enumerate(zip(offered, own, strict=True)):
        if theirs != mine:
            raise WireError(
                f"parameter {number} of the optimizer {optimizer!r} is {theirs} at the source, and {mine} here: give "
                "the optimizer its parameters in the same order in every process"
            )


def _check_alike(what: str, offered: Tensor, own: Tensor) -> None:
    if (offered.shape, offered.dtype) != (own.shape, own.dtype):
        theirs, mine = (f"{list(each.shape)} of {str(each.dtype)[6:]}" for each in (offered, own))
        raise WireError(f"the {what} is {theirs} at the source, and {mine} here")


def _fits(tensor: Tensor, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether bytes of that shape and dtype can be received into the memory of `tensor`."""
    if (list(tensor.shape), tensor.dtype) != (shape, dtype):
        return False
    has_other_bytes = tensor.is_conj() or tensor.is_neg()  # than those of its values
    return not has_other_bytes and once(tensor, tensor) is tensor  # an expanded one repeats its memory


class _Intervals:
    """Memory that is taken, so that no two tensors are received in the same."""

    def __init__(self) -> None:
        self._ends: dict[torch.device, list[tuple[int, int]]] = {}  # sorted

    def add(self, tensor: Tensor) -> bool:
        """False: some of its memory is taken."""
        if not tensor.numel():
            return True
        start = tensor.data_ptr()
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = start + span * tensor.itemsize
        taken = self._ends.setdefault(tensor.device, [])
        place = bisect.bisect(taken, (start, end))
        is_free = (place == 0 or taken[place - 1][1] <= start) and (place == len(taken) or end <= taken[place][0])
        if is_free:
            taken.insert(place, (start, end))
        return is_free
