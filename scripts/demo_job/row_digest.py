"""A digest of a model's parameters that is the same however ranks divide them along their first dimension.

It is the sum, modulo 2**256, of the SHA-256 of each row with its name and number. So the digests of all parts sum to
that of the whole model, and no rank needs the others' parts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_BITS = 256


def digest_of_rows(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """What this rank holds of `parameters`, which are named alike on all ranks."""
    import torch  # it takes seconds
    from torch.distributed.tensor import DTensor

    from elasticgang.state.dtensor import local
    from elasticgang.torch_private import local_block

    total = 0
    for name, parameter in parameters:
        part, first = local(parameter).cpu(), 0
        if isinstance(parameter, DTensor):
            block = local_block(parameter)
            if block is None or any(block[1][1:]) or block[0][1:] != tuple(parameter.shape[1:]):
                raise ValueError(f"`parameters` must be divided along their first dimension alone, but {name} is not.")
            first = block[1][0] if block[1] else 0
        for place, row in enumerate(part if part.dim() else part.view(1)):
            stored = row.reshape(-1).view(torch.uint8).numpy().tobytes()
            digest = hashlib.sha256(f"{name} {first + place} {parameter.dtype} ".encode() + stored)
            total += int.from_bytes(digest.digest(), "big")
    return _text(total)


def sum_of(digests: Iterable[str]) -> str:
    """The digest of the whole model, from those of its parts."""
    return _text(sum(int(digest, 16) for digest in digests))


def _text(total: int) -> str:
    return f"{total % (1 << _BITS):0{_BITS // 4}x}"
