"""One checked collective, and how tensors are combined."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from elasticgang.integers import integer


class ReduceOperation(enum.Enum):
    """How the tensors of the ranks are combined."""

    SUM = 1
    MEAN = 2
    PRODUCT = 3
    MIN = 4
    MAX = 5


class BitwiseOperation(enum.Enum):
    """What torch can reduce with beyond fairseq2's `ReduceOperation`."""

    BAND = 1
    BOR = 2
    BXOR = 3


@dataclass(slots=True)  # frozen, it takes three times as long to make
class Collective:
    """One checked call, which nobody changes. `call`: its row of the `TABLE` of collectives. `outputs` are written; a
    tensor reduced in place is in both. `peer`: the source, destination or partner, as a rank of the gang. `op`: a
    `ReduceOperation` or a `BitwiseOperation`. `timeout_s`: of this call alone; None is the gang's. `wait_all_ranks`: of
    a monitored barrier: its error names all that are absent.
    """

    call: str
    outputs: tuple[Tensor, ...] = ()
    inputs: tuple[Tensor, ...] = ()
    op: enum.Enum = ReduceOperation.SUM
    peer: int = 0
    tag: int = 0
    timeout_s: float | None = None
    wait_all_ranks: bool = False


def check_ranks(ranks: Sequence[int], size: int) -> list[int]:
    """`ranks` in ascending order. Raise ValueError unless they are at least one, distinct, and ranks of a gang of
    `size`."""
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
    """In which `tensor` may be written to, by whichever thread, and nothing is tracked."""
    return torch.inference_mode() if tensor.is_inference() else torch.no_grad()
