"""What memory each process of a job has to itself.

A job of a small model, after its first steps. Prints one JSON line per kind of process: how many there are, and
the most memory that one of them has to itself (USS) and has written to (private dirty pages), in MB of 10**6 bytes. USS
also counts pages of files, such as libtorch's, that no other process has in use at that moment.

  agent              `elasticgang run`
  forkserver, coordinator
  rank               of four that train the model with AdamW
  comm               of those that each rank has: the comm process in use, and the standby
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from scripts.figures import print_figures

_TRAIN = """import os, time, torch, elasticgang as eg
manager = eg.join(layout=eg.ParallelLayout())
torch.manual_seed(0)
layers = torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
model = eg.DistributedDataParallel(manager, torch.nn.Sequential(*layers))
optim = eg.Optimizer(manager, torch.optim.AdamW(model.parameters()))
batches = eg.GlobalBatch(64, size=64, slot=8, seed=0)
data = torch.randn(64, 64)
manager.register_state(model=model, optim=optim)
for step in manager.steps(10**7):
    with step:
        slots = batches.slots(step)
        for slot in slots:
            with model.accumulate(last=slot.last):
                model(data[slot.index]).square().sum().backward()
        optim.step(weight=slots.num_samples, max_norm=1.0)
    if step.index == STEPS:
        print("has done its steps", flush=True)
    time.sleep(0.02)
"""
_ASKED_MB = {"agent": 40, "forkserver": 5, "coordinator": 5, "rank": 17, "comm": 12}
_LIMIT_S = 120.0


class NoFigureError(Exception):
    """The job did not do its steps. The message says why."""


def measure(ranks: int, steps: int, directory: Path) -> Iterator[dict[str, Any]]:
    script = directory / "train.py"
    script.write_text(_TRAIN.replace("STEPS", str(steps)))
    output = directory / "output"
    command = [sys.executable, "-m", "elasticgang", "run", "--nproc-per-node", str(ranks), str(script)]
    with output.open("w") as written:
        agent = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT)
    try:
        deadline_s = time.monotonic() + _LIMIT_S
        while output.read_text().count("has done its steps") < ranks:
            if agent.poll() is not None or time.monotonic() > deadline_s:
                raise NoFigureError(f"the job did not do {steps} steps: {output.read_text()[-2000:]}")
            time.sleep(0.1)
        yield from figures(psutil.Process(agent.pid))
    finally:
        agent.terminate()
        try:
            agent.wait(30)
        finally:
            agent.kill()


def figures(agent: psutil.Process) -> Iterator[dict[str, Any]]:
    uss, dirty = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    for process in (agent, *agent.children(recursive=True)):
        kind = "agent" if process == agent else process.name().removeprefix("eg-").split("-")[0]
        if kind in _ASKED_MB:
            uss[kind].append(process.memory_full_info().uss)
            dirty[kind].append(private_dirty(process.pid))
    for kind, asked_mb in _ASKED_MB.items():
        yield {
            "figure": kind,
            "count": len(uss[kind]),
            "uss_mb": round(max(uss[kind]) / 1e6, 1),
            "private_dirty_mb": round(max(dirty[kind]) / 1e6, 1),
            "asked": asked_mb,
        }


def private_dirty(pid: int) -> int:
    """In bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:")) << 10


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="before it is measured (default: %(default)s)")
    args = parser.parse_args()
    for name in ("ranks", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, but is {getattr(args, name)} instead")
    setting = {"ranks": args.ranks, "cores": len(os.sched_getaffinity(0))}
    with tempfile.TemporaryDirectory() as directory:
        return print_figures("memory", setting, measure(args.ranks, args.steps, Path(directory)), (NoFigureError,))


if __name__ == "__main__":
    sys.exit(main())
