"""How long a job stands still when a rank is killed, and how long until it is back at full strength.

Kills a random rank whenever the job is back at full strength, after a short random wait; the steps are small, so that
what is measured is the runtime. Prints one JSON line per figure, in ms where the name says so:

  recovery_ms    from the kill to the first step that the survivors commit in a generation without the victim
  rejoin_ms      from the kill to the first step that all ranks vote for again
  dropped_steps  tries that somebody had prepared and that were not committed
  notice_ms      from the kill until the agent knows that the rank exits (`process/death_watch.py`)
  gone_ms        from the kill until its pidfd says that it is gone, with its memory
  phase_ms       of a recovery: detect (to the notice), leave, abort, quorum, configure, first_commit; they add up to it

And beside them, in the same run, the same kills of a job of torchft's, with the ratios to ours: its Manager, in-process
Gloo, its lighthouse with the default settings of its command and "tuned" (heartbeat timeout 1 s, join timeout 0.2 s).
Its collectives time out after --peer-timeout; its default of 60 s would be worse for it. Its survivors do not go on
together: recovery_ms is until the last of them commits, first_ms until the first does.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

from scripts.benches.torchft_peer.job import PeerFailedError, PeerJob, PeerSettings, default_settings, tuned_settings
from scripts.demo_job.driver import Job, JobFailedError, JobSpec
from scripts.demo_job.run_audit import CommittedRun, Kill, Phases, percentile, recoveries
from scripts.figures import check_output_dir, print_figures

_SMALL_STEPS = ("--dim", "32", "--layers", "1", "--context", "16")
_NEVER = 10**7  # steps: the job ends when the kills are done
_POLL_S = 0.005
_BACK_LIMIT_S = 60.0


class KillsAtFullStrength:
    """Decides when to kill, and kills."""

    lack = "not back at full strength"

    def __init__(self, job: Job, num_kills: int, seed: int, wait_s: tuple[float, float]) -> None:
        self._job, self._num_kills, self._wait_s = job, num_kills, wait_s
        self._source = random.Random(f"bench {seed}")
        self._kill_at: float | None = None
        self._deadline = math.inf

    def tick(self) -> float | None:
        now = time.monotonic()
        if not self._is_whole():
            if self._kill_at is None and now > self._deadline:
                raise JobFailedError(f"{self.lack} within {_BACK_LIMIT_S:g} s; see {self._job.log}")
            return _POLL_S
        if len(self._job.killer.sent) == self._num_kills:
            return None
        if self._kill_at is None:
            self._kill_at = now + self._source.uniform(*self._wait_s)
        if now < self._kill_at:
            return min(_POLL_S, self._kill_at - now)
        if self._job.killer.kill(self._job.run_log, self._victim()) is not None:
            self._kill_at, self._deadline = None, now + _BACK_LIMIT_S
        return _POLL_S

    def _victim(self) -> int:
        """Its local rank."""
        return self._source.randrange(self._job.spec.ranks)

    def _is_whole(self) -> bool:
        """Whether all ranks voted for the newest step, and none of them is the last victim."""
        run_log, sent = self._job.run_log, self._job.killer.sent
        if run_log.newest is None or run_log.strength() < self._job.spec.ranks:
            return False
        return not sent or run_log.newest.generation > run_log.generation_of(sent[-1].member)


def measure(job: Job, num_kills: int, seed: int, wait_s: tuple[float, float]) -> Iterator[dict[str, Any]]:
    """The figures. Raises JobFailedError."""
    job.follow(KillsAtFullStrength(job, num_kills, seed, wait_s).tick)
    job.read()
    run_log = job.run_log
    kills: Sequence[Kill] = job.killer.happened(run_log)
    committed_run = CommittedRun(run_log)
    found = recoveries(run_log, committed_run, kills, job.spec.ranks)
    yield figure_of("recovery_ms", [each.recovery_ms for each in found], p50=50, p99=99, max=100)
    yield figure_of("rejoin_ms", [each.rejoin_ms for each in found], p50=50, max=100)
    yield {"figure": "dropped_steps", "total": len(committed_run.dropped), "kills": len(kills)}
    for name, times in (
        ("notice_ms", run_log.noticed),
        ("gone_ms", {member: exited.seen_at for member, exited in run_log.exited.items()}),
    ):
        yield figure_of(
            name, [(times[k.member] - k.t) * 1e3 for k in kills if k.member in times], p50=50, p99=99, max=100
        )
    phases = [astuple(each.phases) for each in found if each.phases is not None]
    for column, field in enumerate(fields(Phases)):
        yield {**figure_of("phase_ms", [row[column] for row in phases], p50=50, p99=99, max=100), "phase": field.name}


def figure_of(name: str, values: Sequence[float | None], **percents: float) -> dict[str, Any]:
    measured = [value for value in values if value is not None]
    figure: dict[str, Any] = {"figure": name, "count": len(measured)}
    for percent_name, percent in percents.items():
        value = percentile(measured, percent)
        figure[percent_name] = None if value is None else round(value, 1)
    return figure


def num_bytes(text: str) -> int:
    try:
        return int(float(text))
    except (OverflowError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes") from None


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench recovery",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--ranks", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--kills", type=int, default=20, help="(default: %(default)s)")
    parser.add_argument(
        "--rank-bytes",
        type=num_bytes,
        default=0,
        help="memory that each of our ranks holds besides, such as 2e9 (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the waits and of the victims (default: %(default)s)")
    parser.add_argument(
        "--wait",
        type=float,
        nargs=2,
        default=(0.2, 1.0),
        metavar=("FROM", "TO"),
        help="seconds between full strength and the next kill (default: 0.2 1.0)",
    )
    parser.add_argument(
        "--peer-kills", type=int, default=10, help="kills of each of torchft's jobs; 0: without (default: %(default)s)"
    )
    parser.add_argument(
        "--peer-timeout", type=float, default=10.0, metavar="SECONDS", help="of its collectives (default: %(default)g)"
    )
    parser.add_argument("--output-dir", type=Path, help="keep the job's files here, in a new or empty folder")
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error(f"--ranks must be at least 2, but is {args.ranks} instead")
    if args.rank_bytes < 0:
        parser.error(f"--rank-bytes must be at least 0, but is {args.rank_bytes} instead")
    if args.kills < 1:
        parser.error(f"--kills must be at least 1, but is {args.kills} instead")
    if args.peer_kills < 0:
        parser.error(f"--peer-kills must be at least 0, but is {args.peer_kills} instead")
    if args.peer_timeout <= 0:
        parser.error(f"--peer-timeout must be greater than 0, but is {args.peer_timeout:g} instead")
    if not 0 <= args.wait[0] <= args.wait[1]:
        parser.error("--wait must be two numbers of seconds, the smaller one first")
    check_output_dir(parser, args.output_dir)
    return args


def beside(
    peer: PeerSettings, directory: Path, args: argparse.Namespace, ours: dict[str, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """The peer's figures, and how many times ours they are. Raises PeerFailedError."""
    with PeerJob(peer, directory) as job:
        measured = list(job.kills(args.peer_kills, args.seed, tuple(args.wait)))
    first, recovery, rejoin = zip(*measured, strict=True)
    for name, values in (("first_ms", first), ("recovery_ms", recovery), ("rejoin_ms", rejoin)):
        figure = {**figure_of(name, values, p50=50, p99=99, max=100), "peer": peer.name}
        for percent in ("p50", "p99"):
            if ours.get(name, {}).get(percent):
                figure[f"{percent}_ratio"] = round(figure[percent] / ours[name][percent], 1)
        yield figure


def run(args: argparse.Namespace, directory: Path) -> Iterator[dict[str, Any]]:
    ours = {}
    train_args = (*_SMALL_STEPS, "--hold-bytes", str(args.rank_bytes))
    with Job(JobSpec(args.ranks, _NEVER, args.seed, directory / "ours", train_args)) as job:
        for figure in measure(job, args.kills, args.seed, tuple(args.wait)):
            ours[figure["figure"]] = figure
            yield figure
    if args.peer_kills:
        for peer in (default_settings(args.ranks, args.peer_timeout), tuned_settings(args.ranks, args.peer_timeout)):
            yield from beside(peer, directory / peer.name.replace(" ", "-"), args, ours)


def main() -> int:
    args = parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        setting = {"ranks": args.ranks, "rank_bytes": args.rank_bytes}
        figures = run(args, args.output_dir or Path(temporary))
        return print_figures("recovery", setting, figures, (JobFailedError, PeerFailedError))


if __name__ == "__main__":
    sys.exit(main())
