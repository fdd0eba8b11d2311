"""A collective on contiguous tensors of a dtype that the backend takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from elasticgang.collectives.collective import REDUCING, Collective, Then, Work, writing
from elasticgang.collectives.dtypes import NATIVE, WIDENED


def start_prepared(collective: Collective, device: torch.device, issue: Callable[[Collective], Work]) -> Work:
    """`issue` the collective on contiguous tensors of a dtype that the backend of `device` takes."""
    taken, unpack = _contiguous(collective)
    taken, narrow = (taken, None) if device.type == "cuda" else _as_gloo_takes(taken)
    work = issue(taken)
    for last in (narrow, unpack):
        work = work if last is None else Then(work, last)
    return work


def _contiguous(c: Collective) -> tuple[Collective, Callable[[], None] | None]:
    """The collective on contiguous tensors, and a last step. Gloo goes by where elements lie, not by their index: with
    gaps between them, or other strides on other ranks, it gives wrong results and says nothing."""
    if all(tensor.is_contiguous() for tensor in (*c.inputs, *c.outputs)):
        return c, None
    with torch.no_grad():
        inputs = tuple(source.detach().contiguous() for source in c.inputs)
        if c.is_in_place:
            outputs = inputs
        else:
            outputs = tuple(
                target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
                for target in c.outputs
            )

    def unpack() -> None:
        for target, staged in zip(c.outputs, outputs, strict=True):
            if staged is not target:
                _copy(staged, target)

    return replace(c, outputs=outputs, inputs=inputs), unpack


def _as_gloo_takes(c: Collective) -> tuple[Collective, Callable[[], None] | None]:
    """The collective in a dtype that Gloo knows: what moves, as bytes; what is reduced, wider. And a last step."""
    dtype = (*c.inputs, *c.outputs)[0].dtype
    if dtype in NATIVE or (dtype.is_complex and c.call in REDUCING):
        return c, None
    if c.call not in REDUCING:
        outputs, inputs = ([t.view(-1).view(torch.uint8) for t in part] for part in (c.outputs, c.inputs))
        return replace(c, outputs=tuple(outputs), inputs=tuple(inputs)), None
    wide = WIDENED[dtype]
    output = c.outputs[0].to(wide)
    source = output if c.is_in_place else c.inputs[0].to(wide)
    return replace(c, outputs=(output,), inputs=(source,)), lambda: _copy(output, c.outputs[0])


def _copy(source: Tensor, target: Tensor) -> None:
    with writing(target):
        target.copy_(source)
