"""The job of `scripts/bench state` of which one rank is killed and heals: `train.py DIRECTORY MIB STEP_MS`.

The MIB are parameters that AdamW trains, and its two averages of each. A step computes for STEP_MS on the ranks that
have slots, which a sleep stands for, as if a device computed, and then applies AdamW. A learner has no slots, and heals
meanwhile. Each rank writes a line to `LOCAL_RANK-PID.jsonl` for every step that it commits: when, and whether it had
healed in it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch

import elasticgang as eg
from elasticgang import testing

_NEVER = 10**7
_CHUNK_MIB = 64
_NUM_SLOTS = 2


def make_model(mib: int) -> torch.nn.ParameterList:
    """Parameters of a third of so many MiB."""
    left, sizes = mib << 18, []  # of float32
    while left >= 3:
        sizes.append(min(left // 3, _CHUNK_MIB << 18))
        left -= 3 * sizes[-1]
    return torch.nn.ParameterList(torch.nn.Parameter(torch.rand(size)) for size in sizes)


def main() -> None:
    here, mib, step_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]) / 1000
    torch.set_num_threads(1)
    manager = eg.join()
    model = make_model(mib)
    optim = eg.Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True))
    manager.register_state(model=model, optim=optim)
    gradients = [torch.ones_like(parameter) for parameter in model]
    batches = eg.GlobalBatch(64, size=_NUM_SLOTS, slot=1, seed=0)
    heals: list[float] = []
    testing.fail_at("healing", lambda: heals.append(time.monotonic()))
    testing.fail_at("healed", lambda: heals.append(time.monotonic()))
    with (here / f"{os.environ['LOCAL_RANK']}-{os.getpid()}.jsonl").open("w", buffering=1) as output:
        for step in manager.steps(_NEVER):
            with step:
                slots = batches.slots(step)
                for parameter, gradient in zip(model, gradients, strict=True):
                    parameter.grad = gradient
                if slots.num_samples:  # a learner has none
                    time.sleep(step_s)  # a device computes meanwhile
                is_committed = optim.step(weight=slots.num_samples / _NUM_SLOTS)  # 1 in all: the gradients stay
            if is_committed:
                healed_s = heals[-1] - heals[-2] if len(heals) > 1 else None
                line = {"step": step.index, "at": time.monotonic(), "healed_s": healed_s}
                output.write(json.dumps(line) + "\n")
                heals.clear()


if __name__ == "__main__":
    main()
