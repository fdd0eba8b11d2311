"""Connections between agents: a notice reaches the others at once, also while the store is unreachable.

MESH-1  Two agents of a record share one connection. It starts with a hello from both: agent, job, protocol, and the
    agent it is meant for. A connection without a valid hello, or with an invalid message, is closed; no other is.
MESH-2  A lost connection alone proves nothing. The peer's process has exited if its address refuses a new connection,
    or if another agent answers there: an agent kills its members before it takes another id.
MESH-3  The kernel's probes find a peer that is cut off within `_PROBES_S`.
MESH-4  At most `MAX_UNAUTHENTICATED` connections wait for their hello, for `HELLO_TIMEOUT_S` each. Further ones are
    closed at once, so that no client can use up the agent's descriptors. A peer dials again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Mapping
from typing import Any

from elasticgang.errors import WireError
from elasticgang.process import framing
from elasticgang.protocol.record import PROTOCOL

log = logging.getLogger("elasticgang")

MAX_BYTES = 1 << 16
MAX_UNAUTHENTICATED = 64
HELLO_TIMEOUT_S = 2.0
_CONNECT_TIMEOUT_S = 2.0
_REDIAL_S = 0.2
_PROBES_S = 3

MessageHandler = Callable[[str, dict[str, Any]], None]


class PeerMesh:
    """All connections of one agent. For the loop's thread alone."""

    def __init__(self, job: str, agent: str, on_message: MessageHandler) -> None:
        """`on_message` is called with a peer's id and a message of its; whatever it raises closes that connection
        (MESH-1)."""
        self._job, self._agent, self._on_message = job, agent, on_message
        self._addresses: dict[str, str] = {}
        self._connections: dict[str, set[asyncio.StreamWriter]] = {}
        self._dials: dict[str, asyncio.Task[None]] = {}
        self._served: set[asyncio.Task[Any]] = set()
        self._num_unauthenticated = 0
        self._server: asyncio.Server | None = None
        self.exited: set[str] = set()

    async def listen(self, host: str) -> str:
        """Returns the address. Raises OSError."""
        self._server = await asyncio.start_server(self._admit, host, 0)
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    def follow(self, addresses: Mapping[str, str]) -> None:
        """Connect to these agents, and to no others any more."""
        self._addresses = {agent: address for agent, address in addresses.items() if agent != self._agent and address}
        for agent in set(self._connections) | set(self._dials) | self.exited:
            if agent not in self._addresses:
                self._drop(agent)
        for agent in self._addresses:
            if agent < self._agent:
                self._dial(agent)

    def broadcast(self, kind: str, **fields: Any) -> None:
        message = framing.pack(kind, **fields)
        for writers in self._connections.values():
            for writer in writers:
                writer.write(message)

    def is_up(self, agent: str) -> bool:
        return bool(self._connections.get(agent))

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for agent in set(self._connections) | set(self._dials):
            self._drop(agent)
        for task in self._served:
            task.cancel()

    def _drop(self, agent: str) -> None:
        self.exited.discard(agent)
        if (dial := self._dials.pop(agent, None)) is not None:
            dial.cancel()
        for writer in self._connections.pop(agent, ()):
            writer.close()

    # -- either end

    def _dial(self, agent: str) -> None:
        if agent in self._addresses and agent not in self._dials and not self.is_up(agent):
            task = asyncio.ensure_future(self._keep_dialing(agent, self._addresses[agent]))
            self._dials[agent] = task
            task.add_done_callback(lambda _: self._dials.pop(agent, None) if self._dials.get(agent) is task else None)

    async def _keep_dialing(self, agent: str, address: str) -> None:
        host, _, port = address.rpartition(":")
        while not self.is_up(agent):
            try:
                reader, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), _CONNECT_TIMEOUT_S)
            except ConnectionRefusedError:
                self.exited.add(agent)
            except (OSError, asyncio.TimeoutError):
                pass
            else:
                if await self._handshake(agent, reader, writer):
                    return
            await asyncio.sleep(_REDIAL_S)

    async def _handshake(self, agent: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """MESH-1, on the dialling side. False: the handshake failed."""
        try:
            writer.write(framing.pack("hello", job=self._job, agent=self._agent, protocol=PROTOCOL, to=agent))
            answer = await asyncio.wait_for(_receive(reader), HELLO_TIMEOUT_S)
        except (WireError, OSError, EOFError, asyncio.TimeoutError):
            writer.close()
            return False
        except asyncio.CancelledError:
            writer.close()
            raise
        if (answer["kind"], answer.get("agent"), answer.get("job")) != ("hello", agent, self._job):
            self.exited.add(agent)  # MESH-2
            writer.close()
            return False
        task = asyncio.ensure_future(self._listen(agent, reader, writer))
        self._served.add(task)
        task.add_done_callback(self._served.discard)
        return True

    def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._num_unauthenticated >= MAX_UNAUTHENTICATED:  # MESH-4
            writer.transport.abort()
            return
        self._num_unauthenticated += 1
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._served.add(task)
        task.add_done_callback(self._served.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_unauthenticated = True
        try:
            hello = await asyncio.wait_for(_receive(reader), HELLO_TIMEOUT_S)
            writer.write(framing.pack("hello", job=self._job, agent=self._agent, protocol=PROTOCOL))
            wanted = {"kind": "hello", "job": self._job, "protocol": PROTOCOL, "to": self._agent}
            if all(hello.get(name) == value for name, value in wanted.items()) and isinstance(hello.get("agent"), str):
                is_unauthenticated = False
                self._num_unauthenticated -= 1
                await self._listen(hello["agent"], reader, writer)
        except (WireError, OSError, EOFError, asyncio.TimeoutError):
            pass
        finally:
            self._num_unauthenticated -= is_unauthenticated
            writer.close()

    async def _listen(self, agent: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _keep_alive(writer.get_extra_info("socket"))
        self._connections.setdefault(agent, set()).add(writer)
        self.exited.discard(agent)
        try:
            while True:
                self._on_message(agent, await _receive(reader))
        except (WireError, OSError, EOFError):
            pass
        except Exception as exc:
            log.debug("invalid message from agent %s: %r", agent, exc)
        finally:
            writer.close()
            wires = self._connections.get(agent)
            if wires is not None:
                wires.discard(writer)
                self._dial(agent)


async def _receive(reader: asyncio.StreamReader) -> dict[str, Any]:
    header = await reader.readexactly(framing.HEADER_BYTES)
    return framing.unpack(await reader.readexactly(framing.body_size(header, MAX_BYTES)))


def _keep_alive(sock: socket.socket) -> None:
    """MESH-3."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _PROBES_S * 1000)
