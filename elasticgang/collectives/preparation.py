"""Prepares a collective for a backend: contiguous tensors of a supported dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from elasticgang.collectives.collective import Collective
from elasticgang.collectives.dtypes import NATIVE, WIDENED
from elasticgang.collectives.table import TABLE, Step, copy
from elasticgang.collectives.work import Work


def start_prepared(collective: Collective, device: torch.device, issue: Callable[[Collective], Work]) -> Work:
    """Call `issue` with the prepared collective. The returned work ends with the copies back into the caller's
    tensors."""
    taken, unpack = contiguous(collective)
    taken, narrow = _as_backend_takes(taken, device)
    return issue(taken).then(narrow).then(unpack)


def contiguous(c: Collective) -> tuple[Collective, Step | None]:
    """The collective on contiguous tensors, and the copy back after it. Gloo ignores strides: for tensors with gaps, or
    with different strides on different ranks, it silently gives wrong results."""
    if all(tensor.is_contiguous() for tensor in (*c.inputs, *c.outputs)):
        return c, None
    with torch.no_grad():
        inputs = tuple(source.detach().contiguous() for source in c.inputs)
        if TABLE[c.call].is_in_place:
            outputs = inputs
        else:
            outputs = tuple(
                target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
                for target in c.outputs
            )

    def unpack() -> None:
        for target, staged in zip(c.outputs, outputs, strict=True):
            if staged is not target:
                copy(staged, target)

    return replace(c, outputs=outputs, inputs=inputs), unpack


def _as_backend_takes(c: Collective, device: torch.device) -> tuple[Collective, Step | None]:
    """The collective in a dtype that the backend supports, and the copy back after it. Other dtypes are moved as bytes
    and reduced in a wider dtype. Complex numbers become pairs of real ones. NCCL reduces some dtypes beyond those."""
    tensors = (*c.inputs, *c.outputs)
    if not tensors:
        return c, None
    dtype, reduces, is_gloo = tensors[0].dtype, TABLE[c.call].reduces, device.type != "cuda"
    view: Callable[[Tensor], Tensor]
    if dtype.is_complex and (reduces or not is_gloo) and not TABLE[c.call].is_message:
        view = torch.view_as_real
    elif all(tensor.dtype in NATIVE for tensor in tensors) or (reduces and not is_gloo and dtype not in WIDENED):
        return c, None
    elif not reduces:
        view = _bytes
    else:
        wide = WIDENED[dtype]
        inputs = tuple(tensor.to(wide) for tensor in c.inputs)
        output = inputs[0] if TABLE[c.call].is_in_place else c.outputs[0].to(wide)
        return replace(c, outputs=(output,), inputs=inputs), lambda: copy(output, c.outputs[0])
    outputs, inputs = (tuple(view(tensor.detach()) for tensor in part) for part in (c.outputs, c.inputs))
    return replace(c, outputs=outputs, inputs=inputs), None


def _bytes(tensor: Tensor) -> Tensor:
    flat = tensor.as_strided((tensor.numel(),), (1,))  # a contiguous tensor of one element may have any stride
    return flat.view(torch.uint8)
