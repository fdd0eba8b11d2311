"""Run a command on a machine whose cores are taken away again and again, as a busy host takes them from its guests.

For the time of a stall a process of real-time priority has the core, and nothing else runs there. The stalls of the
cores are independent: at times one process stands still while its peer runs, and at times all do. Tests that depend on
which of two processes is quicker fail here within a few runs; beside ordinary load they can pass for weeks.

    scripts/chaos stalls                                      # scripts/test
    scripts/chaos stalls -- scripts/test chaos -k drain       # another command

Needs the right to use real-time priorities (root, or CAP_SYS_NICE). Exit code: the command's; 3 without that right;
128 + N when signal N ended the command.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

EXIT_NOT_HERE = 3

_TEST = str(Path(__file__).resolve().parents[1] / "test")


def may_stall() -> bool:
    """Whether this process may take a core: whether it may have a real-time priority."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except PermissionError:
        return False
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    return True


def _take(core: int, seed: int, stall_ms: Sequence[float], pause_ms: Sequence[float]) -> None:
    """Takes the core away now and then, until the parent process has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this one once the command has ended
    parent = os.getppid()
    times = random.Random(seed * 1_000 + core)
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    while os.getppid() == parent:
        time.sleep(times.uniform(*pause_ms) / 1_000)
        until = time.monotonic() + times.uniform(*stall_ms) / 1_000
        while time.monotonic() < until:
            pass


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "scripts/chaos stalls", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="*", default=[_TEST], help="what is run (default: scripts/test)")
    parser.add_argument("--seed", type=int, default=0, help="of the times of the stalls (default: 0)")
    for name, low, high in (("stall", 20.0, 300.0), ("pause", 50.0, 600.0)):
        parser.add_argument(
            f"--{name}-ms",
            nargs=2,
            type=float,
            default=(low, high),
            metavar=("MIN", "MAX"),
            help=f"how long a {name} is, evenly distributed (default: {low:g} {high:g})",
        )
    args = parser.parse_args(argv)
    for name, (low, high) in (("stall", args.stall_ms), ("pause", args.pause_ms)):
        if not 0 <= low <= high or high > 10_000:
            parser.error(f"--{name}-ms: must be 0 <= MIN <= MAX <= 10000, but is {low:g} {high:g}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = _parse_args(argv)
    if not may_stall():
        print(
            "error: this process may not have a real-time priority. Run it as root, or give it CAP_SYS_NICE "
            "(docker run --cap-add SYS_NICE).",
            file=sys.stderr,
        )
        return EXIT_NOT_HERE
    context = multiprocessing.get_context("fork")
    takers = [
        context.Process(target=_take, args=(core, args.seed, args.stall_ms, args.pause_ms), daemon=True)
        for core in sorted(os.sched_getaffinity(0))
    ]
    for taker in takers:
        taker.start()
    try:
        command = subprocess.Popen(args.command)
        while True:
            with contextlib.suppress(KeyboardInterrupt):  # the terminal has told the command as well
                status = command.wait()
                return status if status >= 0 else 128 - status
    except OSError as error:
        print(f"error: cannot run {args.command[0]}: {error}", file=sys.stderr)
        return 127
    finally:
        for taker in takers:
            taker.kill()
            taker.join()


if __name__ == "__main__":
    sys.exit(main())
