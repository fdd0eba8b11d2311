"""An attacker costs a listening coordinator no memory, keeps no honest agent out, and fills no log."""

from __future__ import annotations

import asyncio
import os
import queue
import resource
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from elasticgang.errors import OperationalError
from elasticgang.session import connection as connections
from elasticgang.session import listener as listeners
from elasticgang.session.connection import ClientConnection, Connection
from elasticgang.session.credentials import Credentials
from elasticgang.session.frames import FrameBuffer, FrameWriter, body_frame
from elasticgang.session.handshake import AGENT, RANK, ClientHandshake, Identity
from elasticgang.session.incidents import FORGET_S, Incidents
from elasticgang.session.secret import Secret
from tests.integration.echo_sessions import (
    DEADLINE_S,
    IDENTITY,
    SECRETS,
    Client,
    Echo,
    connect,
    ended,
    is_served,
    raw,
    read_body,
    serve,
    shake_by_hand,
)

NOT_UNICODE = ClientHandshake(IDENTITY, b"", b"n" * 32).hello().replace(b'"job":"job"', rb'"job":"\ud800"')


def test_an_honest_client_is_served() -> None:
    async def test(echo: Echo) -> None:
        assert await is_served(echo)
        assert echo.listener.num_pending == 0
        assert echo.log == []

    serve(test)


def test_a_connection_that_breaks_while_much_is_sent_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """Between the failure of a write and `connection_lost`, asyncio logs each further write."""

    async def test(echo: Echo) -> None:
        client, connection = await connect(echo)
        await asyncio.wait_for(client.is_open.wait(), DEADLINE_S)
        (session,) = echo.sessions
        assert connection.transport is not None
        sock = connection.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.transport.abort()
        await client.reason
        await asyncio.sleep(0)  # the socket is closed in a callback: a reset is on its way, which nobody has read
        for _ in range(100):
            session.send(b"x" * 1000)
        await asyncio.wait_for(echo.reasons.get(), DEADLINE_S)
        assert "socket.send() raised" not in caplog.text

    serve(test)


# CONN-PATH
@pytest.mark.parametrize("is_to_server", [False, True])
def test_no_session_begins_over_a_path_that_loses_large_packets(is_to_server: bool) -> None:
    """One direction passes `narrow` bytes and then nothing: more than a handshake needs without padding, and less than
    one packet of the largest usual network."""
    narrow = 9000

    async def test(echo: Echo) -> None:
        has_lost = asyncio.Event()
        relays: list[asyncio.Task[None]] = []

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_wide: bool) -> None:
            num_left = 1 << 20 if is_wide else narrow
            while data := await reader.read(1 << 16):
                num_left -= len(data)
                if num_left < 0:
                    has_lost.set()
                    return
                writer.write(data)

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            echo.writers.append(writer)
            far_reader, far_writer = await raw(echo)
            ways = ((reader, far_writer, not is_to_server), (far_reader, writer, is_to_server))
            relays.extend(asyncio.ensure_future(relay(one, other, is_wide=is_wide)) for one, other, is_wide in ways)

        between = await asyncio.start_server(accept, "127.0.0.1", 0)
        client = Client()
        connection = ClientConnection(client, IDENTITY, SECRETS["job"])
        port = between.sockets[0].getsockname()[1]
        await asyncio.get_running_loop().create_connection(lambda: connection, "127.0.0.1", port)
        outcomes = [asyncio.ensure_future(event.wait()) for event in (has_lost, client.is_open)]
        await asyncio.wait(outcomes, return_when=asyncio.FIRST_COMPLETED)
        assert not connection.is_open
        for task in (*outcomes, *relays):
            task.cancel()
        connection.abort("the test ends")
        between.close()
        assert await is_served(echo)  # over another path

    serve(test)


@pytest.mark.parametrize(
    ("sent", "parts"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", ["1195725856 bytes", "1024"]),
        (struct.pack("!I", 2 << 30), ["2147483648 bytes", "1024"]),
        (body_frame(os.urandom(300)), ["hello"]),
        (body_frame(NOT_UNICODE), ["Unicode"]),
        (body_frame(ClientHandshake(IDENTITY, b"", b"n" * 32).hello()) + body_frame(b"x" * 32), ["the secret"]),
        (body_frame(ClientHandshake(Identity("job", RANK, 8), b"", b"n" * 32).hello()), ["role rank"]),
    ],
)
def test_what_is_not_from_a_holder_of_the_secret_is_cut_off_and_logged_once(sent: bytes, parts: list[str]) -> None:
    async def test(echo: Echo) -> None:
        for _ in range(20):
            reader, writer = await raw(echo)
            writer.write(sent)
            await ended(reader)
            writer.close()
        assert await is_served(echo)
        assert len(echo.log) == 1
        assert all(part in echo.log[0] for part in parts)
        assert sum(echo.listener.incidents.counts.values()) == 20

    serve(test)


class Ending(Echo):
    """At a message it sends the last one, and closes the session."""

    def __init__(self) -> None:
        super().__init__()
        self.has_closed = threading.Event()

    def received(self, connection: Connection, payload: bytes) -> None:
        connection.send(b"last")
        connection.close()
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: loop.call_soon(lambda: loop.call_soon(self.has_closed.set)))  # after asyncio's own


# CONN-LINGER
def test_the_last_message_arrives_although_the_peer_sends_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client reads nothing while it sends."""
    monkeypatch.setattr(connections, "LINGER_S", DEADLINE_S)  # the client may be late
    begun: queue.Queue[Ending] = queue.Queue()

    async def run_server() -> None:
        ending = Ending()
        await ending.listener.start("127.0.0.1", 0)
        begun.put(ending)
        assert await asyncio.wait_for(ending.reasons.get(), DEADLINE_S) == ""
        await ending.listener.stop()

    async def run_client(ending: Ending) -> None:
        client, connection = await connect(ending)
        await client.is_open.wait()
        connection.send(b"end it")
        assert ending.has_closed.wait(DEADLINE_S)
        for _ in range(3):
            connection.send(b"more")
        assert await asyncio.wait_for(client.reason, DEADLINE_S) == ""
        assert client.payloads.get_nowait() == b"last"

    with ThreadPoolExecutor(1) as pool:
        serving = pool.submit(asyncio.run, run_server())
        asyncio.run(run_client(begun.get(timeout=DEADLINE_S)))
        serving.result(DEADLINE_S)


@pytest.mark.parametrize(
    ("identity", "secret"),
    [(IDENTITY, b"w" * 32), (Identity("other", AGENT, 8), SECRETS["job"]), (Identity("none", AGENT, 8), b"w" * 32)],
)
def test_a_wrong_secret_and_one_of_another_job_are_refused(identity: Identity, secret: bytes) -> None:
    async def test(echo: Echo) -> None:
        for _ in range(3):
            client, _ = await connect(echo, identity, secret)
            await client.reason
            assert not client.is_open.is_set()
        assert len(echo.log) == 1
        assert "the secret" in echo.log[0]

    serve(test)


def test_a_client_does_not_talk_to_a_server_without_the_secret() -> None:
    async def run() -> None:
        gone = asyncio.Event()

        async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_body(reader)
            writer.write(body_frame(os.urandom(32)))
            proof = await read_body(reader)
            writer.write(body_frame(proof))  # the client's own
            await reader.read()
            writer.close()
            await writer.wait_closed()
            gone.set()

        server = await asyncio.start_server(impostor, "127.0.0.1", 0)
        client = Client()
        connection = ClientConnection(client, IDENTITY, SECRETS["job"])
        port = server.sockets[0].getsockname()[1]
        await asyncio.get_running_loop().create_connection(lambda: connection, "127.0.0.1", port)
        reason = await asyncio.wait_for(client.reason, DEADLINE_S)
        assert "the coordinator" in reason
        assert "the secret" in reason
        assert not client.is_open.is_set()
        await asyncio.wait_for(gone.wait(), DEADLINE_S)
        server.close()

    asyncio.run(run())


Attack = Callable[[FrameWriter], bytes]


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (lambda w: (frame := w.frame(b"x")) + frame, "frame 0"),
        (lambda w: struct.pack("!I", 2 << 30) + b"x" * 100, "2147483648 bytes"),
        (lambda w: FrameWriter(b"k" * 32).frame(b"x"), "MAC"),
        (lambda w: w.frame(b"bad"), "a bad message"),
        (lambda w: body_frame(b"short"), "too short"),
    ],
)
def test_a_session_with_the_secret_ends_at_its_first_fault(attack: Attack, reason: str) -> None:
    async def test(echo: Echo) -> None:
        for _ in range(3):
            reader, writer, keys = await shake_by_hand(echo)
            writer.write(attack(FrameWriter(keys.to_server)))
            await ended(reader)
            writer.close()
            assert reason in await echo.reasons.get()
        assert await is_served(echo)
        assert len(echo.log) == 1

    serve(test)


def test_frames_recorded_in_one_session_are_worthless_in_another() -> None:
    async def test(echo: Echo) -> None:
        reader, writer, keys = await shake_by_hand(echo)
        recorded = FrameWriter(keys.to_server).frame(b"pay")
        writer.write(recorded)
        await read_body(reader)
        writer.close()
        assert await echo.reasons.get() == ""
        reader, writer, _ = await shake_by_hand(echo)
        writer.write(recorded)
        await ended(reader)
        assert "MAC" in await echo.reasons.get()

    serve(test)


def test_half_open_connections_are_bounded_and_do_not_keep_others_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "MAX_PENDING", 16)
    monkeypatch.setattr(listeners, "MIN_PENDING_S", 0.01)

    async def test(echo: Echo) -> None:
        opened = []
        for number in range(200):
            opened.append(await raw(echo))
            assert echo.listener.num_pending <= 16
            if number % 50 == 49:
                assert await is_served(echo)
        for reader, writer in opened[:100]:
            assert await ended(reader) == b""
            writer.close()
        assert [line for line in echo.log if "wait for their handshake" in line] == echo.log[:1]
        assert len(echo.log) == 1
        for _, writer in opened[100:]:
            writer.close()

    serve(test)


# LISTEN-BOUND
def test_many_honest_clients_come_at_once_and_none_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "MAX_PENDING", 16)
    monkeypatch.setattr(listeners, "MIN_PENDING_S", DEADLINE_S)  # a machine that stands still costs nobody its place

    async def test(echo: Echo) -> None:
        assert all(await asyncio.gather(*(is_served(echo) for _ in range(200))))
        assert echo.log == []
        assert echo.listener.num_pending == 0

    serve(test)


# LISTEN-TURN
def test_others_have_their_turn_while_many_connections_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "ACCEPT_S", 0.0)
    num = 20

    async def test(echo: Echo) -> None:
        waiting = [socket.create_connection(("127.0.0.1", echo.listener.port)) for _ in range(num)]
        most, before = 0, 0
        while before < num:
            await asyncio.sleep(0)  # a turn of the loop
            most, before = max(most, echo.listener.num_pending - before), echo.listener.num_pending
        assert most == 1
        for sock in waiting:
            sock.close()

    serve(test)


# CONN-TURN
def test_others_have_their_turn_while_one_session_sends_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "TURN_S", 0.0)
    num = 200

    async def test(echo: Echo) -> None:
        _, writer, keys = await shake_by_hand(echo)
        frames = FrameWriter(keys.to_server)
        writer.write(b"".join(frames.frame(b"%d" % number) for number in range(num)))
        received: list[bytes] = []
        monkeypatch.setattr(Echo, "received", lambda echo, connection, payload: received.append(payload))
        most = before = 0
        while before < num:
            await asyncio.sleep(0)  # a turn of the loop
            most, before = max(most, len(received) - before), len(received)
        assert most == 1
        assert received == [b"%d" % number for number in range(num)]
        writer.close()

    serve(test)


def test_a_connection_that_is_ended_before_it_is_made_is_noted_with_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "ACCEPT_S", DEADLINE_S)
    monkeypatch.setattr(listeners, "MAX_PENDING", 2)
    monkeypatch.setattr(listeners, "MIN_PENDING_S", 0.0)

    async def test(echo: Echo) -> None:
        together = [socket.create_connection(("127.0.0.1", echo.listener.port)) for _ in range(4)]  # in one turn
        await echo.has_logged.wait()
        assert echo.log == ["closed a connection from 127.0.0.1: more than 2 connections wait for their handshake"]
        for sock in together:
            sock.close()

    serve(test)


# LISTEN-BOUND
def test_who_waits_in_the_queue_is_served_once_the_oldest_had_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "MAX_PENDING", 4)
    monkeypatch.setattr(listeners, "MIN_PENDING_S", 0.2)

    async def test(echo: Echo) -> None:
        began_s = asyncio.get_running_loop().time()
        silent = [await raw(echo) for _ in range(4)]
        assert await is_served(echo)
        assert asyncio.get_running_loop().time() - began_s > 0.1
        assert await ended(silent[0][0]) == b""
        assert not silent[3][0].at_eof()
        assert echo.log == ["closed a connection from 127.0.0.1: more than 4 connections wait for their handshake"]

    serve(test)


# LISTEN-BOUND
def test_a_coordinator_without_descriptors_accepts_again_once_it_has_some() -> None:
    async def test(echo: Echo) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        waiting = socket.socket()
        waiting.setblocking(False)
        try:
            # 0, 1 and 2 stay open, whatever a thread of the test before still closes
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            waiting.connect_ex(("127.0.0.1", echo.listener.port))
            await echo.has_logged.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert "Too many open files" in echo.log[0]
        assert await is_served(echo)
        waiting.close()
        assert len(echo.log) == 1

    serve(test)


# LISTEN-SPARE
def test_connections_leave_descriptors_to_the_process_and_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listeners, "MIN_PENDING_S", 0.01)

    async def test(echo: Echo) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(100)]  # so that no lower number is free
        waiting = [socket.socket() for _ in range(50)]
        limit = waiting[-1].fileno() + 1 + listeners.NUM_SPARE + 8
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            for each in waiting:
                each.setblocking(False)
                each.connect_ex(("127.0.0.1", echo.listener.port))
            await echo.has_logged.wait()
            assert f"{listeners.NUM_SPARE} descriptors are left" in echo.log[0]
            for descriptor in [os.open(os.devnull, os.O_RDONLY) for _ in range(listeners.NUM_SPARE)]:
                os.close(descriptor)
            while not (await outcome(echo)):
                pass
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for descriptor in taken:
                os.close(descriptor)
            for each in waiting:
                each.close()

    async def outcome(echo: Echo) -> bool:
        """Whether a session opens."""
        client, connection = await connect(echo)
        opened: asyncio.Future[object] = asyncio.ensure_future(client.is_open.wait())
        ended: asyncio.Future[object] = asyncio.ensure_future(asyncio.shield(client.reason))
        await asyncio.wait([opened, ended], return_when=asyncio.FIRST_COMPLETED)
        opened.cancel()
        ended.cancel()
        connection.abort("the test ends")
        return client.is_open.is_set()

    serve(test)


# LISTEN-BOUND
def test_many_connections_are_taken_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a large job come at once, and each turn serves all of them."""
    monkeypatch.setattr(listeners, "ACCEPT_S", DEADLINE_S)  # however slow the machine is

    async def test(echo: Echo) -> None:
        waiting = [socket.create_connection(("127.0.0.1", echo.listener.port)) for _ in range(100)]
        for _ in range(5):
            await asyncio.sleep(0)
        assert echo.listener.num_pending == 100
        for each in waiting:
            each.close()

    serve(test)


def test_a_handshake_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_S", 1.0)  # more than what a machine may stand still before the hello

    async def test(echo: Echo) -> None:
        silent, slow = await raw(echo), await raw(echo)
        handshake = ClientHandshake(IDENTITY, SECRETS["job"], os.urandom(32))
        slow[1].write(body_frame(handshake.hello()))
        assert await ended(silent[0]) == b""
        assert len(await ended(slow[0])) == 36  # the challenge
        assert echo.listener.num_pending == 0
        assert len(echo.log) == 1
        assert "its handshake was not complete after 1 s" in echo.log[0]
        for _, writer in (silent, slow):
            writer.close()

    serve(test)


# CONN-DEADLINE
def test_a_client_leaves_a_server_that_never_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_S", 0.2)

    async def run() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:  # its kernel takes the connection
            client = Client()
            connection = ClientConnection(client, IDENTITY, SECRETS["job"])
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: connection, *silent.getsockname())
            reason = await asyncio.wait_for(client.reason, DEADLINE_S)
            assert reason == "its handshake was not complete after 0.2 s"

    asyncio.run(run())


# CONN-NODELAY
def test_both_ends_send_a_message_at_once() -> None:
    async def test(echo: Echo) -> None:
        client, connection = await connect(echo)
        await client.is_open.wait()
        (session,) = echo.sessions
        for end in (connection, session):
            assert end.transport is not None
            assert end.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        connection.close()

    serve(test)


# CONN-ALIVE
def test_the_kernel_of_each_end_looks_whether_the_others_host_is_up() -> None:
    async def test(echo: Echo) -> None:
        client, connection = await connect(echo)
        await client.is_open.wait()
        (session,) = echo.sessions
        for end in (connection, session):
            assert end.transport is not None
            sock = end.transport.get_extra_info("socket")
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle, every, number, unacknowledged_ms = (
                sock.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT, socket.TCP_USER_TIMEOUT)
            )
            assert idle + every * number == unacknowledged_ms / 1000 == connections.ALIVE_S
        connection.close()

    serve(test)


# CONN-UNREAD
def test_a_peer_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MAX_UNSENT_BYTES", 1 << 20)

    async def test(echo: Echo) -> None:
        _, writer, _ = await shake_by_hand(echo)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        (victim,) = echo.sessions
        num_sent = 0
        while victim.is_open:
            victim.send(b"x" * 100_000)
            num_sent += 1
            assert num_sent < 1000
            if num_sent % 10 == 0:
                assert await is_served(echo)
        assert "unread" in await_reason(echo)
        assert await is_served(echo)
        assert len(echo.log) == 1
        writer.close()

    serve(test)


# CONN-LINGER
def test_a_closed_session_whose_peer_reads_nothing_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 0.1)

    async def test(echo: Echo) -> None:
        _, writer, _ = await shake_by_hand(echo)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        (session,) = echo.sessions
        transport = session.transport
        assert transport is not None
        while transport.get_write_buffer_size() == 0:
            session.send(b"x" * 100_000)
        session.close()
        assert await echo.reasons.get() == ""
        assert transport.get_write_buffer_size() == 0
        writer.close()

    serve(test)


def await_reason(echo: Echo) -> str:
    """The last one that is not an honest client's end."""
    reasons = [echo.reasons.get_nowait() for _ in range(echo.reasons.qsize())]
    return next(reason for reason in reasons if reason)


def test_a_slow_frame_holds_no_more_than_the_limit() -> None:
    async def test(echo: Echo) -> None:
        _, writer, keys = await shake_by_hand(echo)
        frame = FrameWriter(keys.to_server).frame(b"x" * (1 << 20))
        writer.write(frame[:-1])
        await writer.drain()
        (session,) = echo.sessions
        while session.num_unread_bytes < len(frame) - 1:
            assert await is_served(echo)
            assert session.num_unread_bytes <= (1 << 20) + 64
        writer.close()

    serve(test)


def test_incidents_are_bounded() -> None:
    log: list[str] = []
    incidents = Incidents(log.append)
    for number in range(5000):
        incidents.note(f"10.0.{number // 256}.{number % 256}", "garbage")
    assert len(incidents.counts) <= 1025
    assert len(log) <= 1025
    assert sum(incidents.counts.values()) == 5000


# INCIDENT-ONCE
def test_a_coordinator_of_weeks_still_tells_why_it_closes_a_connection() -> None:
    log: list[str] = []
    now_s = 0.0
    incidents = Incidents(log.append, lambda: now_s)
    for number in range(5000):  # agents that end, and come back with other names
        now_s += 60.0
        incidents.note("10.0.0.1", f"agent {number} ends")
        assert log[-1].endswith(f"agent {number} ends")
    assert len(incidents.counts) <= 1025
    told = len(log)
    for number in range(5000):
        incidents.note(f"10.1.{number // 256}.{number % 256}", "garbage")
    assert len(log) <= told + 1025
    now_s += FORGET_S
    incidents.note("10.0.0.1", "garbage")
    assert log[-1].endswith("from 10.0.0.1: garbage")


@pytest.mark.parametrize(
    ("host", "has_secret", "insecure", "is_allowed"),
    [
        ("127.0.0.1", False, False, True),
        ("::1", False, False, True),
        ("0.0.0.0", False, False, False),
        ("0.0.0.0", True, False, True),
        ("0.0.0.0", False, True, True),
        ("10.1.2.3", False, False, False),
    ],
)
def test_without_a_secret_only_loopback_is_listened_on(
    host: str, has_secret: bool, insecure: bool, is_allowed: bool
) -> None:
    credentials = Credentials(Secret(b"0123456789abcdef") if has_secret else None, None, insecure)
    if is_allowed:
        credentials.check_address(host, "it listens on loopback only")
        return
    with pytest.raises(OperationalError, match="listens on loopback only"):
        credentials.check_address(host, "it listens on loopback only")


def test_a_buffer_is_empty_between_frames() -> None:
    buffer = FrameBuffer(10)
    buffer.feed(body_frame(b"x") + b"\0")
    assert buffer.next() == b"x"
    assert buffer.num_bytes == 1
