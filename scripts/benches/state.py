"""What durable checkpoints cost: a step beside a save, how long the step is held, and a job that is started again.

The steps of one rank, in turns: with a save of elasticgang's, without, with `torch.distributed.checkpoint.async_save`
of the same tensors, without. Then a job of `--ranks` that is killed whole and started again, and reads its checkpoint.
Prints one JSON line per figure:

  step_during_save  mean of the steps from the beginning of a save to its end / median of those without
  hold              the step in which a save begins, less the median of those without: ours / async_save's
  resume            from the start of the second job to its first new step: the share spent outside process start (until
                    the script is at its first step) and reading the bytes (as plain `read` does, right after)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.checkpoint.state_dict_saver import async_save

import elasticgang as eg
from elasticgang.checkpoint import listing
from elasticgang.checkpoint.locations import storage_at
from scripts.benches.pairs.checkpointed import make_state

JOB = Path(__file__).with_name("pairs") / "checkpointed.py"
_LIMIT_S = 300.0


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
        kill_tree(first)
        for path in directory.glob("*.json"):
            path.unlink()
        begun = time.time()
        second = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            wait_for(lambda: len(list(directory.glob("*.json"))) == args.ranks, "a new step", second)
        finally:
            kill_tree(second)
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


def wait_for(is_true: Callable[[], bool], what: str, job: subprocess.Popen[bytes] | None = None) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not is_true():
        if time.monotonic() > deadline or (job is not None and job.poll() is not None):
            raise SystemExit(f"scripts/bench state: no {what} within {_LIMIT_S:g} s, or the job has ended")
        time.sleep(0.02)


def kill_tree(job: subprocess.Popen[bytes]) -> None:
    family = psutil.Process(job.pid).children(recursive=True)
    job.kill()
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    job.wait()
    psutil.wait_procs(family, timeout=30)


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
    parser.add_argument("--only", choices=["steps", "resume"], help="these figures alone")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        directory = Path(name)
        if args.only != "steps":
            (directory / "resume").mkdir()
            print(json.dumps(resume(args, directory / "resume")), flush=True)
        if args.only != "resume":
            for figure in run_steps(args, directory):
                print(json.dumps(figure), flush=True)


if __name__ == "__main__":
    main()
