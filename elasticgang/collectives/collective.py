"""A checked collective, and the operations that reduce tensors."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from elasticgang.integers import integer


class ReduceOperation(enum.Enum):
    """The operation that combines the tensors of all ranks."""

    SUM = 1
    MEAN = 2
    PRODUCT = 3
    MIN = 4
    MAX = 5


class BitwiseOperation(enum.Enum):
    """The reductions of torch that fairseq2's `ReduceOperation` lacks. Integers only."""

    BAND = 1
    BOR = 2
    BXOR = 3


@dataclass(slots=True)  # not frozen: that takes three times as long to construct
class Collective:
    """One checked call. Do not change it.

    `call`: its row in the `TABLE` of collectives. `outputs`: the tensors to write; an in-place call has the same
    tensors in `outputs` and `inputs`. `op`: a `ReduceOperation` or a `BitwiseOperation`. `peer`: the root, or the
    partner of a message, as a rank of the gang. `timeout_s`: of this call; None for the gang's. `wait_all_ranks`: the
    error of a monitored barrier names all absent ranks, not only the first. `messages`: of a call of several messages,
    the partner and the tag of each output, which is received, and then of each input, which is sent.
    """

    call: str
    outputs: tuple[Tensor, ...] = ()
    inputs: tuple[Tensor, ...] = ()
    op: enum.Enum = ReduceOperation.SUM
    peer: int = 0
    tag: int = 0
    timeout_s: float | None = None
    wait_all_ranks: bool = False
    messages: tuple[tuple[int, int], ...] = ()


def check_ranks(ranks: Sequence[int], size: int) -> list[int]:
    """`ranks` in ascending order. Raises ValueError: they are empty, not distinct, or not ranks of a gang of `size`."""
    given: object = ranks
    if isinstance(given, str | bytes) or not (isinstance(given, Sequence) or hasattr(given, "__array__")):
        raise ValueError(f"`ranks` must be a list of ranks, but is {ranks!r} instead.")
    if len(ranks) == 0:
        raise ValueError("`ranks` must have at least one rank, but is empty.")
    checked = []
    for index, rank in enumerate(ranks):
        number = integer(rank)
        if number is None or not 0 <= number < size:
            raise ValueError(
                f"`ranks[{index}]` must be an integer of at least 0 and less than the gang's size ({size}), but is "
                f"{rank!r} instead."
            )
        checked.append(number)
    if len(set(checked)) != len(checked):
        raise ValueError(f"`ranks` must be distinct, but are {checked} instead.")
    return sorted(checked)


def writing(tensor: Tensor) -> AbstractContextManager[None]:
    """A context in which any thread may write to `tensor`, without autograd."""
    return torch.inference_mode() if tensor.is_inference() else torch.no_grad()
