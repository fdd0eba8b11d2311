"""A rank that leaves the job saves no state that was not compared."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, cast

import pytest
import torch

import elasticgang as eg
from elasticgang.member.interfaces import Checkpoints
from elasticgang.member.local_rendezvous import LocalRendezvous
from elasticgang.member.manager import QuorumManager
from elasticgang.protocol.member_instructions import Instruction, SendRequest
from elasticgang.protocol.record import Record
from elasticgang.state.snapshot_server import SnapshotServer

CPU = torch.device("cpu")


class Recorded:
    """Checkpoints that are nowhere. `saves`: what `close` was given, once it was called."""

    coverage = None
    proposes = is_saving = False
    schedule = "every 1 steps"

    def __init__(self) -> None:
        self.saves: bool | None = None

    def is_due(self, state: object) -> bool:
        return True

    def save_last(self, member: str, state: object) -> tuple[bool, bool]:
        return False, False

    def close(self, member: str, state: object, *, saves: bool) -> None:
        self.saves = saves

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    monkeypatch.setattr(LocalRendezvous, "compare_state", 1)
    return Recorded()


def steps(recorded: Recorded, num: int) -> Generator[eg.Step, None, None]:
    layout = eg.ParallelLayout()
    make = lambda *_: cast(Checkpoints, recorded)  # noqa: E731
    manager = QuorumManager(LocalRendezvous(layout, CPU), SnapshotServer(), layout, CPU, make)
    manager.register_state(weights=torch.nn.Linear(1, 1))
    manager.checkpoints("anywhere", every_steps=1)
    for step in manager.steps(num):
        with step:
            assert manager.commit(1.0, lambda _: None)
        yield step


# COMPARE-3
def test_a_rank_that_leaves_after_a_commit_saves_nothing(recorded: Recorded) -> None:
    loop = steps(recorded, 3)
    next(loop)
    next(loop)
    loop.close()  # as an exception does
    assert recorded.saves is False


# COMPARE-1
def test_a_request_says_which_steps_are_saved_if_states_are_compared(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[str] = []
    perform = LocalRendezvous.perform

    def performed(self: LocalRendezvous, instruction: Instruction) -> Record | None:
        if isinstance(instruction, SendRequest):
            requests.append(instruction.saves)
        return perform(self, instruction)

    monkeypatch.setattr(LocalRendezvous, "perform", performed)
    next(steps(recorded, 1))
    monkeypatch.setattr(LocalRendezvous, "compare_state", 0)
    next(steps(recorded, 1))
    assert requests == ["every 1 steps", ""]


def test_a_rank_that_leaves_after_a_comparison_may_save(recorded: Recorded) -> None:
    assert len(list(steps(recorded, 3))) == 3
    assert recorded.saves is True
