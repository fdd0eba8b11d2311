"""TLS: the files that are refused, what both ends say of each other's certificate, and what an attacker gets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import ssl
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from elasticgang.agent.control_plane import ControlPlane, Limits
from elasticgang.errors import OperationalError
from elasticgang.launch import cli
from elasticgang.process.lease import Lease
from elasticgang.protocol.agent_state import AgentState
from elasticgang.protocol.coordinator_messages import JOB_TIMEOUTS
from elasticgang.protocol.restarts import Restarts
from elasticgang.session import connection as connections
from elasticgang.session import listener as listeners
from elasticgang.session.credentials import Credentials, credentials_from_json
from elasticgang.session.frames import body_frame
from elasticgang.session.handshake import ClientHandshake
from elasticgang.session.secret import Secret
from elasticgang.session.tls import Tls, TlsContents, TlsFiles, TlsStream, name_to_check, read_tls
from elasticgang.session.tls_rotation import Life
from tests.integration.certificates import Authority, Files
from tests.integration.echo_sessions import IDENTITY, SECRETS, Echo, connect, ended, is_served, raw, serve


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def other(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "other")


# -- the files


def no_key(files: Files) -> Files:
    files.key.unlink()
    return files


def open_key(files: Files) -> Files:
    files.key.chmod(0o660)
    return files


def no_certificate(files: Files) -> Files:
    files.cert.write_text("nothing")
    return files


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (no_key, "the key file {key} cannot be read: No such file or directory"),
        (open_key, "the key file {key} must be its owner's alone, but its mode is 0660: run `chmod 600 {key}`"),
        (no_certificate, "--tls-cert {cert} holds no certificate in PEM"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    authority: Authority, change: Callable[[Files], Files], complaint: str
) -> None:
    files = change(authority.issue())
    with pytest.raises(OperationalError) as refused:
        files.read()
    assert str(refused.value) == complaint.format(**files._asdict())


def test_the_options_come_together(authority: Authority) -> None:
    cert, key, ca = authority.issue()
    assert read_tls(None, None, None, is_client=True) is None
    with pytest.raises(OperationalError, match="but --tls-key is missing"):
        read_tls(cert, None, ca, is_client=True)
    with pytest.raises(OperationalError, match="but --tls-cert and --tls-ca is missing"):
        read_tls(None, key, None, is_client=True)


def test_a_key_with_a_passphrase_is_refused(authority: Authority) -> None:
    files = authority.issue()
    key = load_pem_private_key(files.key.read_bytes(), None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"passphrase"))
    files.key.write_bytes(locked)
    with pytest.raises(OperationalError, match="it is encrypted: give one without a passphrase") as refused:
        files.read()
    assert str(files.key) in str(refused.value)


# TLS-SELF
def test_a_certificate_that_its_own_ca_refuses_is_found_before_anything_starts(
    authority: Authority, other: Authority
) -> None:
    mine, theirs, old = authority.issue(), other.issue(), authority.issue(expired=True)
    mine.read()
    for is_client in (True, False):
        with pytest.raises(OperationalError, match="another CA has signed it") as refused:
            read_tls(mine.cert, mine.key, theirs.ca, is_client=is_client)
        assert str(mine.cert) in str(refused.value)
        assert str(theirs.ca) in str(refused.value)
        with pytest.raises(OperationalError, match="it has expired: issue a new one"):
            old.read(is_client=is_client)
    with pytest.raises(OperationalError, match="is not the key of --tls-cert"):
        read_tls(mine.cert, theirs.key, mine.ca, is_client=True)


def test_the_commands_refuse_them_before_they_start(
    authority: Authority, other: Authority, capsys: pytest.CaptureFixture[str]
) -> None:
    options = authority.issue()._replace(ca=other.ca).options
    for command in (["coordinator", "--port", "0"], ["run"]):
        script = [__file__] if command == ["run"] else []
        assert cli.main([*command, *options, *script]) == cli.EXIT_USAGE
        assert "another CA has signed it" in capsys.readouterr().err


def test_a_key_is_not_shown(authority: Authority) -> None:
    files = authority.issue()
    tls = files.read()
    assert repr(tls) == f"Tls({str(files.cert)!r})"
    with pytest.raises(TypeError):
        pickle.dumps(tls)


def test_credentials_reach_another_process() -> None:
    contents, files = TlsContents("cert", "key", "ca"), TlsFiles("/a", "/b", "/c")
    tls = Tls(files, contents, Life("the certificate", 1.0, 2.0), is_client=False)
    credentials = Credentials(Secret(bytes(range(32))), tls, insecure=True)
    same = credentials_from_json(json.loads(json.dumps(credentials.to_json())))
    assert (same.key, same.insecure) == (credentials.key, True)
    assert same.tls is not None
    assert (same.tls.files, same.tls.contents, same.tls.life) == (files, contents, tls.life)
    assert not same.tls.is_client
    assert credentials_from_json(Credentials().to_json()) == Credentials()


def test_with_tls_every_address_is_allowed(authority: Authority) -> None:
    Credentials(tls=authority.issue().read()).check_address("0.0.0.0", "it listens on loopback only")


# -- both ends


def test_a_session_without_a_secret_is_served_over_tls(authority: Authority) -> None:
    tls = authority.issue("127.0.0.1").read()

    async def test(echo: Echo) -> None:
        assert await is_served(echo, tls)
        assert echo.log == []

    serve(test, tls)


def test_a_large_message_passes(authority: Authority) -> None:
    tls = authority.issue().read()

    async def test(echo: Echo) -> None:
        client, connection = await connect(echo, tls=tls)
        await client.is_open.wait()
        message = os.urandom(900_000)
        connection.send(message)
        assert await client.payloads.get() == message
        connection.close()

    serve(test, tls)


async def refused(echo: Echo, tls: Tls, name: str | None = None) -> str:
    """Why the client's session did not open."""
    client, _ = await connect(echo, tls=tls, name=name)
    reason = await client.reason
    assert not client.is_open.is_set()
    return reason


# TLS-BOTH
def test_a_client_refuses_a_server_of_another_ca(authority: Authority, other: Authority) -> None:
    async def test(echo: Echo) -> None:
        reason = await refused(echo, authority.issue().read())
        assert reason.startswith("the certificate of the coordinator is refused: another CA has signed it")
        assert echo.sessions == []
        await echo.has_logged.wait()
        (line,) = echo.log
        assert "a client refuses the certificate" in line
        assert "both ends need certificates of one CA" in line

    serve(test, other.issue().read())


# TLS-BOTH
def test_an_agent_that_refuses_the_certificate_is_told_so_and_not_asked_for_a_secret(
    authority: Authority, other: Authority
) -> None:
    credentials = Credentials(tls=other.issue().load())

    async def test(echo: Echo) -> None:
        callbacks: Any = SimpleNamespace(state=AgentState("a", "127.0.0.1", "job", Restarts(0), num_ranks=1))
        address, limits = f"127.0.0.1:{echo.listener.port}", Limits(connect=2.0, reconnect=2.0)
        plane = ControlPlane(callbacks, address, "job", credentials, limits, JOB_TIMEOUTS, Lease.create())
        with pytest.raises(OperationalError) as refused:
            await plane.open()
        await plane.leave("")
        assert str(refused.value).startswith(f"cannot open a session with the coordinator at {address}: ")
        assert "the certificate of the coordinator is refused: another CA has signed it" in str(refused.value)
        assert "--secret-file" not in str(refused.value)

    serve(test, authority.issue().load())


def test_a_server_refuses_a_client_of_another_ca_and_both_say_so(authority: Authority, other: Authority) -> None:
    mine, theirs = authority.issue(), other.issue()

    async def test(echo: Echo) -> None:
        for _ in range(5):
            reason = await refused(echo, theirs._replace(ca=mine.ca).load())
            assert reason == (
                f"the coordinator refuses the certificate {theirs.cert}: another CA has signed it: both ends need "
                "certificates of one CA, and this CA as `--tls-ca`"
            )
        assert await is_served(echo, mine.read())
        (line,) = echo.log
        assert "the certificate of a client is refused: another CA has signed it" in line
        assert sum(echo.listener.incidents.counts.values()) == 5

    serve(test, mine.read())


def test_an_expired_client_is_told_so(authority: Authority) -> None:
    old = authority.issue(expired=True)

    async def test(echo: Echo) -> None:
        reason = await refused(echo, old.load())
        assert reason == f"the coordinator refuses the certificate {old.cert}: it has expired: issue a new one"
        await echo.has_logged.wait()
        assert "the certificate of a client is refused: it has expired" in echo.log[0]

    serve(test, authority.issue().read())


# TLS-NAME
def test_the_certificate_must_be_for_the_host_that_the_agent_connects_to(authority: Authority) -> None:
    tls = authority.issue("coordinator.example").read()

    async def test(echo: Echo) -> None:
        assert "it is for another host: issue one with this name" in await refused(echo, tls, "elsewhere.example")
        assert "it is for another address" in await refused(echo, tls, "192.0.2.1")
        client, connection = await connect(echo, tls=tls, name="coordinator.example")
        await client.is_open.wait()
        connection.close()

    serve(test, tls)


@pytest.mark.parametrize(
    ("host", "name"),
    [("127.0.0.1", None), ("::1", None), ("localhost", "localhost"), ("10.0.0.1", "10.0.0.1"), ("host", "host")],
)
def test_a_name_is_checked_beyond_loopback(host: str, name: str | None) -> None:
    assert name_to_check(host) == name


def test_one_end_without_tls_is_told_so(authority: Authority) -> None:
    tls = authority.issue().read()

    async def with_tls(echo: Echo) -> None:
        client, _ = await connect(echo)
        assert "it may require TLS (`--tls-cert`)" in await client.reason
        await echo.has_logged.wait()
        (line,) = echo.log
        assert "a client does not speak TLS 1.3" in line

    async def without(echo: Echo) -> None:
        client, _ = await connect(echo, tls=tls)
        await client.reason
        await echo.has_logged.wait()
        (line,) = echo.log
        assert "a client speaks TLS, and this end does not: both ends need `--tls-cert`, or neither" in line

    serve(with_tls, tls)
    serve(without)


def test_a_secret_beside_tls_must_be_right_too(authority: Authority) -> None:
    tls = authority.issue().read()

    async def test(echo: Echo) -> None:
        client, _ = await connect(echo, secret=b"w" * 32, tls=tls)
        await client.reason
        assert not client.is_open.is_set()
        await echo.has_logged.wait()
        assert "does not hold the secret" in echo.log[0]
        assert await is_served(echo, tls)

    serve(test, tls)


# -- attackers


def test_a_client_without_a_certificate_is_cut_off_and_logged_once(authority: Authority) -> None:
    files = authority.issue()
    tls = files.read()

    async def test(echo: Echo) -> None:
        context = ssl.create_default_context(cafile=str(files.ca))
        context.check_hostname = False
        for _ in range(20):
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", echo.listener.port, ssl=context)
                try:
                    writer.write(body_frame(ClientHandshake(IDENTITY, SECRETS["job"], b"n" * 32).hello()))
                    assert await ended(reader) == b""
                finally:  # Python 3.10 warns of a transport that was lost and not closed
                    writer.close()
        assert await is_served(echo, tls)
        (line,) = echo.log
        assert "a client shows no certificate" in line
        assert sum(echo.listener.incidents.counts.values()) == 20
        assert echo.listener.num_pending == 0

    serve(test, tls)


def test_an_older_tls_is_refused(authority: Authority) -> None:
    files = authority.issue()
    tls = files.read()

    async def test(echo: Echo) -> None:
        context = ssl.create_default_context(cafile=str(files.ca))
        context.check_hostname = False
        context.load_cert_chain(files.cert, files.key)
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError):
            await asyncio.open_connection("127.0.0.1", echo.listener.port, ssl=context)
        assert await is_served(echo, tls)
        assert len(echo.log) == 1

    serve(test, tls)


# The same each time: one in 500 of random ones looks like the start of an old, longer hello, whose rest is waited for.
NOISE = bytes(number * number % 251 for number in range(400))


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", NOISE, b"\x16\x03\x01\xff\xff" + b"x" * 70_000])
def test_what_is_not_tls_is_cut_off_and_logged_once(authority: Authority, sent: bytes) -> None:
    tls = authority.issue().read()

    async def test(echo: Echo) -> None:
        for _ in range(20):
            reader, writer = await raw(echo)
            writer.write(sent)
            await ended(reader)
            writer.close()
        assert await is_served(echo, tls)
        assert len(echo.log) == 1
        assert "a client does not speak TLS 1.3" in echo.log[0]

    serve(test, tls)


def hello_of(tls: Tls) -> bytes:
    stream = TlsStream(tls.client_context(checks_name=False), is_server=False)
    stream.receive(b"")
    return stream.outgoing()


# CONN-TLS, LISTEN-BOUND
def test_slow_tls_handshakes_are_bounded_and_keep_nobody_out(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listeners, "MAX_PENDING", 16)
    monkeypatch.setattr(listeners, "MIN_PENDING_S", 0.01)
    tls = authority.issue().read()
    hello = hello_of(tls)

    async def test(echo: Echo) -> None:
        opened = []
        for number in range(200):
            opened.append(await raw(echo))
            opened[-1][1].write(hello if number % 2 else hello[:50])
            assert echo.listener.num_pending <= 16
            if number % 50 == 49:
                assert await is_served(echo, tls)
        for reader, writer in opened[:100]:
            await ended(reader)
            writer.close()
        assert len(echo.log) == 1
        assert "wait for their handshake" in echo.log[0]

    serve(test, tls)


# CONN-TLS
def test_a_tls_handshake_has_the_deadline_of_the_whole(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HANDSHAKE_S", 0.3)
    tls = authority.issue().read()

    async def test(echo: Echo) -> None:
        reader, writer = await raw(echo)
        writer.write(hello_of(tls))
        await ended(reader)
        writer.close()
        assert echo.listener.num_pending == 0
        assert "its handshake was not complete after 0.3 s" in echo.log[0]

    serve(test, tls)
