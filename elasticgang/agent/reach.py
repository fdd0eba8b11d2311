"""Which hosts this one reaches (REACH-1): those that accept a connection, and whose large packets come through.

TRY-1  Whoever connects to an agent's listener gets `_NUM_BYTES` bytes, more than one packet of 9,000 bytes holds. So
    an agent finds a path that loses large packets alone (a wrong MTU), on which connections open, but collectives end
    by their time limit. Each agent tries the way from the others to itself; the way back is tried by them.
TRY-2  A path is tried twice before it counts as broken: the first packet of a connection may be lost, and the second.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping

from elasticgang.session.addresses import family_of, host_and_port

REACH_S = 2.0  # a first packet that is lost is sent again after one second
TRY_S = 6.0
_NUM_TRIES = 2
_NUM_BYTES = 10 << 10
_MAX_OPEN = 256  # connections


def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """TRY-1. Reads nothing."""
    writer.write(bytes(_NUM_BYTES))
    writer.close()


async def try_hosts(others: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Those of `others` (agents, each with its address as HOST:PORT, where it answers) that are reached, and those that
    are not, with the reasons in words. After `TRY_S` the rest is in neither."""
    turns, found = asyncio.Semaphore(_MAX_OPEN), dict[str, str]()

    async def try_one(agent: str, address: str) -> None:
        async with turns:
            for _ in range(_NUM_TRIES):  # TRY-2
                why = await _why_unreached(address)
                if not why:
                    break
        found[agent] = why

    tries = [asyncio.ensure_future(try_one(agent, address)) for agent, address in others.items()]
    try:
        if tries:
            await asyncio.wait(tries, timeout=TRY_S)
    finally:
        for each in tries:
            each.cancel()
    return (
        tuple(agent for agent, why in found.items() if not why),
        tuple((agent, why) for agent, why in found.items() if why),
    )


async def _why_unreached(address: str) -> str:
    """Empty: it is reached."""
    why = "no answer"
    host, port = host_and_port(address)
    loop = asyncio.get_running_loop()
    try:
        with socket.socket(family_of(host), socket.SOCK_STREAM) as sock:
            sock.setblocking(False)

            async def try_once() -> None:
                nonlocal why
                await loop.sock_connect(sock, (host, int(port)))
                why = "large packets from there are lost"
                while await loop.sock_recv(sock, _NUM_BYTES):
                    pass

            await asyncio.wait_for(try_once(), REACH_S)
    except asyncio.TimeoutError:
        return why
    except OSError as exc:
        return os.strerror(exc.errno) if exc.errno else str(exc)
    return ""
