"""How far long work is: a bar on a terminal, a line now and then elsewhere. Pure: file and clock are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import TextIO

BAR_S, LINE_S = 0.1, 10.0
_WIDTH = 30
_ERASE = "\r\x1b[K"


def no_progress(num_bytes: int) -> None:
    """For work whose progress nobody watches."""


class Progress:
    """The progress of one piece of work, while this context lasts. The bar is erased at its end."""

    def __init__(self, what: str, num_bytes: int, file: TextIO, clock: Callable[[], float]) -> None:
        """`num_bytes`: of the whole work. `clock`: seconds."""
        self._what, self._num_bytes, self._file, self._clock = what, num_bytes, file, clock
        self._done = 0
        self._is_terminal = file.isatty()
        self._next_s = clock() + (0.0 if self._is_terminal else LINE_S)

    def add(self, num_bytes: int) -> None:
        """So many further bytes are done."""
        self._done += num_bytes
        if (now_s := self._clock()) >= self._next_s:
            self._next_s = now_s + (BAR_S if self._is_terminal else LINE_S)
            self._show()

    def _show(self) -> None:
        if self._is_terminal:
            text = f"{_ERASE}{self._what}: {bar(self._done, self._num_bytes)} {share(self._done, self._num_bytes)}"
        else:
            text = f"{self._what}: {share(self._done, self._num_bytes)}\n"
        self._file.write(text)
        self._file.flush()

    def __enter__(self) -> Progress:
        if self._is_terminal:
            self._show()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_terminal:
            self._file.write(_ERASE)
            self._file.flush()


class LongWork:
    """What the members of a host do that lasts long. `verb`: what that is, such as "heals"."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._known: dict[str, tuple[float, int]] = {}  # by member: when the next line is due, bytes in the last one

    def lines(self, now_s: float, under_way: Mapping[str, tuple[int, int]]) -> Iterator[str]:
        """A line for each member that has worked for `LINE_S` longer, and has got further. `under_way`: the bytes that
        are done, of how many."""
        self._known = {member: known for member, known in self._known.items() if member in under_way}
        for member, (done, total) in under_way.items():
            if done >= total:
                self._known.pop(member, None)
                continue
            due_s, last = self._known.setdefault(member, (now_s + LINE_S, done))
            if now_s >= due_s and done != last:
                self._known[member] = (now_s + LINE_S, done)
                yield f"{member} {self._verb}: {share(done, total)}"


def bar(done: int, total: int) -> str:
    filled = _WIDTH * min(done, total) // total if total else _WIDTH
    return f"[{'#' * filled}{'.' * (_WIDTH - filled)}]"


def share(done: int, total: int) -> str:
    return f"{100 * min(done, total) // total if total else 100} % of {total:,} bytes"
