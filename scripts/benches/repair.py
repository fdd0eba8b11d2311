"""How long until a replica group that lost a rank is whole again, by a spare that takes the seat.

Two replica groups of two ranks (`tp=2`) and one spare. Kills a random rank that has a seat, whenever all seats are
taken, all vote, and a spare waits again; the steps are small, so that what is measured is the runtime. Prints one JSON
line per figure, in ms:

  recovery_ms  from the kill to the next committed step
  full_ms      from the kill to the first committed step that all four ranks voted for, the former spare with them
  phase_ms     of a recovery: detect, leave, abort, quorum, configure, first_commit; they add up to it
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

from scripts.benches.recovery import KillsAtFullStrength, figure_of
from scripts.demo_job.driver import Job, JobFailedError, JobSpec
from scripts.demo_job.run_audit import CommittedRun, Phases, recoveries
from scripts.figures import check_output_dir, print_figures

TRAIN = Path(__file__).with_name("pairs") / "train.py"
RANKS, SPARES = 4, 1

_NEVER = 10**7  # steps: the job ends when the kills are done


class KillsOfTheSeated(KillsAtFullStrength):
    """Of a rank that has a seat, when a spare waits too."""

    lack = "not whole again"

    def _victim(self) -> int:
        run_log = self._job.run_log
        return run_log.spawned[self._source.choice(sorted(run_log.sharers()))].local_rank

    def _is_whole(self) -> bool:
        """Whether the newest step is of the newest generation, all seats voted for it, and a spare waits."""
        run_log, sent = self._job.run_log, self._job.killer.sent
        if run_log.newest is None or run_log.newest.generation != run_log.generation:
            return False
        if run_log.strength() < RANKS or run_log.spares < SPARES:
            return False
        return not sent or run_log.generation > run_log.generation_of(sent[-1].member)


def measure(job: Job, num_kills: int, seed: int, wait_s: tuple[float, float]) -> Iterator[dict[str, Any]]:
    """The figures. Raises JobFailedError."""
    job.follow(KillsOfTheSeated(job, num_kills, seed, wait_s).tick)
    job.read()
    found = recoveries(job.run_log, CommittedRun(job.run_log), job.killer.happened(job.run_log), RANKS)
    percents = {"p50": 50, "p99": 99, "max": 100}
    yield figure_of("recovery_ms", [each.recovery_ms for each in found], **percents)
    yield figure_of("full_ms", [each.rejoin_ms for each in found], **percents)
    phases = [astuple(each.phases) for each in found if each.phases is not None]
    for column, field in enumerate(fields(Phases)):
        yield {**figure_of("phase_ms", [row[column] for row in phases], **percents), "phase": field.name}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench repair",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--kills", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the waits and of the victims (default: %(default)s)")
    parser.add_argument(
        "--wait",
        type=float,
        nargs=2,
        default=(0.2, 1.0),
        metavar=("FROM", "TO"),
        help="seconds between full strength and the next kill (default: 0.2 1.0)",
    )
    parser.add_argument("--output-dir", type=Path, help="keep the job's files here, in a new or empty folder")
    args = parser.parse_args()
    if args.kills < 1:
        parser.error(f"--kills must be at least 1, but is {args.kills} instead")
    if not 0 <= args.wait[0] <= args.wait[1]:
        parser.error("--wait must be two numbers of seconds, the smaller one first")
    check_output_dir(parser, args.output_dir)
    return args


def run(args: argparse.Namespace, directory: Path) -> Iterator[dict[str, Any]]:
    """Raises JobFailedError."""
    with Job(JobSpec(RANKS, _NEVER, args.seed, directory, script=TRAIN, spares=SPARES)) as job:
        yield from measure(job, args.kills, args.seed, tuple(args.wait))


def main() -> int:
    args = parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        setting = {"layout": "tp=2", "ranks": RANKS, "spares": SPARES}
        return print_figures("repair", setting, run(args, args.output_dir or Path(temporary)), (JobFailedError,))


if __name__ == "__main__":
    sys.exit(main())
