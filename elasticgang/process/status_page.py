"""The status page: a rank's progress in shared memory, which its agent reads without the rank's help.

A rank that is stopped, or whose threads all wait for the GIL, cannot send a message; its page stays readable.

STATUS-1  Every word has one writer at a time: the rank's training thread, the holder of the block's lock, the pulse
    thread, the agent, or the comm process of that block; once the rank dies, the kernel, in the mutex of
    `death_watch.py`. A word is read and written whole: a memoryview of format "Q" compiles to one aligned 8-byte load
    or store. Values that belong together are in one word (`commit`) or are checked (`groups`).
STATUS-2  `submitted` is incremented before a collective is sent, `completed` before its end is reported: a collective
    under way is never missed.
STATUS-3  A block is given back only after its comm process has died, so that no earlier process writes to it.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import math
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from elasticgang.process import death_watch

SIZE = 32 << 10
PULSE_MS = 100

_NUM_GROUPS = 64
_NUM_BLOCKS = 5
_NAME_WORDS = 4
_COUNTS = 5  # of a group: its key, then what `GroupStamps` has
_ROW = _COUNTS + _NAME_WORDS  # with the gangs that it is for, to be shown
_BLOCK_HEAD = 3
_PID, _COMM_BEATS, _CLEARED = range(_BLOCK_HEAD)
_BLOCK = _BLOCK_HEAD + _NUM_GROUPS * _ROW
_MUTEX = 16
_FIRST_BLOCK = _MUTEX + death_watch.NUM_WORDS
_NUM_TIMES = 32
_LAP = 0xFF  # of a word with the time of a commit, in ns: these bits are the step's, so that an old one is not taken
_TIMES = _FIRST_BLOCK + _NUM_BLOCKS * _BLOCK  # when the last steps were committed
_NUMBER = 3 + _NAME_WORDS  # a reported number: how often, the last value, the sum, the name
_NUM_NUMBERS = 8
_NUMBERS = _TIMES + _NUM_TIMES
_OPTIMIZER_BYTES = _NUMBERS + _NUM_NUMBERS * _NUMBER
MAX_NAME_BYTES = 8 * _NAME_WORDS
FILE_NAME = "elasticgang-page"


class ThreadState(enum.IntEnum):
    """Where the training thread is.

    USER_CODE: in the script. WAITING: in a wait of the runtime. REQUESTING: on its way to the next generation. SPARE:
    without coordinates in the present one.
    """

    STARTING = 0
    USER_CODE = 1
    WAITING = 2
    REQUESTING = 3
    SPARE = 4
    LEFT = 5


(
    _BEATS,
    _PULSE,
    _STEPS,
    _THREAD_STATE,
    _PAUSED,
    _GENERATION,
    _COMM,
    _ENDING,
    _DRAINING,
    _COMMITTED,
    _SUCCESSORS,
    _STEP,
    _HEAL_RECEIVED,
    _HEAL_BYTES,
    _SAVE_WRITTEN,
    _SAVE_BYTES,
) = range(16)
_USED, _LAST_SHIFT = 0xFF, 8  # of `_COMM`: the number of the block in use, and of the one before it
_STEP_BITS = 40  # of the word that names a committed attempt; the rest is the generation


@dataclass(frozen=True)
class GroupStamps:
    """Counters of the process group with the key `group`, which is equal on all its ranks. Collectives have the same
    order on all ranks; messages (sends and receives) do not."""

    group: int
    submitted: int
    completed: int
    messages_submitted: int
    messages_completed: int


@dataclass(frozen=True)
class ReportedNumber:
    """A number that the script reports: how often, its last value, and the sum of its finite values."""

    num_reports: int
    last: float
    total: float


class CommBlock:
    """The part of a page that one comm process and its rank share."""

    def __init__(self, words: memoryview, index: int) -> None:
        first = _FIRST_BLOCK + index * _BLOCK
        self.index = index
        self._words = words[first : first + _BLOCK]
        self._rows: dict[str, int] = {}
        self._lock = threading.Lock()

    # -- the rank

    def reset(self) -> None:
        """Erase the values of an earlier process."""
        for index in range(_BLOCK):
            self._words[index] = 0

    def configure(self, names: Sequence[str], shown: Mapping[str, str] = MappingProxyType({})) -> None:
        """Count these groups and no others. No collective of the former ones is under way. `shown`: as of `add`, by
        name."""
        self.clear()
        for row in range(_NUM_GROUPS):
            self._words[_BLOCK_HEAD + row * _ROW] = 0
        for name in names:
            self.add(name, shown.get(name, ""))
        self._words[_CLEARED] = 0

    def add(self, name: str, shown: str = "") -> None:
        """Count one more group. Groups beyond `_NUM_GROUPS` are not counted. `shown`: what a person is told that it is;
        `MAX_NAME_BYTES` of it are kept. "": `name`."""
        with self._lock:
            row = len(self._rows)
            if name in self._rows or row >= _NUM_GROUPS:
                return
            at = _BLOCK_HEAD + row * _ROW
            for column in range(1, _COUNTS):
                self._words[at + column] = 0
            for index, word in enumerate(_words_of((shown or name).encode()[:MAX_NAME_BYTES])):
                self._words[at + _COUNTS + index] = word
            self._words[at] = key_of(name)
            self._rows[name] = row

    def clear(self) -> None:
        """No collective is under way: the process is dead, or its groups are closed. Their counters stay for
        `last_groups` until others are configured."""
        with self._lock:
            self._words[_CLEARED] = 1
            self._rows = {}

    def submitted(self, name: str, is_message: bool) -> None:
        with self._lock:  # otherwise a count from before `clear` could go to the next group in the row
            self._count(name, 3 if is_message else 1)

    # -- the comm process

    def start(self) -> None:
        self._words[_COMM_BEATS] = 0
        self._words[_PID] = os.getpid()

    def beat(self) -> None:
        self._words[_COMM_BEATS] += 1

    def set_groups(self, names: Sequence[str]) -> None:
        """Count these groups and no others. The rank has configured them."""
        self._rows = {}
        for name in names:
            self.append_group(name)

    def append_group(self, name: str) -> None:
        """Count one more group, which the rank has added. Its row is known by its key: the rank also counts groups that
        this process does not run."""
        key = key_of(name)
        rows = (row for row in range(_NUM_GROUPS) if self._words[_BLOCK_HEAD + row * _ROW] == key)
        row = next(rows, None)
        if row is not None:
            self._rows[name] = row

    def completed(self, name: str, is_message: bool) -> None:
        with self._lock:  # works end on several threads
            self._count(name, 4 if is_message else 2)

    def _count(self, name: str, column: int) -> None:
        row = self._rows.get(name)
        if row is not None:
            self._words[_BLOCK_HEAD + row * _ROW + column] += 1

    # -- the agent

    @property
    def pid(self) -> int:
        return self._words[_PID]

    @property
    def beats(self) -> int:
        return self._words[_COMM_BEATS]

    def groups(self) -> list[GroupStamps]:
        """The groups whose collectives may be under way."""
        return [] if self._words[_CLEARED] else self.last_groups()

    def last_names(self) -> dict[int, str]:
        """What the groups of `last_groups` are for, by their keys."""
        found = {}
        for at in range(_BLOCK_HEAD, _BLOCK, _ROW):
            group = self._words[at]
            if not group:
                break
            name = _bytes_of(self._words[at + _COUNTS : at + _ROW]).decode(errors="ignore")
            if self._words[at] == group:
                found[group] = name
        return found

    def last_groups(self) -> list[GroupStamps]:
        """As `groups`; when they are closed, the last ones."""
        found = []
        for at in range(_BLOCK_HEAD, _BLOCK, _ROW):
            group = self._words[at]
            if not group:
                break
            completed, messages_completed = (
                self._words[at + 2],
                self._words[at + 4],
            )  # STATUS-2: before what was submitted
            stamps = GroupStamps(group, self._words[at + 1], completed, self._words[at + 3], messages_completed)
            if self._words[at] == group:  # else the rank configures other groups at this moment
                found.append(stamps)
        return found


class StatusPage:
    """One rank's page. Its agent creates it; the rank and its comm processes map it."""

    def __init__(self, fd: int | None = None, *, is_read_only: bool = False) -> None:
        """Map the page of `fd`, which the caller keeps open; None creates a page for this process alone."""
        access = mmap.ACCESS_READ if is_read_only else mmap.ACCESS_WRITE
        memory = mmap.mmap(-1, SIZE) if fd is None else mmap.mmap(fd, SIZE, access=access)
        self.fd = fd
        self._words = memoryview(memory).cast("Q")  # STATUS-1
        self._free = list(range(_NUM_BLOCKS))
        self._lock = threading.Lock()

    @staticmethod
    def create() -> int:
        """A descriptor of a new page; the caller closes it."""
        fd = os.memfd_create(FILE_NAME, os.MFD_CLOEXEC)
        os.ftruncate(fd, SIZE)
        return fd

    @staticmethod
    def of_process(pid: int) -> StatusPage | None:
        """The page of a rank process, to read; None if the process has none, is gone, or belongs to another user."""
        directory = f"/proc/{pid}/fd"
        with contextlib.suppress(OSError):
            for name in os.listdir(directory):
                with contextlib.suppress(OSError):
                    path = os.path.join(directory, name)
                    if os.readlink(path).startswith(f"/memfd:{FILE_NAME} "):
                        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                        try:
                            return StatusPage(fd, is_read_only=True)
                        finally:
                            os.close(fd)
        return None

    # -- the training thread

    def beat(self) -> None:
        """The training thread makes progress."""
        self._words[_BEATS] += 1

    def begin_step(self, index: int) -> None:
        self._words[_STEP] = index + 1
        self.beat()

    def step_done(self) -> None:
        self._words[_STEPS] += 1
        self.beat()

    def entered(self, generation: int) -> None:
        self._words[_GENERATION] = generation

    def commit(self, step: int, generation: int) -> None:
        """The rank knows that `step` steps are committed, the last of them in `generation`."""
        if step != self.committed[0]:
            self._words[_TIMES + step % _NUM_TIMES] = time.monotonic_ns() & ~_LAP | step // _NUM_TIMES & _LAP
        self._words[_COMMITTED] = generation << _STEP_BITS | step

    def set_optimizer_bytes(self, num_bytes: int) -> None:
        """The size of the state of this rank's optimizers on the host, once there is one."""
        self._words[_OPTIMIZER_BYTES] = num_bytes

    def report(self, name: str, value: float) -> None:
        """Keep a number of the script's.

        Raises:
            ValueError: the name is empty or longer than `MAX_NAME_BYTES`, or there are too many names.
        """
        encoded = name.encode()
        if not 0 < len(encoded) <= MAX_NAME_BYTES:
            raise ValueError(f"a reported name must have 1 to {MAX_NAME_BYTES} bytes, but is {name!r} instead.")
        for at in range(_NUMBERS, _NUMBERS + _NUM_NUMBERS * _NUMBER, _NUMBER):
            if not self._words[at] or self._name_at(at) == encoded:
                break
        else:
            raise ValueError(f"at most {_NUM_NUMBERS} names can be reported, but {name!r} is one more.")
        for index, word in enumerate(_words_of(encoded)):
            self._words[at + 3 + index] = word
        self._words[at + 1] = _word_of(value)
        if math.isfinite(value):
            self._words[at + 2] = _word_of(_float_of(self._words[at + 2]) + value)
        self._words[at] += 1  # last: a name is there before it is counted

    def _name_at(self, at: int) -> bytes:
        return _bytes_of(self._words[at + 3 : at + 3 + _NAME_WORDS])

    def set_thread_state(self, doing: ThreadState) -> None:
        self._words[_THREAD_STATE] = doing
        self.beat()

    @contextlib.contextmanager
    def in_thread_state(self, doing: ThreadState) -> Iterator[None]:
        """WAITING, REQUESTING: around a wait of the runtime, whose time does not count (HANG-3). USER_CODE: around code
        of the script within such a wait."""
        before = self.thread_state
        self.set_thread_state(doing)
        try:
            yield
        finally:
            self.set_thread_state(before)

    def forget_steps(self) -> None:
        """The next steps may take long again: the training state is rebuilt."""
        self._words[_STEPS] = 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self._words[_PAUSED] += 1
        try:
            yield
        finally:
            self._words[_PAUSED] -= 1
            self.beat()

    # -- the thread that heals, or the one that holds the lock of what is received

    def set_healing(self, num_received: int, num_bytes: int) -> None:
        """So many of so many bytes of the state have arrived. 0 of 0: this rank heals no longer, and has not healed."""
        self._words[_HEAL_BYTES] = num_bytes
        self._words[_HEAL_RECEIVED] = num_received

    # -- the thread of a save

    def set_saving(self, num_written: int, num_bytes: int) -> None:
        """So many of so many bytes of this rank's share of a checkpoint are written. 0 of 0: no save is under way."""
        self._words[_SAVE_BYTES] = num_bytes
        self._words[_SAVE_WRITTEN] = num_written

    # -- any thread of the rank

    def pulse(self) -> None:
        """The process runs, and its threads get the GIL (see HANG-3)."""
        self._words[_PULSE] += 1

    @property
    def mutex(self) -> memoryview:
        """For `death_watch.py`: the pulse thread holds it, and the agent waits for its death."""
        return self._words[_MUTEX : _MUTEX + death_watch.NUM_WORDS]

    def mark_draining(self) -> None:
        """The rank drains: the agent does not restart it (DRAIN-1)."""
        self._words[_DRAINING] = 1

    def take_block(self) -> CommBlock | None:
        """A block for a comm process about to start; None if all are in use."""
        with self._lock:
            if not self._free:
                return None
            block = CommBlock(self._words, self._free.pop(0))
        block.reset()
        return block

    def give_back(self, block: CommBlock) -> None:
        """STATUS-3."""
        with self._lock:
            self._free.append(block.index)

    def use(self, block: CommBlock | None) -> None:
        """The comm process of the present generation. Without one, the last block stays known (`last_comm`)."""
        last = self._words[_COMM] & _USED or self._words[_COMM] >> _LAST_SHIFT
        self._words[_COMM] = last << _LAST_SHIFT if block is None else block.index + 1

    # -- the comm process

    def block(self, index: int) -> CommBlock:
        return CommBlock(self._words, index)

    # -- the agent, and whoever watches the job

    @property
    def healing(self) -> tuple[int, int]:
        """How many bytes of how many have arrived, in the last heal; (0, 0) before the first, and once one failed."""
        return self._words[_HEAL_RECEIVED], self._words[_HEAL_BYTES]

    @property
    def saving(self) -> tuple[int, int]:
        """How many bytes of how many are written, of the save under way; (0, 0) without one."""
        return self._words[_SAVE_WRITTEN], self._words[_SAVE_BYTES]

    def commit_times(self) -> list[tuple[int, float]]:
        """(steps, CLOCK_MONOTONIC seconds) of the last commits that this process saw, the newest last."""
        newest = self.committed[0]
        found: list[tuple[int, float]] = []
        for step in range(max(newest - _NUM_TIMES + 2, 1), newest + 1):  # not the oldest: it may be overwritten now
            word = self._words[_TIMES + step % _NUM_TIMES]
            if word and word & _LAP == step // _NUM_TIMES & _LAP:  # else the process has not seen this commit
                found.append((step, (word & ~_LAP) / 1e9))
        return found

    def numbers(self) -> dict[str, ReportedNumber]:
        """What the script reports."""
        found = {}
        for at in range(_NUMBERS, _NUMBERS + _NUM_NUMBERS * _NUMBER, _NUMBER):
            count = self._words[at]
            if not count:
                break
            last, total = _float_of(self._words[at + 1]), _float_of(self._words[at + 2])
            found[self._name_at(at).decode()] = ReportedNumber(count, last, total)
        return found

    def mark_job_ending(self) -> None:
        """The job is ending: a SIGTERM from now on stops the rank at once."""
        self._words[_ENDING] = 1

    def set_successors(self, num: int) -> None:
        """How many other ranks of the job have no seat yet and could copy the state: they start, or wait."""
        self._words[_SUCCESSORS] = num

    @property
    def optimizer_bytes(self) -> int:
        """As of `set_optimizer_bytes`; 0: not known."""
        return self._words[_OPTIMIZER_BYTES]

    @property
    def successors(self) -> int:
        """The number that the agent wrote last."""
        return self._words[_SUCCESSORS]

    @property
    def job_ending(self) -> bool:
        return bool(self._words[_ENDING])

    @property
    def draining(self) -> bool:
        return bool(self._words[_DRAINING])

    @property
    def beats(self) -> int:
        return self._words[_BEATS]

    @property
    def pulses(self) -> int:
        return self._words[_PULSE]

    @property
    def steps(self) -> int:
        """Steps whose share this rank has computed, committed or not."""
        return self._words[_STEPS]

    @property
    def step(self) -> int | None:
        """The index of the last step that the rank began; None before the first."""
        word = self._words[_STEP]
        return word - 1 if word else None

    @property
    def committed(self) -> tuple[int, int]:
        """The arguments of the last `commit`: (steps, generation of the last step); (0, 0) before the first."""
        word = self._words[_COMMITTED]
        return word & (1 << _STEP_BITS) - 1, word >> _STEP_BITS

    @property
    def thread_state(self) -> ThreadState:
        return ThreadState(self._words[_THREAD_STATE])

    @property
    def is_paused(self) -> bool:
        return self._words[_PAUSED] > 0

    @property
    def generation(self) -> int:
        return self._words[_GENERATION]

    @property
    def comm(self) -> CommBlock | None:
        """The block of the comm process in use."""
        return self._block_of(self._words[_COMM] & _USED)

    @property
    def last_comm(self) -> CommBlock | None:
        """As `comm`; between two generations, the last one."""
        word = self._words[_COMM]
        return self._block_of(word & _USED or word >> _LAST_SHIFT)

    def _block_of(self, number: int) -> CommBlock | None:
        return CommBlock(self._words, number - 1) if 0 < number <= _NUM_BLOCKS else None


def key_of(name: str) -> int:
    """The key of a group name; never 0."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") or 1


def _words_of(name: bytes) -> tuple[int, ...]:
    return struct.unpack(f"={_NAME_WORDS}Q", name.ljust(MAX_NAME_BYTES, b"\0"))


def _bytes_of(words: Sequence[int]) -> bytes:
    return struct.pack(f"={_NAME_WORDS}Q", *words).rstrip(b"\0")


def _word_of(value: float) -> int:
    (word,) = struct.unpack("=Q", struct.pack("=d", value))
    return int(word)


def _float_of(word: int) -> float:
    (value,) = struct.unpack("=d", struct.pack("=Q", word))
    return float(value)
