"""Which hosts this one reaches (REACH-1): those that accept a connection, and whose large packets come through.

TRY-1  Whoever connects to an agent's listener gets one byte, and then more than one packet of 9,000 bytes holds. So an
    agent finds a path that loses large packets alone (a wrong MTU), on which connections open, but collectives end by
    their time limit. Each agent tries the way from the others to itself; the way back is tried by them.
TRY-2  A host that accepts a connection is reached, even if nothing comes: its agent may stand still.
TRY-3  A connection that is not accepted is tried again after `_ATTEMPT_S`: the kernel sends a first packet again only
    after 1 s and 3 s, and of many hosts that are tried at once, some would lose both.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Mapping

from elasticgang.session.addresses import family_of, host_and_port

REACH_S = 2.5
TRY_S = 5.0
_ATTEMPT_S = 0.5
_NUM_BYTES = 10 << 10
_MAX_OPEN = 256  # connections


def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """TRY-1. Reads nothing."""
    writer.write(b"\0")  # in a packet of its own: asyncio's sockets have TCP_NODELAY
    writer.write(bytes(_NUM_BYTES))
    writer.close()


async def try_hosts(others: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Those of `others` (agents, each with its address as HOST:PORT, where it answers) that are reached within
    `REACH_S`, and those that are not, with the reasons in words. After `TRY_S`, or without a descriptor, the rest is in
    neither."""
    turns, found = asyncio.Semaphore(_MAX_OPEN), dict[str, str]()

    async def try_one(agent: str, address: str) -> None:
        host, port = host_and_port(address)
        async with turns:
            with contextlib.suppress(OSError):  # of this host: it says nothing about the other one
                found[agent] = await _why_unreached(host, int(port))

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


async def _why_unreached(host: str, port: int) -> str:
    """Empty: it is reached. Raises OSError: it cannot be tried."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + REACH_S
    while (left_s := until_s - loop.time()) > 0:
        with socket.socket(family_of(host), socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            try:
                await asyncio.wait_for(loop.sock_connect(sock, (host, port)), min(left_s, _ATTEMPT_S))
            except asyncio.TimeoutError:
                continue  # TRY-3
            except OSError as exc:
                return os.strerror(exc.errno) if exc.errno else str(exc)
            loses_some = await _loses_large_packets(sock, until_s)
            return "large packets from there are lost" if loses_some else ""
    return f"no answer within {REACH_S:g} s"


async def _loses_large_packets(sock: socket.socket, until_s: float) -> bool:
    """Of what the other end sends, something comes, but not all."""
    loop = asyncio.get_running_loop()
    num_received = 0
    with contextlib.suppress(OSError):
        while (left_s := until_s - loop.time()) > 0:
            try:
                data = await asyncio.wait_for(loop.sock_recv(sock, _NUM_BYTES), left_s)
            except asyncio.TimeoutError:
                break
            num_received += len(data)
            if not data or num_received > _NUM_BYTES:
                return False
        return num_received > 0  # TRY-2
    return False
