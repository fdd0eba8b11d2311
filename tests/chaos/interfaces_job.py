"""A job of two hosts in which a rank heals while its test pulls a cable: `interfaces_job.py DIRECTORY WAITS`.

Ranks read no memory of each other, as on different machines. With WAITS=test, a learner makes the file `healing` at its
20th chunk, and waits for `go_on`. With WAITS=paths, neither of two paths receives more than `NUM_EACH` chunks before
the other one has received as many. Once it has healed, all write their parameters' sum in the same step.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

import elasticgang as eg
from elasticgang import testing
from elasticgang.state import peer_memory, staging, striped_fetch
from tests.chaos.several import SLOW_S
from tests.integration.memory_holder import after
from tests.support import wait_until

NUM_BYTES = 24 << 20
NUM_EACH = 64
_CHUNK_BYTES = 64 << 10
_NEVER = 10**6


def main() -> None:
    here, waits = Path(sys.argv[1]), sys.argv[2]
    staging.CHUNK_BYTES = _CHUNK_BYTES
    striped_fetch.STRIPE_BYTES = 1 << 20
    peer_memory.MIN_BYTES = 1 << 60
    torch.manual_seed(os.getpid())
    manager = eg.join(layout=eg.ParallelLayout())
    model = nn.Linear(NUM_BYTES // 4, 1, bias=False)
    optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.01))
    batches = eg.GlobalBatch(64, size=2, slot=1, seed=0)
    manager.register_state(model=model, optim=optim)
    has_healed: list[bool] = []

    def stand() -> None:
        (here / "healing").touch()
        wait_until((here / "go_on").exists, "the test")

    paths, path = threading.Barrier(2), threading.local()

    def meet() -> None:
        path.num = getattr(path, "num", 0) + 1
        if path.num == NUM_EACH:
            paths.wait(SLOW_S)

    if waits == "test":
        testing.fail_at("chunk_received", after(20, stand))
    elif waits == "paths":
        testing.fail_at("chunk_received", meet)
    testing.fail_at("healed", lambda: has_healed.append(True))
    is_told = False
    for step in manager.steps(_NEVER):
        with step:
            slots = batches.slots(step)
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            is_committed = optim.step(weight=slots.num_samples, sums={"healed": float(bool(has_healed))})
        if is_committed and optim.sums["healed"] and not is_told:
            is_told = True
            total = float(next(model.parameters()).detach().double().sum())
            (here / f"sum-{os.getpid()}.part").write_text(f"{step.index} {total!r}")
            (here / f"sum-{os.getpid()}.part").rename(here / f"sum-{os.getpid()}")
        if step.index == 3:
            (here / "trained").touch()
        time.sleep(0.1)


if __name__ == "__main__":
    main()
