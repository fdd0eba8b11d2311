"""A rank of a job of two that saves durable checkpoints, without the rest of the job."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from elasticgang.checkpoint.saver import DurableCheckpoints
from elasticgang.checkpoint.schedule import Schedule
from elasticgang.layout import Member, ParallelLayout
from elasticgang.layout import plan as plan_seats
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.member_state import MemberState
from elasticgang.protocol.record import ACTIVE, CheckpointRef, Record, Seat
from elasticgang.state import SnapshotServer
from tests.support import wait_until

MEMBERS = ("a0", "b0")
EVERY = 10


class Counter:
    """A registered object that is neither module nor optimizer."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"seen": 0, "mean": torch.zeros(2), "note": (1, None)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Model(nn.Module):
    running: Tensor

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 3)
        self.low = nn.Parameter(torch.zeros(7, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("running", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layer(inputs).sum() + self.low.sum() + self.empty.sum()
        return output


class Rank:
    """One member of a job of two hosts, without the job."""

    def __init__(
        self,
        directory: Path | str,
        member: str = "a0",
        model: nn.Module | None = None,
        keep: int = 2,
        schedule: Schedule | None = None,
        **options: Any,
    ) -> None:
        """`options`: of `DurableCheckpoints`."""
        self.server = SnapshotServer()
        torch.manual_seed(0)
        self.model = model or Model()
        self.optim = torch.optim.AdamW(self.model.parameters())
        self.counter = Counter()
        self.server.register(model=self.model, optim=self.optim, counter=self.counter)
        self.checkpoints = DurableCheckpoints(
            directory, schedule or Schedule(EVERY, clock=time.monotonic), keep, self.server, **options
        )
        self.member = member
        self.state = MemberState(member)
        self.enter(MEMBERS)

    def enter(self, members: tuple[str, ...], generation: int = 1) -> None:
        layout = ParallelLayout()
        planned = plan_seats([Member(each, each[0]) for each in members], layout)
        seats = tuple(Seat(each, each[0], each[0], 0, "", ACTIVE) for each in members)
        agents = tuple(each[0] for each in members)
        committed = self.state.tip or Attempt(0, 1)
        self.state.record = Record("job", generation, "", layout, planned, seats, agents, committed)
        self.state.active, self.state.entered = set(members), generation

    def train(self, steps: int) -> Rank:
        """Equal calls leave equal state."""
        torch.manual_seed(steps)
        for _ in range(2):
            loss: Tensor = self.model(torch.randn(4, self.model.get_parameter("layer.weight").shape[1]))
            loss.backward()  # type: ignore[no-untyped-call]
            self.optim.step()
            self.optim.zero_grad()
        self.model.get_buffer("running").fill_(steps)
        self.counter.state = {"seen": steps, "mean": torch.full((2,), float(steps)), "note": (steps, None)}
        self.state.tip = self.state.committed = Attempt(steps, 1)
        return self

    def begin(self) -> Rank:
        self.server.begin(self.state.tip)
        self.checkpoints.begin(self.member, self.state)
        return self

    def close(self) -> None:
        self.checkpoints.close(self.member, self.state)

    def save(self, steps: int) -> Rank:
        self.train(steps).begin().close()
        return self

    def load(self, steps: int) -> bool:
        ref = self.newest()
        assert ref.attempt == Attempt(steps, 1)
        return self.checkpoints.load(ref, self.state)

    def newest(self) -> CheckpointRef:
        ref = self.checkpoints.newest(self.state)
        assert ref is not None
        return ref

    def content(self) -> list[object]:
        optim = self.optim.state_dict()
        tensors = [*self.model.state_dict().items()]
        states = [(index, key, value) for index, each in optim["state"].items() for key, value in each.items()]
        return [*tensors, *states, optim["param_groups"], *self.counter.state.items()]


def same(one: Rank, other: Rank) -> bool:
    return repr(one.content()) == repr(other.content())


def writers() -> list[psutil.Process]:
    """Live ones. Other tests of this process may have left a child that is not reaped. A child may have no command line
    yet when `Popen` returns: the kernel sets it last of all."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "elasticgang.checkpoint.writer" in wait_until(child.cmdline, "its command line"):
                found.append(child)
    return found
