"""What a script does in its loop before or behind `with step:`, it does for a step that is dropped too."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

import elasticgang as eg
from elasticgang.layout import Member, plan
from elasticgang.member.local_rendezvous import LocalRendezvous
from elasticgang.member.manager import QuorumManager
from elasticgang.protocol.member_instructions import Instruction
from elasticgang.protocol.record import ACTIVE, LEARNER, Record
from elasticgang.reshape.state_mover import StateMover
from elasticgang.state.snapshot_server import SnapshotServer
from elasticgang.train.optimizer import Optimizer

CPU = torch.device("cpu")
NUM_STEPS = 3
LOST = 1  # the step that is dropped once


class Loop:
    """A job of one rank with a schedule and an average of the weights."""

    def __init__(
        self,
        server: SnapshotServer | None = None,
        rendezvous: LocalRendezvous | None = None,
        manager: QuorumManager | None = None,
    ) -> None:
        layout = eg.ParallelLayout()
        self.server = server or SnapshotServer()
        rendezvous = rendezvous or LocalRendezvous(layout, CPU)
        self.manager = manager or QuorumManager(rendezvous, self.server, layout, CPU)
        self.model, self.average = nn.Linear(2, 1), nn.Linear(2, 1)
        sgd = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.optim = Optimizer(self.manager, sgd)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
        state = {"model": self.model, "average": self.average, "optim": self.optim, "schedule": self.schedule}
        self.manager.register_state(**state)

    @property
    def rate(self) -> float:
        rate: float = self.optim.param_groups[0]["lr"]
        return rate

    def steps(self) -> Iterator[tuple[int, bool]]:
        """Yields each attempt at a step twice: before `with step:`, and behind it, with whether it is behind."""
        is_lost = False
        for step in self.manager.steps(NUM_STEPS):
            yield step.index, False
            with step:
                self.model(torch.ones(2)).sum().backward()
                if step.index == LOST and not is_lost:
                    is_lost = True
                    self.manager.report_error(ValueError("not finite"))
                self.optim.step(weight=1.0)
            yield step.index, True


# DRIVER-9, SMALLSTATE-3
@pytest.mark.parametrize("is_behind", [True, False], ids=["behind", "before"])
def test_a_schedule_goes_on_once_for_each_step_that_is_committed(is_behind: bool) -> None:
    loop = Loop()
    for index, behind in loop.steps():
        if behind == is_behind and (behind or index > 0):  # torch warns of a schedule that steps before the optimizer
            loop.schedule.step()
    assert loop.schedule.last_epoch == (expected := NUM_STEPS - (not is_behind))
    assert loop.rate == 0.5**expected


# SMALLSTATE-3
def test_code_that_leaves_itself_out_when_a_step_is_tried_again_misses_nothing() -> None:
    loop, last, rates = Loop(), 0, []
    for index, behind in loop.steps():
        if not behind and index != last:
            loop.schedule.step()
            last = index
        if behind:
            rates.append(loop.rate)
    assert rates == [1.0, 0.5, 0.5, 0.25]
    assert loop.schedule.last_epoch == NUM_STEPS - 1


# SMALLSTATE-4
def test_a_checkpoint_has_what_was_there_before_the_code_of_the_loop_and_a_learner_gets_what_it_has_changed() -> None:
    loop, registered = Loop(), (server := SnapshotServer()).registered
    server.register(schedule=loop.schedule)

    def saved_and_served() -> tuple[int, int]:
        registered.small.reach()
        loop.schedule.step()
        server.begin(None)
        return tuple(each["others"]["schedule"]["last_epoch"] for each in (registered.tree(), registered.small.begun))

    with pytest.warns(UserWarning, match="before `optimizer.step"):
        assert saved_and_served() == (0, 1)
    server.registered.restore()
    assert saved_and_served() == (0, 1), "again"
    registered.small.forget()
    assert saved_and_served() == (1, 2)
    # This rank has healed in the step, which is then dropped.
    registered.load({"large": registered.large(), "small": registered.small.copy()})
    server.registered.restore()
    assert saved_and_served() == (2, 2)


# SMALLSTATE-4
def test_an_object_that_is_registered_in_the_loop_before_the_first_step_is_in_its_snapshot_and_its_checkpoint() -> None:
    loop, late = Loop(), nn.BatchNorm1d(2)
    for step in loop.manager.steps(1):
        loop.server.registered.small.reach()
        loop.manager.register_state(late=late)
        with step:
            assert "running_mean" in loop.server.registered.small.begun["buffers"]["late"]
            assert "running_mean" in loop.server.registered.tree()["buffers"]["late"]
            loop.model(torch.ones(2)).sum().backward()
            loop.optim.step(weight=1.0)


# SMALLSTATE-4
def test_what_moves_to_another_layout_has_what_was_there_before_the_code_of_the_loop() -> None:
    layout, server = eg.ParallelLayout(), SnapshotServer()
    manager = QuorumManager(LocalRendezvous(layout, CPU), server, layout, CPU, mover=StateMover(server))
    loop, found = Loop(server, manager=manager), []
    for index, behind in loop.steps():
        if not behind and index > 0:  # torch warns of a schedule that steps before the optimizer
            loop.schedule.step()
        elif behind and loop.manager.committed_steps == index:  # it was dropped, as in a generation that has ended
            found.append(server.registered.tree()["others"]["schedule"]["last_epoch"])
    assert found == [LOST - 1]


def changed(loop: Loop, *, only_of_committed: bool) -> None:
    former = -1
    for index, behind in loop.steps():
        is_committed = loop.manager.committed_steps > index
        if behind and (is_committed or not only_of_committed):
            with torch.no_grad():
                loop.average.weight.add_(1)
        former = index
    assert former == NUM_STEPS - 1


# DRIVER-9
def test_a_parameter_that_a_script_changes_behind_a_dropped_step_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        changed(Loop(), only_of_committed=False)
    (message,) = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
    assert "'weight' of 'average'" in message
    assert "if optim.step(...)" in message


def test_nothing_is_told_of_parameters_that_change_behind_committed_steps_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        changed(Loop(), only_of_committed=True)
    assert not [record for record in caplog.records if "dropped" in record.getMessage()]


class Unhealed(SnapshotServer):
    """No heal succeeds."""

    def heal(self, *_: object, **__: object) -> bool:
        return False


class Learner(LocalRendezvous):
    """This rank has no state; a peer has, and reports an error in each step."""

    def perform(self, instruction: Instruction) -> Record | None:
        found = super().perform(instruction)
        if self.record is not None and len(self.record.seats) == 1:
            (own,) = self.record.seats
            seats = own._replace(member="peer", host="peer", status=ACTIVE), own._replace(status=LEARNER)
            planned = plan([Member(each.member, each.host) for each in seats], self.record.layout)
            self.record = replace(self.record, plan=planned, seats=seats)
        return found

    def start_sum(self, values: Sequence[float]) -> Callable[[], list[float]]:
        weight, num_failed, *rest = values
        return lambda: [weight, num_failed + 1, *rest]


# DRIVER-9
def test_nothing_is_told_of_parameters_of_a_rank_that_is_yet_to_heal(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(Unhealed(), Learner(eg.ParallelLayout(), CPU))
    attempts = loop.steps()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert next(attempts) == (0, False)
            assert next(attempts) == (0, True)
            assert loop.manager.tip is None
            with torch.no_grad():
                loop.average.weight.add_(1)
    assert not [record for record in caplog.records if "dropped" in record.getMessage()]
