"""Random schedules of simulated jobs, by the real rules, with every promise checked after every move.

  scripts/chaos simulate --schedules 1000000    seeds 0 to 999,999, on all cores
  scripts/chaos simulate --replay FILE          what happens in a golden scenario, or in a failure printed here

Each failure is printed, with its seed, as a scenario that replays it. The exit code is 1 when there was one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from elasticgang.simulation.invariants import is_broken
from elasticgang.simulation.runner import Tally, run_over
from elasticgang.simulation.scenario import play, read, shrink, write
from elasticgang.simulation.schedule import Failure

_TERMINAL_S, _LOG_S = 0.5, 30.0
_MAX_PRINTED = 20


class Progress:
    """A line on stderr that changes in place; where that is no terminal, a line now and then."""

    def __init__(self, num_schedules: int) -> None:
        self._num_schedules = num_schedules
        self._in_place = sys.stderr.isatty()
        self._begin_s = self._told_s = time.monotonic()

    def tell(self, tally: Tally) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s < (_TERMINAL_S if self._in_place else _LOG_S):
            return
        self._told_s = now_s
        rate = tally.num_schedules / (now_s - self._begin_s)
        left_s = (self._num_schedules - tally.num_schedules) / rate
        self._write(
            f"{tally.num_schedules} of {self._num_schedules} schedules, {len(tally.failures)} failures, "
            f"{rate:.0f} a second, {left_s:.0f} s left"
        )

    def clear(self) -> None:
        if self._in_place:
            self._write("")

    def _write(self, line: str) -> None:
        print(f"\r\033[K{line}" if self._in_place else line, end="" if self._in_place else "\n", file=sys.stderr)
        sys.stderr.flush()


def simulate(seeds: range, num_processes: int) -> int:
    total, progress, begin_s = Tally(), Progress(len(seeds)), time.monotonic()
    parts = run_over(seeds, num_processes)
    interrupted = False
    try:
        for part in parts:
            for failure in part.failures:
                if len(total.failures) < _MAX_PRINTED:
                    progress.clear()
                    print(format_failure(failure), flush=True)
                total.failures.append(failure)
            part.failures.clear()
            total.add(part)
            progress.tell(total)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        parts.close()
    progress.clear()
    print(f"{total}; seeds from {seeds.start}; {time.monotonic() - begin_s:.1f} s" + "; interrupted" * interrupted)
    return 130 if interrupted else int(bool(total.failures))


def format_failure(failure: Failure) -> str:
    """As a scenario, as short as can be. What the simulator itself raised is not one."""
    if not is_broken(failure.violation):
        return f"# Seed {failure.seed}.\n{failure.violation}"
    return write(shrink(failure))


def replay(path: Path) -> int:
    """Prints what is told; fails when that is not what the file expects, or a promise is broken."""
    story, expected = read(path.read_text())
    told = play(story)
    for line in told:
        print(line if not expected or line in expected else f"{line}    # not expected")
    missing = [line for line in expected if line not in told]
    for line in missing:
        print(f"# expected, but not told: {line}")
    return int(bool(expected and told != expected) or is_broken(told[-1]))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/chaos simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schedules", type=int, default=10_000, help="how many (default: 10000)")
    parser.add_argument("--seed", type=int, default=0, help="the first one's; the others follow it (default: 0)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="a scenario, instead of random schedules")
    arguments = parser.parse_args(argv)
    if arguments.schedules < 1 or arguments.jobs < 1:
        parser.error("--schedules and --jobs must be positive")
    if arguments.replay is None:
        seeds = range(arguments.seed, arguments.seed + arguments.schedules)
        return simulate(seeds, arguments.jobs)
    try:
        return replay(arguments.replay)
    except (OSError, ValueError) as error:
        parser.error(f"{arguments.replay}: {error}")


if __name__ == "__main__":
    sys.exit(main())
