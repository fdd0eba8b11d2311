"""How long a job stands still when a rank is killed, and how long until it is back at full strength.

Kills a random rank whenever the job is back at full strength, after a short random wait; the steps are small, so that
what is measured is the runtime. Prints one JSON line per figure, in ms where the name says so:

  recovery_ms    from the kill to the first step that the survivors commit in a generation without the victim
  rejoin_ms      from the kill to the first step that all ranks vote for again
  dropped_steps  tries that somebody had prepared and that were not committed
  phase_ms       of a recovery: detect, abort, quorum, configure, first_commit; they add up to it
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "demo_job"))

from account import Kill, Ledger, Phases, percentile, recoveries
from driver import Job, JobFailedError, JobSpec

_SMALL_STEPS = ("--dim", "32", "--layers", "1", "--context", "16")
_NEVER = 10**7  # steps: the job ends when the kills are done
_POLL_S = 0.005
_BACK_LIMIT_S = 60.0


class KillsAtFullStrength:
    """Decides when to kill, and kills."""

    def __init__(self, job: Job, num_kills: int, seed: int, wait_s: tuple[float, float]) -> None:
        self._job, self._num_kills, self._wait_s = job, num_kills, wait_s
        self._source = random.Random(f"bench {seed}")
        self._kill_at: float | None = None
        self._deadline = math.inf

    def tick(self) -> float | None:
        now = time.monotonic()
        if not self._is_whole():
            if self._kill_at is None and now > self._deadline:
                raise JobFailedError(f"not back at full strength within {_BACK_LIMIT_S:g} s; see {self._job.log}")
            return _POLL_S
        if len(self._job.killer.sent) == self._num_kills:
            return None
        if self._kill_at is None:
            self._kill_at = now + self._source.uniform(*self._wait_s)
        if now < self._kill_at:
            return min(_POLL_S, self._kill_at - now)
        if self._job.killer.kill(self._job.journal, self._source.randrange(self._job.spec.ranks)) is not None:
            self._kill_at, self._deadline = None, now + _BACK_LIMIT_S
        return _POLL_S

    def _is_whole(self) -> bool:
        """Whether all ranks voted for the newest step, and none of them is the last victim."""
        journal, sent = self._job.journal, self._job.killer.sent
        if journal.newest is None or journal.strength() < self._job.spec.ranks:
            return False
        return not sent or journal.newest.generation > journal.generation_of(sent[-1].member)


def measure(job: Job, num_kills: int, seed: int, wait_s: tuple[float, float]) -> Iterator[dict[str, Any]]:
    """The figures. Raises JobFailedError."""
    job.follow(KillsAtFullStrength(job, num_kills, seed, wait_s).tick)
    job.read()
    kills: Sequence[Kill] = job.killer.happened(job.journal)
    ledger = Ledger(job.journal)
    found = recoveries(job.journal, ledger, kills, job.spec.ranks)
    yield _figure("recovery_ms", [each.recovery_ms for each in found], p50=50, p99=99, max=100)
    yield _figure("rejoin_ms", [each.rejoin_ms for each in found], p50=50, max=100)
    yield {"figure": "dropped_steps", "total": len(ledger.dropped), "kills": len(kills)}
    phases = [astuple(each.phases) for each in found if each.phases is not None]
    for column, field in enumerate(fields(Phases)):
        yield {**_figure("phase_ms", [row[column] for row in phases], p50=50, max=100), "phase": field.name}


def _figure(name: str, values: Sequence[float | None], **percents: float) -> dict[str, Any]:
    measured = [value for value in values if value is not None]
    figure: dict[str, Any] = {"figure": name, "count": len(measured)}
    for percent_name, percent in percents.items():
        value = percentile(measured, percent)
        figure[percent_name] = None if value is None else round(value, 1)
    return figure


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench recovery",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--ranks", type=int, default=4, help="(default: %(default)s)")
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
    if args.ranks < 2:
        parser.error(f"--ranks must be at least 2, but is {args.ranks} instead")
    if args.kills < 1:
        parser.error(f"--kills must be at least 1, but is {args.kills} instead")
    if not 0 <= args.wait[0] <= args.wait[1]:
        parser.error("--wait must be two numbers of seconds, the smaller one first")
    if args.output_dir is not None and args.output_dir.exists() and any(args.output_dir.iterdir()):
        parser.error(f"--output-dir {args.output_dir} is not empty; name a new folder")
    return args


def main() -> int:
    args = parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        spec = JobSpec(args.ranks, _NEVER, args.seed, args.output_dir or Path(temporary), _SMALL_STEPS)
        try:
            with Job(spec) as job:
                for figure in measure(job, args.kills, args.seed, tuple(args.wait)):
                    load = round(os.getloadavg()[0], 2)
                    print(json.dumps({"bench": "recovery", "ranks": args.ranks, **figure, "load": load}), flush=True)
        except JobFailedError as error:
            print(f"scripts/bench recovery: error: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
