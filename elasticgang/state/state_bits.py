"""Digests of the training state that replicas have alike (`protocol/state_comparison.py`).

That is the large state: parameters, and the tensors in the state of optimizers; of a DTensor the local part. Buffers
and other registered objects may differ between ranks until a heal, such as the averages of BatchNorm.

BITS-1  A digest is of the values in their logical order, bit by bit. It tells payloads of NaN and the signs of zeros
    apart; strides and addresses do not count, which a heal may change.
BITS-2  A tensor is copied in chunks of `staging.CHUNK_BYTES` at most, if at all. One on a device goes through pinned
    memory, behind all that the current stream has queued.
BITS-3  The order of tensors does not depend on that in which an optimizer has made its state.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from elasticgang.protocol.shortened import shortened
from elasticgang.state import staging
from elasticgang.state.serialization import as_bytes

_MASK = (1 << 52) - 1


def digest(large: dict[str, Any], beat: Callable[[], object]) -> tuple[list[str], list[int]]:
    """The names of the tensors, and their digests, below 2**52. `large`: as of `RegisteredState`. `beat`: called before
    each tensor."""
    names, digests = [], []
    reader: staging.Reader | None = None
    for name, tensor in _tensors(large):
        beat()
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
            continue  # it has no plain memory
        if tensor.numel() and not tensor.untyped_storage().nbytes():
            continue  # it was freed
        if staging.device.holds(tensor):
            reader = reader or staging.Reader(staging.device.mark(tensor.device if tensor.is_cuda else None))
            found = _of_chunks(reader.chunks(tensor))
        elif _is_flat(tensor):
            found = xxhash.xxh3_64_intdigest(_memory_of(tensor))
        else:
            found = _of_chunks(as_bytes(part) for part in _parts(tensor))
        names.append(name)
        digests.append(found & _MASK)
    return names, digests


def in_words(names: Sequence[str], numbers: Sequence[int]) -> str:
    """`'weight' of 'model' and 2 more`. Empty: they are none of `names`."""
    return shortened([names[number] for number in numbers if number < len(names)], 1)


def _tensors(large: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    parameters = [f"{key!r} of {module!r}" for module, of_module in large["parameters"].items() for key in of_module]
    every = (each for of_module in large["parameters"].values() for each in of_module.values())
    yield from zip(parameters, every, strict=True)
    for name, state in large["optimizers"].items():
        owned = [parameters[number] if number >= 0 else "" for number in large["owned"][name]]
        for path, tensor in _in_tree(state, ()):
            what = f"{path[-1]!r} in {name!r}"
            if path[0] == "state" and type(number := path[1]) is int and 0 <= number < len(owned):
                what = f"{path[-1]!r} of {owned[number] or f'parameter {number}'} in {name!r}"
            yield what, tensor


def _in_tree(tree: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """BITS-3."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, dict):
        for key in sorted(tree, key=str):
            yield from _in_tree(tree[key], (*path, key))
    elif isinstance(tree, list | tuple):
        for number, item in enumerate(tree):
            yield from _in_tree(item, (*path, number))


def _is_flat(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _memory_of(tensor: Tensor) -> Any:
    """Without the views of torch, which take longer than the digest of a small tensor."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()) if tensor.nbytes else b""


def _of_chunks(chunks: Iterator[memoryview]) -> int:
    found = xxhash.xxh3_64()
    for chunk in chunks:
        found.update(chunk)
    return found.intdigest()


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """BITS-2: `tensor` in parts that lie behind one another in logical order (BITS-1)."""
    if tensor.nbytes <= staging.CHUNK_BYTES:
        yield tensor
        return
    dim = next(dim for dim, size in enumerate(tensor.shape) if size > 1)
    half = tensor.shape[dim] // 2
    yield from _parts(tensor.narrow(dim, 0, half))
    yield from _parts(tensor.narrow(dim, half, tensor.shape[dim] - half))
