"""One checked collective, the work it becomes, and what is common to all works."""

from __future__ import annotations

import enum
import operator
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.futures import Future

from elasticgang.integers import integer

_S = TypeVar("_S")

_T = TypeVar("_T")

_MONITOR_GRACE_S = 5.0

REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter", "reduce_scatter_single"})


class ReduceOperation(enum.Enum):
    """How the tensors of the ranks are combined."""

    SUM = 1
    MEAN = 2
    PRODUCT = 3
    MIN = 4
    MAX = 5


@dataclass(frozen=True)
class Collective:
    """One checked call. `outputs` are written; a tensor reduced in place is in both. `peer`: the source, destination or
    partner, as a rank of the gang. `op`: a `ReduceOperation`, or a `BitwiseOperation` of `torch_calls.py`. `timeout_s`:
    of this call alone; None is the gang's. `wait_all_ranks`: of a monitored barrier: its error names all that are
    absent.
    """

    call: str
    outputs: tuple[Tensor, ...] = ()
    inputs: tuple[Tensor, ...] = ()
    op: enum.Enum = ReduceOperation.SUM
    peer: int = 0
    tag: int = 0
    timeout_s: float | None = None
    wait_all_ranks: bool = False

    def __post_init__(self) -> None:
        for name in ("peer", "tag"):  # numpy's integers do not travel
            object.__setattr__(self, name, operator.index(getattr(self, name)))

    @property
    def is_in_place(self) -> bool:
        return self.call in ("all_reduce", "reduce", "broadcast")

    @property
    def grace_s(self) -> float:
        """How much longer than its timeout the call is waited for: the error of a monitored barrier, which names the
        absent ranks, comes when that has passed."""
        return _MONITOR_GRACE_S if self.call == "monitored_barrier" else 0.0


class Work(Protocol):
    """A collective under way."""

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it has ended (on CUDA: until the current stream waits for it), at most `timeout` seconds (None:
        the gang's own). False when the gang was poisoned.

        Raises GangError as the call itself would have.
        """

    def get_future(self) -> Future[bool]:
        """What `wait` returns, once it has ended; or its error."""


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


def start_mean(start: Callable[[Collective], Work], collective: Collective, size: int) -> Work:
    """MEAN over `size` as SUM and a division, which every backend can do."""
    tensor = collective.outputs[0]
    check_mean(tensor)
    work = start(replace(collective, op=ReduceOperation.SUM))
    return Then(work, lambda: _divide(tensor, size))


def check_mean(tensor: Tensor) -> None:
    """Raise ValueError when `tensor` has no mean."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise ValueError(f"MEAN needs a floating-point or complex dtype, but the tensor's is {tensor.dtype} instead.")


def _divide(tensor: Tensor, divisor: int) -> None:
    with writing(tensor):
        tensor.div_(divisor)


def writing(tensor: Tensor) -> AbstractContextManager[None]:
    """In which `tensor` may be written to, by whichever thread, and nothing is tracked."""
    return torch.inference_mode() if tensor.is_inference() else torch.no_grad()


def follow(future: Future[_T], finish: Callable[[Future[_T]], _S]) -> Future[_S]:
    """As `future.then(finish)`, but an error keeps its type. Only for Python: C++ takes the error for a value.

    The error has no traceback: frames have futures, and futures errors, in circles that no collection sees."""
    following: Future[_S] = Future()

    def finished(future: Future[_T]) -> None:
        try:
            result = finish(future)
        except Exception as error:
            following.set_exception(error.with_traceback(None))  # type: ignore[arg-type]  # torch's annotation is wrong
        else:
            following.set_result(result)

    future.add_done_callback(finished)
    return following


class Then:
    """A work with a last step, done once, by whoever learns first that it has completed, unless the gang was
    poisoned."""

    def __init__(self, work: Work, last: Callable[[], None]) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._last: Callable[[], None] | None = last

    def wait(self, timeout: float | None = None) -> bool:
        return self._finish(self._work.wait(timeout))

    def get_future(self) -> Future[bool]:
        return follow(self._work.get_future(), lambda future: self._finish(future.value()))

    def _finish(self, completed: bool) -> bool:
        with self._lock:  # who comes second waits until it is done
            last, self._last = self._last, None
            if completed and last is not None:
                last()
        return completed


class EndedWork:
    """A collective that was over when it began."""

    def __init__(self, completed: bool = True) -> None:
        self._completed = completed

    def wait(self, timeout: float | None = None) -> bool:
        return self._completed

    def get_future(self) -> Future[bool]:
        future: Future[bool] = Future()
        future.set_result(self._completed)
        return future
