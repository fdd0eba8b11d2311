"""The form of registered modules and optimizers (`protocol/form.py`).

STATEFORM-1  The form of an object is that before the first step. Of buffers it has the names alone, of those that are
    persistent when the module is registered: forward may make others, on some ranks sooner, and replace them, and a
    heal takes those of another shape (BUFFERS-2). Of an optimizer it has the parameters of each group, in order, and
    not the settings, which a heal takes too (SMALLSTATE-1), nor its state, which the first apply makes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from elasticgang.protocol.form import Item
from elasticgang.state.optimizer_settings import groups_of


def form_of_module(name: str, parameters: Mapping[str, Tensor], persistent: Collection[str]) -> Iterator[Item]:
    """STATEFORM-1. `persistent`: the names of parameters and buffers in the state dict of the module."""
    for key, parameter in parameters.items():
        yield f"parameter {key!r} of {name!r}", _described(parameter)
    for key in sorted(set(persistent) - parameters.keys()):
        yield f"buffer {key!r} of {name!r}", "registered"


def _described(parameter: Tensor) -> str:
    """In words: shape and dtype, and where a rank has its part."""
    found = f"{list(parameter.shape)} of {str(parameter.dtype).removeprefix('torch.')}"
    return f"{found}, placed {parameter.placements}" if isinstance(parameter, DTensor) else found


def form_of_optimizer(name: str, optimizer: Any, names: dict[int, str]) -> Iterator[Item]:
    """STATEFORM-1. `names`: of parameters, by their ids."""
    kind = type(getattr(optimizer, "optim", optimizer))  # of what `elasticgang.Optimizer` wraps
    yield f"the class of {name!r}", f"{kind.__module__}.{kind.__qualname__}"
    for number, group in enumerate(groups_of(optimizer)):
        what = f"group {number} of {name!r}"
        yield what, f"{len(group['params'])} parameters"
        for place, parameter in enumerate(group["params"]):
            yield f"parameter {place} of {what}", names.get(id(parameter)) or f"{_described(parameter)}, not registered"
