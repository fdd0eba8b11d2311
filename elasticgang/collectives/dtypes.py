"""Which dtypes are reduced between processes, and on the CPU as what: Gloo adds few of them."""

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
# What Gloo cannot add, in what it can.
WIDENED = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_REAL = {torch.complex64: torch.float32, torch.complex128: torch.float64}
_BITWISE = frozenset({"band", "bor", "bxor"})


def device_dtype(call: str, op: object, dtype: torch.dtype) -> torch.dtype:
    """`dtype`, which NCCL can reduce by `op` in `call`.

    Raises:
        ValueError: it cannot.
    """
    if op in _BITWISE:
        raise ValueError(f"`{call}` by {op} is nothing that NCCL has; use a group of another backend.")
    if dtype in NATIVE or (dtype in _REAL and op in ("sum", "mean")):
        return dtype
    names = ", ".join(sorted(str(known).removeprefix("torch.") for known in NATIVE))
    raise ValueError(
        f"`{call}` by {op} needs a dtype that NCCL reduces ({names}, and complex ones by sum and mean), but the "
        f"tensor's is {dtype} instead."
    )


def reduced_dtype(call: str, op: object, dtype: torch.dtype) -> torch.dtype:
    """In which dtype tensors of `dtype` are reduced by `op` ("sum", "mean", …) in `call`.

    Raises:
        ValueError: they cannot be.
    """
    if op in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"`{call}` by {op} needs integers, but the tensor is of {dtype} instead.")
    if dtype in NATIVE:
        return dtype
    if dtype in WIDENED:
        return WIDENED[dtype]
    if dtype in _REAL and op in ("sum", "mean"):
        return _REAL[dtype]
    names = ", ".join(sorted(str(known).removeprefix("torch.") for known in (*NATIVE, *WIDENED)))
    raise ValueError(
        f"`{call}` by {op} needs a dtype that is reduced between processes ({names}, and complex ones by sum), but the "
        f"tensor's is {dtype} instead."
    )
