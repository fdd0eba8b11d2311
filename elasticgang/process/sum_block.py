"""A block of shared memory in which the ranks of one host add up a few numbers, without a message.

The agent makes one block for each generation, and sends its descriptor to the ranks that have a seat in it. Each rank
has a row for its numbers. One more row is for the sums of all hosts.

BLOCK-1  A row has one writer. It writes its numbers, then the count of its sums, then the bell. A row whose count is
    smaller than the number of the sum is missing, whatever else is in it: a writer that was killed half-way has
    written nothing.
BLOCK-2  The numbers of two successive sums have different places. A rank writes sum n + 2 only after all ranks have
    written sum n + 1, and a rank that has written sum n + 1 reads sum n no more.
BLOCK-3  A waiter misses no wake-up. It reads the bell of the row before the row's count and the mark of the end, and
    waits in the kernel only while the bell is what it has read. A writer, and whoever ends the block, changes the bell
    last, to a value that it never had before or that says the end.
BLOCK-4  The end of the generation wakes all waiters at once. A row that is complete stays readable.
BLOCK-5  A block belongs to one generation. Only its ranks have its descriptor, so that no rank of an older generation
    can write to it, or be read from it. A rank that leaves the generation closes it: errors refer to it through their
    tracebacks, so that it may be garbage for long.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import mmap
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

from elasticgang.process import futex
from elasticgang.process.late_signals import LONGEST_WAIT_S

FILE_NAME = "elasticgang-sums"
MAX_VALUES = 4096  # in one sum

_WORD = 8  # bytes
_HEAD = 8  # words: the mark of the end, in a cache line of its own
_ROW_HEAD = 8
_BELL, _COUNT, _LENGTHS = 0, 1, 2
_ROW = _ROW_HEAD + 2 * MAX_VALUES
_ENDED = (1 << 32) - 1  # a bell: no count has this value


class SumBlockEnded(Exception):
    """The generation has ended on this host."""


class SumBlock:
    """The block as one rank sees it. `end` is for any thread, all else for its training thread.

    The rows of the ranks are numbered from 0. `OUTCOME`, behind them, has the sums of all hosts.
    """

    def __init__(self, fd: int, num_ranks: int) -> None:
        """Map the block of `fd`, which the caller closes."""
        self._memory = memory = mmap.mmap(fd, _num_bytes(num_ranks))
        self._words = memoryview(memory).cast("Q")
        self._numbers = memoryview(memory).cast("d")
        self._bells = [ctypes.c_uint32.from_buffer(memory, _WORD * _first(row)) for row in range(num_ranks + 1)]
        self._lock = threading.Lock()  # `end` does not meet `close`
        self._is_closed = False
        self.num_ranks = num_ranks
        self.outcome = num_ranks

    @staticmethod
    def create() -> int:
        """A descriptor for a new block; the caller closes it. Raises OSError: there is none left."""
        return os.memfd_create(FILE_NAME, os.MFD_CLOEXEC)

    @staticmethod
    def prepare(fd: int, num_ranks: int) -> None:
        """Make a new block of so many ranks of it. The kernel allocates pages on the first write."""
        os.ftruncate(fd, _num_bytes(num_ranks))

    @property
    def is_ended(self) -> bool:
        return bool(self._words[0])

    def write(self, row: int, number: int, values: Sequence[float]) -> None:
        """Write the numbers of the sum `number`, from 1 on, to a row. Nobody reads them before `publish`."""
        first = _first(row)
        self._words[first + _LENGTHS + number % 2] = len(values)
        at = first + _ROW_HEAD + number % 2 * MAX_VALUES  # BLOCK-2
        self._numbers[at : at + len(values)] = memoryview(array.array("d", values))

    def publish(self, row: int, number: int) -> None:
        """What was written for the sum `number` is complete: wake who waits for it."""
        futex.fence()  # BLOCK-1
        self._words[_first(row) + _COUNT] = number
        futex.fence()
        self._ring(row, number % _ENDED)

    def read(self, row: int, number: int, deadline_s: float) -> list[float]:
        """Wait until the row has its numbers of the sum `number`, and return them. `deadline_s`: of CLOCK_MONOTONIC.

        Raises:
            SumBlockEnded: the generation has ended, and the row does not have them.
            TimeoutError: the deadline has passed.
        """
        self._wait(row, number, deadline_s)
        first = _first(row)
        length = self._words[first + _LENGTHS + number % 2]
        at = first + _ROW_HEAD + number % 2 * MAX_VALUES
        values: list[Any] = self._numbers[at : at + length].tolist()
        return values

    def end(self) -> None:
        """BLOCK-4. Never blocks; any rank may call it, also more than once. After `close` it does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._words[0] = 1
            futex.fence()  # BLOCK-3: whoever sees a bell of the end sees the mark
            for row in range(len(self._bells)):
                self._ring(row, _ENDED)

    def close(self) -> None:
        """Unmap the block, and close the descriptor that the mapping has. Idempotent. No other call but `end` may
        follow (BLOCK-5)."""
        with self._lock:
            self._is_closed = True
            self._bells.clear()
            self._words.release()
            self._numbers.release()
            with contextlib.suppress(BufferError):  # an exception has left `futex.wait`, and its traceback has the bell
                self._memory.close()

    def _ring(self, row: int, value: int) -> None:
        bell = self._bells[row]
        bell.value = value
        futex.wake(bell)

    def _wait(self, row: int, number: int, deadline_s: float) -> None:
        """BLOCK-3. No variable has the bell: a traceback with this frame would keep `close` from unmapping it."""
        count = _first(row) + _COUNT
        while True:
            value = self._bells[row].value
            futex.fence()
            if self._words[count] >= number:
                futex.fence()
                return
            if self.is_ended:
                raise SumBlockEnded
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            futex.wait(self._bells[row], value, min(left_s, LONGEST_WAIT_S))  # SIGNAL-LATE


def _first(row: int) -> int:
    return _HEAD + row * _ROW


def _num_bytes(num_ranks: int) -> int:
    return _WORD * _first(num_ranks + 1)
