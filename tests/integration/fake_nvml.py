"""A stand-in for nvidia-ml-py: two devices of one model, whose state is in the files of the directory that FAKE_NVML
names. `users-N`: ids of processes on device N. `ecc-N`: its number of ECC errors. `xid-N`: an Xid that nobody has read.
`lost-N`: the device has fallen off the
bus. Each reading of users appends to `read-N`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

nvmlEventTypeXidCriticalError = 8
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
NUM_DEVICES = 2
UUIDS = ["GPU-aa", "GPU-bb"]


class NVMLError(Exception):
    pass


class NVMLError_Timeout(NVMLError):
    pass


def _path(name: str) -> Path:
    return Path(os.environ["FAKE_NVML"]) / name


def nvmlInit() -> None:
    if _path("no-driver").exists():
        raise NVMLError("Driver Not Loaded")


def nvmlDeviceGetCount() -> int:
    return NUM_DEVICES


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetHandleByUUID(uuid: str) -> int:
    return UUIDS.index(uuid)


def nvmlDeviceGetIndex(handle: int) -> int:
    if _path(f"lost-{handle}").exists():
        raise NVMLError("GPU is lost")
    return handle


def nvmlDeviceGetName(handle: int) -> str:
    return "model"


def nvmlDeviceGetComputeRunningProcesses(handle: int) -> list[Any]:
    with _path(f"read-{handle}").open("a") as file:
        file.write("x")
    try:
        users = _path(f"users-{handle}").read_text().split()
    except FileNotFoundError:
        users = []
    return [SimpleNamespace(pid=int(pid)) for pid in users]


def nvmlDeviceGetTotalEccErrors(handle: int, kind: int, counter: int) -> int:
    assert (kind, counter) == (NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC)
    if handle == 0:
        raise NVMLError("Not Supported")
    ecc = _path(f"ecc-{handle}")
    return int(ecc.read_text()) if ecc.exists() else 0


def nvmlEventSetCreate() -> list[int]:
    return []


def nvmlDeviceRegisterEvents(handle: int, kinds: int, events: list[int]) -> None:
    assert kinds == nvmlEventTypeXidCriticalError
    events.append(handle)


def nvmlEventSetWait(events: list[int], timeout_ms: int) -> Any:
    _path("waits").touch()
    deadline = time.monotonic() + timeout_ms / 1e3
    while time.monotonic() < deadline:
        for handle in events:
            if (xid := _path(f"xid-{handle}")).exists():
                number = int(xid.read_text())
                xid.unlink()
                return SimpleNamespace(device=handle, eventData=number)
        time.sleep(0.005)
    raise NVMLError_Timeout
