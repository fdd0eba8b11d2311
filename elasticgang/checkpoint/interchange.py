"""Weights of other trainers: what `HuggingFaceStorageWriter` of torch.distributed.checkpoint has written.

torch's own reader reads them. It does not notice a file that is missing, so that is checked here (INTERCHANGE-1).

INTERCHANGE-1  A tensor is read only if its name, shape and dtype are the module's, and the files hold all of it.
"""

from __future__ import annotations

import math
import os
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from elasticgang.checkpoint.loader import ModelMismatch
from elasticgang.errors import CheckpointError, NotSupportedError


def load_weights(module: nn.Module, directory: str | os.PathLike[str], *, prefix: str = "") -> int:
    """Load the parameters and persistent buffers of `module` from the safetensors files in `directory`, as
    `torch.distributed.checkpoint.HuggingFaceStorageWriter` writes them: whole tensors, or each rank's shards. Every
    rank calls it, before the first step, or in `manager.build`. It does not communicate. Returns the number of tensors.

    `module`: also one with DTensors, of which each rank reads its part. `prefix`: comes before the module's names in
    the files; tensors of other names are then left alone.

    Raises:
        CheckpointError: a file cannot be read; or the files do not hold what the module has, the first difference of
            which it names. Then nothing was loaded.
        NotSupportedError: the package safetensors is missing: `pip install 'elasticgang[checkpoint]'`.
    """
    try:
        from safetensors import SafetensorError
    except ImportError as exc:
        raise NotSupportedError("this needs the package safetensors: pip install 'elasticgang[checkpoint]'") from exc
    try:
        reader = HuggingFaceStorageReader(os.fspath(directory))
        state = _matched(module, reader.read_metadata(), os.fspath(directory), prefix)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no process group is used
            load(state, storage_reader=reader, no_dist=True)
    except (OSError, SafetensorError, KeyError, ValueError) as exc:
        raise CheckpointError(f"cannot read the weights in {os.fspath(directory)}: {exc}") from exc
    return len(state)


def _matched(module: nn.Module, metadata: Metadata, directory: str, prefix: str) -> dict[str, Any]:
    """What to load, by the names of the files (INTERCHANGE-1)."""
    saved = {name: each for name, each in metadata.state_dict_metadata.items() if name.startswith(prefix)}
    if not saved:
        start = f" whose names begin with {prefix!r}" if prefix else ""
        raise CheckpointError(f"{directory} has no safetensors files with tensors{start}")
    tied: dict[int, list[str]] = {}
    wanted: dict[str, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"the module's {name} is no tensor, and safetensors files hold nothing else")
        wanted[prefix + name] = tensor
        tied.setdefault(id(tensor), []).append(prefix + name)
    if unknown := sorted(saved.keys() - wanted.keys()):
        raise ModelMismatch(f"{unknown[0]} is in {directory}, and the module has none of that name")
    found: dict[str, Any] = {}
    for names in tied.values():
        present = [name for name in names if name in saved]
        if not present:
            raise ModelMismatch(f"{names[0]} of the module is not in {directory}")
        for name in present:
            _check(name, wanted[name], saved[name], directory)
            found[name] = wanted[name]
    return found


def _check(name: str, tensor: Tensor, entry: Any, directory: str) -> None:
    assert isinstance(entry, TensorStorageMetadata)
    if entry.size != tensor.shape:
        raise ModelMismatch(f"{name} is {list(entry.size)} in {directory}, but {list(tensor.shape)} in the module")
    if entry.properties.dtype != tensor.dtype:
        raise ModelMismatch(f"{name} is {entry.properties.dtype} in {directory}, but {tensor.dtype} in the module")
    if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != tensor.numel():
        raise CheckpointError(f"the files in {directory} do not hold all of {name}, or hold a part of it twice")
