"""TLS files that change while a process runs: which are used, which are not, and what is said."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from elasticgang.errors import WireError
from elasticgang.session import tls_watch
from elasticgang.session.credentials import Credentials
from elasticgang.session.tls import Tls
from elasticgang.session.tls_rotation import EndsSoon, HasEnded, News, Refused, Renewed
from elasticgang.session.tls_watch import TlsWatch, watch_tls
from elasticgang.state.authentication import Authenticator
from elasticgang.state.state_listener import StateListener
from elasticgang.state.transport import Channel
from tests.integration.certificates import Authority, Files, Mounted
from tests.integration.echo_sessions import Echo, connect, is_served, serve
from tests.support import wait_until

DEADLINE_S = 30.0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


class Watched:
    """A process's files, which the test looks at."""

    def __init__(self, directory: Path, files: Files) -> None:
        self.mounted = Mounted(directory, files)
        self.files = self.mounted.files
        self.tls = self.files.read()
        self.news: list[News] = []
        self._watch = TlsWatch(self.tls, self.news.append)

    def look(self) -> list[News]:
        self.news.clear()
        self._watch.look()
        return list(self.news)

    def rewrite(self, files: Files) -> None:
        """In place, byte for byte; the links stay."""
        for path, new in zip(self.files, files, strict=True):
            path.write_bytes(new.read_bytes())


@pytest.fixture
def watched(tmp_path: Path, authority: Authority) -> Watched:
    return Watched(tmp_path / "mounted", authority.issue())


def served(tls: Tls, client: Tls) -> bool:
    """Whether a new session opens between a server and a client."""
    opened = []

    async def test(echo: Echo) -> None:
        opened.append(await opens(echo, client))

    serve(test, tls)
    return opened == [True]


async def opens(echo: Echo, tls: Tls) -> bool:
    client, connection = await connect(echo, tls=tls)
    opening = asyncio.ensure_future(client.is_open.wait())
    either: list[asyncio.Future[Any]] = [opening, client.reason]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    is_open = client.is_open.is_set()
    opening.cancel()
    connection.close()
    return is_open


# -- new files


# TLS-NEWEST, TLSWATCH-2
def test_a_replaced_directory_counts_for_the_next_handshake_and_ends_no_session(
    tmp_path: Path, authority: Authority, watched: Watched
) -> None:
    other, old = Authority(tmp_path, "other"), authority.issue().read()

    async def test(echo: Echo) -> None:
        client, connection = await connect(echo, tls=watched.tls)
        await client.is_open.wait()
        watched.mounted.swap(other.issue())
        (told,) = watched.look()
        assert isinstance(told, Renewed)
        connection.send(b"goes on")
        assert await client.payloads.get() == b"goes on"
        assert await is_served(echo, watched.tls)
        assert await is_served(echo, other.issue().read())
        late, _ = await connect(echo, tls=old)
        assert "another CA has signed it" in await late.reason  # the old CA counts no more
        connection.send(b"still")
        assert await client.payloads.get() == b"still"
        connection.close()

    serve(test, watched.tls)


# TLS-NEWEST
def test_files_that_are_rewritten_in_place_count(authority: Authority, watched: Watched) -> None:
    new = authority.issue()
    before = [os.stat(path) for path in watched.files]
    watched.rewrite(new)
    for path, stat in zip(watched.files, before, strict=True):
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as some tools keep it
    (told,) = watched.look()
    assert isinstance(told, Renewed)
    assert watched.tls.contents == new.load().contents
    assert watched.look() == []


# TLS-NEWEST
def test_a_ca_alone_that_changes_counts(tmp_path: Path, watched: Watched) -> None:
    """As in a change of CAs without a gap: both first, then the new certificates, then the new CA alone."""
    other = Authority(tmp_path, "other")
    new = other.issue().load()
    assert not served(watched.tls, new)
    watched.files.ca.write_text(watched.files.ca.read_text() + other.ca.read_text())
    (told,) = watched.look()
    assert isinstance(told, Renewed)
    both = other.issue()._replace(ca=watched.files.ca)
    assert served(watched.tls, both.load())


# TLS-NEWEST
def test_a_state_server_and_a_healer_use_the_newest_files(tmp_path: Path, watched: Watched) -> None:
    def answer(channel: Channel) -> None:
        channel.send(channel.receive(1 << 10))

    authenticator = Authenticator("job", Credentials(tls=watched.tls))
    listener = StateListener("127.0.0.1", authenticator, answer)

    def heals(healer: Authenticator) -> bool:
        with healer.connect(listener.address) as channel:
            channel.send("hello")
            return bool(channel.receive(1 << 10) == "hello")

    new = Authority(tmp_path, "other").issue()
    of_new = Authenticator("job", Credentials(tls=new.read()))
    try:
        assert heals(authenticator)
        with pytest.raises(WireError):
            heals(of_new)
        watched.mounted.swap(new)
        watched.look()
        assert heals(of_new)
        assert heals(authenticator)
    finally:
        listener.close()


# -- files that cannot be used


def halfway(watched: Watched, new: Files) -> str:
    watched.files.cert.write_bytes(new.cert.read_bytes())
    return f"--tls-key {watched.files.key} is not the key of --tls-cert {watched.files.cert}"


def cut_certificate(watched: Watched, new: Files) -> str:
    watched.files.cert.write_bytes(new.cert.read_bytes()[:-200])
    watched.files.key.write_bytes(new.key.read_bytes())
    return f"--tls-cert {watched.files.cert}, --tls-key {watched.files.key} or --tls-ca {watched.files.ca} cannot be "


def empty_key(watched: Watched, new: Files) -> str:
    watched.files.key.write_bytes(b"")
    return f"--tls-key {watched.files.key} holds no private key in PEM"


def cut_ca(watched: Watched, new: Files) -> str:
    watched.files.ca.write_bytes(watched.files.ca.read_bytes()[:-200])
    return f"--tls-cert {watched.files.cert}, --tls-key {watched.files.key} or --tls-ca {watched.files.ca} cannot be "


def open_key(watched: Watched, new: Files) -> str:
    watched.rewrite(new)
    watched.files.key.chmod(0o644)
    return f"the key file {watched.files.key} must be its owner's alone, but its mode is 0644"


def missing(watched: Watched, new: Files) -> str:
    watched.files.cert.resolve().unlink()
    return f"the certificate file {watched.files.cert} cannot be read: No such file or directory"


# TLS-WHOLE
@pytest.mark.parametrize("spoil", [halfway, cut_certificate, empty_key, cut_ca, open_key, missing])
def test_files_that_cannot_be_used_leave_the_earlier_ones_in_use(
    authority: Authority, watched: Watched, spoil: Callable[[Watched, Files], str]
) -> None:
    before, new = watched.tls.contents, authority.issue()
    reason = spoil(watched, new)
    assert watched.look() == []  # they may be about to be replaced
    (told,) = watched.look()
    assert isinstance(told, Refused)
    assert told.text.startswith(reason)
    assert told.text.endswith("; the earlier TLS files stay in use")
    assert watched.look() == watched.look() == []
    assert watched.tls.contents is before
    assert served(watched.tls, authority.issue().read())
    watched.mounted.swap(new)
    (told,) = watched.look()
    assert isinstance(told, Renewed)
    assert watched.tls.contents == new.load().contents


# TLS-WHOLE, TLS-SELF
def test_a_certificate_that_is_expired_or_of_another_ca_is_not_taken_into_use(
    tmp_path: Path, authority: Authority, watched: Watched
) -> None:
    before = watched.tls.contents
    mismatched = Authority(tmp_path, "other").issue()._replace(ca=authority.ca)
    watched.mounted.swap(authority.issue(expired=True))
    told = watched.look() + watched.look()
    watched.mounted.swap(mismatched)
    told += watched.look() + watched.look()
    assert [type(news) for news in told] == [Refused, Refused]
    assert "it has expired" in told[0].text
    assert "another CA has signed it" in told[1].text
    assert watched.tls.contents is before


# TLS-WHOLE
def test_a_certificate_that_is_not_valid_yet_is_taken_once_it_is(
    authority: Authority, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_watch, "RECHECK_S", 0.0)
    watched.mounted.swap(authority.issue(begins_in=timedelta(seconds=3)))
    told: list[News] = []
    deadline = time.monotonic() + DEADLINE_S
    while not any(isinstance(news, Renewed) for news in told):
        assert time.monotonic() < deadline
        told += watched.look()
    assert isinstance(told[0], Refused)
    assert "it is not valid yet" in told[0].text
    assert len(told) == 2


# -- ends


# TLS-ENDS
def test_the_end_of_the_certificate_is_told_of_before_it_comes(tmp_path: Path, authority: Authority) -> None:
    soon = authority.issue(begins_in=timedelta(hours=-20), ends_in=timedelta(hours=4, seconds=30))
    watched = Watched(tmp_path / "soon", soon)
    (told,) = watched.look()
    assert isinstance(told, EndsSoon)
    assert told.text.startswith(f"the certificate {watched.files.cert} expires in 4 h, at 20")
    assert watched.look() == []


# TLS-ENDS
def test_an_end_is_told_of_when_it_comes_and_sessions_go_on(tmp_path: Path, authority: Authority) -> None:
    watched = Watched(tmp_path / "short", authority.issue(begins_in=timedelta(hours=-1), ends_in=timedelta(seconds=3)))

    async def test(echo: Echo) -> None:
        client, connection = await connect(echo, tls=watched.tls)
        await client.is_open.wait()
        told: list[News] = []
        deadline = time.monotonic() + DEADLINE_S
        while not any(isinstance(news, HasEnded) for news in told):
            assert time.monotonic() < deadline
            told += watched.look()
        assert [type(news) for news in told] == [EndsSoon, HasEnded]
        while await opens(echo, watched.tls):  # OpenSSL's clock is late by some milliseconds
            assert time.monotonic() < deadline
        connection.send(b"goes on")
        assert await client.payloads.get() == b"goes on"
        connection.close()
        watched.mounted.swap(authority.issue())
        (renewed,) = watched.look()
        assert isinstance(renewed, Renewed)
        assert await is_served(echo, watched.tls)

    serve(test, watched.tls)


# TLS-ENDS
def test_the_first_certificate_of_the_chain_to_end_counts(tmp_path: Path) -> None:
    """Those of the CAs end in the year 3000."""
    root = Authority(tmp_path, "root")
    files = Authority(tmp_path, "between", parent=root).issue(ends_in=timedelta(days=1_000 * 365))
    life = files.read().life
    assert life is not None
    assert life.what.startswith("the CA certificate in ")
    assert life.end.startswith("3000-01-01")
    plain = root.issue(ends_in=timedelta(days=30)).read().life
    assert plain is not None
    assert plain.what.startswith("the certificate ")


# -- the thread


@pytest.fixture
def watch(watched: Watched) -> Iterator[tuple[Watched, TlsWatch, threading.Event]]:
    renewed = threading.Event()
    watch = watch_tls(watched.tls, lambda news: renewed.set() if isinstance(news, Renewed) else None)
    assert watch is not None
    yield watched, watch, renewed
    watch.stop()


def test_new_files_are_found_without_a_connection(
    authority: Authority, watch: tuple[Watched, TlsWatch, threading.Event]
) -> None:
    watched, _, renewed = watch
    new = authority.issue()
    watched.mounted.swap(new)
    assert renewed.wait(DEADLINE_S)
    assert watched.tls.contents == new.load().contents


# TLSWATCH-1
def test_a_disk_that_blocks_keeps_no_connection_waiting(
    authority: Authority, watch: tuple[Watched, TlsWatch, threading.Event]
) -> None:
    watched, _, renewed = watch
    new = authority.issue()
    pipe = watched.files.cert.with_name("pipe")
    os.mkfifo(pipe)
    pipe.replace(watched.files.cert)

    def blocked() -> int | None:
        """The end from which a look that blocks gets its bytes."""
        with contextlib.suppress(OSError):  # nobody has opened the other end
            return os.open(watched.files.cert, os.O_WRONLY | os.O_NONBLOCK)
        return None

    end = wait_until(blocked, "a look that blocks")
    assert served(watched.tls, watched.tls)
    assert not renewed.is_set()
    watched.files.key.write_bytes(new.key.read_bytes())
    os.write(end, new.cert.read_bytes())
    os.close(end)
    assert renewed.wait(DEADLINE_S)
    assert watched.tls.contents == new.load().contents
    end = wait_until(blocked, "the next look")
    watch[1].stop()
    os.close(end)  # the thread ends


def test_without_tls_nothing_is_watched() -> None:
    assert watch_tls(None, lambda news: None) is None
