"""Tells a fault of a rank's device from an error of the script. Pure.

CUDA-1  A fault of the device is an error after which this process cannot use it any more, and which no input of the
    script need have caused: the CUDA errors of `_FAULTS`, and `DeviceError`. Out of memory, a failed assertion in a
    kernel and an invalid argument are the script's own errors. An error that a fault has caused is a fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from elasticgang.errors import DeviceError

# The exit status of a rank whose device has failed. A script may exit with it too.
DEVICE_FAULT_STATUS = 83

# The texts of `cudaGetErrorString`, and of cuBLAS and cuDNN after the failure of a kernel.
_FAULTS = (
    "an illegal memory access was encountered",
    "unspecified launch failure",
    "the launch timed out and was terminated",
    "an illegal instruction was encountered",
    "misaligned address",
    "operation not supported on global/shared address space",
    "invalid program counter",
    "hardware stack error",
    "uncorrectable ECC error encountered",
    "uncorrectable NVLink error detected during the execution",
    "Invalid access of peer GPU memory over nvlink or a hardware error",
    "CUDA-capable device(s) is/are busy or unavailable",
    "no CUDA-capable device is detected",
    "device lost",
    "unknown error",
    "CUBLAS_STATUS_EXECUTION_FAILED",
    "CUDNN_STATUS_EXECUTION_FAILED",
)
_PREFIX = re.compile(r"(?:CUDA error|Triton Error \[CUDA\]|cuDNN error): ")
_MAX_REASON = 200


def device_fault(error: BaseException) -> str | None:
    """The fault of the device that `error` is, or that has caused it, in one line; None: there is none."""
    for found in _chain(error):
        line = str(found).partition("\n")[0][:_MAX_REASON]
        if isinstance(found, DeviceError):
            return line or "the script has found its device broken"
        prefix = _PREFIX.match(line) if isinstance(found, RuntimeError) else None
        if prefix is not None and line.startswith(_FAULTS, prefix.end()):
            return line
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, its cause or what it was raised in, and so on."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
