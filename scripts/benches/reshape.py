"""How long a job is without a committed step when it takes a fallback layout, and when it goes back.

Two pairs of ranks (`sdp=2`), one rank of them on a second host. In each round the host is killed, and the three ranks
that are left take the whole model each (`sdp=1`). Then one of them is killed, which changes no layout. Once it is back,
the host is started again. Prints one JSON line per figure, in ms unless the name says bytes:

  fallback_ms  from the kill of the host to the first step committed in the fallback layout
  kill_ms      from the kill of a rank to the next committed step, in the fallback layout
  back_ms      from the last step committed in the fallback layout to the first one in the first layout
  phase_ms     of each of these changes, on the first host, by kind; "first_commit" has the move of the state
  moved_bytes  what all ranks have fetched in a change, by kind, beside the bytes that their seats hold then
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elasticgang.observe.change_report import PHASES
from scripts.benches.recovery import figure_of
from scripts.demo_job.demo import TRAIN_LAYOUT
from scripts.demo_job.driver import Job, JobFailedError, JobSpec
from scripts.demo_job.run_audit import CommittedRun
from scripts.figures import check_output_dir, print_figures

LAYOUT = "sdp=2,min_replicas=2/sdp=1"
FIRST, FALLBACK = (1, 2, 1), (1, 1, 1)
RANKS_HERE, RANKS = 3, 4

_NEVER = 10**7  # steps: the job ends when the rounds are done
_SETTLED = 5  # steps of all ranks before the next change
_POLL_S = 0.005
_LIMIT_S = 120.0


class Rounds:
    """Loses the host, kills a rank and starts the host again, each once the job has settled. `host_lost_at`: when."""

    def __init__(self, job: Job, num_rounds: int) -> None:
        self._job, self._num_rounds = job, num_rounds
        self._steps = self._turn()
        self.host_lost_at: list[float] = []

    def tick(self) -> float | None:
        return next(self._steps, None)

    def _turn(self) -> Iterator[float]:
        host, killer, run_log = self._job.second_host, self._job.killer, self._job.run_log
        assert host is not None
        for _ in range(self._num_rounds):
            yield from self._settle(FIRST, RANKS)
            while not host.lose(killer, run_log):
                yield _POLL_S
            self.host_lost_at.append(time.monotonic())
            yield from self._settle(FALLBACK, RANKS_HERE)
            while killer.kill(run_log, 0) is None:
                yield _POLL_S
            yield from self._settle(FALLBACK, RANKS_HERE)
            host.start()
        yield from self._settle(FIRST, RANKS)

    def _settle(self, sizes: tuple[int, int, int], num_ranks: int) -> Iterator[float]:
        """Until so many ranks have committed some steps in the layout of `sizes`, in a generation of their own."""
        run_log, deadline = self._job.run_log, time.monotonic() + _LIMIT_S
        begun: tuple[int, int] | None = None
        before = run_log.generation
        while True:
            newest = run_log.newest
            is_new = newest is not None and (newest.generation > before or before <= 1)
            if newest is not None and is_new and run_log.sizes == sizes and run_log.strength() == num_ranks:
                if begun is None or begun[0] != newest.generation:
                    begun = newest.generation, newest.step
                if newest.step - begun[1] >= _SETTLED:
                    return
            if time.monotonic() > deadline:
                raise JobFailedError(f"the job has not settled within {_LIMIT_S:g} s; see {self._job.log}")
            yield _POLL_S


def measure(job: Job, num_rounds: int, directory: Path) -> Iterator[dict[str, Any]]:
    """The figures. Raises JobFailedError."""
    rounds = Rounds(job, num_rounds)
    job.follow(rounds.tick)
    job.read()
    committed = CommittedRun(job.run_log)
    in_order = sorted((t, attempt) for attempt, t in committed.committed_at.items())
    sizes_of = {each.attempt.generation: each.sizes for each in job.run_log.prepared}

    def first_after(t: float, generation: int, sizes: tuple[int, int, int]) -> float:
        return next(
            at
            for at, each in in_order
            if at > t and each.generation > generation and sizes_of[each.generation] == sizes
        )

    def generation_at(t: float) -> int:
        return max(each.generation for at, each in in_order if at <= t)

    lost = [(first_after(t, generation_at(t), FALLBACK) - t) * 1e3 for t in rounds.host_lost_at]
    kills = job.killer.happened(job.run_log)
    killed = [(first_after(kill.t, generation_at(kill.t), FALLBACK) - kill.t) * 1e3 for kill in kills]
    back = [
        (later - earlier) * 1e3
        for (earlier, one), (later, other) in itertools.pairwise(in_order)
        if (sizes_of[one.generation], sizes_of[other.generation]) == (FALLBACK, FIRST)
    ]
    for name, values in (("fallback_ms", lost), ("kill_ms", killed), ("back_ms", back)):
        yield figure_of(name, values, p50=50, max=100)
    yield from changes(directory)


def changes(directory: Path) -> Iterator[dict[str, Any]]:
    """The phases and the bytes of each kind of change, from the agents' events."""
    paths = sorted(directory.rglob("events.jsonl"))
    events = [json.loads(line) for path in paths for line in path.read_text().splitlines()]
    here = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    bytes_of: defaultdict[int, int] = defaultdict(int)
    for event in events:
        if event["event"] == "healed":
            bytes_of[event["generation"]] += event["bytes"]
    found: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for change in here:
        if change["event"] == "generation_change" and change["generation"] > 1:
            back = "back" if change["fallback_of"] is None else "fallback"
            kind = back if change["layout_before"] else "kill" if change["left"] else "join"
            found[kind].append(change)
    for kind, of_kind in sorted(found.items()):
        for phase in PHASES:
            values = [change["phases_ms"][phase] for change in of_kind]
            if any(value is not None for value in values):
                yield {**figure_of("phase_ms", values, p50=50, max=100), "phase": phase, "kind": kind}
        moved = [bytes_of[change["generation"]] for change in of_kind]
        yield {"figure": "moved_bytes", "count": len(moved), "p50": statistics.median(moved), "kind": kind}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench reshape",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--dim", type=int, default=512, help="of the model; 512: 80 MB of state (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the model and the data (default: %(default)s)")
    parser.add_argument("--output-dir", type=Path, help="keep the job's files here, in a new or empty folder")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds must be at least 1, but is {args.rounds} instead")
    check_output_dir(parser, args.output_dir)
    return args


def run(args: argparse.Namespace, directory: Path) -> Iterator[dict[str, Any]]:
    """Raises JobFailedError."""
    spec = JobSpec(
        RANKS_HERE,
        _NEVER,
        args.seed,
        directory,
        ("--dim", str(args.dim)),
        TRAIN_LAYOUT,
        run_args=["--layout", LAYOUT, "--module"],
        num_parts=2,
        host_every_steps=_NEVER,
    )
    with Job(spec) as job:
        yield from measure(job, args.rounds, directory)


def main() -> int:
    args = parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        setting = {"layout": LAYOUT, "ranks": RANKS, "dim": args.dim}
        return print_figures("reshape", setting, run(args, args.output_dir or Path(temporary)), (JobFailedError,))


if __name__ == "__main__":
    sys.exit(main())
