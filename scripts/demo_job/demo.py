"""Train a small transformer on real text while its ranks are killed at random, and prove that nothing was lost."""

from __future__ import annotations

import argparse
import json
import math
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from elasticgang.launch.arguments import layout_of
from elasticgang.layout import ParallelLayout
from elasticgang.layout.parallel_layout import NOTATION, NOTATION_HELP
from scripts.demo_job.driver import TRAIN, Job, JobFailedError, JobSpec
from scripts.demo_job.kills import ScheduledKills
from scripts.demo_job.progress import Progress, Status
from scripts.demo_job.report import LOSS_TOLERANCE, Asked, Report, Run
from scripts.demo_job.run_audit import CommittedRun, Recovery, recoveries
from scripts.demo_job.run_log import Part, parts_of
from scripts.demo_job.second_host import NUM_RANKS

ROOT = Path(__file__).resolve().parents[2]
TRAIN_LAYOUT = Path("scripts.demo_job.train_layout")  # a module
_HOST_LOSSES = 6  # after so large a part of the steps the second host is lost, or comes back
_LLAMA_LAYERS, _LLAMA_KV_HEADS, _LLAMA_SLOTS = 2, 2, 4
MAX_RANKS = 8  # the slots of train.py's batch: more ranks would have nothing to do

EXIT_FAULT, EXIT_USAGE = 1, 2

_EPILOG = f"""\
examples:
  scripts/demo                                 four ranks, a kill about every 5 s, about a minute on two cores
  scripts/demo --kill-every 2 --seed 7         more kills, on another schedule
  scripts/demo --reproducible                  ends in the bits of one undisturbed rank
  scripts/demo --reproducible --layout sdp=2   the same with FSDP2, in the bits of one rank that holds the whole model
  scripts/demo --steps 60 --kill-every 2 --no-reference
                                               a short one
  scripts/demo --no-kill --no-reference        the job alone
  scripts/demo --layout sdp=2,tp=2             a small Llama, of which each rank holds a part: two replica groups of
                                               four ranks, and a spare
  scripts/demo --layout sdp=2,min_replicas=2/sdp=1
                                               four ranks on two agents, of which the second one is lost and comes back:
                                               the others then hold the whole model each, as they cannot fill two
                                               replica groups

What it writes, in runs/<date>-seed<seed>/ or --output-dir:
  summary.json   the figures, and the kills as they were drawn and as they were carried out
  loss.png       loss over steps, each kill and each return marked, the undisturbed run beside it
  main/, reference/
                 of each job: the agent's events.jsonl, what each rank wrote (history/), and its output (job.log)

The reference is the same job without kills. The losses of the two may differ by {LOSS_TOLERANCE:g} in a step: a killed
rank's share is computed by others, so that the same terms are added in another order (measured without kills, with
1 to 4 ranks over 300 steps: up to 2.6e-7; with one sample of one step left out: more than 1e-3). With --reproducible
the reference is one rank alone, and the final parameters of all ranks must be the same as its, bit by bit. With
--layout it is one rank that holds the whole model (measured without kills: up to 3.2e-7). --reproducible compares the
bits with it too, if the layouts divide the model over sdp alone; tp and pp change what is added to what.

With a fallback layout the job has two agents, as if on two hosts. The second one has one rank. It is killed after a
sixth of the steps, and started again a sixth after that, as often as the steps allow: the state moves to the fallback
layout and back, in memory.

Exit code: 0 when the run passed. 1 when a sample was lost or seen twice, when the loss curve leaves the reference's,
when the bits differ with --reproducible, when fewer kills happened than asked for, when the job did not take a fallback
layout for each loss of the second host, or when the job failed. 2 for a command line that makes no sense.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = _Parser(
        prog="scripts/demo",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--ranks", type=_integer, metavar="N", help="processes that train (default: 4; two replica groups of a layout)"
    )
    parser.add_argument(
        "--layout",
        type=llama_layout,
        default=ParallelLayout(),
        metavar=NOTATION,
        help="train a Llama that is divided among ranks: sdp (FSDP2), tp (parallelize_module), pp (a 1F1B pipeline). "
        f"{NOTATION_HELP[0].upper()}{NOTATION_HELP[1:]}",
    )
    parser.add_argument(
        "--spares", type=_integer, metavar="N", help="further processes that wait (default: 0; 1 with a layout)"
    )
    parser.add_argument(
        "--steps", type=_integer, default=300, metavar="N", help="optimizer steps to commit (default: %(default)s)"
    )
    parser.add_argument(
        "--kill-every",
        type=_seconds,
        default=5.0,
        metavar="SECONDS",
        help="the mean wait between kills; each is between 0.6 and 1.4 times that (default: %(default)g)",
    )
    parser.add_argument(
        "--max-kills", type=_integer, metavar="N", help="leave the ranks alone after N kills (default: kill to the end)"
    )
    parser.add_argument(
        "--pause",
        type=_seconds,
        metavar="SECONDS",
        help="each rank sleeps so long in each step, so that a quick machine does not end the job before its first "
        "kill; not in the reference (default: no pause)",
    )
    parser.add_argument(
        "--seed",
        type=_integer,
        default=0,
        metavar="N",
        help="of the kill schedule, the model and the order of the data (default: %(default)s)",
    )
    parser.add_argument(
        "--reproducible",
        action="store_true",
        help='sum the gradients with reduction="reproducible", and compare the final parameters with one rank\'s; also '
        "with a --layout of sdp alone",
    )
    parser.add_argument("--no-kill", action="store_true", help="leave the ranks alone")
    parser.add_argument("--no-reference", action="store_true", help="leave out the undisturbed run")
    parser.add_argument(
        "--output-dir", type=Path, metavar="DIR", help="a new or empty folder (default: runs/<date>-seed<seed>)"
    )
    args = parser.parse_args(argv)
    is_divided = args.layout.unit > 1
    ranks = args.layout.num_needed if args.layout.fallback else 2 * args.layout.unit
    args.ranks = args.ranks if args.ranks is not None else ranks if is_divided else 4
    args.spares = args.spares if args.spares is not None else int(is_divided and not args.layout.fallback)
    for message in _complaints(args):
        parser.error(message)
    return args


def _complaints(args: argparse.Namespace) -> list[str]:
    found = []
    if not 1 <= args.ranks <= MAX_RANKS:
        found.append(f"--ranks must be from 1 to {MAX_RANKS}, but is {args.ranks} instead")
    if args.ranks == 1 and not args.no_kill:
        found.append("--ranks must be at least 2, so that somebody is left with the state; or add --no-kill")
    if args.reproducible and args.no_reference:
        found.append("--reproducible compares with the undisturbed run: leave out --no-reference")
    if args.reproducible and any(each.tp > 1 or each.pp > 1 for each in args.layout.options):
        found.append(
            "--reproducible compares with the bits of one rank, which hold for sdp: leave out tp and pp, which change "
            "what is added to what"
        )
    unit = args.layout.unit
    if args.ranks % unit:
        found.append(f"--ranks must be a multiple of {unit}, the ranks of a replica group, but is {args.ranks} instead")
    elif unit > 1 and args.ranks == unit and not args.no_kill and not args.layout.fallback:
        found.append(f"--ranks must be at least {2 * unit}, so that a part survives its rank; or add --no-kill")
    if args.layout.fallback:
        found += _fallback_complaints(args)
    if args.spares < 0:
        found.append(f"--spares must be at least 0, but is {args.spares} instead")
    if args.steps < 1:
        found.append(f"--steps must be at least 1, but is {args.steps} instead")
    if args.max_kills is not None and args.max_kills < 1:
        found.append(f"--max-kills must be at least 1, but is {args.max_kills} instead; or add --no-kill")
    if args.seed < 0:
        found.append(f"--seed must be at least 0, but is {args.seed} instead")
    if args.output_dir is not None and args.output_dir.exists():
        if not args.output_dir.is_dir():
            found.append(f"--output-dir {args.output_dir} is not a folder")
        elif any(args.output_dir.iterdir()):
            found.append(f"--output-dir {args.output_dir} is not empty; name a new folder")
    return found


def _fallback_complaints(args: argparse.Namespace) -> list[str]:
    """The second host has one rank. Without it the others must hold all parts, and must not fill the first layout."""
    layout: ParallelLayout = args.layout
    if layout.unit == 1:
        return ["--layout with a fallback must divide the model in its first layout"]
    if layout.min_replicas < 2:
        return [
            "--layout with a fallback needs a first layout with min_replicas of at least 2: of "
            f"{layout.options[0].text}, the host that is lost may take a part of the model with it"
        ]
    if args.ranks != layout.num_needed or args.spares:
        few = "so that a lost host leaves too few for the layout"
        return [f"--ranks must be {layout.num_needed} and --spares 0, {few}"]
    if not any(option.num_needed <= args.ranks - NUM_RANKS for option in layout.fallback):
        return [f"--layout needs a fallback for the {args.ranks - NUM_RANKS} ranks that are left"]
    return []


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, but is {text!r} instead") from None


def llama_layout(text: str) -> ParallelLayout:
    """A layout that divides the Llama of train_layout.py evenly."""
    layout = layout_of(text)
    limits = {
        "pp": (_LLAMA_LAYERS, "layers"),
        "tp": (_LLAMA_KV_HEADS, "heads"),
        "sdp": (_LLAMA_SLOTS, "slots of a batch"),
    }
    for each in layout.options:
        for axis, (whole, what) in limits.items():
            if whole % getattr(each, axis):
                raise argparse.ArgumentTypeError(
                    f"{axis} must divide {whole}, the number of {what}, but is {getattr(each, axis)} instead"
                )
    return layout


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds greater than 0, but is {text!r} instead")
    return value


def run_job(spec: JobSpec, label: str, kills: ScheduledKills | None) -> tuple[Job, str | None]:
    """Run it to its end, with its progress shown. Returns it and, if it failed, why."""
    with Job(spec) as job, Progress(label, spec.steps) as progress:

        def tick() -> float:
            wait_s = math.inf if kills is None else kills.tick(job.killer, job.run_log)
            if job.second_host is not None:
                wait_s = min(wait_s, job.second_host.tick(job.killer, job.run_log))
            if progress.is_due and job.run_log.newest is not None:
                progress.show(status_of(job))
            return wait_s

        try:
            job.follow(tick)
            if job.run_log.newest is not None:
                progress.show(status_of(job))
        except JobFailedError as error:
            return job, str(error)
    return job, None


def layout_parts(layout: ParallelLayout) -> list[Part]:
    return [()] if layout.unit == 1 else parts_of((layout.pp, layout.sdp, layout.tp))


def status_of(job: Job) -> Status:
    committed_run = CommittedRun(job.run_log)
    newest = max(committed_run.committed_at)
    found: list[Recovery] = recoveries(job.run_log, committed_run, job.killer.sent, job.spec.all_ranks)
    measured = [recovery.recovery_ms for recovery in found if recovery.recovery_ms is not None]
    return Status(
        steps=len(committed_run.attempts),
        loss=committed_run.loss(newest),
        seated=job.run_log.seated,
        ranks=job.spec.all_ranks,
        kills=len(found),
        recovery_ms=measured[-1] if measured else None,
    )


def expected_samples(spec: JobSpec) -> list[list[int]]:
    """The samples of each step of an undisturbed run."""
    from scripts.demo_job import train, train_layout
    from scripts.demo_job.llama import LlamaConfig  # here: they import torch, which takes seconds

    job, num_slots = (train, MAX_RANKS) if spec.script == TRAIN else (train_layout, _LLAMA_SLOTS)
    args = job.parse_args(spec.train_argv)
    batches = train.make_batches(args, len(train.load_text(args.context)))
    found = LlamaConfig.num_layers, LlamaConfig.num_kv_heads, batches.num_slots
    if found != (_LLAMA_LAYERS, _LLAMA_KV_HEADS, num_slots):
        raise AssertionError(f"layers, heads and slots are {found}, but demo.py has other numbers")
    return [batches.samples(step).tolist() for step in range(spec.steps)]


def spec_of(args: argparse.Namespace, directory: Path, *, is_reference: bool = False) -> JobSpec:
    layout: ParallelLayout = args.layout
    is_divided = layout.unit > 1
    is_alone = is_reference and (is_divided or args.reproducible)
    ranks, spares = 1 if is_alone else args.ranks, 0 if is_reference else args.spares
    train_args = ["--reduction", "reproducible" if args.reproducible else "sum"]
    if args.pause is not None and not is_reference:
        train_args += ["--pause", str(args.pause)]
    if not is_divided:
        return JobSpec(ranks, args.steps, args.seed, directory, train_args, spares=spares)
    has_second_host = bool(layout.fallback) and not is_alone and not args.no_kill
    return JobSpec(
        ranks - NUM_RANKS if has_second_host else ranks,
        args.steps,
        args.seed,
        directory,
        train_args,
        TRAIN_LAYOUT,
        spares,
        ["--module"] if is_alone else ["--layout", layout.text, "--module"],
        num_parts=1 if is_alone else layout.unit,
        host_every_steps=max(1, args.steps // _HOST_LOSSES) if has_second_host else None,
    )


def run(args: argparse.Namespace, directory: Path) -> Report:
    spec = spec_of(args, directory / "main")
    kills = (
        None if args.no_kill else ScheduledKills(args.seed, spec.ranks + spec.spares, args.kill_every, args.max_kills)
    )
    job, failure = run_job(spec, "training", kills)
    reference = None
    if not args.no_reference and failure is None:
        undisturbed, failure = run_job(spec_of(args, directory / "reference", is_reference=True), "reference", None)
        failure = None if failure is None else f"the undisturbed run: {failure}"
        reference = undisturbed.run_log
    happened = job.killer.happened(job.run_log)
    return Report(
        Run(
            asked=Asked(
                args.ranks,
                args.steps,
                args.seed,
                None if kills is None else args.kill_every,
                args.reproducible,
                args.layout.text,
                layout_parts(args.layout),
                0 if job.second_host is None else job.second_host.num_answered(job.run_log),
            ),
            run_log=job.run_log,
            failure=failure,
            due=[] if kills is None else kills.asked(job.run_log, len(happened)),
            carried_out=[] if kills is None else kills.carried_out,
            kills=happened,
            expected=expected_samples(spec),
            reference=reference,
        )
    )


def write(report: Report, directory: Path) -> None:
    (directory / "summary.json").write_text(json.dumps(report.summary(), indent=2) + "\n")
    written = ["summary.json"]
    if report.curve:
        try:
            from scripts.demo_job.plot import plot
        except ImportError as missing:
            print(f"no loss.png: {missing}; it comes with `pip install 'elasticgang[plot]'`")
        else:
            plot(report, directory / "loss.png")
            written.append("loss.png")
    print("\n".join(report.lines()))
    print(f"  written      {', '.join(written)} in {directory}")


def _on_signal(number: int, frame: object) -> NoReturn:
    sys.exit(128 + number)


def main() -> int:
    args = parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _on_signal)
    directory = args.output_dir or ROOT / "runs" / f"{time.strftime('%Y%m%d-%H%M%S')}-seed{args.seed}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"scripts/demo: error: cannot make {directory}: {error.strerror}", file=sys.stderr)
        return EXIT_USAGE
    try:
        report = run(args, directory)
        write(report, directory)
    except KeyboardInterrupt:
        print("\nscripts/demo: interrupted; the job is ended", file=sys.stderr)
        return 128 + signal.SIGINT
    print("PASSED" if not report.faults else "FAILED")
    return EXIT_FAULT if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
