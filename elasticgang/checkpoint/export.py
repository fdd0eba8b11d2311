"""Writes the weights of a checkpoint as one file for inference: plain safetensors, or what `torch.load` reads."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from elasticgang.checkpoint import files, listing
from elasticgang.checkpoint.block_reader import CheckpointReader
from elasticgang.checkpoint.loader import Whole
from elasticgang.checkpoint.locations import storage_at
from elasticgang.checkpoint.manifest import INVALID, SUFFIX, Manifest, TensorEntry
from elasticgang.checkpoint.names import tensor_names, without_axes
from elasticgang.checkpoint.placed import KEYS, MODULE_KINDS
from elasticgang.checkpoint.saved_objects import others_of_stages
from elasticgang.checkpoint.shard import Block, header_of
from elasticgang.checkpoint.storage import Folder
from elasticgang.errors import CheckpointError, NotSupportedError, OperationalError
from elasticgang.layout import MODEL_AXES
from elasticgang.progress import Progress, no_progress
from elasticgang.state.registered_objects import EXTRA, is_extra_state
from elasticgang.state.serialization import as_bytes, unflatten

log = logging.getLogger("elasticgang")


def export(
    source: str | os.PathLike[str], output: Path, module: str | None = None, progress_on: TextIO | None = None
) -> tuple[str, int]:
    """Write the state dict of the registered `module` (None: the only one) to `output`: its parameters and persistent
    buffers under all of their keys, and its extra state, so that `load_state_dict` of the whole model takes it. A
    safetensors file has only the extra state that is one tensor; the rest is left out, with a warning. `source`: a
    checkpoint, or a directory of which the newest usable one is taken, with a warning for each newer one; or the URL of
    one. `progress_on`: where the progress is shown. Returns the checkpoint and the number of keys.

    Raises:
        CheckpointError: there is no usable checkpoint, or none of that module; or a plain tensor of it differs
            between seats, or two stages have different tensors of one name or key. Nothing was written.
        OSError: `output` cannot be written, or `source` cannot be read.
        NotSupportedError, OperationalError: fsspec cannot open `source`.
    """
    storage = storage_at(source)
    if (folder := storage.as_folder()).has_manifest():
        return folder.path, _export(folder, listing.read_manifest(folder), output, module, progress_on)
    problems: list[str] = []
    for found in listing.scan(storage):
        if problems:
            log.warning("cannot use the checkpoint %s; trying the one before", problems[-1])
        problem = found.problem
        if found.manifest is not None:
            try:
                return found.path, _export(found.folder, found.manifest, output, module, progress_on)
            except CheckpointError as exc:
                if not _is_corrupt(found.folder, found.manifest):
                    raise
                problem = str(exc)
        problems.append(f"{found.folder.name}: {problem}")
    raise CheckpointError(
        f"there is no usable checkpoint in {storage.path}" + "".join(f"; {each}" for each in problems)
    )


def _is_corrupt(folder: Folder, manifest: Manifest) -> bool:
    try:
        listing.verify(folder, manifest)
    except CheckpointError:
        return True
    return False


def _export(folder: Folder, manifest: Manifest, output: Path, module: str | None, progress_on: TextIO | None) -> int:
    """As `export`, from one checkpoint. Returns the number of keys."""
    reader = CheckpointReader(folder, manifest, MODEL_AXES)
    names, extra = _weights(manifest, module)
    names |= {key: str(spec["tensor"]) for key, spec in extra.items() if _is_tensor(spec)}
    extra = {key: spec for key, spec in extra.items() if key not in names}
    is_safetensors = output.suffix == SUFFIX
    read = names.values() if is_safetensors else set(names.values())
    num_bytes = sum(_num_bytes(reader.entry(name)) for name in read)
    with contextlib.ExitStack() as held:
        add = no_progress
        if progress_on is not None:
            add = held.enter_context(Progress(output.name, num_bytes, progress_on, time.monotonic)).add
        if is_safetensors:
            if extra:
                log.warning("safetensors files hold tensors alone: %s is left out", ", ".join(sorted(extra)))
                extra = {}
            files.write_file(output, _safetensors(reader, names, add))
        else:
            tensors = {name: _read(reader, reader.entry(name), add) for name in read}
            written = {key: tensors[name] for key, name in names.items()}  # tied ones have one storage
            written |= {key: unflatten(spec, Whole(reader)) for key, spec in extra.items()}  # type: ignore[arg-type]
            _save(written, output)
    return len(names) + len(extra)


class _Output:
    """A file for `torch.save`, which raises RuntimeError for any error of `write`: `error` is the first one."""

    def __init__(self, write: Callable[[memoryview], None]) -> None:
        self._write = write
        self.error: OSError | None = None

    def write(self, data: bytes | memoryview) -> int:
        try:
            self._write(memoryview(data))
        except OSError as exc:
            self.error = self.error or exc
            raise
        return len(data)

    def flush(self) -> None:
        """All of it is written at once."""


def _save(written: dict[str, Any], output: Path) -> None:
    """Raises OSError: `output` cannot be written, and is as it was."""
    with files.new_file(output) as write:
        file = _Output(write)
        try:
            torch.save(written, file)  # type: ignore[arg-type]  # of a file, it calls no other method
        except RuntimeError as exc:
            raise file.error or exc from exc


def _is_tensor(spec: Any) -> bool:
    return isinstance(spec, dict) and "tensor" in spec


def _num_bytes(entry: TensorEntry) -> int:
    return sum(map(entry.num_bytes, entry.pieces))


def _read(reader: CheckpointReader, entry: TensorEntry, on_read: Callable[[int], None]) -> Tensor:
    tensor = reader.read(entry, [0] * len(entry.shape), entry.shape)
    on_read(_num_bytes(entry))
    return tensor


def _weights(manifest: Manifest, module: str | None) -> tuple[dict[str, str], dict[str, Any]]:
    """The tensors of a module by the keys of its state dict, and what it has of extra state by its keys."""
    try:
        by_module = _keys(manifest)
        others = others_of_stages(manifest, lambda name: is_extra_state(name) and name.partition(EXTRA)[0] in by_module)
        states = {name: _module_state(others[name]) for name in others}
    except CheckpointError:
        raise
    except INVALID as exc:
        raise CheckpointError(f"its manifest is invalid: {exc!r}") from exc
    if module is None and len(by_module) == 1:
        (module,) = by_module
    if module not in by_module:
        raise CheckpointError(
            f"name one of the modules of the checkpoint by `--module`: {', '.join(sorted(by_module))}"
        )
    weights = by_module[module]
    extra = {
        name.removeprefix(module + EXTRA): spec for name, spec in states.items() if name.startswith(module + EXTRA)
    }
    if all(short.startswith("module.") for short in weights):  # the wrapper of DistributedDataParallel
        weights = {short.removeprefix("module."): name for short, name in weights.items()}
        extra = {short.removeprefix("module."): spec for short, spec in extra.items()}
    return dict(sorted(weights.items())), extra


def _module_state(spec: Any) -> Any:
    """What `get_extra_state` has returned, in what was saved (REGISTERED-4)."""
    ((_, state),) = spec["dict"]
    return state


def _keys(manifest: Manifest) -> dict[str, dict[str, str]]:
    """By module: the tensor of each key of its state dict, whose names do not say who has written it (PLACED-3).

    Raises:
        CheckpointError: two stages have different tensors under one key.
        INVALID: the manifest is.
    """
    found: dict[str, dict[str, str]] = {}
    for objects in manifest.objects.values():
        for module, spec in objects[KEYS]["dict"] if KEYS in objects else _named_alike(objects):
            keys = found.setdefault(module, {})
            for key, saved in spec["dict"]:
                name = without_axes(saved["tensor"], MODEL_AXES)
                if keys.setdefault(key, name) != name:
                    raise CheckpointError(f"two stages have the key {key}, for {keys[key]} and for {name}")
    return found


def _named_alike(objects: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """As the keys of modules, of a checkpoint of format 1 or 2: the names of all parameters and buffers."""
    for kind in MODULE_KINDS:
        for name in tensor_names(objects[kind]):
            module, _, _ = name.partition(".")
            key = without_axes(name, MODEL_AXES).removeprefix(f"{module}.")
            yield module, {"dict": [[key, {"tensor": name}]]}


def _safetensors(
    reader: CheckpointReader, names: dict[str, str], on_read: Callable[[int], None]
) -> Iterator[memoryview | bytes]:
    """The bytes of a safetensors file, a tensor at a time."""
    entries = {short: reader.entry(name) for short, name in names.items()}
    yield header_of(
        [
            Block(short, each.shape, each.dtype, "", (0,) * len(each.shape), each.shape)
            for short, each in entries.items()
        ],
        is_sharded=False,
    )
    for entry in entries.values():
        yield as_bytes(_read(reader, entry, on_read))


def _file_of(error: OSError, output: str) -> str:
    """The file that an error names. `output` has another name, a hidden one beside it, until it is complete."""
    path = Path(error.filename or output)
    is_output = path.parent == Path(output).parent and path.name.startswith(".")
    return output if is_output else str(path)


def main(argv: list[str]) -> int:
    try:
        path, num_tensors = export(argv[1], Path(argv[2]), argv[3] if len(argv) > 3 else None, sys.stderr)
    except (CheckpointError, NotSupportedError, OperationalError) as exc:
        print(f"elasticgang: error: {exc}", file=sys.stderr)
        return 1
    except OSError as exc:
        what = f"{_file_of(exc, argv[2])}: {exc.strerror}" if exc.strerror else str(exc)
        print(f"elasticgang: error: {what}", file=sys.stderr)
        return 1
    print(f"{num_tensors} tensors of {path} are in {argv[2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
