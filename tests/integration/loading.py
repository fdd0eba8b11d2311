"""What tests of `eg.DataLoader` share: a dataset with faults, and steps of a job of one rank."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy
import torch

import elasticgang as eg
from elasticgang.errors import StepAborted
from elasticgang.member.step import Step
from elasticgang.protocol.member_state import Share
from elasticgang.protocol.sample_positions import BatchShape

NUM_SAMPLES, SIZE, SLOT = 24, 8, 2


class Noted:
    """Notes who has fetched which sample, a line each. A file `NAME-INDEX` in `directory` says what sample INDEX does
    first: `kill`, `stop`, `raise` or `hold`, once for each line in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        for fault, apply in FAULTS.items():
            if self._is_due(f"{fault}-{index}"):
                apply()
        with (self.directory / "fetched").open("a") as file:
            file.write(json.dumps([index, os.getpid()]) + "\n")
        noise = [*torch.rand(2).tolist(), random.random(), float(numpy.random.rand())]
        return {"index": index, "noise": torch.tensor(noise, dtype=torch.float64)}

    def _is_due(self, name: str) -> bool:
        for path in sorted(self.directory.glob(f"{name}.*")):
            path.unlink()
            return True
        return False

    def fetched(self) -> list[list[int]]:
        path = self.directory / "fetched"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def prepare(self, fault: str, index: int, times: int = 1) -> None:
        for number in range(times):
            (self.directory / f"{fault}-{index}.{number}").touch()


def fail() -> None:
    raise ArithmeticError("this sample is broken")


def die_holding_the_done_event() -> None:
    """A worker holds its lock for an instant before each batch."""
    frame = sys._getframe()
    while "done_event" not in frame.f_locals:
        assert frame.f_back is not None
        frame = frame.f_back
    frame.f_locals["done_event"]._cond.acquire()
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": fail,
    "hold": die_holding_the_done_event,
}


class OneStep:
    """A step, and this rank's share of it. Lost once `error` is set."""

    def __init__(self, index: int, share: Share | None) -> None:
        self.index, self.share = index, share
        self.is_lost = False
        self.losses: list[dict[str, Any]] = []  # of data workers

    def check(self) -> None:
        if self.is_lost:
            raise StepAborted("lost")

    def divide(self, num_slots: int) -> None:
        """Nobody keeps slots."""

    def take_samples(self, shape: BatchShape) -> int:
        return self.index * shape.size

    def end_slot(self) -> None:
        pass

    def contribute(self) -> None: ...

    def data_worker_lost(self, loss: dict[str, Any]) -> None:
        self.losses.append(loss)


def step(index: int, place: int = 0, count: int = 1) -> Step:
    return cast(Step, OneStep(index, Share(place, count)))


@contextlib.contextmanager
def lost_after(of: OneStep, seconds: float) -> Iterator[None]:
    """Ends the waits of this step."""
    timer = threading.Timer(seconds, lambda: setattr(of, "is_lost", True))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def indices(loader: eg.DataLoader, of: Step) -> list[int]:
    """The samples that a step gets, which are those of its slots."""
    found: list[int] = []
    for slot, batch in loader.slots(of):
        assert batch["index"].tolist() == slot.index.tolist()
        found += batch["index"].tolist()
    return found
