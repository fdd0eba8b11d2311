"""Progress as a bar on a terminal, and as lines elsewhere."""

from __future__ import annotations

import io
from typing import Any

import pytest

from elasticgang.progress import BAR_S, LINE_S, LongWork, Progress, bar, share


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_terminal_shows_a_bar_that_is_erased_at_the_end() -> None:
    screen, clock = Screen(), Clock()
    with Progress("model.pt", 4_000, screen, clock) as progress:
        progress.add(1_000)
        progress.add(500)  # too soon to draw again
        clock.now_s += BAR_S
        progress.add(500)
    erase = "\r\x1b[K"
    assert screen.getvalue().split(erase) == [
        "",
        "model.pt: [..............................] 0 % of 4,000 bytes",
        "model.pt: [#######.......................] 25 % of 4,000 bytes",
        "model.pt: [###############...............] 50 % of 4,000 bytes",
        "",
    ]


def test_the_bar_is_erased_before_an_error_is_printed() -> None:
    screen = Screen()
    with pytest.raises(ArithmeticError), Progress("model.pt", 4_000, screen, Clock()):
        raise ArithmeticError
    assert screen.getvalue().endswith("\r\x1b[K")


def test_elsewhere_there_is_a_line_now_and_then_and_none_for_short_work() -> None:
    file, clock = io.StringIO(), Clock()
    with Progress("model.pt", 4_000, file, clock) as progress:
        progress.add(1_000)
        clock.now_s += LINE_S
        progress.add(1_000)
        progress.add(1_000)
        clock.now_s += LINE_S
        progress.add(500)
    assert file.getvalue() == "model.pt: 50 % of 4,000 bytes\nmodel.pt: 87 % of 4,000 bytes\n"


@pytest.mark.parametrize(
    ("done", "total", "expected"),
    [(0, 0, "100 % of 0 bytes"), (1, 3, "33 % of 3 bytes"), (5, 3, "100 % of 3 bytes")],
)
def test_work_of_no_bytes_is_done(done: int, total: int, expected: str) -> None:
    assert share(done, total) == expected
    assert len(bar(done, total)) == 32


def test_a_long_heal_has_a_line_now_and_then_while_it_gets_on() -> None:
    heals = LongWork("heals")

    def lines(now_s: float, **healing: Any) -> list[str]:
        return list(heals.lines(now_s, healing))

    assert lines(0.0, a=(0, 0), b=(10, 100)) == []
    assert lines(LINE_S / 2, a=(0, 0), b=(20, 100)) == []
    assert lines(LINE_S, a=(1, 50), b=(30, 100)) == ["b heals: 30 % of 100 bytes"]
    assert lines(LINE_S + 1, a=(2, 50), b=(40, 100)) == []
    assert lines(2 * LINE_S, a=(3, 50), b=(30, 100)) == ["a heals: 6 % of 50 bytes"], "b got no further"
    assert lines(2 * LINE_S + 1, a=(3, 50), b=(100, 100)) == []
    assert lines(3 * LINE_S, a=(3, 50), b=(10, 100)) == [], "another heal begins"
    assert lines(4 * LINE_S, b=(20, 100)) == ["b heals: 20 % of 100 bytes"]
    assert lines(5 * LINE_S) == []
