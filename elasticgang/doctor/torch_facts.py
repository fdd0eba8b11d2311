"""What torch and CUDA say, as one JSON object on stdout: `python -m elasticgang.doctor.torch_facts`.

A process of its own imports torch, because the import may fail, or end the process, or initialise CUDA.
"""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, requires
from typing import Any

import torch
import torch.distributed as dist

_COMPUTE_MODE = 20  # CU_DEVICE_ATTRIBUTE_COMPUTE_MODE
_NCCL_PIN = re.compile(r"nvidia-nccl-cu\d+==([\d.]+)")
_nccl_version: Callable[[], tuple[int, ...]] = torch.cuda.nccl.version  # torch does not annotate it


def main() -> None:
    has_distributed = dist.is_available()
    built = torch.version.cuda
    facts = {
        "version": torch.__version__,
        "has_gloo": has_distributed and dist.is_gloo_available(),
        "cuda": None if built is None else _cuda(built, has_nccl=has_distributed and dist.is_nccl_available()),
    }
    print(json.dumps(facts))


def _cuda(built: str, *, has_nccl: bool) -> dict[str, Any]:
    number = torch.cuda.device_count() if torch.cuda.is_available() else 0
    driver = _library()
    pairs = [(one, other) for one in range(number) for other in range(one + 1, number)]
    return {
        "num_devices": number,
        "driver": None if driver is None else _driver_version(driver),
        "built": [int(part) for part in built.split(".")],
        "nccl": list(_nccl_version()) if has_nccl and number else None,
        "nccl_pin": _nccl_pin(),
        "compute_modes": None if driver is None else _compute_modes(driver, number),
        "no_peers": [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)],
    }


def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    library.cuInit(0)
    return library


def _driver_version(library: ctypes.CDLL) -> list[int] | None:
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)):
        return None
    return [version.value // 1000, version.value % 1000 // 10]


def _compute_modes(library: ctypes.CDLL, number: int) -> list[int] | None:
    modes = []
    for index in range(number):
        device, mode = ctypes.c_int(), ctypes.c_int()
        if library.cuDeviceGet(ctypes.byref(device), index):
            return None
        if library.cuDeviceGetAttribute(ctypes.byref(mode), _COMPUTE_MODE, device):
            return None
        modes.append(mode.value)
    return modes


def _nccl_pin() -> list[int] | None:
    try:
        pins = [match for text in requires("torch") or () if (match := _NCCL_PIN.match(text))]
    except PackageNotFoundError:
        return None
    return [int(part) for part in pins[0][1].split(".")] if pins else None


if __name__ == "__main__":
    main()
