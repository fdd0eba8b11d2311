"""How long the others stand still when a rank joins.

Kills a random rank whenever the job is back at full strength, and looks at what follows its recovery: the victim is
started again, joins, heals and takes part. Prints one JSON line per figure:

  step_ms        between two commits at full strength, undisturbed: the median
  gap_ms         the longest time between two commits, from the survivors' recovery to the first step of all ranks
  gap_steps      the same, in steps of `step_ms`
  lost_steps     tries, between those two, that somebody had prepared and that were not committed
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from scripts.benches.recovery import KillsAtFullStrength, figure_of
from scripts.demo_job.driver import Job, JobFailedError, JobSpec
from scripts.demo_job.run_audit import CommittedRun, Recovery, recoveries
from scripts.figures import check_output_dir, print_figures

_NEVER = 10**7  # steps: the job ends when all has been measured


def measure(job: Job, found: list[Recovery]) -> Iterator[dict[str, Any]]:
    committed_run = CommittedRun(job.run_log)
    commits = sorted((t, attempt) for attempt, t in committed_run.committed_at.items())
    usual = [
        (after - before) * 1e3
        for (before, first), (after, second) in pairwise(commits)
        if first.generation == second.generation and committed_run.strength(first) == job.spec.ranks
    ]
    step_ms = statistics.median(usual)
    gaps, num_lost = [], 0
    for each in found:
        if each.recovery_ms is None or each.rejoin_ms is None:
            continue
        begin, end = each.kill.t + each.recovery_ms / 1e3, each.kill.t + each.rejoin_ms / 1e3
        inside = [t for t, _ in commits if begin <= t <= end]
        gaps.append(max((after - before) * 1e3 for before, after in pairwise(inside)))
        first, last = (next(attempt for t, attempt in commits if t == edge) for edge in (inside[0], inside[-1]))
        num_lost += sum(first < attempt < last for attempt in committed_run.dropped)
    yield {"figure": "step_ms", "count": len(usual), "p50": round(step_ms, 1)}
    yield figure_of("gap_ms", gaps, p50=50, max=100)
    yield figure_of("gap_steps", [gap / step_ms for gap in gaps], p50=50, max=100)
    yield {"figure": "lost_steps", "total": num_lost, "joins": len(gaps)}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench joins", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--joins", type=int, default=10, help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="samples in a step (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the waits and of the victims (default: %(default)s)")
    parser.add_argument("--output-dir", type=Path, help="keep the job's files here, in a new or empty folder")
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error(f"--ranks must be at least 2, but is {args.ranks} instead")
    if args.joins < 1:
        parser.error(f"--joins must be at least 1, but is {args.joins} instead")
    check_output_dir(parser, args.output_dir)
    return args


def run(args: argparse.Namespace, directory: Path) -> Iterator[dict[str, Any]]:
    """Raises JobFailedError."""
    with Job(JobSpec(args.ranks, _NEVER, args.seed, directory, ("--batch-size", str(args.batch_size)))) as job:
        job.follow(KillsAtFullStrength(job, args.joins, args.seed, (1.0, 2.0)).tick)
        job.read()
    found = recoveries(job.run_log, CommittedRun(job.run_log), job.killer.happened(job.run_log), args.ranks)
    yield from measure(job, found)


def main() -> int:
    args = parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        figures = run(args, args.output_dir or Path(temporary))
        return print_figures("joins", {"ranks": args.ranks}, figures, (JobFailedError,))


if __name__ == "__main__":
    sys.exit(main())
