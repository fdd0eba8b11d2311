"""The coordinator's state directory: who holds it, what is in it, and what happens when its disk fails."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
import threading
from pathlib import Path

import pytest

from elasticgang.coordinator import decision_server
from elasticgang.coordinator.decision_server import CoordinatorServer, ServerOptions
from elasticgang.coordinator.server import CoordinatorOptions, serve
from elasticgang.coordinator.state_directory import Kept, StateDirectory
from elasticgang.errors import OperationalError
from elasticgang.protocol.coordinator_messages import Notify, Refused, Term
from elasticgang.protocol.job_facts import AgentFacts
from tests.integration.led_jobs import CREDENTIALS, DEADLINE_S, QUICK, Agent, Job, found, play
from tests.support import PROMPT_S


def test_one_coordinator_holds_a_directory_at_a_time(tmp_path: Path) -> None:
    first = StateDirectory(tmp_path)
    with pytest.raises(OperationalError, match="another coordinator holds the state directory"):
        StateDirectory(tmp_path)
    first.close()
    StateDirectory(tmp_path).close()


# STATE-LOCK
def test_a_file_system_without_locks_is_no_other_coordinator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.raises(OperationalError, match=r"the state directory .* cannot be locked: No locks available"):
        StateDirectory(tmp_path)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    directory = StateDirectory(tmp_path)
    assert directory.read("job") == Kept()
    directory.write("job", Kept(Term(3, "c")))
    directory.write("other", Kept(Term(4, "c"), own=True))
    assert directory.read("job") == Kept(Term(3, "c"))
    assert directory.read("other") == Kept(Term(4, "c"), own=True)
    assert directory.read("other").term.number == 4
    (file,) = (path for path in tmp_path.glob("*.json") if '"job": "job"' in path.read_text())
    file.write_text(file.read_text()[:-5])
    with pytest.raises(OperationalError, match="is damaged"):
        directory.read("job")
    directory.close()


async def start_elsewhere(job: Job, former: list[int]) -> CoordinatorServer:
    """At a port that is none of the `former` ones. The system may choose such a one again."""
    while True:
        job.port = 0
        server = await job.start()
        if job.port not in former:
            return server
        await job.stop()


# MOVED
def test_the_directory_tells_from_where_agents_may_have_leases(tmp_path: Path) -> None:
    async def test(job: Job) -> None:
        assert job.directory is not None
        name = socket.gethostname()
        await found(job)
        first = f"{name}:{job.port}"
        assert job.directory.read("job").addresses == {first}
        former = [job.port]
        for num_addresses in (2, 3):
            await job.stop()
            server = await start_elsewhere(job, former)
            former.append(job.port)
            job.add("c")
            while (state := server.state_of("job")) is None:
                await asyncio.sleep(0.02)
            assert state.office.addresses >= {first, f"{name}:{job.port}"}
            assert len(state.office.addresses) == num_addresses
            assert job.directory.read("job").addresses == state.office.addresses

    play(test, Job(tmp_path))


# MOVED
@pytest.mark.parametrize("advertise", ["", "virtual:29400"])
def test_a_coordinator_at_the_advertised_address_has_not_moved(advertise: str, tmp_path: Path) -> None:
    """An agent that never comes to it is lost, and the other goes on. At another address that takes an operator."""

    async def test(job: Job) -> None:
        a, b = await found(job)
        a.min_agents = 1
        await job.stop()
        for agent in (a, b):
            await agent.client.stop()
        server = await start_elsewhere(job, [job.port])  # where the advertised address leads now
        a.restart(job.port)
        a.end_generation()
        if advertise:
            assert (await a.next()).agents == ("a",)
        else:
            while (state := server.state_of("job")) is None or "b has not come" not in state.word_awaited:
                await asyncio.sleep(0.02)

    play(test, Job(tmp_path, advertise=advertise))


# STATE-PROBE
def test_a_directory_on_a_full_disk_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", lambda fd: _no_space("job", Kept()))
        for _ in range(2):  # the first one does not hold the directory any more
            said = f"^the state directory {tmp_path} cannot be written to: No space left on device$"
            with pytest.raises(OperationalError, match=said):
                StateDirectory(tmp_path)
    directory = StateDirectory(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]
    directory.close()


def test_a_coordinator_whose_disk_is_full_names_the_directory_and_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        options = CoordinatorOptions("127.0.0.1", 0, CREDENTIALS, tmp_path, timeouts=QUICK, grace_s=0.0)
        serving = asyncio.ensure_future(serve(options, print, listening.set_result))
        port = int((await listening).rpartition(":")[2])
        monkeypatch.setattr(os, "fsync", lambda fd: _no_space("job", Kept()))
        agents = [Agent(name, port) for name in ("a", "b")]
        for agent in agents:
            agent.start()
        said = f"^the coordinator failed: the state of job job cannot be written to {tmp_path}: No space left on dev"
        with pytest.raises(OperationalError, match=said):
            await asyncio.wait_for(serving, DEADLINE_S)
        for agent in agents:
            await agent.client.stop()

    asyncio.run(run())


# STATE-WHOLE
def test_a_write_that_fails_leaves_the_former_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = StateDirectory(tmp_path)
    directory.write("job", Kept(Term(3, "c")))
    with monkeypatch.context() as broken:
        broken.setattr(os, "fsync", lambda fd: _no_space("job", Kept()))
        said = f"the state of job job cannot be written to {tmp_path}: No space left on device$"
        with pytest.raises(OSError, match=said):
            directory.write("job", Kept(Term(4, "c")))
    assert directory.read("job") == Kept(Term(3, "c"))
    directory.close()


def test_a_coordinator_whose_disk_fails_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        failures: asyncio.Queue[BaseException] = asyncio.Queue()
        directory = StateDirectory(tmp_path)
        server = CoordinatorServer(ServerOptions(CREDENTIALS, directory, timeouts=QUICK), print, failures.put_nowait)
        port = await server.start("127.0.0.1", 0)
        agents = [Agent(name, port) for name in ("a", "b")]
        agents[0].start()
        while server.state_of("job") is None:
            await asyncio.sleep(0.02)
        monkeypatch.setattr(directory, "write", _no_space)
        agents[1].start()
        assert "No space" in str(await asyncio.wait_for(failures.get(), DEADLINE_S))
        assert all(agent.record is None for agent in agents)  # PERSIST
        for agent in agents:
            await agent.client.stop()
        await server.stop()
        directory.close()

    asyncio.run(run())


# SERVE-NEW, SERVE-PERSIST
def test_other_jobs_go_on_while_the_term_of_one_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    waits: list[bool] = []

    async def test(job: Job) -> None:
        directory, server = job.directory, job.server
        assert directory is not None
        assert server is not None
        directory.write("back", Kept(Term(3, "c")))
        write = directory.write

        def slow(name: str, kept: Kept) -> None:
            has_begun.set()
            waits.append(may_end.wait(PROMPT_S))
            write(name, kept)

        other = job.add("other")
        while not other.hosts:
            await asyncio.sleep(0.01)
        monkeypatch.setattr(directory, "write", slow)
        back = job.add("back", job="back")
        while not has_begun.is_set():
            await asyncio.sleep(0.01)
        assert isinstance(server.grant("back"), Refused)
        third = job.add("third")
        while not third.hosts:
            await asyncio.sleep(0.01)
        assert back.hosts == []
        may_end.set()
        while not back.hosts:
            await asyncio.sleep(0.01)
        state = server.state_of("back")
        assert state is not None
        assert all(waits), "the event loop stood still"
        assert directory.read("back").term == state.office.term == Term(4, state.office.name)

    play(test, Job(tmp_path))


# SERVE-LEAVE
def test_a_coordinator_that_ends_hears_behind_a_late_disk_who_is_stopping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    monkeypatch.setattr(decision_server, "REPEATED_S", 0.0)

    async def test(job: Job) -> None:
        a, _ = await found(job)
        directory, server = job.directory, job.server
        assert directory is not None
        assert server is not None
        write = directory.write

        def slow(name: str, kept: Kept) -> None:
            has_begun.set()
            may_end.wait(PROMPT_S)
            write(name, kept)

        monkeypatch.setattr(directory, "write", slow)
        a.end_generation()
        while not has_begun.is_set():
            await asyncio.sleep(0.01)
        a.client.notify(Notify(AgentFacts(is_stopping=True)))
        leaving = asyncio.ensure_future(server.until_left())
        await asyncio.wait([leaving], timeout=0.2)
        assert not leaving.done()
        may_end.set()
        while not any("ends after them" in line for line in job.log):
            await asyncio.sleep(0.01)
        assert not leaving.done()
        await a.client.stop()
        await leaving

    try:
        play(test, Job(tmp_path))
    finally:
        may_end.set()


# SERVE-STOP
def test_a_coordinator_that_cannot_write_its_term_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        failures: asyncio.Queue[BaseException] = asyncio.Queue()
        directory = StateDirectory(tmp_path)
        directory.write("job", Kept(Term(3, "c")))
        monkeypatch.setattr(directory, "write", _no_space)
        server = CoordinatorServer(ServerOptions(CREDENTIALS, directory, timeouts=QUICK), print, failures.put_nowait)
        agent = Agent("a", await server.start("127.0.0.1", 0)).start()
        assert "No space" in str(await asyncio.wait_for(failures.get(), PROMPT_S))
        assert agent.hosts == []
        await agent.client.stop()
        await server.stop()
        directory.close()

    asyncio.run(run())


def _no_space(job: str, kept: Kept) -> None:
    raise OSError(28, "No space left on device")
