"""Which errors are faults of a rank's device (CUDA-1)."""

from __future__ import annotations

import pytest
import torch

from elasticgang.errors import DeviceError, GangError, OperationalError
from elasticgang.protocol.device_errors import device_fault, fault_in_output

ILLEGAL = "CUDA error: an illegal memory access was encountered"
# As torch 2.13 writes them, with the lines that follow.
ADVICE = "\nSearch for `cudaErrorIllegalAddress' in https://docs.nvidia.com/cuda/\nCompile with `TORCH_USE_CUDA_DSA`.\n"


# CUDA-1
@pytest.mark.parametrize(
    "text",
    [
        ILLEGAL,
        "CUDA error: unspecified launch failure",
        "CUDA error: the launch timed out and was terminated",
        "CUDA error: uncorrectable ECC error encountered",
        "CUDA error: uncorrectable NVLink error detected during the execution",
        "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "CUDA error: no CUDA-capable device is detected",
        "CUDA error: device lost",
        "CUDA error: unknown error",
        "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, ...)`",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
        "CUDA error: CUSPARSE_STATUS_EXECUTION_FAILED when calling `cusparseSpMM(handle, ...)`",
        "cusolver error: CUSOLVER_STATUS_EXECUTION_FAILED, when calling `cusolverDnSgetrf(handle, ...)`",
        "cuFFT error: CUFFT_EXEC_FAILED",
        "CUDA driver error: an illegal memory access was encountered",
        "CUDA driver error: context is destroyed",
        "Triton Error [CUDA]: an illegal memory access was encountered",
    ],
)
@pytest.mark.parametrize("kind", [torch.AcceleratorError, RuntimeError])
def test_errors_after_which_a_process_cannot_use_its_device(kind: type[Exception], text: str) -> None:
    assert device_fault(kind(text)) == text
    assert device_fault(kind(text + ADVICE)) == text


# CUDA-1
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ..."),
        torch.AcceleratorError("CUDA error: out of memory"),
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        torch.AcceleratorError("CUDA error: invalid argument"),
        torch.AcceleratorError("CUDA error: no kernel image is available for execution on the device"),
        RuntimeError("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasSgemm( handle, ...)`"),
        RuntimeError("CUDA driver error: invalid argument"),
        RuntimeError("NCCL error in: NCCLUtils.cpp:94\nLast error:\nCuda failure 2 'out of memory'"),
        RuntimeError("an illegal memory access was encountered"),
        ValueError(ILLEGAL),
        GangError(f"rank 3 has sent: {ILLEGAL}"),
        OperationalError("unknown error"),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_are_the_scripts_own_or_a_lost_peers(error: BaseException) -> None:
    assert device_fault(error) is None


def test_an_error_that_a_fault_has_caused_is_a_fault() -> None:
    def raise_from(cause: Exception, *, hidden: bool) -> None:
        try:
            raise cause
        except RuntimeError as error:
            if hidden:
                raise GangError("all_reduce failed") from None
            raise GangError("all_reduce failed") from error

    with pytest.raises(GangError) as caused:
        raise_from(torch.AcceleratorError(ILLEGAL), hidden=False)
    assert device_fault(caused.value) == ILLEGAL
    with pytest.raises(GangError) as hidden:
        raise_from(torch.AcceleratorError(ILLEGAL), hidden=True)
    assert device_fault(hidden.value) is None


def test_an_error_that_is_raised_while_a_fault_is_handled_is_one() -> None:
    def raise_in_handler() -> None:
        try:
            raise torch.AcceleratorError(ILLEGAL)
        except RuntimeError:
            raise KeyError("loss")  # noqa: B904  # as a script may

    with pytest.raises(KeyError) as caught:
        raise_in_handler()
    assert device_fault(caught.value) == ILLEGAL


def test_a_chain_of_errors_may_have_a_cycle() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__cause__, second.__cause__ = second, first
    assert device_fault(first) is None


class _Mute(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("no text")


class _MuteDevice(DeviceError):
    __str__ = _Mute.__str__


def test_an_error_of_the_script_may_have_no_text() -> None:
    assert device_fault(_Mute()) is None
    assert device_fault(_MuteDevice()) == "the script has found its device broken"


def test_a_script_says_by_itself_that_its_device_is_broken() -> None:
    assert device_fault(DeviceError("the memory test failed at 0x10\nmore")) == "the memory test failed at 0x10"
    assert device_fault(DeviceError()) == "the script has found its device broken"
    assert len(device_fault(DeviceError("x" * 10**6)) or "") == 200


# CUDA-1
def test_the_fault_in_an_error_of_nccl() -> None:
    text = (
        "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version "
        "2.27.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
        "Cuda failure 700 'an illegal memory access was encountered'"
    )
    assert device_fault(RuntimeError(text)) == "NCCL error: an illegal memory access was encountered"


class Errors(Exception):
    """As `ExceptionGroup`, which Python 3.10 lacks."""

    def __init__(self, *exceptions: Exception) -> None:
        super().__init__(f"{len(exceptions)} errors")
        self.exceptions = exceptions


# CUDA-1
def test_a_group_of_errors_is_a_fault_if_one_of_them_is() -> None:
    fault = torch.AcceleratorError(ILLEGAL)
    assert device_fault(Errors(KeyError("loss"), Errors(fault))) == ILLEGAL
    assert device_fault(Errors(KeyError("loss"), Errors(ValueError(ILLEGAL)))) is None
    inside = Errors(ValueError())
    inside.exceptions = (inside,)
    assert device_fault(inside) is None


# CUDA-1
@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        (
            [
                "step 3",
                "terminate called after throwing an instance of 'c10::AcceleratorError'",
                f"  what():  {ILLEGAL}",
            ],
            ILLEGAL,
        ),
        (["  what():  CUDA error: device-side assert triggered", "Aborted"], None),
        (["terminate called without an active exception"], None),
        ([f"caught, and trained on: {ILLEGAL}", "double free or corruption"], None),
        ([], None),
    ],
)
def test_the_fault_in_what_a_process_has_written_before_sigabrt(lines: list[str], fault: str | None) -> None:
    assert fault_in_output(lines) == fault
