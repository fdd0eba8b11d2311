"""Weights of other trainers: what `HuggingFaceStorageWriter` of torch.distributed.checkpoint has written.

torch's own reader reads them. It does not notice a file that is missing, so that is checked here (INTERCHANGE-1).

INTERCHANGE-1  A tensor is read only if its name, shape and dtype are the module's, and the files hold all of it.
INTERCHANGE-2  Of files at a URL, only the headers and the rows that this rank needs are fetched, to files of the same
    sizes in a temporary directory, which torch's reader opens.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

from elasticgang.checkpoint.locations import is_url, storage_at
from elasticgang.checkpoint.saved_objects import ModelMismatch
from elasticgang.checkpoint.storage import Folder
from elasticgang.errors import CheckpointError, NotSupportedError

_SUFFIX = ".safetensors"
_LENGTH_BYTES = 8  # of the number before a header
_MAX_HEADER_BYTES = 100_000_000  # as the package safetensors has it
_FETCH_BYTES = 16 << 20


def load_weights(
    module: nn.Module,
    directory: str | os.PathLike[str],
    *,
    prefix: str = "",
    partial: bool = False,
    names: Callable[[str], str] | None = None,
) -> int:
    """Load the parameters and persistent buffers of `module` from the safetensors files in `directory`, as
    `torch.distributed.checkpoint.HuggingFaceStorageWriter` writes them: whole tensors, or each rank's shards. Every
    rank calls it, before the first step, or in `manager.build`. It does not communicate. Returns the number of tensors.

    `module`: also one with DTensors, of which each rank reads its part. `directory`: also a URL of fsspec, such as
    `s3://bucket/weights`. What this rank needs of its files is fetched to a temporary directory (TMPDIR), and deleted
    again. `prefix`: comes before the module's names in the files; tensors of other names are then left alone.
    `partial`: the module is a part of the model, such as a stage of a pipeline: what the files have besides is left
    alone. `names`: returns the name in the files, without `prefix`, of a parameter or buffer from the one in `module`,
    as of `manager.build`. The extra state of modules (`get_extra_state`) stays as it is.

    Raises:
        CheckpointError: a file cannot be read; or the files do not hold what the module has, the first difference of
            which it names. Then nothing was loaded.
        NotSupportedError: the package safetensors is missing: `pip install 'elasticgang[checkpoint]'`; or what the URL
            needs: `pip install 'elasticgang[fsspec]'`, and fsspec's package for that kind of store.
        OperationalError: fsspec cannot open the URL.
    """
    try:
        from safetensors import SafetensorError
    except ImportError as exc:
        raise NotSupportedError("this needs the package safetensors: pip install 'elasticgang[checkpoint]'") from exc
    with contextlib.ExitStack() as held:
        wanted = _wanted(module, prefix, names)
        return _load(wanted, os.fspath(directory), prefix, partial, SafetensorError, held)


def _wanted(module: nn.Module, prefix: str, names: Callable[[str], str] | None) -> dict[str, Tensor]:
    """The tensors of the module's state dict by their names in the files."""
    wanted: dict[str, Tensor] = {}
    for own, tensor in module.state_dict(keep_vars=True).items():
        if own.rpartition(".")[2] == "_extra_state":
            continue
        if not isinstance(tensor, Tensor):
            raise CheckpointError(f"the module's {own} is no tensor, and safetensors files hold nothing else")
        name = prefix + (own if names is None else names(own))
        if name in wanted:
            raise ValueError(f"`names` must give each tensor a name of its own, but two have {name!r}")
        wanted[name] = tensor
    return wanted


def _load(
    wanted: dict[str, Tensor],
    directory: str,
    prefix: str,
    partial: bool,
    refused: type[Exception],
    held: contextlib.ExitStack,
) -> int:
    """`refused`: what the package safetensors raises."""
    try:
        if is_url(directory):
            mirror = held.enter_context(tempfile.TemporaryDirectory())
            reader: HuggingFaceStorageReader = _UrlReader(directory, Path(mirror))
        else:
            reader = HuggingFaceStorageReader(directory)
        state = _matched(wanted, reader.read_metadata(), directory, prefix, partial)
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no process group is used
            load(state, storage_reader=reader, no_dist=True)
    except (OSError, refused, KeyError, ValueError) as exc:
        raise CheckpointError(f"cannot read the weights in {directory}: {exc}") from exc
    return len(state)


class _UrlReader(HuggingFaceStorageReader):
    """Reads from a URL (INTERCHANGE-2). `mirror`: an empty directory."""

    def __init__(self, url: str, mirror: Path) -> None:
        """Raises OSError or ValueError: the files cannot be read."""
        super().__init__(str(mirror))
        storage = storage_at(url)
        self._folder: Folder = storage.as_folder()
        self._mirror, self._headers = mirror, dict[str, tuple[int, Any]]()
        for file, size in self._folder.sizes(
            sorted(each for each in storage.names() if each.endswith(_SUFFIX))
        ).items():
            self._headers[file] = self._begin(file, size)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            self._fetch(item)
        return super().read_data(plan, planner)

    def _begin(self, file: str, size: int) -> tuple[int, Any]:
        """Make the file in the mirror, with its header. Returns where the data begins, and the header."""
        length = int.from_bytes(self._folder.read(file, _LENGTH_BYTES), "little")
        if not 0 < length <= min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
            raise ValueError(f"{file} has no header of safetensors")
        begin = self._folder.read(file, _LENGTH_BYTES + length)
        with open(self._mirror / file, "wb") as made:
            made.write(begin)
            made.truncate(size)
        return len(begin), json.loads(begin[_LENGTH_BYTES:])

    def _fetch(self, item: ReadItem) -> None:
        """The rows of a tensor that `item` needs. torch's reader has checked the header against the file's size."""
        file = Path(self.storage_data[item.storage_index].relative_path).name
        data_begin, header = self._headers[file]
        entry = header[item.storage_index.fqn]
        first, end = entry["data_offsets"]
        if entry["shape"] and entry["shape"][0]:
            row_bytes = (end - first) // entry["shape"][0]
            first += item.storage_offsets[0] * row_bytes
            end = first + item.lengths[0] * row_bytes
        with open(self._mirror / file, "r+b") as made:
            made.seek(data_begin + first)
            for start in range(first, end, _FETCH_BYTES):
                buffer = bytearray(min(_FETCH_BYTES, end - start))
                self._folder.read_into(file, data_begin + start, memoryview(buffer))
                made.write(buffer)


def _matched(
    wanted: dict[str, Tensor], metadata: Metadata, directory: str, prefix: str, partial: bool
) -> dict[str, Any]:
    """What to load, by the names of the files (INTERCHANGE-1)."""
    saved = {name: each for name, each in metadata.state_dict_metadata.items() if name.startswith(prefix)}
    if not saved:
        start = f" whose names begin with {prefix!r}" if prefix else ""
        raise CheckpointError(f"{directory} has no safetensors files with tensors{start}")
    tied: dict[int, list[str]] = {}
    for name, tensor in wanted.items():
        tied.setdefault(id(tensor), []).append(name)
    if not partial and (unknown := sorted(saved.keys() - wanted.keys())):
        raise ModelMismatch(
            f"{unknown[0]} is in {directory}, and the module has none of that name (`partial=True`: it is a part)"
        )
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
