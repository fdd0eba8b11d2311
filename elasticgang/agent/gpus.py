"""The CUDA devices of this host, as the agent sees them, which must not start CUDA."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_NODE = re.compile(r"nvidia\d+", re.ASCII)


def visible_devices(environ: Mapping[str, str], nodes: Iterable[str]) -> tuple[int, ...]:
    """The indices of the devices that CUDA shows to a process with this environment. `nodes`: the names in /dev. As
    CUDA does, it takes the entries of CUDA_VISIBLE_DEVICES up to the first one that is empty, negative, or the index of
    no device. Where /dev has no device at all, as under WSL, any index may be one."""
    num_nodes = sum(_NODE.fullmatch(node) is not None for node in nodes)
    if _VISIBLE not in environ:
        return tuple(range(num_nodes))

    def is_valid(entry: str) -> bool:
        if entry.isdecimal() and num_nodes:
            return int(entry) < num_nodes
        return entry != "" and not entry.startswith("-")

    entries = (entry.strip() for entry in environ[_VISIBLE].split(","))
    return tuple(range(len(list(itertools.takewhile(is_valid, entries)))))


def nvml_names(environ: Mapping[str, str], devices: Sequence[int], models: Sequence[str]) -> dict[int, int | str]:
    """By device, as CUDA numbers it: its number in NVML, or its UUID. `models`: the model of each device, as NVML
    numbers them. CUDA numbers the devices of one model as NVML does; those of several, only with
    CUDA_DEVICE_ORDER=PCI_BUS_ID. Devices whose number is unknown are left out."""
    visible = environ.get(_VISIBLE)
    entries = [str(number) for number in range(len(models))] if visible is None else visible.split(",")
    is_ordered = len(set(models)) <= 1 or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    names: dict[int, int | str] = {}
    for device in devices:
        entry = entries[device].strip() if device < len(entries) else ""
        if entry.startswith("GPU-"):
            names[device] = entry
        elif entry.isdecimal() and is_ordered and int(entry) < len(models):
            names[device] = int(entry)
    return names
