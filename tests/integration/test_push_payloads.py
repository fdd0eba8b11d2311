"""A record is encoded, compressed and hashed once for all sessions, whenever they are sent it (PUSH-ONCE)."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from elasticgang.coordinator import push_payloads
from elasticgang.coordinator.push_payloads import MAX_KEPT, PushPayloads
from elasticgang.layout import ParallelLayout
from elasticgang.protocol.coordinator_messages import Decision, Push, Term
from elasticgang.protocol.record import Record
from elasticgang.session.messages import decode_from_coordinator, encode
from tests.integration.led_jobs import Agent, Job, found, play
from tests.unit.proposals import agreed, member, report

NUM_JOINERS = 3


@pytest.fixture(autouse=True)
def encoded(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[Any, ...]]:
    """How often each push was encoded as a whole, by what it says."""
    counts: Counter[tuple[Any, ...]] = Counter()

    def count(push: Push) -> bytes:
        counts[push.decision.term, push.decision.record.generation, push.over, push.joining] += 1
        return encode(push)

    monkeypatch.setattr(push_payloads, "encode", count)
    return counts


def large(num_agents: int = 200) -> Record:
    members = {
        f"agent-{number:03}": [member(f"m{number:03}x{rank}") for rank in range(4)] for number in range(num_agents)
    }
    return agreed(None, *(report(agent, *ranks, layout=ParallelLayout()) for agent, ranks in members.items()))


def test_equal_pushes_of_several_sessions_have_one_payload(encoded: Counter[tuple[Any, ...]]) -> None:
    record, payloads = large(), PushPayloads()
    decision = Decision(Term(1, "c"), record, True)
    whole = payloads.payload(Push(decision), None)
    assert payloads.payload(Push(Decision(Term(1, "c"), record, True)), None) is whole
    assert sum(encoded.values()) == 1
    assert payloads.payload(Push(decision, over=1), None) is not whole
    assert payloads.payload(Push(Decision(Term(2, "c"), record, True)), None) is not whole
    assert decode_from_coordinator(whole.data) == Push(decision)


def test_agents_that_know_different_records_have_payloads_of_their_own() -> None:
    record, payloads = large(), PushPayloads()
    following = agreed(record, *(report(agent, *_members(record, agent), seen=record) for agent in record.agents))
    push = Push(Decision(Term(1, "c"), following, True))
    whole, delta = payloads.payload(push, None), payloads.payload(push, record)
    assert len(delta.data) < len(whole.data) / 2
    assert payloads.payload(push, record) is delta
    assert decode_from_coordinator(delta.data, record) == push


def _members(record: Record, agent: str) -> list[Any]:
    return [member(seat.member) for seat in record.seats_of(agent)]


def test_what_is_kept_is_bounded(encoded: Counter[tuple[Any, ...]]) -> None:
    record, payloads = large(1), PushPayloads()
    first = payloads.payload(Push(Decision(Term(1, "c"), record, True)), None)
    for over in range(1, MAX_KEPT):
        payloads.payload(Push(Decision(Term(1, "c"), record, True), over=over), None)
    assert payloads.payload(Push(Decision(Term(1, "c"), record, True)), None) is first
    for over in range(1, MAX_KEPT + 1):
        payloads.payload(Push(Decision(Term(2, "c"), record, True), over=over), None)
    assert payloads.payload(Push(Decision(Term(1, "c"), record, True)), None) is not first
    assert max(encoded.values()) == 2


def test_joiners_that_waited_are_sent_the_payload_of_the_others(encoded: Counter[tuple[Any, ...]]) -> None:
    """ACCEPT: without a state directory they are sent the record once an agent of the one before has accepted it."""

    async def test(job: Job) -> None:
        agents: list[Agent] = [*await found(job)]
        for agent in agents:
            agent.is_ready = False
        joiners = [job.add(f"j{number}", min_agents=1) for number in range(NUM_JOINERS)]
        await _are_ready(job, joiners)
        agents[0].end_generation()
        records = [await agent.next() for agent in (*agents, *joiners)]
        assert len({record.digest for record in records}) == 1
        assert len(records[0].agents) == len(agents) + NUM_JOINERS
        assert set(encoded.values()) == {1}

    play(test, Job())


async def _are_ready(job: Job, agents: list[Agent]) -> None:
    assert job.server is not None
    state = job.server.state_of("job")
    assert state is not None
    while not {agent.name for agent in agents} <= state.reports.counting().keys():
        await asyncio.sleep(0.01)
