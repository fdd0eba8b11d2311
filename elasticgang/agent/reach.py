"""Which hosts accept a connection from this one (REACH-1). Sends nothing."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Mapping

from elasticgang.session.addresses import family_of, host_and_port

REACH_S = 2.5  # a first packet that is lost is sent again after one second
TRY_S = 5.0
_MAX_OPEN = 256  # connections


async def try_hosts(others: Mapping[str, str]) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Those of `others` (agents, each with its address as HOST:PORT, where it listens) that accept a connection within
    `REACH_S`, and those that do not, with the reasons. After `TRY_S` the rest is in neither."""
    turns, found = asyncio.Semaphore(_MAX_OPEN), dict[str, str]()

    async def try_one(agent: str, address: str) -> None:
        async with turns:
            found[agent] = await _why_unreached(address)

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
    host, port = host_and_port(address)
    try:
        with socket.socket(family_of(host), socket.SOCK_STREAM) as sock:
            sock.setblocking(False)
            connecting = asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
            await asyncio.wait_for(connecting, REACH_S)
    except asyncio.TimeoutError:
        return f"no answer within {REACH_S:g} s"
    except OSError as exc:
        return os.strerror(exc.errno) if exc.errno else str(exc)
    return ""
