"""An agent's exchange of its ranks' rendezvous keys, with the stores of comm processes at the other end."""

from __future__ import annotations

import asyncio
import functools
import os
import resource
import socket
import struct
from collections.abc import Callable, Coroutine
from datetime import timedelta
from typing import Any

import pytest

from elasticgang.agent.rank_rendezvous import RankConnection, RankRendezvous
from elasticgang.comm.agent_store import AgentStore, AgentStoreClient, Peers
from elasticgang.layout import Member, ParallelLayout, plan
from elasticgang.member.agent_link import take_block
from elasticgang.process import framing
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.record import ACTIVE, Record, Seat
from elasticgang.protocol.rendezvous_keys import Asked, Key, RendezvousKeys

DEADLINE_S = 30.0
LONG = timedelta(seconds=DEADLINE_S)


def record_of(*members: str, generation: int = 1) -> Record:
    """Members are named "agent/rank"."""
    agents = tuple(dict.fromkeys(member.partition("/")[0] for member in members))
    seats = tuple(Seat(member, member.partition("/")[0], "host", 0, "", ACTIVE) for member in members)
    planned = plan([Member(member, "host") for member in members], ParallelLayout())
    return Record("job", generation, "", ParallelLayout(), planned, seats, agents, Attempt(0, 1))


class Host:
    """An agent that has nothing but the exchange."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[RendezvousKeys] = asyncio.Queue()
        self.lines: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.rendezvous = RankRendezvous(self.sent.put_nowait, self._spawn, self.lines.append)
        self.clients: list[AgentStoreClient] = []
        self.doors: list[socket.socket] = []

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.ensure_future(coroutine))

    def connect(self, member: str) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.rendezvous.add_rank(member, ours)
        connection, end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs, end:
            socket.send_fds(theirs, [b"c"], [end.fileno()])
        return connection

    def door(self, member: str) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.rendezvous.add_rank(member, ours)
        self.doors.append(theirs)
        return theirs

    def client(self, member: str) -> AgentStoreClient:
        self.clients.append(AgentStoreClient(self.connect(member)))
        return self.clients[-1]


def play(test: Callable[[Host], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        host = Host()
        try:
            await asyncio.wait_for(test(host), DEADLINE_S)
        finally:
            for member in ("a/0", "a/1", "a/2"):
                host.rendezvous.remove_rank(member)
            for door in host.doors:
                door.close()
            for client in host.clients:
                await aside(client.close)
        assert [task.exception() for task in host.tasks if task.done()] == [None] * len(host.tasks)

    asyncio.run(run())


async def aside(function: Callable[..., Any], *args: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, functools.partial(function, *args))


def store(client: AgentStoreClient, record: Record, group: str = "g", timeout: timedelta = LONG) -> AgentStore:
    return client.store(record.prefix, group, timeout)


# DOOR-1
def test_ranks_of_one_host_exchange_keys_without_the_coordinator() -> None:
    async def test(host: Host) -> None:
        record = record_of("a/0", "a/1")
        host.rendezvous.begin(record, "a")
        zero, one = store(host.client("a/0"), record), store(host.client("a/1"), record)
        await aside(zero.set, "0", b"\x00zero")
        waiting = asyncio.ensure_future(aside(zero.get, "1"))
        assert await aside(one.get, "0") == b"\x00zero"
        await aside(one.set, "1", "one")
        assert await waiting == b"one"
        assert host.sent.empty()

    play(test)


# DOOR-3
def test_keys_of_several_agents_go_by_the_coordinator_and_again_in_a_new_session() -> None:
    async def test(host: Host) -> None:
        record = record_of("a/0", "b/0")
        host.rendezvous.begin(record, "a")
        mine = store(host.client("a/0"), record)
        await aside(mine.set, "0", "zero")
        first = await host.sent.get()
        assert (first.prefix, first.groups, [key.name for key in first.keys]) == (record.prefix, ("g",), ["0"])
        host.rendezvous.renew()
        assert await host.sent.get() == first
        host.rendezvous.receive(RendezvousKeys(record.prefix, (), (Key("g", "1", "b25l"),)))
        assert await aside(mine.get, "1") == b"one"
        host.rendezvous.receive(RendezvousKeys("another", (), (Key("g", "2", "b25l"),)))
        with pytest.raises(RuntimeError, match=r"wait timeout after 0.05 s .* \['2'\]"):
            await aside(mine.wait, ["2"], timedelta(seconds=0.05))

    play(test)


# AGENT-STORE-2, KEYS-ASKED
def test_a_rank_of_a_large_group_asks_for_the_keys_of_those_that_it_connects_to() -> None:
    async def test(host: Host) -> None:
        record = record_of("a/0", "a/1", "b/0")
        host.rendezvous.begin(record, "a")
        stores = [host.client(f"a/{rank}").store(record.prefix, "g", LONG, Peers(rank, 12)) for rank in range(2)]
        await aside(stores[0].set, "0/0", "zero")
        first = await host.sent.get()
        assert (first.groups, [key.name for key in first.keys]) == ((), ["0/0"])
        assert first.asked == (Asked("g", tuple(f"0/{rank}" for rank in (1, 2, 4, 8, 11))),)
        await aside(stores[1].set, "0/1", "one")
        second = await host.sent.get()
        assert (second.groups, [key.name for key in second.keys]) == ((), ["0/1"])
        assert second.asked == (Asked("g", tuple(f"0/{rank}" for rank in (3, 5, 9))),), (
            "what no other rank has asked for"
        )
        assert await aside(stores[0].get, "0/1") == b"one"
        assert await aside(stores[1].get, "0/0") == b"zero"
        assert host.sent.empty()
        waiting = [asyncio.ensure_future(aside(each.get, "0/7")) for each in stores]
        third = await host.sent.get()
        assert (third.groups, third.keys, third.asked) == ((), (), (Asked("g", ("0/7",)),))
        host.rendezvous.receive(RendezvousKeys(record.prefix, (), (Key("g", "0/9", "bmluZQ=="),)))
        host.rendezvous.renew()
        again = await host.sent.get()
        assert [key.name for key in again.keys] == ["0/0", "0/1"]
        assert [(group, sorted(names)) for group, names in again.asked] == [
            ("g", sorted(f"0/{rank}" for rank in (2, 3, 4, 5, 7, 8, 11)))
        ]
        host.rendezvous.receive(RendezvousKeys(record.prefix, (), (Key("g", "0/7", "c2V2ZW4="),)))
        assert await asyncio.gather(*waiting) == [b"seven"] * 2
        assert await aside(stores[1].get, "0/9") == b"nine"

    play(test)


# KEYS-ASKED, AGENT-STORE-1
def test_a_wait_for_a_key_that_was_asked_for_ends_with_the_generation() -> None:
    async def test(host: Host) -> None:
        record = record_of("a/0", "b/0")
        host.rendezvous.begin(record, "a")
        mine = host.client("a/0").store(record.prefix, "g", LONG, Peers(0, 12))
        waiting = asyncio.ensure_future(aside(mine.get, "0/7"))
        assert (await host.sent.get()).asked == (Asked("g", ("0/7",)),)
        host.rendezvous.end(1)
        with pytest.raises(RuntimeError, match="the generation is over"):
            await waiting
        with pytest.raises(RuntimeError, match="the generation is over"):
            await aside(mine.get, "0/8")

    play(test)


class Recording(RankConnection):
    """A connection that keeps what it is sent."""

    def __init__(self, owner: RankRendezvous, member: str) -> None:
        super().__init__(owner, member)
        self.sent = bytearray()

    def send(self, data: bytes) -> None:
        self.sent += data


# AGENT-STORE-1
def test_a_generation_that_ends_before_an_answer_is_sent_ends_its_wait() -> None:
    async def test(host: Host) -> None:
        record = record_of("a/0", "b/0")
        host.rendezvous.begin(record, "a")
        host.rendezvous.receive(RendezvousKeys(record.prefix, (), (Key("g", "0/7", "c2V2ZW4="),)))
        asking = Recording(host.rendezvous, "a/0")
        asked = [["g", ["0/7"]]]
        host.rendezvous.received(asking, {"prefix": record.prefix, "groups": [], "keys": [], "asked": asked})
        host.rendezvous.end(1)
        assert framing.take(asking.sent, 1024) == {"kind": "over", "prefix": record.prefix}

    play(test)


# DOOR-2
def test_a_rank_without_a_seat_puts_no_key() -> None:
    async def test(host: Host) -> None:
        record = record_of("a/0", "a/1")
        host.rendezvous.begin(record, "a")
        seated, outside = store(host.client("a/0"), record), store(host.client("a/2"), record)
        await aside(outside.set, "0", "forged")
        with pytest.raises(RuntimeError, match="the generation is over"):
            await aside(outside.get, "1")
        await aside(seated.set, "0", "true")
        assert await aside(seated.get, "0") == b"true"
        assert host.lines == []

    play(test)


# DOOR-4
def test_a_connection_waits_while_the_agent_has_no_free_descriptor() -> None:
    async def test(host: Host) -> None:
        record = record_of("a/0", "a/1")
        host.rendezvous.begin(record, "a")
        other = store(host.client("a/1"), record)
        await aside(other.set, "1", "one")
        connection = host.connect("a/0")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # not one that a thread of another test gives back
        try:
            for _ in range(5):  # the loop sees the connection
                await asyncio.sleep(0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        host.clients.append(AgentStoreClient(connection))
        assert await aside(store(host.clients[-1], record).get, "1") == b"one"
        (line,) = host.lines
        assert "ranks wait to be connected, this agent has no free descriptor: [Errno 24]" in line

    play(test)


def test_a_record_that_is_delivered_again_keeps_the_keys_of_its_generation() -> None:
    async def test(host: Host) -> None:
        record = record_of("a/0", "a/1", "a/2")
        host.rendezvous.begin(record, "a")
        mine, other = store(host.client("a/0"), record), store(host.client("a/1"), record)
        await aside(mine.set, "0", "zero")
        assert await aside(other.get, "0") == b"zero"
        host.rendezvous.begin(record, "a")
        assert await aside(store(host.client("a/2"), record).get, "0") == b"zero"

    play(test)


def test_the_late_end_of_an_older_generation_ends_no_wait() -> None:
    async def test(host: Host) -> None:
        record = record_of("a/0", "a/1", generation=2)
        host.rendezvous.begin(record, "a")
        mine, other = store(host.client("a/0"), record), store(host.client("a/1"), record)
        await aside(mine.set, "0", "zero")
        host.rendezvous.end(1)
        assert await aside(other.get, "0") == b"zero"

    play(test)


# AGENT-STORE-1
@pytest.mark.parametrize("how", ["the generation is over", "the agent is gone"])
def test_a_wait_ends_with_its_generation_and_its_agent(how: str) -> None:
    async def test(host: Host) -> None:
        record = record_of("a/0", "a/1")
        host.rendezvous.begin(record, "a")
        mine = store(host.client("a/0"), record)
        await aside(mine.set, "0", "zero")
        waiting = asyncio.ensure_future(aside(mine.get, "1"))
        await asyncio.sleep(0)
        if how == "the generation is over":
            host.rendezvous.end(1)
        else:
            host.rendezvous.remove_rank("a/0")
        with pytest.raises(RuntimeError, match=how):
            await waiting

    play(test)


def test_a_standby_is_not_woken_by_the_end_of_a_generation() -> None:
    async def test(host: Host) -> None:
        record = record_of("a/0", "a/1", "a/2")
        host.rendezvous.begin(record, "a")
        standby = host.connect("a/2")
        mine = store(host.client("a/0"), record)
        await aside(mine.set, "0", "zero")
        assert await aside(store(host.client("a/1"), record).get, "0") == b"zero"
        host.rendezvous.end(1)
        with pytest.raises(RuntimeError, match="the generation is over"):
            await aside(mine.get, "1")
        standby.setblocking(False)
        with standby, pytest.raises(BlockingIOError):
            standby.recv(1)

    play(test)


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not an elasticgang message"),
        (struct.pack("!4sI", b"EG1\n", 2 << 30), "2147483648 bytes is over the limit"),
        (framing.pack("keys", prefix="p"), "'groups'"),
        (framing.pack("keys", prefix="p", groups=["g"], keys=[[1]], asked=[]), "not enough values"),
        (framing.pack("keys", prefix="p", groups=[], keys=[], asked=[["g", 1]]), "not iterable"),
    ],
)
def test_a_connection_with_an_invalid_message_is_closed_and_says_why(sent: bytes, why: str) -> None:
    async def test(host: Host) -> None:
        with host.connect("a/0") as connection:
            connection.sendall(sent)
            connection.settimeout(DEADLINE_S)
            assert await aside(connection.recv, 1) == b""
        assert len(host.lines) == 1
        assert why in host.lines[0]

    play(test)


def test_a_generation_begins_without_the_keys_of_the_former() -> None:
    async def test(host: Host) -> None:
        former, record = record_of("a/0", "a/1"), record_of("a/0", "a/1", generation=2)
        host.rendezvous.begin(former, "a")
        zero, one = host.client("a/0"), host.client("a/1")
        await aside(store(zero, former).set, "0", "former")
        assert await aside(store(one, former).get, "0") == b"former"
        host.rendezvous.begin(record, "a")
        with pytest.raises(RuntimeError, match="wait timeout"):
            await aside(store(one, record, timeout=timedelta(seconds=0.05)).get, "0")
        await aside(store(zero, record).set, "0", "present")
        assert await aside(store(one, record).get, "0") == b"present"

    play(test)


# DOOR-5, BLOCK-5
def test_the_ranks_of_a_generation_share_a_block_that_no_other_generation_has() -> None:
    async def test(host: Host) -> None:
        first, second = record_of("a/0", "a/1"), record_of("a/0", "a/1", "a/2", generation=2)
        doors = [host.door(f"a/{rank}") for rank in range(3)]
        host.rendezvous.begin(first, "a")
        old = take_block(doors[0], first.digest)
        assert old is not None
        host.rendezvous.begin(second, "a")
        blocks = [take_block(door, second.digest) for door in doors]  # rank 1 is given the first one too, and drops it
        assert None not in blocks
        inodes = {os.fstat(block).st_ino for block in blocks if block is not None}
        assert len(inodes) == 1
        assert os.fstat(old).st_ino not in inodes
        assert [take_block(door, second.digest) for door in doors] == [None] * 3
        for block in (old, *blocks):
            os.close(block or -1)

    play(test)


# DOOR-5
def test_an_agent_gives_no_block_to_one_rank_a_spare_or_another_agents_rank() -> None:
    async def test(host: Host) -> None:
        doors = [host.door(f"a/{rank}") for rank in range(3)]
        alone, others = record_of("a/0", "b/0"), record_of("a/0", "a/1", "b/0", "b/1", generation=2)
        host.rendezvous.begin(alone, "a")
        assert take_block(doors[0], alone.digest) is None
        host.rendezvous.begin(others, "a")
        found = [take_block(door, others.digest) for door in doors]
        assert [block is not None for block in found] == [True, True, False]
        for block in found:
            if block is not None:
                os.close(block)

    play(test)


def test_a_block_that_is_larger_than_a_file_may_be_is_as_none() -> None:
    async def test(host: Host) -> None:
        doors = [host.door(f"a/{rank}") for rank in range(2)]
        records = [record_of("a/0", "a/1", generation=number) for number in (1, 2)]
        former = resource.getrlimit(resource.RLIMIT_FSIZE)
        num_open = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, former[1]))
        try:
            host.rendezvous.begin(records[0], "a")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, former)
        (line,) = host.lines
        assert "no memory for the votes of generation 1: [Errno 27] File too large" in line
        assert len(os.listdir("/proc/self/fd")) <= num_open
        assert take_block(doors[0], records[0].digest) is None
        host.rendezvous.begin(records[1], "a")
        for door in doors:
            block = take_block(door, records[1].digest)
            assert block is not None
            os.close(block)

    play(test)


def test_generations_without_a_block_are_told_of_less_and_less() -> None:
    async def test(host: Host) -> None:
        for rank in range(2):
            host.door(f"a/{rank}")
        former = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, former[1]))
        try:
            for number in range(1, 8):
                host.rendezvous.begin(record_of("a/0", "a/1", generation=number), "a")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, former)
        assert [line.partition(" generation ")[2][0] for line in host.lines] == ["1", "2", "4"]

    play(test)


# DOOR-5
def test_one_block_is_to_be_had_without_a_free_descriptor() -> None:
    async def test(host: Host) -> None:
        doors = [host.door(f"a/{rank}") for rank in range(2)]
        records = [record_of("a/0", "a/1", generation=number) for number in (1, 2)]
        former = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, former[1]))
        try:
            for record in records:
                host.rendezvous.begin(record, "a")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, former)
        assert len(host.lines) == 1
        assert "no memory for the votes of generation 2" in host.lines[0]
        for door in doors:
            block = take_block(door, records[0].digest)
            assert block is not None
            os.close(block)
            assert take_block(door, records[1].digest) is None

    play(test)
