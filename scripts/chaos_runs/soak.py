"""Train under random faults for some minutes, and check every promise in what the members wrote.

The demo's model, on several agents with a coordinator: ranks, comm processes, standbys, agents and the coordinator are
killed, ranks and comm processes are stopped, some for ever, ranks are drained, several at once; and ranks are killed
inside a generation change, a heal and a vote, when the events tell of one. What ends is started again. One member that
holds the state is always left alone.

With --layout it trains the demo's Llama, of which each rank holds a part, also in fallback layouts. One holder of each
part is left alone then. Ranks are drained only if the others fill two replica groups.

Checked from the members' own histories, which they write as they go: one chain of records (RULE-2); for each step one
attempt (RULE-4), made of the step's samples, each once (RULE-5); final parameters equal on all members of a part bit
for bit; the loss curve beside that of one undisturbed process. With --reproducible the final bits are those of that
process, which holds the whole model.

The number of steps is what would nearly fill --minutes undisturbed, by the speed of a first run: under faults the job
takes longer, and what is left after --minutes, and after --min-faults, is done without. A job that has had fewer than
--min-faults when it ends fails. So with --pause, which limits the speed, it has steps enough for them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elasticgang.layout import ParallelLayout
from elasticgang.layout.parallel_layout import NOTATION, NOTATION_HELP
from scripts.chaos_runs.soaking.checks import failed_checks
from scripts.chaos_runs.soaking.fault_injector import WEIGHTS, WEIGHTS_OF_FALLBACKS, FaultInjector
from scripts.chaos_runs.soaking.fleet import Fleet, FleetSpec
from scripts.demo_job.demo import TRAIN_LAYOUT, llama_layout
from scripts.demo_job.driver import TRAIN, Tail
from scripts.demo_job.run_audit import CommittedRun
from scripts.demo_job.run_log import RunLog
from scripts.figures import check_output_dir

_SMALL = ("--dim", "64", "--layers", "1", "--context", "32")
_SMALL_LLAMA = ("--dim", "32", "--layers", "2", "--context", "32")  # a pipeline divides the layers
_TICK_S = 0.004
_TELL_S = 10.0
_STALL_S = 90.0
_SHARE = 0.9  # of the steps that the undisturbed rate makes in that time
_CALIBRATION = (20, 80)  # from that step to that one
_MIN_STEPS = 60
_ROOM = 3.0  # a fault waits for its moment, or is not done


class SoakFailedError(Exception):
    pass


def calibrate(args: argparse.Namespace, directory: Path) -> float:
    """Steps a second of the fleet left alone."""
    with Fleet(fleet_spec(args, 10**7, directory)) as fleet:
        first, last = _CALIBRATION
        started = _wait_for_steps(fleet, first)
        ended = _wait_for_steps(fleet, last)
    return (last - first) / (ended - started)


def _wait_for_steps(fleet: Fleet, num_steps: int) -> float:
    deadline = time.monotonic() + _STALL_S
    while time.monotonic() < deadline:
        fleet.read()
        if fleet.run_log.newest is not None and fleet.run_log.newest.step >= num_steps:
            return time.monotonic()
        if any(agent.process.poll() is not None for agent in fleet.agents):
            break
        time.sleep(_TICK_S)
    raise SoakFailedError(f"the job does not start; see {fleet.spec.directory}")


def num_steps_at(args: argparse.Namespace, rate: float) -> int:
    """How many steps the job has, by its undisturbed `rate` in steps a second. With --pause they last for --min-faults,
    however slow the machine was while the rate was measured."""
    steps = args.minutes * 60 * rate * _SHARE
    if args.pause > 0:
        steps = max(steps, _ROOM * args.min_faults * args.every / args.pause)
    return max(_MIN_STEPS, int(steps))


def soak(args: argparse.Namespace, fleet: Fleet, injector: FaultInjector, num_steps: int) -> None:
    """Until the job is over. Raises SoakFailedError when it stands still, or an agent fails."""
    began = told = time.monotonic()
    faults_end = math.inf if args.steps is not None else began + args.minutes * 60
    newest, moved = fleet.run_log.newest, began
    while not fleet.is_over:
        fleet.read()
        wants_faults = time.monotonic() < faults_end or len(injector.done) < args.min_faults
        if wants_faults and not fleet.run_log.finished:
            injector.tick()
        else:
            injector.stop()
        if not fleet.run_log.finished:
            fleet.revive()
        now = time.monotonic()
        if fleet.run_log.newest != newest:
            newest, moved = fleet.run_log.newest, now
        if now - moved > _STALL_S:
            raise SoakFailedError(
                f"no step was committed for {_STALL_S:g} s, after {newest}; see {fleet.spec.directory}"
            )
        if failures := fleet.failures() if now - told > _TELL_S else []:
            raise SoakFailedError(f"{failures[0]}; see {fleet.spec.directory}")
        if now - told > _TELL_S:
            told = now
            done = 0 if newest is None else newest.step + 1
            print(
                f"{now - began:5.0f} s: step {done} of {num_steps}, generation "
                f"{max((line['generation'] for _, line in fleet.generations), default=0)}, "
                f"{len(fleet.live())} of {fleet.spec.ranks} ranks, {len(injector.done)} faults",
                file=sys.stderr,
                flush=True,
            )
        time.sleep(_TICK_S)
    fleet.read()
    if failures := fleet.failures():
        raise SoakFailedError(f"{failures[0]}; see {fleet.spec.directory}")
    if len(injector.done) < args.min_faults:
        raise SoakFailedError(
            f"the job had {len(injector.done)} faults in its {num_steps} steps, but --min-faults is {args.min_faults}; "
            "give more --minutes or --steps, or less between faults with --every"
        )


def run_reference(args: argparse.Namespace, num_steps: int, directory: Path) -> RunLog:
    """One undisturbed process."""
    num_steps = min(num_steps, args.reference_steps)
    if num_steps == 0:
        return RunLog()
    script = ["-m", str(TRAIN_LAYOUT)] if is_divided(args) else [str(TRAIN)]
    command = [sys.executable, *script, *train_args(args, num_steps), "--output-dir", str(directory)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    run_log = RunLog()
    for path in (directory / "history").glob("*.jsonl"):
        for line in Tail(path).read():
            run_log.add_history("alone", line)
    return run_log


def expected_samples(args: argparse.Namespace, num_steps: int) -> Sequence[Sequence[int]]:
    from scripts.demo_job import train, train_layout

    parsed = (train_layout if is_divided(args) else train).parse_args(train_args(args, num_steps))
    batches = train.make_batches(parsed, len(train.load_text(parsed.context)))
    return [batches.samples(step).tolist() for step in range(num_steps)]


def train_args(args: argparse.Namespace, num_steps: int) -> list[str]:
    reduction = "reproducible" if args.reproducible else "sum"
    small = _SMALL_LLAMA if is_divided(args) else _SMALL
    return ["--steps", str(num_steps), "--seed", str(args.seed), "--reduction", reduction, *small]


def fleet_spec(args: argparse.Namespace, num_steps: int, directory: Path) -> FleetSpec:
    given = [*train_args(args, num_steps), "--pause", str(args.pause)]
    if not is_divided(args):
        return FleetSpec(args.agents, args.ranks, directory, given)
    script = ["--layout", args.layout.text, "--module", str(TRAIN_LAYOUT)]
    return FleetSpec(args.agents, args.ranks, directory, given, script, max_unit(args.layout))


def is_divided(args: argparse.Namespace) -> bool:
    return max_unit(args.layout) > 1


def max_unit(layout: ParallelLayout) -> int:
    """The most ranks of a replica group, in any layout of the job."""
    return max(each.unit for each in layout.options)


def summary(
    fleet: Fleet, injector: FaultInjector, num_steps: int, seconds: float, faults: Sequence[str]
) -> dict[str, Any]:
    committed = CommittedRun(fleet.run_log)
    phases: list[Mapping[str, float | None]] = [change["phases_ms"] for change in fleet.changes]
    return {
        "passed": not faults,
        "faults": list(faults),
        "minutes": round(seconds / 60, 2),
        "steps": num_steps,
        "num_faults": len(injector.done),
        "by_kind": injector.counts(),
        "generations": max((line["generation"] for _, line in fleet.generations), default=0),
        "members": len(fleet.run_log.spawned),
        "agents": len(fleet.agents) + len(fleet.past),
        "dropped_attempts": len(committed.dropped),
        "layout_changes": max(0, len(committed.layouts) - 1),
        "in_doubt": sum(len(change["in_doubt"]) for change in fleet.changes),
        "configure_ms_max": max((phase["configure"] or 0.0 for phase in phases), default=0.0),
    }


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/chaos soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--minutes", type=float, default=1.0, help="of faults (default: %(default)g)")
    parser.add_argument(
        "--min-faults", type=int, default=0, help="at least so many, or the run fails (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the faults, the model and the data (default: %(default)s)"
    )
    parser.add_argument("--agents", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="of each agent (default: %(default)s)")
    parser.add_argument(
        "--layout",
        type=llama_layout,
        default=ParallelLayout(),
        metavar=NOTATION,
        help=f"train a Llama that is divided among ranks. {NOTATION_HELP[0].upper()}{NOTATION_HELP[1:]}",
    )
    parser.add_argument("--every", type=float, default=2.0, help="mean seconds between faults (default: %(default)g)")
    parser.add_argument(
        "--pause", type=float, default=0.0, help="seconds that each rank sleeps in each step (default: %(default)g)"
    )
    parser.add_argument("--steps", type=int, help="this many, whatever time it takes")
    parser.add_argument(
        "--reference-steps", type=int, default=10**9, help="of the undisturbed run, at most (default: all)"
    )
    parser.add_argument(
        "--reproducible",
        action="store_true",
        help='sum the gradients with reduction="reproducible": the job must end in the bits of the undisturbed run; '
        "also with a --layout of sdp alone",
    )
    parser.add_argument("--output-dir", type=Path, help="keep everything here, in a new or empty folder")
    args = parser.parse_args(argv)
    if args.minutes <= 0 or args.every <= 0:
        parser.error("--minutes and --every must be greater than 0")
    if args.min_faults < 0:
        parser.error(f"--min-faults must be at least 0, but is {args.min_faults} instead")
    if args.reproducible and args.reference_steps < 10**9:
        parser.error("--reproducible needs the whole undisturbed run: leave out --reference-steps")
    if args.pause < 0:
        parser.error("--pause must be at least 0")
    if args.agents < 1 or args.ranks < 1 or args.agents * args.ranks < 2:
        parser.error("there must be at least two ranks, so that somebody is left with the state")
    if args.agents * args.ranks < 2 * max_unit(args.layout):
        parser.error(f"there must be at least {2 * max_unit(args.layout)} ranks, so that each part survives its rank")
    if args.agents * args.ranks < args.layout.num_needed:
        parser.error(f"there must be at least {args.layout.num_needed} ranks to fill the first layout")
    if args.reproducible and any(each.tp > 1 or each.pp > 1 for each in args.layout.options):
        parser.error("--reproducible holds for sdp: leave out tp and pp, which change what is added to what")
    check_output_dir(parser, args.output_dir)
    return args


def run(args: argparse.Namespace, directory: Path) -> int:
    num_steps = args.steps
    if num_steps is None:
        rate = calibrate(args, directory / "calibration")
        num_steps = num_steps_at(args, rate)
        print(f"{rate:.1f} steps a second undisturbed; {num_steps} steps under faults", file=sys.stderr, flush=True)
    began = time.monotonic()
    with Fleet(fleet_spec(args, num_steps, directory / "job")) as fleet:
        weights = WEIGHTS_OF_FALLBACKS if args.layout.fallback else WEIGHTS
        injector = FaultInjector(fleet, random.Random(f"soak {args.seed}"), args.every, weights)
        try:
            soak(args, fleet, injector, num_steps)
            faults = []
        except SoakFailedError as error:
            faults = [str(error)]
    seconds = time.monotonic() - began
    if not faults:
        reference = run_reference(args, num_steps, directory / "reference")
        digest = next((finished.digest for finished in reference.finished), "unknown") if args.reproducible else None
        faults = failed_checks(
            fleet.run_log,
            [line for _, line in fleet.generations],
            fleet.changes,
            expected_samples(args, num_steps),
            CommittedRun(reference).curve,
            digest,
        )
    found = summary(fleet, injector, num_steps, seconds, faults)
    text = json.dumps(found, indent=2)
    (directory / "summary.json").write_text(text + "\n")
    print(text)
    return int(bool(faults))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        if args.output_dir is not None:
            args.output_dir.mkdir(parents=True, exist_ok=True)
            return run(args, args.output_dir.resolve())
        with tempfile.TemporaryDirectory(prefix="soak-") as temporary:
            return run(args, Path(temporary))
    except SoakFailedError as error:
        print(f"scripts/chaos soak: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
