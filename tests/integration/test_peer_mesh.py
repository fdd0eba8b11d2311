"""Connections between agents, over loopback: what arrives, what is closed, and who is known to be gone."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from elasticgang.agent.peer_mesh import MAX_BYTES, MAX_UNAUTHENTICATED, PeerMesh
from elasticgang.process import framing
from elasticgang.protocol.record import PROTOCOL

DEADLINE_S = 20.0


class Peer:
    def __init__(self, agent: str, job: str = "job") -> None:
        self.agent = agent
        self.heard: list[tuple[str, dict[str, Any]]] = []
        self.wires = PeerMesh(job, agent, self._hear)
        self.address = ""

    def _hear(self, agent: str, message: dict[str, Any]) -> None:
        if message["kind"] == "bad":
            raise ValueError(message)
        if message["kind"] == "worse":
            raise OverflowError(message)
        self.heard.append((agent, message))


@contextlib.asynccontextmanager
async def peers(*agents: str) -> AsyncIterator[list[Peer]]:
    found = [Peer(agent) for agent in agents]
    try:
        for peer in found:
            peer.address = await peer.wires.listen("127.0.0.1")
        for peer in found:
            peer.wires.follow({other.agent: other.address for other in found})
        await until(
            lambda: all(peer.wires.is_up(other.agent) for peer in found for other in found if other is not peer)
        )
        yield found
    finally:
        for peer in found:
            peer.wires.close()


async def until(condition: Callable[[], object]) -> None:
    async def poll() -> None:
        while not condition():
            await asyncio.sleep(0.001)

    await asyncio.wait_for(poll(), DEADLINE_S)


def run(test: Coroutine[Any, Any, None]) -> None:
    """Also what no task has handled fails: it would end the agent."""
    unhandled: list[dict[str, Any]] = []

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
        await test
        gc.collect()

    asyncio.run(watched())
    assert unhandled == []


def test_what_one_tells_all_others_hear() -> None:
    async def test() -> None:
        async with peers("a", "b", "c") as (a, b, c):
            b.wires.broadcast("over", generation=3, reason="r")
            await until(lambda: a.heard and c.heard)
            assert a.heard == c.heard == [("b", {"kind": "over", "generation": 3, "reason": "r"})]
            assert b.heard == []

    run(test())


@pytest.mark.parametrize("victim", ["a", "b"])
def test_a_peer_that_is_gone_is_known_to_be_at_either_end(victim: str) -> None:
    async def test() -> None:
        async with peers("a", "b") as both:
            dead, live = both if victim == "a" else reversed(both)
            dead.wires.close()
            await until(lambda: live.wires.exited == {victim})
            assert not live.wires.is_up(victim)

    run(test())


def test_a_lost_connection_to_a_peer_that_lives_comes_back() -> None:
    async def test() -> None:
        async with peers("a", "b") as (a, b):
            former = a.wires._connections["b"] | b.wires._connections["a"]
            b.wires.broadcast("bad")  # `a` closes
            await until(lambda: former.isdisjoint(a.wires._connections["b"] | b.wires._connections["a"]))
            await until(lambda: a.wires.is_up("b") and b.wires.is_up("a"))
            a.wires.broadcast("join", generation=1)
            await until(lambda: b.heard)
            assert not a.wires.exited
            assert not b.wires.exited

    run(test())


# MESH-2
def test_another_agent_at_the_address_means_that_the_peer_is_gone() -> None:
    async def test() -> None:
        async with peers("a", "b") as (a, b):
            b.wires.follow({"a": a.address, "0": a.address})
            await until(lambda: b.wires.exited == {"0"})
            assert b.wires.is_up("a")

    run(test())


def test_who_takes_part_no_more_is_let_go() -> None:
    async def test() -> None:
        async with peers("a", "b") as (a, b):
            a.wires.follow({"a": a.address})
            b.wires.follow({"b": b.address})
            assert not a.wires.is_up("b")
            await until(lambda: not b.wires.is_up("a"))

    run(test())


HELLO = {"job": "job", "agent": "z", "protocol": PROTOCOL, "to": "a"}
STRANGE = {
    "not ours": b"GET / HTTP/1.1\r\n\r\n",
    "too long": struct.pack("!4sI", b"EG1\n", MAX_BYTES + 1),
    "no JSON": struct.pack("!4sI", b"EG1\n", 4) + b"\xff{}]",
    "a number": struct.pack("!4sI", b"EG1\n", 1) + b"1",
    "no hello": framing.pack("over", generation=1, reason=""),
    "another job": framing.pack("hello", **{**HELLO, "job": "other"}),
    "another protocol": framing.pack("hello", **{**HELLO, "protocol": PROTOCOL + 1}),
    "for another agent": framing.pack("hello", **{**HELLO, "to": "b"}),
    "no agent": framing.pack("hello", **{**HELLO, "agent": 5}),
    "half a message after hello": framing.pack("hello", **HELLO) + framing.pack("join", generation=1)[:-1],
    "a bad message after hello": framing.pack("hello", **HELLO) + framing.pack("bad"),
    "what nobody foresaw after hello": framing.pack("hello", **HELLO) + framing.pack("worse"),
    "half a hello": framing.pack("hello", **HELLO)[:-1],
    "nothing": b"",
}


# MESH-1
@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.parametrize("ends", [True, False])
def test_what_is_not_ours_closes_that_connection_and_nothing_else(name: str, ends: bool) -> None:
    async def test() -> None:
        async with peers("a", "b") as (a, b):
            host, _, port = a.address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(STRANGE[name])
            if ends or name == "half a message after hello":  # a peer may take its time between two messages
                writer.write_eof()
            with contextlib.suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), DEADLINE_S)  # until it is closed
            writer.close()
            b.wires.broadcast("join", generation=1)
            await until(lambda: a.heard)
            assert a.heard == [("b", {"kind": "join", "generation": 1})]
            assert a.wires.is_up("b")
            assert not a.wires.is_up("z")

    run(test())


# MESH-4
def test_of_many_who_say_nothing_most_are_closed_at_once_and_a_peer_comes_back() -> None:
    async def test() -> None:
        async with peers("a", "b") as (a, b):
            host, _, port = a.address.rpartition(":")
            opened = [await asyncio.open_connection(host, int(port)) for _ in range(2 * MAX_UNAUTHENTICATED)]
            closing = [asyncio.ensure_future(reader.read()) for reader, _ in opened]
            await until(lambda: sum(task.done() for task in closing) >= MAX_UNAUTHENTICATED)
            assert a.wires._num_unauthenticated == MAX_UNAUTHENTICATED
            former = a.wires._connections["b"] | b.wires._connections["a"]
            b.wires.broadcast("bad")  # `a` closes
            await until(lambda: former.isdisjoint(a.wires._connections["b"] | b.wires._connections["a"]))
            await until(lambda: a.wires.is_up("b") and b.wires.is_up("a"))
            await until(lambda: all(task.done() for task in closing))
            await until(lambda: a.wires._num_unauthenticated == 0)
            await asyncio.gather(*closing, return_exceptions=True)
            for _, writer in opened:
                writer.close()

    run(test())
