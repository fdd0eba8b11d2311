"""A training job with checkpoints, whose gradients are small integers: however it was interrupted, and with any number
of ranks, it ends in the bits of a run alone.

`python resumed_job.py DIRECTORY STEPS EVERY`. EVERY: a number of steps, or of seconds, as `0.5s`. It appends the index
of each committed step to `steps-PID`, and writes `done-LOCAL_RANK` with the digest of its parameters. It waits in the
step that stands in the file `hold`, while that is there. With APART in the environment, each rank has a directory of
checkpoints of its own. With DIE_IN_LAST, the first rank that has copied its share of the final state, or of
the one with which it leaves, is killed. With
AWAIT_SAVES, no step ends while a save is under way, so that none is left out. SIZE and SAMPLES: of the global batch.
PAUSE: so many seconds in each step. It appends the samples of its slots of committed steps to `samples-PID`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

import elasticgang as eg
from elasticgang import testing

NUM_SAMPLES = 37


class Counter(nn.Module):
    """The gradient of `weight[i]` is how often sample i was taken, times what the slot's random numbers say. `padding`
    makes the state large enough for several writers."""

    steps: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUM_SAMPLES))
        self.padding = nn.Parameter(torch.zeros(width, 256))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, index: Tensor) -> Tensor:
        factors = torch.randint(1, 5, index.shape)
        return (self.weight[index] * factors).sum() + self.padding[: len(index)].sum()


class Seen:
    """A registered object: the indices of all committed steps."""

    def __init__(self) -> None:
        self.indices: list[int] = []

    def state_dict(self) -> dict[str, list[int]]:
        return {"indices": self.indices}

    def load_state_dict(self, state: dict[str, list[int]]) -> None:
        self.indices = list(state["indices"])


def held(path: Path) -> int | None:
    with contextlib.suppress(FileNotFoundError):
        return int(path.read_text())
    return None


def is_saving() -> bool:
    return any(thread.name == "checkpoint" for thread in threading.enumerate())


def limit_writer(max_file_bytes: int) -> None:
    """Of the process alone that writes checkpoints: the limit is on shared memory too."""
    for child in psutil.Process().children():
        if "elasticgang.checkpoint.writer" in child.cmdline():
            resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))


def main() -> None:
    here, num_steps, every = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    if limit := os.environ.get("MAX_FILE_BYTES"):
        testing.fail_at("checkpoint_copied", lambda: limit_writer(int(limit)))
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    manager = eg.join()
    if os.environ.get("DIE_IN_LAST"):

        def die_once() -> None:
            if manager.committed_steps == num_steps or manager.leave_requested:
                with contextlib.suppress(FileExistsError), open(here / "died", "x"):
                    os.kill(os.getpid(), signal.SIGKILL)

        testing.fail_at("checkpoint_copied", die_once)
    model = eg.DistributedDataParallel(manager, Counter(int(os.environ.get("WIDTH", "64"))))
    optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5))
    num_samples, size = int(os.environ.get("SAMPLES", NUM_SAMPLES)), int(os.environ.get("SIZE", 8))
    batches, seen = eg.GlobalBatch(num_samples, size=size, slot=2, seed=5), Seen()
    manager.register_state(model=model, optim=optim, seen=seen)
    own = here / f"checkpoints-{os.environ.get('LOCAL_RANK', '0')}" if os.environ.get("APART") else None
    if every.endswith("s"):
        manager.checkpoints(own, every_seconds=float(every[:-1]))
    else:
        manager.checkpoints(own, every_steps=int(every))
    for step in manager.steps(num_steps):
        with step:
            slots = batches.slots(step)
            for slot in slots:
                with model.accumulate(last=slot.last):
                    model(slot.index).backward()
            while held(here / "hold") == step.index or (os.environ.get("AWAIT_SAVES") and is_saving()):
                step.check()
                time.sleep(0.01)
            time.sleep(float(os.environ.get("PAUSE", "0")))
            model.module.get_buffer("steps").fill_(step.index + 1)
            seen.indices = [*seen.indices, step.index]
            # The weight of all ranks together is a power of two, so that every gradient is exact.
            if optim.step(weight=slots.num_samples):
                with open(here / f"steps-{os.getpid()}", "a") as file:
                    file.write(f"{step.index}\n")
                with open(here / f"samples-{os.getpid()}", "a") as file:
                    file.writelines(f"{each}\n" for place in range(len(slots)) for each in slots[place].index.tolist())
    digest = hashlib.sha256()
    for tensor in model.module.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    assert seen.indices == list(range(num_steps)), seen.indices
    (here / f"done-{os.environ.get('LOCAL_RANK', '0')}").write_text(f"{digest.hexdigest()}\n")


if __name__ == "__main__":
    main()
