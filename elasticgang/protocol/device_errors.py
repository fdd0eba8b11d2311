"""Tells a fault of a rank's device from an error of the script. Pure.

CUDA-1  A fault of the device is an error after which this process cannot use it any more, and which no input of the
    script need have caused: the CUDA errors of `_FAULTS`, and `DeviceError`. Out of memory, a failed assertion in a
    kernel and an invalid argument are the script's own errors. An error that a fault has caused is a fault, and so is a
    group of errors with one.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator

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
    "context is destroyed",
    "unknown error",
    "CUBLAS_STATUS_EXECUTION_FAILED",
    "CUDNN_STATUS_EXECUTION_FAILED",
    "CUSOLVER_STATUS_EXECUTION_FAILED",
    "CUSPARSE_STATUS_EXECUTION_FAILED",
    "CUFFT_EXEC_FAILED",
)
_PREFIX = re.compile(
    r"CUDA error: |CUDA driver error: |Triton Error \[CUDA\]: |cuDNN error: |cusolver error: |cuFFT error: "
)
_IN_NCCL = re.compile(r"Cuda failure (?:\d+ )?'([^'\n]*)'")  # in the lines of an NCCL error
_MAX_REASON = 200


def device_fault(error: BaseException) -> str | None:
    """The fault of the device that `error` is, or that has caused it, in one line; None: there is none."""
    for found in _chain(error):
        if not isinstance(found, DeviceError | RuntimeError):
            continue
        text = ""
        with contextlib.suppress(Exception):  # the script's own class
            text = str(found)
        if isinstance(found, DeviceError):
            return text.partition("\n")[0][:_MAX_REASON] or "the script has found its device broken"
        if (fault := _fault_in(text)) is not None:
            return fault
    return None


def fault_in_output(lines: Iterable[str]) -> str | None:
    """The fault of the device that the last lines of a process name which died by SIGABRT; None: they name none. A C++
    exception that nobody catches, as in a destructor or in a thread of torch, ends the process so, and its text is in
    the line that names the exception."""
    for line in lines:
        _, is_there, what = line.partition("what():")
        if is_there and (fault := _fault_in(what.strip())) is not None:
            return fault
    return None


def _fault_in(text: str) -> str | None:
    """The line of an error's text that names a fault."""
    line = text.partition("\n")[0][:_MAX_REASON]
    prefix = _PREFIX.match(line)
    if prefix is not None and line.startswith(_FAULTS, prefix.end()):
        return line
    inner = _IN_NCCL.search(text)
    if inner is not None and inner[1].startswith(_FAULTS):
        return f"NCCL error: {inner[1]}"
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, its cause or what it was raised in, the members of a group of errors, and so on."""
    seen: set[int] = set()
    left: list[BaseException] = [error]
    while left:
        found = left.pop(0)
        if id(found) in seen:
            continue
        seen.add(id(found))
        yield found
        cause = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
        # `BaseExceptionGroup` is not in Python 3.10, where a library has one of its own.
        members = getattr(found, "exceptions", ())
        left += [each for each in (cause, *members) if isinstance(each, BaseException)]
