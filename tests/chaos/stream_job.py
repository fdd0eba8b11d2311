"""A training job that reads from streams, may die at the places that it is told to, and whose result is exact.

`python stream_job.py DIRECTORY STEPS FAULTS EVERY WORKERS`. The faults are those of `job.py`; EVERY: the steps between
two checkpoints, or 0; WORKERS: the data workers of each rank. The gradient of a sample's weight is how often the sample
was taken, times what the slot's random numbers say. A rank waits in the step that stands in the file `hold`, while that
is there.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import elasticgang as eg
from tests.chaos.job import Counter, Faults, History, digest_of
from tests.chaos.resumed_job import held

PADDING = int(os.environ.get("STREAM_JOB_PADDING", "4000"))
RAISES = Path(os.environ.get("STREAM_JOB_RAISES", os.devnull + "/none"))  # while it is there, once
NUM_SPLITS, SIZE, SLOT = 8, 8, 2
SPLIT_SAMPLES = 3
NUM_SAMPLES = NUM_SPLITS * SPLIT_SAMPLES
assert NUM_SAMPLES <= 37, "the weights of `Counter`"


class Numbers(IterableDataset[int]):
    """The samples of a split, each its own number."""

    def __init__(self, split: int) -> None:
        self._split, self._place = split, 0

    def __iter__(self) -> Iterator[int]:
        while self._place < SPLIT_SAMPLES:
            self._place += 1
            yield SPLIT_SAMPLES * self._split + self._place - 1
        self._place = 0

    def state_dict(self) -> dict[str, Any]:
        if self._split == 5 and self._place == 2 and RAISES.exists():
            RAISES.unlink()
            raise ArithmeticError("this state cannot be saved")
        padding = "x" * PADDING * (self._split >= NUM_SPLITS // 2)  # too long for the first collective of an exchange
        return {"place": self._place, "padding": padding}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._place = state["place"]


def open_split(split: int) -> StatefulDataLoader[int]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata 0.11 calls it
        return StatefulDataLoader(Numbers(split), batch_size=None)


def main() -> None:
    here, num_steps, specs, every = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4])
    num_workers = int(sys.argv[5])
    torch.set_num_threads(1)
    faults = Faults(here, specs, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    manager = eg.join()
    faults.install(manager)
    model = Counter(3)
    ddp = eg.DistributedDataParallel(manager, model)
    sgd = torch.optim.SGD(model.parameters(), lr=0.125, momentum=0.5)
    optim = eg.Optimizer(manager, sgd)
    loader = eg.StreamLoader(manager, open_split, num_splits=NUM_SPLITS, size=SIZE, slot=SLOT, num_workers=num_workers)
    manager.register_state(model=model, optim=optim, stream=loader)
    if every:
        manager.checkpoints(here / "checkpoints", every_steps=every)
    history = History(here / "history", manager.member)
    for step in manager.steps(num_steps):
        with step:
            faults.wait_for_company()
            slots, samples = loader.slots(step), []
            for slot, batch in slots:
                with ddp.accumulate(last=slot.last):
                    ddp(batch).backward()
                samples += batch.tolist()
                faults.at("forward")  # in some ranks, while others wait for the states of the splits
            faults.at("body")
            while held(here / "hold") == step.index:
                step.check()
                time.sleep(0.01)
            attempt: dict[str, Any] = {"step": step.index, "generation": step.generation}
            history.write("prepared", **attempt, samples=samples)
            if optim.step(weight=slots.num_samples, max_norm=4.0):
                assert manager.tip is not None
                history.write("committed", step=step.index, generation=manager.tip.generation)
    digest = digest_of(model.state_dict(), sgd.state_dict(), loader.state_dict())
    history.write("finished", digest=digest)
    faults.finish()


if __name__ == "__main__":
    main()
