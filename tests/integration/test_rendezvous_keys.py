"""Rendezvous keys by way of the coordinator: those of a generation reach its agents, and nobody else puts any."""

from __future__ import annotations

import asyncio

import pytest

from elasticgang.protocol.coordinator_messages import JoinRequest, Notify
from elasticgang.protocol.rendezvous_keys import Asked, Key, RendezvousKeys
from elasticgang.session import connection
from tests.integration.led_jobs import Agent, Job, found, play


def prefix(agent: Agent) -> str:
    assert agent.record is not None
    return agent.record.prefix


def put(
    agent: Agent, *keys: Key, groups: tuple[str, ...] = ("g",), of: str = "", asked: tuple[Asked, ...] = ()
) -> None:
    agent.client.send_keys(RendezvousKeys(of or prefix(agent), groups, keys, asked))


async def got(agent: Agent) -> tuple[Key, ...]:
    return (await agent.keys.get()).keys


async def answered(agent: Agent) -> None:
    """The coordinator has read what `agent` sent before: it ends sessions in order."""
    await agent.client.stop()


AGAIN = Key("g", "0", "again")
FIRST, SECOND, FORGED = Key("g", "0", "true"), Key("g", "1", "other"), Key("g", "1", "forged")


def test_keys_reach_the_other_agent_also_when_it_comes_later() -> None:
    async def test(job: Job) -> None:
        a, b = await found(job)
        put(a, FIRST)
        put(b, SECOND)
        assert await got(a) == (SECOND,)
        assert await got(b) == (FIRST,)

    play(test, Job())


# KEYS-ASKED
def test_an_agent_gets_the_keys_that_it_has_asked_for_alone() -> None:
    async def test(job: Job) -> None:
        a, b = await found(job)
        put(a, FIRST, groups=())
        put(b, asked=(Asked("g", ("0", "2")),), groups=())
        assert await got(b) == (FIRST,)
        put(a, SECOND, Key("g", "2", "third"), groups=())
        assert await got(b) == (Key("g", "2", "third"),)
        assert a.keys.empty()

    play(test, Job())


# SERVE-TURN
def test_what_comes_together_is_sent_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "TURN_S", 60.0)

    async def test(job: Job) -> None:
        a, b = await found(job)
        put(b)
        put(a, asked=(Asked("h", ("0",)),), groups=())
        put(b, Key("h", "0", "read"), groups=())
        assert await got(a) == (Key("h", "0", "read"),)  # the coordinator knows what b has joined
        put(a, FIRST, groups=())
        put(a, SECOND, groups=())
        assert await got(b) == (FIRST, SECOND)

    play(test, Job())


@pytest.mark.parametrize("conflict", [True, False])
def test_a_forged_key_ends_its_senders_session_and_reaches_nobody(conflict: bool) -> None:
    """By an agent that has the secret: the value of another's key, or a key of a generation that it is not in."""

    async def test(job: Job) -> None:
        a, b = await found(job)
        put(a, FIRST)
        put(b)
        assert await got(b) == (FIRST,)
        num_sessions = len(b.hosts)
        if conflict:
            forger, forged, why = b, Key("g", "0", "forged"), "has another value already"
        else:
            forger, forged, why = job.add("c"), FORGED, "of a generation that it is not in"
            while not forger.session.is_welcome:
                await asyncio.sleep(0)
        put(forger, forged, of=prefix(a))
        while not job.log:
            await asyncio.sleep(0)
        assert why in job.log[0]
        while conflict and len(b.hosts) == num_sessions:
            await asyncio.sleep(0.01)
        put(b, SECOND)
        assert await got(a) == (SECOND,)
        assert not conflict or await got(b) == (FIRST,)  # in its new session
        assert forger is b or forger.keys.empty()

    play(test, Job())


def test_an_agent_of_another_job_gets_and_changes_nothing() -> None:
    async def test(job: Job) -> None:
        a, b = await found(job)
        put(a, FIRST)
        others = [job.add(name, job="other") for name in "ab"]
        for other in others:
            await other.next()
            put(other, FORGED, of=prefix(a))
            await answered(other)
        put(b, SECOND)
        assert await got(a) == (SECOND,)
        assert await got(b) == (FIRST,)
        assert all(other.keys.empty() for other in others)

    play(test, Job())


# SERVE-KEYS
def test_the_keys_of_a_generation_are_dropped_with_it() -> None:
    async def test(job: Job) -> None:
        a, b = await found(job)
        former = prefix(a)
        put(a, FIRST)
        a.end_generation()
        await a.next(), await b.next()
        put(b, of=former)  # joins, too late
        put(b, SECOND)
        put(a)
        assert await got(a) == (SECOND,)
        assert b.keys.empty()

    play(test, Job())


# SERVE-KEYS
def test_keys_that_come_before_the_coordinator_takes_office_are_dropped() -> None:
    async def test(job: Job) -> None:
        a, b = await found(job)
        await job.stop()
        await b.client.stop()
        job.founds = False
        server = await job.start()
        while (state := server.state_of("job")) is None or state.record is None:
            await asyncio.sleep(0.01)
        put(a, FIRST)
        a.client.notify(Notify(JoinRequest(1)))
        while state.newest.joining != 1:  # the keys were read before
            await asyncio.sleep(0.01)
        assert not state.in_office
        b.restart(job.port)
        while not state.in_office:
            await asyncio.sleep(0.01)
        put(b)
        put(a, AGAIN)
        assert await got(b) == (AGAIN,)

    play(test, Job())


def test_a_coordinator_that_was_restarted_takes_the_keys_anew() -> None:
    """The agents send them again in the next session."""

    async def test(job: Job) -> None:
        a, b = await found(job)
        put(a, FIRST)
        await job.stop()
        sessions = [(agent, len(agent.hosts)) for agent in (a, b)]
        job.founds = False
        server = await job.start()
        for agent, seen in sessions:
            while len(agent.hosts) == seen:
                await asyncio.sleep(0.01)
        while (state := server.state_of("job")) is None or not state.in_office:
            await asyncio.sleep(0.01)
        put(a, FIRST)
        put(b, SECOND)
        assert await got(a) == (SECOND,)
        assert await got(b) == (FIRST,)

    play(test, Job())
