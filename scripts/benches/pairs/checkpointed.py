"""The job of `scripts/bench state` that is killed whole and started again: `checkpointed.py DIRECTORY MIB`.

Each rank writes `LOCAL_RANK.json` after the first step that it commits: the step, when its script was at the first
step, and when the step was committed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import elasticgang as eg

_NEVER = 10**7
_CHUNK_MIB = 64


class State(nn.Module):
    """Parameters of so many MiB, of which only a small one is trained."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        sizes = [_CHUNK_MIB] * (mib // _CHUNK_MIB) + [mib % _CHUNK_MIB] * bool(mib % _CHUNK_MIB)
        self.frozen = nn.ParameterList(
            nn.Parameter(torch.rand(each * 256, 1024), requires_grad=False) for each in sizes
        )
        self.trained = nn.Parameter(torch.zeros(1024))


def make_state(mib: int) -> tuple[State, dict[str, Tensor]]:
    state = State(mib)
    return state, {name: parameter.detach() for name, parameter in state.named_parameters()}


def main() -> None:
    here, mib = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    manager = eg.join()
    state, _ = make_state(mib)
    optim = eg.Optimizer(manager, torch.optim.SGD([state.trained], lr=0.1))
    manager.register_state(model=state, optim=optim)
    manager.checkpoints(every_steps=5)
    output = here / f"{os.environ['LOCAL_RANK']}.json"
    ready = time.time()
    for step in manager.steps(_NEVER):
        with step:
            state.trained.grad = torch.ones_like(state.trained)
            time.sleep(0.05)
            if optim.step(weight=1.0) and not output.exists():
                text = json.dumps({"step": step.index, "ready": ready, "committed": time.time()})
                output.with_suffix(".tmp").write_text(text)
                output.with_suffix(".tmp").rename(output)


if __name__ == "__main__":
    main()
