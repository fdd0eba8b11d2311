"""The job of `scripts/bench state` of which one rank is killed and heals: `train.py DIRECTORY MIB STEP_MS`.

A step lasts STEP_MS on the ranks that have slots. A learner has none, and heals meanwhile. Each rank writes a line to
`LOCAL_RANK-PID.jsonl` for every step that it commits: when, and whether it had healed in it.
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
from scripts.benches.pairs.checkpointed import make_state

_NEVER = 10**7


def main() -> None:
    here, mib, step_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]) / 1000
    torch.set_num_threads(1)
    manager = eg.join()
    state, _ = make_state(mib)
    optim = eg.Optimizer(manager, torch.optim.SGD([state.trained], lr=0.1))
    manager.register_state(model=state, optim=optim)
    batches = eg.GlobalBatch(64, size=2, slot=1, seed=0)
    heals: list[float] = []
    testing.fail_at("healing", lambda: heals.append(time.monotonic()))
    testing.fail_at("healed", lambda: heals.append(time.monotonic()))
    with (here / f"{os.environ['LOCAL_RANK']}-{os.getpid()}.jsonl").open("w", buffering=1) as output:
        for step in manager.steps(_NEVER):
            with step:
                slots = batches.slots(step)
                state.trained.grad = torch.ones_like(state.trained)
                if slots.num_samples:  # a learner has none
                    time.sleep(step_s)  # a device computes meanwhile
                is_committed = optim.step(weight=slots.num_samples)
            if is_committed:
                healed_s = heals[-1] - heals[-2] if len(heals) > 1 else None
                line = {"step": step.index, "at": time.monotonic(), "healed_s": healed_s}
                output.write(json.dumps(line) + "\n")
                heals.clear()


if __name__ == "__main__":
    main()
