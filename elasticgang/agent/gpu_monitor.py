"""What NVIDIA's management library (NVML) tells about this host's devices: fatal errors, and which processes use them.

It needs the package nvidia-ml-py (`pip install 'elasticgang[gpu]'`) and NVIDIA's driver. Without either, nothing is
known. It never starts CUDA. Xid and ECC errors were only seen over a stand-in for the package.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

from elasticgang.agent.gpus import nvml_names

_POLL_MS = 1000
MAX_ERRORS = 16  # of one device that nobody has taken; a broken one may report thousands in a second
_MODULE = "pynvml"


class GpuMonitor:
    """A thread reads the errors. Calls of NVML have no timeout: one that hangs holds up that thread alone."""

    def __init__(self, devices: Sequence[int]) -> None:
        """`devices`: as CUDA numbers them; none, if they are unknown."""
        self._devices = tuple(devices)
        self._lock = threading.Lock()
        self._handles: dict[int, Any] = {}  # by device, once the library is initialized
        self._device_of: dict[int, int] = {}  # by NVML's number, which NVML does not tell of a device that is lost
        self._errors: defaultdict[int, deque[str]] = defaultdict(functools.partial(deque, maxlen=MAX_ERRORS))
        self._num_ecc: dict[int, int] = {}
        self._stopping = threading.Event()

    def start(self) -> None:
        if self._devices:
            threading.Thread(target=self._run, name="gpu-monitor", daemon=True).start()

    def stop(self) -> None:
        """Never blocks."""
        self._stopping.set()

    def take_errors(self, device: int) -> str:
        """What the driver has reported about the device since the last call, in words: the last `MAX_ERRORS` errors.
        Empty if nothing is known."""
        with self._lock:
            return ", ".join(self._errors.pop(device, ()))

    def users(self, device: int) -> set[int] | None:
        """The ids of the processes that have memory on the device. None: unknown. Blocks as long as the driver does."""
        handle = self._handles.get(device)
        if handle is None:
            return None
        try:
            return {process.pid for process in self._nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        except self._nvml.NVMLError:
            return None

    # -- on the thread

    def _run(self) -> None:
        try:
            self._nvml = nvml = importlib.import_module(_MODULE)
        except ImportError:
            return
        try:
            nvml.nvmlInit()
            self._handles = self._find_handles()
            events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            return
        for device, handle in self._handles.items():
            try:
                self._device_of[nvml.nvmlDeviceGetIndex(handle)] = device
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, events)
            except nvml.NVMLError:  # a device without such events, or one that is lost
                continue
        self._read_ecc()
        while not self._stopping.is_set():
            self._read_xid(events)
            self._read_ecc()

    def _find_handles(self) -> dict[int, Any]:
        nvml = self._nvml
        models = [nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(nvml.nvmlDeviceGetCount())]
        names = nvml_names(os.environ, self._devices, models)
        return {
            device: nvml.nvmlDeviceGetHandleByIndex(name)
            if isinstance(name, int)
            else nvml.nvmlDeviceGetHandleByUUID(name)
            for device, name in names.items()
        }

    def _read_xid(self, events: Any) -> None:
        nvml = self._nvml
        try:
            event = nvml.nvmlEventSetWait(events, _POLL_MS)
            device = self._device_of.get(nvml.nvmlDeviceGetIndex(event.device))
        except nvml.NVMLError as error:
            if not isinstance(error, nvml.NVMLError_Timeout):
                self._stopping.wait(_POLL_MS / 1e3)
            return
        if device is not None:
            with self._lock:
                self._errors[device].append(f"Xid {event.eventData}")

    def _read_ecc(self) -> None:
        nvml = self._nvml
        for device, handle in self._handles.items():
            try:
                num = nvml.nvmlDeviceGetTotalEccErrors(
                    handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            except nvml.NVMLError:  # a device without ECC, or one that is lost
                continue
            new = num - self._num_ecc.setdefault(device, num)
            if new > 0:
                self._num_ecc[device] = num
                with self._lock:
                    self._errors[device].append(f"{new} uncorrectable ECC error{'s' * (new != 1)}")
