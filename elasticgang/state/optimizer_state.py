"""What an optimizer keeps for its parameters, as a rank loads it.

OPTIMIZERSTATE-1  What an optimizer keeps has the dtype that it was received in. torch's `load_state_dict` converts it
    to that of the parameter, and so loses bits of master weights, of averages beside bfloat16, and of codes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from elasticgang.state import staging
from elasticgang.state.dtensor import like, local, locally
from elasticgang.state.optimizer_settings import parameters_of

log = logging.getLogger("elasticgang")


def placed(state: dict[str, Any], optimizer: Any, writer: staging.Writer) -> dict[str, Any]:
    """An optimizer's state, with DTensors for parameters that are DTensors, and on the devices of the parameters."""
    parameters = parameters_of(optimizer)
    former = locally(optimizer.state_dict()["state"])

    def place(value: Any, parameter: Tensor, former: Any) -> Any:
        return like(_on_device(value, parameter, former, writer), parameter)

    placed = {}
    for index, kept in state["state"].items():
        if not is_number_of(index, parameters):
            continue
        parameter, mine = parameters[index], former.get(index)
        if isinstance(kept, dict):
            mine = mine if isinstance(mine, dict) else {}
            placed[index] = {key: place(value, parameter, mine.get(key)) for key, value in kept.items()}
        else:
            placed[index] = place(kept, parameter, mine)
    return {**state, "state": {**state["state"], **placed}}


def is_number_of(key: object, parameters: Sequence[Tensor]) -> bool:
    """Whether `key` of an optimizer's state stands for a parameter. Others are the optimizer's own."""
    return type(key) is int and 0 <= key < len(parameters)


def keep_dtypes(name: str, received: dict[Any, Any], optimizer: Any) -> None:
    """OPTIMIZERSTATE-1. The dicts in `state_dict` are those of the optimizer, as torch makes it."""
    converted = list(_converted(received, optimizer.state_dict()["state"]))
    for tensors, key, tensor in converted:
        if isinstance(tensors, dict | list):
            tensors[key] = tensor.to(tensors[key].device)
    if not converted:
        return
    if left := [tensor.dtype for _, _, tensor in _converted(received, optimizer.state_dict()["state"])]:
        log.warning("load_state_dict of %r has converted state to another dtype than %s", name, left[0])


def _converted(received: Any, loaded: Any) -> Iterator[tuple[Any, Any, Tensor]]:
    """The tensors of `received` that have another dtype in `loaded`: the dict or sequence there, and the key in it."""
    keys: Iterable[Any] = ()
    if isinstance(received, dict) and isinstance(loaded, dict):
        keys = [key for key in received if key in loaded]
    elif isinstance(received, list | tuple) and isinstance(loaded, list | tuple):
        keys = range(min(len(received), len(loaded)))
    for key in keys:
        value, own = received[key], loaded[key]
        if not isinstance(value, Tensor):
            yield from _converted(value, own)
        elif isinstance(own, Tensor) and own.dtype != value.dtype:
            yield loaded, key, value


def _on_device(value: Any, parameter: torch.Tensor, former: Any, writer: staging.Writer) -> Any:
    """Large state in the shape of its parameter, which optimizers keep on the parameter's device: in the memory of
    `former`, if it fits, so that the device holds it once. Other values as they are: `load_state_dict` copies what is
    not on its device yet."""
    part = local(parameter)
    if not isinstance(value, torch.Tensor) or value.shape != part.shape or not staging.device.holds(part):
        return value
    if value.nbytes <= staging.CHUNK_BYTES or staging.device.holds(value):
        return value
    fits = isinstance(former, torch.Tensor) and (former.shape, former.dtype) == (value.shape, value.dtype)
    target = former if fits and staging.device.holds(former) else torch.empty_like(value, device=part.device)
    writer.copy(target, value)
    return target
