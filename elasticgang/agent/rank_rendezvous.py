"""Brings the ranks' rendezvous keys to each other, and to the coordinator when the generation has several agents.
Gives the ranks the memory in which they add up their votes (`process/sum_block.py`).

A rank has a door to its agent: a socket over which it sends one end of a new connection for each of its comm processes.

DOOR-1  Only a holder of the door can connect. It exists in the agent and in the rank alone.
DOOR-2  A connection takes part in a generation only while its rank has a seat in the newest record.
DOOR-3  Keys that come in one turn of the event loop are sent on together. What has come is sent again in each session.
DOOR-4  While this process has no free descriptor it receives no connection: the kernel would drop it. It says so, and
    tries again; the rendezvous then goes on where it was.
DOOR-5  A rank finds the block of a generation in its door when it gets the record. This process has a descriptor in
    reserve for the next block, so that one change of the generation needs no free one.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from elasticgang.errors import WireError
from elasticgang.process import framing
from elasticgang.process.sum_block import SumBlock
from elasticgang.protocol.record import Record
from elasticgang.protocol.rendezvous_keys import MAX_VALUE_CHARS, Asked, Key, KeyExchange, RendezvousKeys, batches
from elasticgang.protocol.shortened import has_line
from elasticgang.protocol.sum_route import sharing_members
from elasticgang.testing import reached

_MAX_FRAME_BYTES = 4 * MAX_VALUE_CHARS
_MAX_UNSENT_BYTES = 128 << 20
_RETRY_S = 0.5
_COORDINATOR = None  # the party


class RankRendezvous:
    """Belongs to the agent's event loop. `send`: to the coordinator. `spawn_task`: runs a task whose failure ends the
    agent."""

    def __init__(
        self,
        send: Callable[[RendezvousKeys], None],
        spawn_task: Callable[[Coroutine[Any, Any, None]], object],
        write_line: Callable[[str], None],
    ) -> None:
        self._send, self._spawn_task, self._write_line = send, spawn_task, write_line
        self._doors: dict[str, socket.socket] = {}  # by member
        self._connections: set[RankConnection] = set()
        self._generation = 0
        self._members: frozenset[str] = frozenset()  # of this agent, with a seat
        self._exchange: KeyExchange[RankConnection | None] = KeyExchange("")
        self._has_peers = False
        self._outbox: dict[RankConnection | None, list[Key]] = defaultdict(list)
        self._joined: dict[str, None] = {}  # the groups that this agent has joined at the coordinator
        self._new_groups: list[str] = []  # of these, what it has not been told
        self._new_asked: list[Asked] = []
        self._flushing: asyncio.Handle | None = None
        self._reserve: int | None = None  # the descriptor of the next block
        self._num_without_block = 0  # generations in a row
        self._has_told_shortage = False  # since the last connection that was received

    def begin(self, record: Record, agent: str) -> None:
        """`agent`: this one's id."""
        if record.prefix != self._exchange.prefix:
            self._generation, self._exchange = record.generation, KeyExchange(record.prefix)
            self._members = frozenset(seat.member for seat in record.seats_of(agent))
            self._has_peers = len(record.agents) > 1
            self._forget_sent()
            self._send_block(record, sharing_members(record.seats_of(agent)))

    def _send_block(self, record: Record, members: Sequence[str]) -> None:
        """BLOCK-5, DOOR-5. A rank without a block ends the generation."""
        if not members:
            return
        block: int | None = None
        try:
            block, self._reserve = self._reserve if self._reserve is not None else SumBlock.create(), None
            SumBlock.prepare(block, len(members))
            for member in members:
                if (door := self._doors.get(member)) is not None:  # else it has died meanwhile
                    with contextlib.suppress(OSError):  # likewise, or it takes none
                        # Not `socket.send_fds`, which ignores its flags.
                        rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [block])
                        door.sendmsg([record.digest.encode()], [rights], socket.MSG_DONTWAIT)
        except OSError as exc:
            self._num_without_block += 1
            if has_line(self._num_without_block):
                self._write_line(
                    f"elasticgang: there is no memory for the votes of generation {record.generation}: {exc}"
                )
        else:
            self._num_without_block = 0
        finally:
            if block is not None:
                os.close(block)
        self._refill()

    def _refill(self) -> None:
        """DOOR-5."""
        if self._reserve is None:
            with contextlib.suppress(OSError):  # the next block needs a free descriptor then
                self._reserve = SumBlock.create()

    def end(self, generation: int) -> None:
        """The keys of that generation, and of older ones, are dropped; whoever waits for one is told so."""
        if self._members and self._generation <= generation:
            over = framing.pack("over", prefix=self._exchange.prefix)
            waiting = dict.fromkeys([*self._exchange.parties(), *self._outbox])  # what is in the outbox is dropped
            self._members, self._exchange = frozenset(), KeyExchange("")
            self._forget_sent()
            for connection in waiting:  # a standby waits for no key
                if connection is not _COORDINATOR:
                    connection.send(over)

    def _forget_sent(self) -> None:
        self._outbox.clear()
        self._joined.clear()
        self._new_groups.clear()
        self._new_asked.clear()

    def add_rank(self, member: str, door: socket.socket) -> None:
        self._doors[member] = door
        self._listen(member, door)
        self._refill()

    def remove_rank(self, member: str) -> None:
        door = self._doors.pop(member, None)
        if door is not None:
            asyncio.get_running_loop().remove_reader(door)
            door.close()
        for connection in [each for each in self._connections if each.member == member]:
            connection.close()

    def renew(self) -> None:
        """There is a new session, and a coordinator in office: it may know nothing of this generation."""
        if self._has_peers:
            groups = self._exchange.groups
            self._exchange.leave(_COORDINATOR)
            self._new_groups, self._new_asked = list(self._joined), list(self._exchange.awaited())
            self._outbox[_COORDINATOR] = self._exchange.take(_COORDINATOR, groups).get(_COORDINATOR, [])
            self._plan_flush()

    def receive(self, message: RendezvousKeys) -> None:
        """From the coordinator."""
        if message.prefix == self._exchange.prefix:
            self._take(_COORDINATOR, (), message.keys, ())

    # -- of its connections

    def opened(self, connection: RankConnection) -> None:
        self._connections.add(connection)
        if connection.member not in self._doors:  # the rank has exited meanwhile
            connection.close()

    def closed(self, connection: RankConnection) -> None:
        self._connections.discard(connection)
        self._outbox.pop(connection, None)
        self._exchange.leave(connection)

    def received(self, connection: RankConnection, message: dict[str, Any]) -> None:
        """Raises WireError, KeyError, TypeError or ValueError: it is invalid."""
        prefix, groups = message["prefix"], [str(group) for group in message["groups"]]
        keys = [Key(str(group), str(name), str(value)) for group, name, value in message["keys"]]
        asked = [Asked(str(group), tuple(str(name) for name in names)) for group, names in message["asked"]]
        if prefix != self._exchange.prefix or connection.member not in self._members:  # DOOR-2
            connection.send(framing.pack("over", prefix=str(prefix)))
            return
        self._take(connection, groups, keys, asked)

    def _listen(self, member: str, door: socket.socket) -> None:
        if self._doors.get(member) is door:
            asyncio.get_running_loop().add_reader(door, self._accept, member, door)

    def _accept(self, member: str, door: socket.socket) -> None:
        """DOOR-1."""
        loop = asyncio.get_running_loop()
        try:
            os.close(os.dup(door.fileno()))
        except OSError as exc:  # DOOR-4
            self._tell_shortage(exc)
            loop.remove_reader(door)
            loop.call_later(_RETRY_S, self._listen, member, door)
            return
        self._has_told_shortage = False
        try:
            data, descriptors, _, _ = socket.recv_fds(door, 16, 1)
        except OSError:
            data, descriptors = b"", []
        if not data:  # the rank has exited, and `remove_rank` follows
            loop.remove_reader(door)
        for descriptor in descriptors:
            sock = socket.socket(fileno=descriptor)
            sock.setblocking(False)
            self._spawn_task(self._open(member, sock))

    def _tell_shortage(self, exc: OSError) -> None:
        if not self._has_told_shortage:
            self._has_told_shortage = True
            self._write_line(f"elasticgang: ranks wait to be connected, this agent has no free descriptor: {exc}")

    async def _open(self, member: str, sock: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: RankConnection(self, member), sock)
        except OSError:
            sock.close()

    def report(self, line: str) -> None:
        self._write_line(line)

    # -- the exchange

    def _take(
        self, party: RankConnection | None, groups: Sequence[str], keys: Sequence[Key], asked: Sequence[Asked]
    ) -> None:
        elsewhere = self._exchange.unasked(asked)
        sends = self._exchange.take(party, groups, keys, asked)
        if self._has_peers and party is not _COORDINATOR:
            self._pass_on(groups, keys, elsewhere)
        for other, found in sends.items():
            self._outbox[other] += found
        self._plan_flush()

    def _pass_on(self, groups: Sequence[str], keys: Sequence[Key], asked: Sequence[Asked]) -> None:
        """The coordinator gets all keys of the ranks of this agent, and is asked for what they ask for."""
        for group in dict.fromkeys([*groups, *(key.group for key in keys)]):
            if not self._exchange.has_joined(_COORDINATOR, group):
                self._outbox[_COORDINATOR] += self._exchange.take(_COORDINATOR, [group]).get(_COORDINATOR, [])
        new_groups = [group for group in groups if group not in self._joined]
        self._joined.update(dict.fromkeys(new_groups))
        self._new_groups += new_groups
        self._new_asked += [each for each in asked if each.group not in self._joined]

    def _plan_flush(self) -> None:
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        """DOOR-3."""
        self._flushing = None
        outbox, self._outbox = self._outbox, defaultdict(list)
        prefix = self._exchange.prefix
        groups, self._new_groups = tuple(self._new_groups), []
        asked, self._new_asked = tuple(self._new_asked), []
        to_coordinator = outbox.pop(_COORDINATOR, [])
        for connection, keys in outbox.items():
            if connection is not None:
                connection.send(framing.pack("keys", prefix=prefix, keys=keys))
        if to_coordinator:
            reached("keys_collected")
        for batch in batches(to_coordinator):
            self._send(RendezvousKeys(prefix, groups, batch, asked))
            groups, asked = (), ()
        if groups or asked:
            self._send(RendezvousKeys(prefix, groups, (), asked))


class RankConnection(asyncio.Protocol):
    """Of one comm process of the rank `member`, or of the rank itself."""

    def __init__(self, owner: RankRendezvous, member: str) -> None:
        self._owner, self.member = owner, member
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._owner.opened(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        try:
            while (message := framing.take(self._buffer, _MAX_FRAME_BYTES)) is not None:
                self._owner.received(self, message)
        except (WireError, KeyError, TypeError, ValueError) as exc:
            self._owner.report(f"elasticgang: {self.member} sent an invalid rendezvous key ({exc})")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.closed(self)

    def send(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
            self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
