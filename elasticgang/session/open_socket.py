"""Opens a socket to a host that may have several addresses (ADDRESS-ALL, ADDRESS-TIME). In a module of its own, because
the command line checks addresses without asyncio, which takes time to import."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable

from elasticgang.session.addresses import distinct, failure_of, family_of

STAGGER_S = 0.5


async def open_socket(host: str, port: int) -> socket.socket:
    """Connect to the first address of `host` that accepts it. Raises OSError (ADDRESS-ALL)."""
    loop = asyncio.get_running_loop()
    addresses = distinct(await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    waiting = list(addresses)
    errors: dict[str, OSError] = {}
    attempts: dict[asyncio.Task[socket.socket], str] = {}
    try:
        while waiting or attempts:
            if waiting:
                address = waiting.pop(0)
                attempts[loop.create_task(_open(address, port))] = address
            next_s = STAGGER_S / len(addresses) if waiting else None  # ADDRESS-TIME
            done, _ = await asyncio.wait(attempts, timeout=next_s, return_when=asyncio.FIRST_COMPLETED)
            if (opened := _take_done(attempts, done, errors)) is not None:
                return opened
    finally:
        for attempt in attempts:
            if not attempt.cancel() and not attempt.cancelled() and attempt.exception() is None:
                attempt.result().close()
    raise failure_of({address: errors[address] for address in addresses})


def _take_done(
    attempts: dict[asyncio.Task[socket.socket], str],
    done: Iterable[asyncio.Task[socket.socket]],
    errors: dict[str, OSError],
) -> socket.socket | None:
    """Move the failures of `done` from `attempts` to `errors`. Returns the first socket that is connected, and leaves
    the rest."""
    for attempt in done:
        address = attempts.pop(attempt)
        try:
            return attempt.result()
        except OSError as exc:
            errors[address] = exc
    return None


async def _open(address: str, port: int) -> socket.socket:
    sock = socket.socket(family_of(address), socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (address, port))
    except BaseException:
        sock.close()
        raise
    return sock
