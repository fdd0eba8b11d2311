"""How much work a kill in the middle of a long step costs, with the gradients of survivors' slots kept and without.

Kills a random rank at a random moment of each --every-th step, in two jobs one after the other: with `keep=True` and
without. With --layout, such as tp=2, each rank holds a part of the model, and its replica group dies with it. A slot
counts as computed once its forward has begun, on each rank for itself. Prints JSON lines for each job:

  lost_slots     slots of the killed steps that were computed in vain, in all; "of_dead": those that the replica groups
                 of the killed ranks had begun in these steps; "ratio": of both; "share": the ratio to the even shares
                 of these groups
  step_ms        of the steps that were not killed
  killed_step_ms of the killed steps, from the commit before to their own
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from elasticgang.layout import ParallelLayout
from elasticgang.train.slot_gradients import REDUCTIONS
from scripts.benches.recovery import figure_of
from scripts.demo_job.driver import Job, JobFailedError, JobSpec
from scripts.demo_job.run_audit import CommittedRun, Kill
from scripts.figures import check_output_dir, print_figures

TRAIN = Path(__file__).with_name("slots") / "train.py"

_NEVER = 10**7  # steps: the job ends when the kills are done
_POLL_S = 0.005


class KillsInSteps:
    """Decides when to kill, and kills. A step that ends before its moment leaves the kill to the next one."""

    def __init__(self, job: Job, num_kills: int, every: int, seed: int) -> None:
        self._job, self._num_kills, self._every = job, num_kills, every
        self._source = random.Random(f"long steps {seed}")
        self._newest = -1
        self._began_at, self._step_s, self._kill_at = 0.0, 0.0, 0.0
        self._due = every  # the first step that may be killed next

    def tick(self) -> float | None:
        run_log, now, sent = self._job.run_log, time.monotonic(), self._job.killer.sent
        if run_log.newest is None:
            return _POLL_S
        if run_log.newest.step != self._newest:
            self._newest, before, self._began_at = run_log.newest.step, self._began_at, now
            if not sent or self._newest > sent[-1].step:
                self._step_s = now - before
            self._kill_at = now + self._source.uniform(0.0, self._step_s)
        if len(sent) == self._num_kills:
            return None if self._newest > sent[-1].step else _POLL_S
        is_whole = run_log.strength() == self._job.spec.ranks == len(run_log.live())
        if self._newest + 1 < self._due or not is_whole or now < self._kill_at:
            return _POLL_S
        if self._job.killer.kill(run_log, self._source.randrange(self._job.spec.ranks)) is not None:
            self._due = self._newest + 1 + self._every
        return _POLL_S


def computed(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """The slots that each member has begun to compute."""
    found = {}
    for path in (directory / "history").glob("*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        found[path.stem] = [line for line in lines if line["kind"] == "slot"]
    return found


def lost_and_of_dead(by_member: dict[str, list[dict[str, Any]]], kill: Kill, num_needed: int) -> tuple[int, int]:
    """Slots of the killed step that were computed in vain, and that the dead rank's group had begun. `num_needed`: how
    many are computed in an undisturbed step."""
    of_step = [line for lines in by_member.values() for line in lines if line["step"] == kill.step]
    mine = [(line["generation"], line["group"]) for line in by_member[kill.member] if line["step"] <= kill.step]
    of_group = [line for line in of_step if mine and (line["generation"], line["group"]) == mine[-1]]
    return len(of_step) - num_needed, len(of_group)


def measure(job: Job, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The figures. Raises JobFailedError."""
    job.follow(KillsInSteps(job, args.kills, args.every, args.seed).tick)
    job.read()
    kills: list[Kill] = job.killer.happened(job.run_log)
    by_member = computed(job.spec.directory)
    num_needed = args.slots * args.layout.unit // args.layout.sdp
    each = [lost_and_of_dead(by_member, kill, num_needed) for kill in kills]
    lost, of_dead = [one for one, _ in each], [one for _, one in each]
    even = num_needed * args.layout.unit / job.spec.ranks * len(kills)
    yield {
        "figure": "lost_slots",
        "kills": len(kills),
        "total": sum(lost),
        "of_dead": sum(of_dead),
        "ratio": round(sum(lost) / sum(of_dead), 2) if any(of_dead) else None,
        "share": round(sum(lost) / even, 2),
        "each": lost,
        "each_of_dead": of_dead,
    }
    run = CommittedRun(job.run_log)
    at = {attempt.step: t for attempt, t in run.committed_at.items()}
    killed = {kill.step for kill in kills}
    times = {step: (at[step] - at[step - 1]) * 1e3 for step in at if step - 1 in at}
    for name, is_killed in (("step_ms", False), ("killed_step_ms", True)):
        chosen = [time_ms for step, time_ms in times.items() if (step in killed) == is_killed]
        yield figure_of(name, chosen, p50=50, max=100)


def layout_of(text: str) -> ParallelLayout:
    """Raises ArgumentTypeError."""
    try:
        sizes = {axis: int(size) for axis, size in (entry.split("=") for entry in text.split(","))}
        if not sizes.keys() <= {"pp", "sdp", "tp"}:
            raise ValueError(text)
        return ParallelLayout(pp=sizes.get("pp", 1), sdp=sizes.get("sdp", 1), tp=sizes.get("tp", 1))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must be like sdp=2, with the axes pp, sdp and tp, but is {text!r}"
        ) from error


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench long_steps",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--ranks", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--layout", type=layout_of, default=ParallelLayout(), help="such as sdp=2 (default: none)")
    parser.add_argument("--reduction", choices=REDUCTIONS, default="reproducible", help="(default: %(default)s)")
    parser.add_argument("--slots", type=int, default=32, help="in a step (default: %(default)s)")
    parser.add_argument("--depth", type=int, default=100, help="work in a slot: linear layers (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=10, help="in each job (default: %(default)s)")
    parser.add_argument("--every", type=int, default=10, metavar="STEPS", help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims (default: %(default)s)")
    parser.add_argument("--output-dir", type=Path, help="keep the jobs' files here, in a new or empty folder")
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error(f"--ranks must be at least 2, but is {args.ranks} instead")
    if args.ranks % args.layout.unit or args.ranks == args.layout.unit:
        parser.error(f"--ranks must make at least two replica groups of {args.layout.unit}, but is {args.ranks}")
    if args.layout.pp > 1 and args.reduction != "sum":
        parser.error("--layout with pp needs --reduction sum")
    for name in ("slots", "depth", "kills", "every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, but is {getattr(args, name)} instead")
    check_output_dir(parser, args.output_dir)
    return args


def run(args: argparse.Namespace, directory: Path) -> Iterator[dict[str, Any]]:
    """Raises JobFailedError."""
    for keeps in (True, False):
        train_args = [f"--{axis}={getattr(args.layout, axis)}" for axis in ("pp", "sdp", "tp")]
        train_args += [f"--slots={args.slots}", f"--depth={args.depth}", f"--reduction={args.reduction}"]
        train_args += ["--keep"] if keeps else []
        spec = JobSpec(
            args.ranks,
            _NEVER,
            args.seed,
            directory / ("keep" if keeps else "without"),
            train_args,
            script=TRAIN,
            num_parts=args.layout.unit,
        )
        with Job(spec) as job:
            for figure in measure(job, args):
                yield {"keep": keeps, **figure}


def main() -> int:
    args = parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        figures = run(args, args.output_dir or Path(temporary))
        asked = {
            "ranks": args.ranks,
            "slots": args.slots,
            "layout": args.layout.sizes,
            "reduction": args.reduction,
        }
        return print_figures("long_steps", asked, figures, (JobFailedError,))


if __name__ == "__main__":
    sys.exit(main())
