"""What the state costs: a heal beside its peers, durable checkpoints, a job started again, and the same bits.

Prints one JSON line per figure. "ratio" is what issue 14 names, and "asked" what it is to be. Both sides of a ratio are
measured in turns, in one run, so that the load of the machine falls on both. A figure that cannot be measured has the
reason in its line:

  heal_beside_torchft    a heal between two processes: the time of torchft's HTTPTransport, in the best of several
                         chunk settings, with the load into the module / ours
  heal_beside_sockets    the time of plain sockets that receive into the same memory, with a digest / ours
  heal_extra_memory      the peak of resident and shared memory above what the source and the receiver had
  gap_during_heal        a job of two ranks of which one is killed: the survivor's longest gap between two commits
                         around the heal / its median step
  step_during_save_*     mean of the steps from the beginning of a save to its end / median of those without, for
                         elasticgang's save and for `torch.distributed.checkpoint.async_save` of the same tensors
  hold                   the step in which a save begins, less the median of those without: ours / async_save's
  resume                 a job that is killed whole and started again, from its start to its first new step: the share
                         spent outside process start (until the script is at its first step) and reading the bytes (as
                         plain `read` does, right after)
  reproducible_reduction the demo's model: the median step with reduction="reproducible" / with "sum"; --dim sets how
                         long a step is
  reproducible_shards    the same for the demo's Llama, of which each of the ranks holds a shard (FSDP2, --layout sdp=2)

Lower --mib where the memory does not hold such a state four times. --only selects some of the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_saver import async_save

import elasticgang as eg
from elasticgang.checkpoint import listing
from elasticgang.checkpoint.locations import storage_at
from scripts.benches import steady
from scripts.benches.heals import measure as heals
from scripts.benches.heals.measure import end_tree, wait_for
from scripts.benches.pairs.checkpointed import make_state
from scripts.demo_job.demo import TRAIN_LAYOUT
from scripts.demo_job.driver import JobFailedError, JobSpec

JOB = Path(__file__).with_name("pairs") / "checkpointed.py"
GROUPS = ("heal", "gap", "steps", "resume", "reproducible")


class Window:
    """The steps of one kind of save: those in which one begins, and those until its end."""

    def __init__(self) -> None:
        self.first: list[float] = []
        self.during: list[float] = []
        self.saves_s: list[float] = []


def run_steps(args: argparse.Namespace, directory: Path) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    state, tensors = make_state(args.mib)
    manager = eg.join()
    optim = eg.Optimizer(manager, torch.optim.SGD([state.trained], lr=0.1))
    manager.register_state(model=state, optim=optim)
    turn = args.turn
    manager.checkpoints(directory / "ours", every_steps=2 * turn, keep=1)
    matrix = torch.rand(512, 512)
    repeats = calibrate(matrix, args.step_ms / 1000)
    windows = {"ours": Window(), "theirs": Window()}
    plain: list[float] = []
    pending: Any = None
    saving, since = "", 0.0

    def is_done(index: int) -> bool:
        """Whether the save under way at this step has ended."""
        if saving == "theirs":
            return bool(pending.done())
        name = f"step-{index - index % (2 * turn):012d}"
        return any(each.startswith(name) for each in listing.names(storage_at(directory / "ours"))[0])

    for step in manager.steps(2 * turn * (args.rounds + 1)):
        if saving and step.index % turn == 0:  # no save begins beside another
            wait_for(lambda: is_done(step.index - 1), "end of a save")  # noqa: B023  # called at once
            windows[saving].saves_s.append(time.perf_counter() - since)
            saving = ""
            shutil.rmtree(directory / "theirs", ignore_errors=True)
        is_first = ""
        begun = time.perf_counter()
        with step:
            if step.index >= 2 * turn and step.index % turn == 0:
                saving = is_first = "ours" if step.index % (2 * turn) == 0 else "theirs"
                since = begun
                if saving == "theirs":
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        pending = async_save(tensors, checkpoint_id=str(directory / "theirs"))
            for _ in range(repeats):
                matrix @ matrix
            state.trained.grad = torch.ones_like(state.trained)
            optim.step(weight=1.0)
        seconds = time.perf_counter() - begun
        if saving:
            window = windows[saving]
            (window.first if is_first else window.during).append(seconds)
            if is_done(step.index):
                window.saves_s.append(time.perf_counter() - since)
                saving = ""
                shutil.rmtree(directory / "theirs", ignore_errors=True)
        elif step.index >= turn:
            plain.append(seconds)
    base = statistics.median(plain)
    common = {"mib": args.mib, "plain_ms": round(base * 1000, 1), "rounds": args.rounds}
    for kind, window in windows.items():
        steps = window.first + window.during
        yield {
            "figure": f"step_during_save_{kind}",
            **common,
            "during_ms": round(statistics.mean(steps) * 1000, 1),
            "save_s": [round(each, 2) for each in window.saves_s],
            "ratio": round(statistics.mean(steps) / base, 3),
            **({"asked": 1.10} if kind == "ours" else {}),
        }
    holds = {kind: statistics.median(window.first) - base for kind, window in windows.items()}
    yield {
        "figure": "hold",
        **common,
        **{f"{kind}_ms": round(hold * 1000, 1) for kind, hold in holds.items()},
        "ratio": round(holds["ours"] / holds["theirs"], 3),
        "asked": 0.5,
    }


def calibrate(matrix: torch.Tensor, seconds: float) -> int:
    """How many products take about so long, at the best of several times."""
    times = []
    for _ in range(10):
        begun = time.perf_counter()
        for _ in range(10):
            matrix @ matrix
        times.append(time.perf_counter() - begun)
    return max(1, round(seconds / (min(times) / 10)))


def resume(args: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Kill a job whole after its checkpoint, and start it again."""
    command = [sys.executable, "-m", "elasticgang", "run", "--nproc-per-node", str(args.ranks)]
    command += ["--checkpoint-dir", str(directory / "checkpoints"), str(JOB), str(directory), str(args.mib)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (directory / "job.log").open("wb") as log:
        first = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        wait_for(lambda: any(listing.scan(storage_at(directory / "checkpoints"))), "a checkpoint", first)
        end_tree(first)
        for path in directory.glob("*.json"):
            path.unlink()
        begun = time.time()
        second = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            wait_for(lambda: len(list(directory.glob("*.json"))) == args.ranks, "a new step", second)
        finally:
            end_tree(second)
    times = [json.loads(path.read_text()) for path in directory.glob("*.json")]
    assert min(each["step"] for each in times) > 0
    ready, committed = (max(each[name] for each in times) for name in ("ready", "committed"))
    read_s = time_reading(Path(next(listing.scan(storage_at(directory / "checkpoints"))).path))
    total, start = committed - begun, ready - begun
    return {
        "figure": "resume",
        "mib": args.mib,
        "ranks": args.ranks,
        "total_s": round(total, 2),
        "start_s": round(start, 2),
        "read_s": round(read_s, 2),
        "ratio": round(max(0.0, total - start - read_s) / total, 3),
        "asked": 0.3,
    }


def time_reading(path: Path) -> float:
    begun = time.perf_counter()
    for file in path.glob("*.safetensors"):
        buffer = memoryview(bytearray(file.stat().st_size))
        with open(file, "rb", buffering=0) as source:
            while buffer:
                buffer = buffer[source.readinto(buffer) :]
    return time.perf_counter() - begun


def reproducible(args: argparse.Namespace, directory: Path, *, is_sharded: bool) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"sum": [], "reproducible": []}
    for number in range(args.rounds):
        for kind, found in rates.items():
            options = ("--dim", str(args.dim), f"--reduction={kind}")
            spec = JobSpec(2, args.demo_steps, 0, directory / f"{kind}-{number}", options)
            if is_sharded:
                spec = replace(spec, script=TRAIN_LAYOUT, run_args=["--layout", "sdp=2", "--module"], num_parts=2)
            found.append(steady.rate_of(spec))
    pairs = zip(rates["sum"], rates["reproducible"], strict=True)
    return {
        "figure": "reproducible_shards" if is_sharded else "reproducible_reduction",
        "rounds": args.rounds,
        "plain_ms": round(1000 / statistics.median(rates["sum"]), 1),
        "ratio": round(statistics.median(plain / exact for plain, exact in pairs), 3),
        "asked": 1.3,
    }


def measure(args: argparse.Namespace, directory: Path) -> Iterator[dict[str, Any]]:
    for group in GROUPS:
        if group not in args.only:
            continue
        (directory / group).mkdir()
        try:
            yield from measure_group(group, args, directory / group)
        except (OSError, subprocess.SubprocessError, JobFailedError) as error:
            yield {"figure": group, "not_measured": str(error)}


def measure_group(group: str, args: argparse.Namespace, directory: Path) -> Iterator[dict[str, Any]]:
    if group == "heal":
        yield from heals.transfers(args.mib, args.rounds)
    elif group == "gap":
        yield heals.gaps(args.mib, args.rounds, args.heal_step_ms, directory)
    elif group == "steps":
        yield from run_steps(args, directory)
    elif group == "resume":
        os.sync()  # the rows before have written GiBs, which a disk may still take
        yield resume(args, directory)
    else:
        for is_sharded in (False, True):
            yield reproducible(args, directory / ("shards" if is_sharded else "whole"), is_sharded=is_sharded)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/bench state", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024, help="size of the state (default: %(default)s)")
    parser.add_argument("--step-ms", type=float, default=300.0, help="what a step computes (default: %(default)s)")
    parser.add_argument("--turn", type=int, default=20, help="steps from save to save (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="saves of each kind (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="of the job that is resumed (default: %(default)s)")
    parser.add_argument("--directory", type=Path, help="where the checkpoints are written (default: a temporary one)")
    parser.add_argument("--heal-step-ms", type=float, default=70.0, help="of the job that heals (default: %(default)s)")
    parser.add_argument("--dim", type=int, default=336, help="of the demo's model (default: %(default)s)")
    parser.add_argument("--demo-steps", type=int, default=120, help="of each of its runs (default: %(default)s)")
    parser.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS, help="these figures alone")
    args = parser.parse_args()
    if args.mib < 1 or args.rounds < 1 or args.demo_steps < 40:
        parser.error("--mib and --rounds must be at least 1, --demo-steps at least 40")
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        directory = Path(name)
        for figure in measure(args, directory):
            print(json.dumps({**figure, "load": round(os.getloadavg()[0], 2)}), flush=True)


if __name__ == "__main__":
    main()
