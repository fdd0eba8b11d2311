"""A collective in words, for messages."""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch

from elasticgang.collectives.collective import Collective
from elasticgang.collectives.table import TABLE


class Description(NamedTuple):
    """What is kept of a collective while it is under way: nothing of its tensors' memory. `shape`: of the first output,
    or input; None: it has no tensor. `has_ended`: only its count is missing, because nobody has waited for it."""

    call: str
    op: enum.Enum
    dtype: torch.dtype | None
    shape: tuple[int, ...] | None
    has_ended: bool = False

    def __str__(self) -> str:
        if self.shape is None:
            return self.call
        sizes = "x".join(map(str, self.shape)) or "1"
        by = f" by {self.op.name}" if TABLE[self.call].reduces else ""
        return f"{self.call} of {sizes} {str(self.dtype).removeprefix('torch.')}{by}"


def describe(collective: Collective) -> Description:
    first = next(iter((*collective.outputs, *collective.inputs)), None)
    dtype, shape = (None, None) if first is None else (first.dtype, tuple(first.shape))
    return Description(collective.call, collective.op, dtype, shape)
