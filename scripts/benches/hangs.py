"""How long a job stands still when a rank is stopped: SIGSTOP, and nobody sends SIGCONT.

Stops a random rank whenever the job is back at full strength. Prints one JSON line per figure:

  recovery_ms    from SIGSTOP to the first step that the others commit without the victim, which its agent has ended
  rejoin_ms      from SIGSTOP to the first step that all ranks vote for again
  ended          victims that were ended, and other ranks that were: there should be none of these
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.benches.recovery import KillsAtFullStrength, figure_of
from scripts.demo_job.driver import Job, JobFailedError, JobSpec
from scripts.demo_job.run_audit import CommittedRun, recoveries
from scripts.figures import check_output_dir, print_figures

_SMALL_STEPS = ("--dim", "32", "--layers", "1", "--context", "16")
_NEVER = 10**7  # steps: the job ends when all has been measured


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench hangs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--stops", type=int, default=10, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the waits and of the victims (default: %(default)s)")
    parser.add_argument(
        "--hang-timeout", type=float, default=2.0, metavar="SECONDS", help="of the job (default: %(default)g)"
    )
    parser.add_argument("--output-dir", type=Path, help="keep the job's files here, in a new or empty folder")
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error(f"--ranks must be at least 2, but is {args.ranks} instead")
    if args.stops < 1:
        parser.error(f"--stops must be at least 1, but is {args.stops} instead")
    check_output_dir(parser, args.output_dir)
    return args


def measure(args: argparse.Namespace, directory: Path) -> Iterator[dict[str, Any]]:
    """Raises JobFailedError."""
    run_args = ("--hang-timeout", str(args.hang_timeout))
    spec = JobSpec(args.ranks, _NEVER, args.seed, directory, _SMALL_STEPS, run_args=run_args, signal=signal.SIGSTOP)
    with Job(spec) as job:
        job.follow(KillsAtFullStrength(job, args.stops, args.seed, (0.5, 1.5)).tick)
        job.read()
    committed_run, stopped = CommittedRun(job.run_log), job.killer.happened(job.run_log)
    found = recoveries(job.run_log, committed_run, stopped, args.ranks)
    victims = {kill.member for kill in stopped}
    ended = [exited for exited in job.run_log.exited if exited not in victims]
    yield figure_of("recovery_ms", [each.recovery_ms for each in found], p50=50, max=100)
    yield figure_of("rejoin_ms", [each.rejoin_ms for each in found], p50=50, max=100)
    yield {"figure": "ended", "victims": len(victims), "others": len(ended)}


def main() -> int:
    args = parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        figures = measure(args, args.output_dir or Path(temporary))
        return print_figures("hangs", {"hang_timeout_s": args.hang_timeout}, figures, (JobFailedError,))


if __name__ == "__main__":
    sys.exit(main())
