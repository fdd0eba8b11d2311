"""Which hosts an agent reaches, over real sockets."""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from elasticgang.agent.reach import REACH_S, answer, try_hosts

Found = tuple[tuple[str, ...], tuple[tuple[str, str], ...]]
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], None]
LOST = "large packets from there are lost"


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def tried(listener: socket.socket) -> Found:
    return asyncio.run(try_hosts({"a": f"127.0.0.1:{port_of(listener)}"}))


def tried_with(answers: Answer) -> Found:
    writers = []

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        answers(reader, writer)

    async def run() -> Found:
        async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
            found = await try_hosts({"a": f"127.0.0.1:{port_of(server.sockets[0])}"})
            for writer in writers:
                writer.close()
                await writer.wait_closed()
            return found

    return asyncio.run(run())


@pytest.fixture
def may_open_many_files() -> Iterator[None]:
    """This process has both ends of each connection, and a slow machine closes those of the answers late."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else max(soft, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# REACH-1
@pytest.mark.usefixtures("may_open_many_files")
def test_agents_that_answer_are_reached_and_a_port_without_one_is_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        unused = port_of(closed)

    async def run() -> Found:
        async with await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024) as server:
            address = f"127.0.0.1:{port_of(server.sockets[0])}"
            others = {f"a{number}": address for number in range(600)}  # more than are tried at once
            return await try_hosts({**others, "b": f"127.0.0.1:{unused}"})

    reached, unreached = asyncio.run(run())
    assert set(reached) == {f"a{number}" for number in range(600)}
    assert unreached == (("b", "Connection refused"),)


# TRY-1
@pytest.mark.parametrize("num_bytes", [1, 5000])
def test_a_host_of_which_only_a_part_comes_loses_large_packets(num_bytes: int) -> None:
    def answer_in_part(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(num_bytes))

    began_s = time.monotonic()
    assert tried_with(answer_in_part) == ((), (("a", LOST),))
    assert time.monotonic() - began_s >= REACH_S - 0.1


# TRY-2
def test_a_host_that_accepts_a_connection_and_stands_still_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert tried(listener) == (("a",), ())


# TRY-2
def test_a_host_that_hangs_up_is_reached() -> None:
    assert tried_with(lambda _, writer: writer.close()) == (("a",), ())


# TRY-3
def test_a_host_is_reached_although_the_network_loses_some_packets() -> None:
    async def try_late(listener: socket.socket) -> Found:
        """Its queue is full for so long that the kernel's first two packets are lost."""
        loop, address = asyncio.get_running_loop(), listener.getsockname()
        with socket.create_connection(address):
            loop.call_later(1.2, lambda: listener.accept()[0].close())
            return await try_hosts({"a": f"127.0.0.1:{port_of(listener)}"})

    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        assert asyncio.run(try_late(listener)) == (("a",), ())


# REACH-1
def test_a_host_without_descriptors_does_not_say_that_it_reaches_nobody() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def without_any(others: dict[str, str]) -> Found:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            return await try_hosts(others)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert asyncio.run(without_any({"a": f"127.0.0.1:{port_of(listener)}"})) == ((), ())
