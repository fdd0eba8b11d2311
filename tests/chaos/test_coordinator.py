"""The coordinator's process, as agents reach it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elasticgang.coordinator.server import CoordinatorOptions, ReservedPort, serve
from elasticgang.errors import OperationalError
from elasticgang.protocol.agent_session import AgentSession
from elasticgang.protocol.coordinator_messages import Welcome
from elasticgang.protocol.record import Report
from elasticgang.protocol.rendezvous_keys import RendezvousKeys
from elasticgang.session.agent_client import AgentClient
from elasticgang.session.credentials import Credentials
from elasticgang.session.secret import Secret

TIMEOUT_S = 20.0
LOOPBACK = CoordinatorOptions("127.0.0.1", 0)
NONE, RIGHT, WRONG = Credentials(), Credentials(Secret(b"1" * 16)), Credentials(Secret(b"0" * 16))


class Agent:
    """Without ranks."""

    def __init__(self, address: str, credentials: Credentials = NONE) -> None:
        host, _, port = address.rpartition(":")
        self.welcome: asyncio.Future[tuple[Welcome, str]] = asyncio.get_running_loop().create_future()
        self.refused = asyncio.Event()
        self.client = AgentClient(AgentSession("a", "incarnation"), self, (host, int(port)), "job", credentials)
        self.client.start()

    def set_lease(self, until_s: float) -> None: ...

    def collect_report(self) -> Report | None:
        return None

    def inform(self, event: object) -> None: ...

    def kill_ranks(self, reason: str) -> None: ...

    def welcomed(self, welcome: Welcome, host: str) -> None:
        if welcome.in_office and not self.welcome.done():
            self.welcome.set_result((welcome, host))

    def receive_keys(self, message: RendezvousKeys) -> None: ...

    def disconnected(self, reason: str) -> None:
        self.refused.set()


def play(options: CoordinatorOptions, story: Callable[[str], Awaitable[None]]) -> None:
    async def run() -> None:
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        serving = asyncio.ensure_future(serve(options, lambda line: None, address.set_result))
        either: list[asyncio.Future[Any]] = [serving, address]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not address.done():
            await serving  # raises
        try:
            await asyncio.wait_for(story(address.result()), TIMEOUT_S)
        finally:
            serving.cancel()
            await asyncio.wait([serving])

    asyncio.run(run())


@pytest.mark.parametrize(("host", "everywhere"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_an_agent_is_told_whether_the_coordinator_listens_everywhere(host: str, everywhere: bool) -> None:
    async def story(address: str) -> None:
        agent = Agent(f"127.0.0.1:{address.rpartition(':')[2]}")
        welcome, seen = await agent.welcome
        assert (welcome.everywhere, seen) == (everywhere, "127.0.0.1")
        await agent.client.stop()

    play(replace(LOOPBACK, host=host, credentials=Credentials(insecure=True), grace_s=0.0), story)


def test_a_coordinator_without_a_directory_leads_no_new_job_before_others_could_come_back() -> None:
    grace_s, began_s = 0.7, time.monotonic()

    async def story(address: str) -> None:
        agent = Agent(address)
        await agent.welcome
        assert time.monotonic() - began_s >= grace_s
        await agent.client.stop()

    play(replace(LOOPBACK, grace_s=grace_s), story)


def test_an_agent_with_another_secret_is_not_taken_in() -> None:
    async def story(address: str) -> None:
        wrong, right = Agent(address, WRONG), Agent(address, RIGHT)
        await right.welcome
        await wrong.refused.wait()
        assert not wrong.welcome.done()
        for agent in (wrong, right):
            await agent.client.stop()

    play(replace(LOOPBACK, credentials=RIGHT, grace_s=0.0), story)


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    async def story(address: str) -> None:
        raise AssertionError(address)

    with pytest.raises(OperationalError, match=r"the state directory .* cannot be used"):
        play(replace(LOOPBACK, state_dir=tmp_path / "file"), story)


def test_a_reserved_port_refuses_until_a_coordinator_listens_on_it() -> None:
    reserved = ReservedPort("127.0.0.1")

    async def story(address: str) -> None:
        assert address == f"127.0.0.1:{reserved.port}"
        socket.create_connection(("127.0.0.1", reserved.port), TIMEOUT_S).close()

    try:
        for _ in range(2):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", reserved.port), TIMEOUT_S)
            play(replace(LOOPBACK, port=reserved.port), story)
    finally:
        reserved.close()
