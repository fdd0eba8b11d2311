"""A job whose ranks add up many numbers, and write down the sums: summing_job.py DIRECTORY NUM_RANKS NUM_NUMBERS.

With `--stop`, each rank stops its comm processes meanwhile.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path

import torch

import elasticgang as eg
from scripts.chaos_runs.soaking.comm_processes import comm_processes


def numbers_of(rank: int, num: int) -> list[float]:
    chance = random.Random(rank)
    return [chance.uniform(-1e6, 1e6) for _ in range(num)]


def main() -> None:
    directory, size, num = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    manager = eg.join()
    model = eg.DistributedDataParallel(manager, torch.nn.Linear(2, 1))
    optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
    manager.register_state(model=model, optim=optim)
    for step in manager.steps(1):
        with step:
            assert manager.gangs.root.size == size
            rank = manager.gangs.root.rank
            pids = comm_processes(os.getpid()) if "--stop" in sys.argv else []
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            sums = [manager.sum_over_ranks(numbers_of(rank, num)) for _ in range(3)]
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            (directory / f"sums-{rank}").write_text(json.dumps([len(pids), *sums]))
            with model.accumulate(last=True):
                model(torch.ones(1, 2)).sum().backward()
            optim.step(weight=1)


if __name__ == "__main__":
    main()
