"""State as JSON and tensors, without pickle, so that a peer can send only data.

SERIAL-1  `unflatten(*flatten(tree))` equals `tree`, including tuples, integer keys, NaN and infinities.
SERIAL-2  `flatten` refuses a value of any other type, and a tensor that is not strided (sparse, nested), and names its
    path.
SERIAL-3  A value of a subclass of `int`, `float` or `str` (such as `numpy.float64`), and an integer or a bool of numpy,
    becomes the plain value. A member of an enumeration is refused, because code may compare it by identity;
    `numpy.float32` too, because what is computed with it is rounded to 32 bits, and with a plain one it would not be.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_STRIDED: torch.layout = torch.strided
_PLAIN = (str, int, float, bool, type(None))


def flatten(tree: object) -> tuple[Any, list[Tensor]]:
    """`tree` as JSON-serializable data in which `{"tensor": i}` stands for the i-th of the tensors (SERIAL-1).

    Raises:
        TypeError: a value is neither a strided tensor, a plain value, nor a list, tuple or dict of such.
    """
    tensors: list[Tensor] = []
    return _flatten(tree, tensors, "state"), tensors


def _flatten(tree: object, tensors: list[Tensor], path: str) -> Any:
    if isinstance(tree, Tensor):
        if tree.layout is not _STRIDED or tree.is_nested:
            kind = "nested" if tree.is_nested else str(tree.layout).removeprefix("torch.")
            raise TypeError(f"{path} is a tensor of the layout {kind}; state must be made of strided tensors")
        tensors.append(tree.detach())
        return {"tensor": len(tensors) - 1}
    if type(plain := _plain(tree)) in _PLAIN:
        return plain
    if isinstance(tree, list | tuple):
        items = [_flatten(item, tensors, f"{path}[{index}]") for index, item in enumerate(tree)]
        return {"tuple": items} if isinstance(tree, tuple) else items
    if isinstance(tree, dict):
        for key in tree:
            if type(_plain(key)) not in _PLAIN:
                raise TypeError(f"{path} has the key {key!r} of {type(key).__name__}; keys must be plain values")
        return {"dict": [[_plain(key), _flatten(value, tensors, f"{path}[{key!r}]")] for key, value in tree.items()]}
    raise TypeError(  # SERIAL-2
        f"{path} is of {type(tree).__name__}; state must be made of tensors, numbers, strings, lists, tuples and dicts"
    )


def _plain(value: Any) -> Any:
    """SERIAL-3. What is no such value, as it is."""
    if type(value) in _PLAIN or isinstance(value, enum.Enum):
        return value
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    numpy = sys.modules.get("numpy")  # without it no value is numpy's
    return value.item() if numpy is not None and isinstance(value, numpy.integer | numpy.bool_) else value


def unflatten(data: Any, tensors: Sequence[Tensor]) -> Any:
    """Raises KeyError, IndexError or TypeError: `data` is not a result of `flatten`."""
    if isinstance(data, list):
        return [unflatten(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    if "tensor" in data:
        return tensors[data["tensor"]]
    if "tuple" in data:
        return tuple(unflatten(item, tensors) for item in data["tuple"])
    return {key: unflatten(value, tensors) for key, value in data["dict"]}


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, without a copy if it is contiguous and on the CPU."""
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")
