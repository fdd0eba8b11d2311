"""How the work of one change of the generation grows with the number of agents."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from elasticgang.layout import ParallelLayout
from elasticgang.member.manager import QuorumManager
from elasticgang.protocol.member_state import Share
from elasticgang.protocol.record import Record, Report
from elasticgang.protocol.rendezvous_keys import Asked, Key, KeyExchange
from elasticgang.train.slot_gradients import SlotGradients
from scripts.benches.scale import Job, Rank
from tests.unit.proposals import agreed, member, report, trained

SETTINGS = (("number of steps", "10"),)


def change(num_agents: int) -> tuple[Record, list[Report]]:
    """A job whose last agent has lost its rank, and started another one."""
    names = [f"agent-{number:03}-" for number in range(num_agents)]
    record, attempt = trained(*names)
    stay, lost = names[:-1], names[-1]
    reports = [report(name, member(f"{name}0", attempt, entered=2), seen=record, settings=SETTINGS) for name in stay]
    restarted = report(lost, member(f"{lost}1"), exited=(f"{lost}0",), seen=record, settings=SETTINGS)
    return record, [*reports, restarted]


def num_calls(function: Callable[[], object]) -> int:
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    former = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(former)
    return calls


def num_opcodes(function: Callable[[], object]) -> int:
    """With what loops execute, which calls nothing."""
    opcodes = 0

    def count(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        nonlocal opcodes
        frame.f_trace_opcodes = True
        opcodes += event == "opcode"
        return count

    former, frame = sys.gettrace(), inspect.currentframe()
    assert frame is not None
    frame.f_trace_opcodes = True  # Python 3.12 traces none if no frame had asked for them before `settrace`
    sys.settrace(count)
    try:
        function()
    finally:
        sys.settrace(former)
        frame.f_trace_opcodes = False
    assert opcodes
    return opcodes


def check_growth(at: Callable[[int], Callable[[], object]]) -> None:
    """Of what `at` gives for a number of agents."""
    calls = [num_calls(at(num_agents)) for num_agents in (60, 240)]
    assert calls[1] < 5 * calls[0], calls


@pytest.mark.parametrize("joins", [False, True])
def test_the_work_of_a_decision_grows_with_the_number_of_agents_alone(joins: bool) -> None:
    def decision(num_agents: int) -> Callable[[], object]:
        record, reports = change(num_agents)
        if joins:
            reports.append(report("newcomer-", member("newcomer-0"), seen=record, settings=SETTINGS))
        return lambda: agreed(record, *reports)

    check_growth(decision)


def test_the_work_of_the_coordinator_grows_with_the_number_of_agents_alone() -> None:
    """From the loss of a rank to the push of the next record, with all reports."""

    def loss(num_agents: int) -> Callable[[], object]:
        job = Job(num_agents, 2)
        job.found()
        job.lose(0)
        job.restart(0)
        return lambda: job.lose(1)

    check_growth(loss)


# KEYS-ASKED
def test_the_work_of_exchanging_keys_grows_with_the_number_of_agents_alone() -> None:
    """Each asks for the keys of four others."""

    def exchange(num_agents: int) -> Callable[[], object]:
        keys: KeyExchange[int] = KeyExchange("p")
        asked = [
            Asked("g", tuple(str((agent + by) % num_agents) for by in (-2, -1, 1, 2))) for agent in range(num_agents)
        ]

        def take_all() -> None:
            for agent in range(num_agents):
                keys.take(agent, (), [Key("g", str(agent), "value")], [asked[agent]])
            assert not keys.awaited()

        return take_all

    check_growth(exchange)


@pytest.mark.parametrize("layout", [ParallelLayout(), ParallelLayout(pp=2, sdp=5, tp=2)])
def test_the_work_of_a_rank_in_a_step_does_not_grow_with_the_number_of_ranks(layout: ParallelLayout) -> None:
    """A step of 8,000 ranks took each of them 62 ms, for what the seats of the others say."""
    opcodes = []
    for num_agents in (30, 120):
        rank = Rank(num_agents, 2, layout)
        rank.enter()
        rank.step()
        opcodes.append(num_opcodes(rank.step))
    assert opcodes[1] < 1.1 * opcodes[0]


def test_the_work_of_a_rank_in_a_step_does_not_grow_with_the_number_of_learners_that_have_healed() -> None:
    opcodes = []
    for num_agents in (30, 120):
        rank = Rank(num_agents, 2, ParallelLayout(), num_learners=num_agents // 2)
        rank.enter()
        state = rank.lifecycle.state
        assert state.record is not None
        state.active.update(state.record.plan.ranks)
        rank.step()
        opcodes.append(num_opcodes(rank.step))
    assert opcodes[1] < 1.1 * opcodes[0]


def dividing(num_ranks: int) -> Callable[[], None]:
    """What begins the slots of a step, with one share for each rank in all steps."""
    shares, gang = tuple(Share(index, num_ranks) for index in range(num_ranks)), SimpleNamespace(rank=0)
    manager = SimpleNamespace(layout=ParallelLayout(), reduction=lambda over: gang)
    manager.empty = lambda num, dtype, device: torch.empty(num, dtype=dtype, device=device)
    gradients = SlotGradients(cast(QuorumManager, manager), "dp", [[torch.zeros(3)]], "sum", keeps=True)

    def begin() -> None:
        manager.step = SimpleNamespace(index=0, num_slots=2 * num_ranks, share=shares[0], shares=shares)
        gradients.begin()

    return begin


def test_the_work_of_dividing_the_slots_of_a_step_does_not_grow_with_the_number_of_ranks() -> None:
    opcodes = []
    for begin in map(dividing, (60, 240)):
        begin()
        opcodes.append(num_opcodes(begin))
    assert opcodes[1] < 1.1 * opcodes[0]


def test_the_work_of_a_rank_between_steps_grows_with_the_number_of_agents_alone() -> None:
    check_growth(lambda num_agents: Rank(num_agents, 2, ParallelLayout(tp=2)).enter)
