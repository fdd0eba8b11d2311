"""A server of sessions that sends back what it gets, its honest clients, and connections that are made by hand."""

from __future__ import annotations

import asyncio
import os
import struct
from collections.abc import Callable, Coroutine
from typing import Any

from elasticgang.errors import WireError
from elasticgang.session.connection import ClientConnection, Connection
from elasticgang.session.frames import body_frame
from elasticgang.session.handshake import AGENT, ClientHandshake, Identity, SessionKeys
from elasticgang.session.listener import Listener
from elasticgang.session.tls import Tls, TlsStream

SECRETS = {"job": b"s" * 32, "other": b"o" * 32}
IDENTITY = Identity("job", AGENT, 8)
DEADLINE_S = 30.0


class Echo:
    """A server's side: it sends back what it gets."""

    def __init__(self, tls: Tls | None = None) -> None:
        self.log: list[str] = []
        self.has_logged = asyncio.Event()
        self.sessions: list[Connection] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.reasons: asyncio.Queue[str] = asyncio.Queue()
        self.listener = Listener(self, SECRETS.get, self._log, max_bytes=1 << 20, tls=tls)

    def _log(self, line: str) -> None:
        self.log.append(line)
        self.has_logged.set()

    def opened(self, connection: Connection) -> None:
        self.sessions.append(connection)

    def received(self, connection: Connection, payload: bytes) -> None:
        if payload == b"bad":
            raise WireError("a bad message")
        connection.send(payload)

    def closed(self, connection: Connection, reason: str) -> None:
        self.sessions.remove(connection)
        self.reasons.put_nowait(reason)
        if reason:
            self.listener.incidents.note(connection.peer.rsplit(":", 1)[0], reason)


class Client:
    def __init__(self) -> None:
        self.payloads: asyncio.Queue[bytes] = asyncio.Queue()
        self.is_open = asyncio.Event()
        self.reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def opened(self, connection: Connection) -> None:
        self.is_open.set()

    def received(self, connection: Connection, payload: bytes) -> None:
        self.payloads.put_nowait(payload)

    def closed(self, connection: Connection, reason: str) -> None:
        self.reason.set_result(reason)


def serve(test: Callable[[Echo], Coroutine[Any, Any, None]], tls: Tls | None = None) -> None:
    async def run() -> None:
        echo = Echo(tls)
        await echo.listener.start("127.0.0.1", 0)
        try:
            await asyncio.wait_for(test(echo), DEADLINE_S)
        finally:
            for writer in echo.writers:
                writer.close()
            await echo.listener.stop()

    asyncio.run(run())


async def connect(
    echo: Echo,
    identity: Identity = IDENTITY,
    secret: bytes = SECRETS["job"],
    tls: Tls | None = None,
    name: str | None = None,
) -> tuple[Client, ClientConnection]:
    client = Client()
    context = None if tls is None else tls.client_context(checks_name=name is not None)
    stream = None if context is None else TlsStream(context, is_server=False, name=name)
    connection = ClientConnection(client, identity, secret, tls=stream, certificate="" if tls is None else tls.path)
    await asyncio.get_running_loop().create_connection(lambda: connection, "127.0.0.1", echo.listener.port)
    return client, connection


async def is_served(echo: Echo, tls: Tls | None = None) -> bool:
    """Whether an honest client gets its answer."""
    client, connection = await connect(echo, tls=tls)
    await client.is_open.wait()
    connection.send(b"hello")
    answer = await client.payloads.get()
    connection.close()
    await client.reason
    return answer == b"hello"


async def raw(echo: Echo) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", echo.listener.port)
    echo.writers.append(writer)
    return reader, writer


async def read_body(reader: asyncio.StreamReader) -> bytes:
    (size,) = struct.unpack("!I", await reader.readexactly(4))
    return await reader.readexactly(size)


async def shake_by_hand(echo: Echo) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, SessionKeys]:
    reader, writer = await raw(echo)
    handshake = ClientHandshake(IDENTITY, SECRETS["job"], os.urandom(32))
    writer.write(body_frame(handshake.hello()))
    writer.write(body_frame(handshake.answer(await read_body(reader))))
    return reader, writer, handshake.finish(await read_body(reader))


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What came before the server closed the connection."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""
