"""Which hosts an agent reaches: real connections on loopback."""

from __future__ import annotations

import asyncio
import socket
import time

from elasticgang.agent.reach import REACH_S, answer, try_hosts


def found(*listeners: socket.socket) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    return asyncio.run(try_hosts({str(n): f"127.0.0.1:{each.getsockname()[1]}" for n, each in enumerate(listeners)}))


def listener() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def test_an_agent_that_answers_is_reached_and_a_port_without_one_is_not() -> None:
    async def run() -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
        with listener() as closed:
            refused = closed.getsockname()[1]
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            others = {f"a{number}": f"127.0.0.1:{port}" for number in range(600)}  # more than are tried at once
            return await try_hosts({**others, "b": f"127.0.0.1:{refused}"})

    reached, unreached = asyncio.run(run())
    assert set(reached) == {f"a{number}" for number in range(600)}
    assert unreached == (("b", "Connection refused"),)


# TRY-1, TRY-2
def test_a_host_from_which_nothing_comes_is_tried_twice() -> None:
    with listener() as silent:
        began_s = time.monotonic()
        assert found(silent) == ((), (("0", "large packets from there are lost"),))
        assert time.monotonic() - began_s >= 2 * REACH_S


# TRY-2
def test_a_host_that_answers_the_second_try_is_reached() -> None:
    async def run() -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
        waiting = []

        def answer_second(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            waiting.append(writer)
            if len(waiting) > 1:
                answer(reader, writer)

        async with await asyncio.start_server(answer_second, "127.0.0.1", 0) as server:
            tried = await try_hosts({"a": f"127.0.0.1:{server.sockets[0].getsockname()[1]}"})
            waiting[0].close()
            return tried

    assert asyncio.run(run()) == (("a",), ())
