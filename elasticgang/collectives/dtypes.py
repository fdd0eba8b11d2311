"""The dtypes that Gloo and NCCL reduce, and the wider dtypes in which others are reduced."""

from __future__ import annotations

import torch

NATIVE = frozenset(
    {
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    }
)
# Dtypes that Gloo and NCCL cannot reduce, and the dtype in which they are reduced.
WIDENED = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_BITWISE = frozenset({"band", "bor", "bxor"})


def check_nccl_dtype(call: str, op: str, dtype: torch.dtype) -> None:
    """Raises ValueError: NCCL cannot reduce tensors of `dtype` by `op` ("sum", "mean", …) in `call`."""
    if op in _BITWISE:
        raise ValueError(f"NCCL has no `{call}` by {op}; use a group of another backend.")
    if dtype in NATIVE or (dtype in _REAL and op in ("sum", "mean")):
        return
    names = ", ".join(sorted(str(known).removeprefix("torch.") for known in NATIVE))
    raise ValueError(
        f"`{call}` by {op} needs a dtype that NCCL reduces ({names}, and complex ones by sum and mean), but the "
        f"tensor's is {dtype} instead."
    )


def gloo_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which Gloo reduces tensors of `dtype`, one that `check_gloo_dtype` accepts."""
    return WIDENED.get(dtype) or _REAL.get(dtype, dtype)


def check_gloo_dtype(call: str, op: str, dtype: torch.dtype) -> None:
    """Raises ValueError: Gloo cannot reduce tensors of `dtype` by `op` ("sum", "mean", …) in `call`."""
    if op in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"`{call}` by {op} needs integers, but the tensor is of {dtype} instead.")
    if dtype in NATIVE or dtype in WIDENED or (dtype in _REAL and op in ("sum", "mean")):
        return
    names = ", ".join(sorted(str(known).removeprefix("torch.") for known in (*NATIVE, *WIDENED)))
    raise ValueError(
        f"`{call}` by {op} needs a dtype that is reduced between processes ({names}, and complex ones by sum), but the "
        f"tensor's is {dtype} instead."
    )
