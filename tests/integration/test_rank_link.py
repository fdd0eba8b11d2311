"""The agent's end of the socket to a rank."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from elasticgang.agent.rank_link import RankLink
from elasticgang.process import framing

GUARD_S = 10.0


def test_messages_come_whole_and_only_once_it_follows() -> None:
    async def run() -> list[dict[str, Any]]:
        ours, theirs = socket.socketpair()
        found: list[dict[str, Any]] = []
        with theirs:
            link = await RankLink.open(ours)
            data = framing.pack("a", text="x" * 100_000) + framing.pack("b")
            sent = asyncio.get_running_loop().run_in_executor(None, theirs.sendall, data)
            await asyncio.sleep(0)
            assert found == []
            link.follow(found.append, lambda exc: None)
            await sent
        await link.wait_closed(GUARD_S)
        return found

    assert [message["kind"] for message in asyncio.run(run())] == ["a", "b"]


# RANK-2
def test_what_was_sent_before_is_handled_first() -> None:
    async def run() -> list[str]:
        ours, theirs = socket.socketpair()
        events: list[str] = []
        with theirs:
            link = await RankLink.open(ours)
            link.follow(lambda message: events.append(message["kind"]), lambda exc: None)
            theirs.sendall(framing.pack("a", text="x" * 50_000))
            theirs.sendall(framing.pack("b"))
            read = asyncio.get_running_loop().create_future()

            def on_read() -> None:
                events.append("read")
                read.set_result(None)

            link.when_read(on_read)
            await asyncio.wait_for(read, GUARD_S)
            link.when_read(lambda: events.append("nothing to read"))
        link.close()
        return events

    assert asyncio.run(run()) == ["a", "b", "read", "nothing to read"]


# RANK-2, RANKLINK-1
def test_what_a_rank_sent_before_it_died_is_handled_although_nothing_can_be_sent_to_it() -> None:
    async def run() -> list[str]:
        ours, theirs = socket.socketpair()
        events: list[str] = []
        link = await RankLink.open(ours)
        link.send(b"a message that the rank does not read")
        with theirs:
            theirs.sendall(framing.pack("a", text="x" * 50_000))
            theirs.sendall(framing.pack("left"))
        link.follow(lambda message: events.append(message["kind"]), lambda exc: None)
        link.send(b"to a socket that is closed")
        link.when_read(lambda: events.append("read"))
        await link.wait_closed(GUARD_S)
        link.when_read(lambda: events.append("nothing to read"))
        return events

    assert asyncio.run(run()) == ["a", "left", "read", "nothing to read"]


def test_an_invalid_message_closes_the_link() -> None:
    async def run() -> tuple[list[str], bytes]:
        ours, theirs = socket.socketpair()
        found: list[str] = []

        def on_message(message: dict[str, Any]) -> None:
            found.append(message["missing"])

        with theirs:
            link = await RankLink.open(ours)
            link.follow(on_message, lambda exc: found.append(type(exc).__name__))
            theirs.sendall(framing.pack("a") + framing.pack("b", missing="not handled"))
            await link.wait_closed(GUARD_S)
            theirs.settimeout(GUARD_S)
            rest = theirs.recv(1)
            link.when_read(lambda: found.append("read"))
        return found, rest

    assert asyncio.run(run()) == (["KeyError", "read"], b"")
