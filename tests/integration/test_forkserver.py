"""Processes forked from one that has everything imported: what they have, and that they end with their owner."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from elasticgang.errors import OperationalError
from elasticgang.process.forkserver import ForkServer, ForkServerClient, Spawned
from tests.support import REPOSITORY, wait_dead, wait_until

CHILDREN = "tests.integration.children"
HOLES = "tests.integration.leaves_holes"
CALLED = "tests.integration.is_called"
GUARD_S = 20.0


def can_collapse() -> bool:
    memory = mmap.mmap(-1, 8 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:: 4 << 10] = bytes(len(memory) // (4 << 10))
    try:
        memory.madvise(25, 2 << 20, 4 << 20)  # MADV_COLLAPSE
    except OSError:
        return False
    return True


@pytest.fixture
def quick() -> Iterator[ForkServer]:
    """A fork server of this test's own, without torch."""
    server = ForkServer(preload=(), env={"PYTHONPATH": str(REPOSITORY)})
    server.wait_ready()
    yield server
    server.close()


def end(spawned: Spawned) -> int:
    """Wait for it; its exit status, as of `subprocess`."""
    assert not wait_dead([spawned.pidfd], GUARD_S)
    found = os.waitid(os.P_PIDFD, spawned.pidfd, os.WEXITED)
    os.close(spawned.pidfd)
    assert found is not None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def kill(spawned: Spawned) -> None:
    signal.pidfd_send_signal(spawned.pidfd, signal.SIGKILL)
    assert end(spawned) == -signal.SIGKILL


def description(server: ForkServerClient, args: dict[str, Any] | None = None, **options: Any) -> dict[str, Any]:
    reader, writer = os.pipe()
    with os.fdopen(reader) as told:
        fds = [writer, *options.pop("fds", ())]
        spawned = server.spawn(f"{CHILDREN}:describe", args or {}, fds=fds, **options)
        os.close(writer)
        described: dict[str, Any] = json.loads(told.read())
    assert described["pid"] == spawned.pid
    assert end(spawned) == 0
    return described


def test_a_child_has_only_the_given_descriptors_and_environment(quick: ForkServer) -> None:
    with open(os.devnull) as given:
        found = description(quick, {"x": [1, None, "é"]}, fds=[given.fileno()], env={"MINE": "1"}, name="a-name")
    assert found["args"] == {"x": [1, None, "é"]}
    assert found["num_fds"] == 2
    assert len(found["open"]) == 3 + 2 + 1  # stdio, what was given, and the listing itself
    assert found["env"]["MINE"] == "1"
    assert found["stdin"] == os.devnull
    assert found["name"] == "a-name"
    assert found["threads"] == 1
    assert found["sigint"] == signal.SIG_DFL, "a Ctrl-C at its start shows the traceback of no script"


# FORK-2
def test_a_child_belongs_to_the_owner_and_leads_a_group(quick: ForkServer) -> None:
    found = description(quick)
    assert found["parent"] == os.getpid()
    assert found["group"] == found["pid"]


def test_a_child_joins_the_group_it_is_told(quick: ForkServer) -> None:
    leader = quick.spawn(f"{CHILDREN}:sleep", {})
    assert os.getpgid(leader.pid) == leader.pid  # at once, so that others can follow
    assert description(quick, group=leader.pid)["group"] == leader.pid
    kill(leader)


def test_children_draw_different_random_numbers(quick: ForkServer) -> None:
    assert len({description(quick)["random"] for _ in range(4)}) == 4


def test_output_goes_where_it_is_told_and_the_code_comes_back(quick: ForkServer) -> None:
    readers, writers = zip(os.pipe(), os.pipe(), strict=True)
    out, err = (readers[0], writers[0]), (readers[1], writers[1])
    spawned = quick.spawn(
        f"{CHILDREN}:echo", {"out": "to stdout", "err": "to stderr", "code": 7}, stdio=[out[1], err[1]]
    )
    for _, writer in (out, err):
        os.close(writer)
    with os.fdopen(out[0]) as stdout, os.fdopen(err[0]) as stderr:
        assert (stdout.read(), stderr.read()) == ("to stdout\n", "to stderr\n")
    assert end(spawned) == 7


def test_an_exception_is_shown_and_ends_with_code_1(capfd: pytest.CaptureFixture[str]) -> None:
    server = ForkServer(preload=(), env={"PYTHONPATH": str(REPOSITORY)})
    server.wait_ready()
    assert end(server.spawn(f"{CHILDREN}:fail", {})) == 1
    assert "ValueError: it fails" in capfd.readouterr().err
    assert description(server)["args"] == {}
    server.close()


def test_a_child_for_a_group_that_is_gone_ends_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    """The rank that asked for its comm process was killed meanwhile."""
    server = ForkServer(preload=(), env={"PYTHONPATH": str(REPOSITORY)})
    server.wait_ready()
    leader = server.spawn(f"{CHILDREN}:sleep", {})
    kill(leader)
    assert end(server.spawn(f"{CHILDREN}:sleep", {}, group=leader.pid)) == 1
    server.close()
    assert capfd.readouterr() == ("", "")


# FORK-5
@pytest.mark.skipif(not can_collapse(), reason="this kernel does not collapse pages on request")
def test_memory_that_was_imported_is_in_huge_pages() -> None:
    server = ForkServer(preload=("tests.integration.holds_memory",), env={"PYTHONPATH": str(REPOSITORY)})
    server.wait_ready()
    huge_kb = [
        int(line.split()[1])
        for line in Path(f"/proc/{server.process.pid}/smaps_rollup").read_text().splitlines()
        if line.startswith("AnonHugePages:")
    ]
    server.close()
    assert sum(huge_kb) >= 8 << 10


# FORK-6
def test_objects_of_a_fork_lie_side_by_side() -> None:
    """But for the ends of pools: one of Python's allocator holds 31 of the largest."""
    server = ForkServer(preload=(HOLES,), env={"PYTHONPATH": str(REPOSITORY)})
    server.wait_ready()
    reading, writing = os.pipe()
    assert end(server.spawn(f"{HOLES}:neighbours", {}, fds=[writing])) == 0
    server.close()
    os.close(writing)
    with open(reading, "rb") as told:
        found = json.loads(told.read())
    assert {size: num for size, num in found.items() if num < 80} == {}


# FORK-7
def test_a_function_that_the_owner_names_is_called_once_and_forks_find_its_code_moved() -> None:
    server = ForkServer(preload=(f"{CALLED}:call", CALLED), env={"PYTHONPATH": str(REPOSITORY)})
    server.wait_ready()
    for _ in range(2):
        reading, writing = os.pipe()
        assert end(server.spawn(f"{CALLED}:tell", {}, fds=[writing])) == 0
        os.close(writing)
        with open(reading, "rb") as told:
            assert json.loads(told.read()) == {"calls": [server.process.pid], "kept": ["not called"]}
    server.close()


@pytest.mark.parametrize(
    ("function", "error"),
    [("fail", "ValueError: it cannot do that here"), ("leave_a_thread", "2 threads are alive")],
)
def test_a_server_does_not_start_if_such_a_function_fails_or_leaves_a_thread(function: str, error: str) -> None:
    server = ForkServer(preload=(f"{CALLED}:{function}",), env={"PYTHONPATH": str(REPOSITORY)})
    with pytest.raises(OperationalError, match=error):
        server.wait_ready()
    server.close()


@pytest.mark.parametrize("allocator", ["pymalloc", "malloc", "debug"])
def test_free_blocks_are_filled_with_little_whatever_allocates(allocator: str) -> None:
    """Where blocks never lie side by side, too: `PYTHONMALLOC` is for valgrind and for debugging."""
    fills = "from elasticgang.process.free_blocks import fill_free_blocks; print(sum(map(len, fill_free_blocks())))"
    environment = {"PYTHONPATH": str(REPOSITORY), "PYTHONMALLOC": allocator}
    done = subprocess.run([sys.executable, "-c", fills], check=True, timeout=60, env=environment, capture_output=True)
    assert 0 < int(done.stdout) < 400_000  # objects


# HUGE-1
@pytest.mark.skipif(not can_collapse(), reason="this kernel does not collapse pages on request")
def test_memory_is_moved_while_a_body_runs_by_a_thread_that_exits_with_it() -> None:
    moves_memory = """
        import os, re
        from elasticgang.process import huge_pages
        def huge_kb():
            return int(re.search(r"AnonHugePages: *(\\d+)", open("/proc/self/smaps_rollup").read())[1])
        with huge_pages.collapsing():
            memory = bytearray(b"1" * (16 << 20))
            while huge_kb() < 8 << 10:
                pass
        assert len(os.listdir("/proc/self/task")) == 1
        for _ in range(50):
            with huge_pages.collapsing():
                pass
            assert len(os.listdir("/proc/self/task")) == 1
    """
    code = textwrap.dedent(moves_memory)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={"PYTHONPATH": str(REPOSITORY)})


# HUGE-2
def test_memory_is_moved_in_pieces_until_the_body_has_ended() -> None:
    """Else a fork server on a busy machine cannot start: the kernel takes many seconds to move all of its memory."""
    moves_a_part = """
        import mmap
        from elasticgang.process import huge_pages
        memory = mmap.mmap(-1, 1 << 30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        looks = []
        def is_over():
            looks.append(None)
            return len(looks) == most
        for most, expected in ((1, 1), (10, 10)):
            looks.clear()
            huge_pages.collapse(is_over)
            assert len(looks) == expected, looks
    """
    code = textwrap.dedent(moves_a_part)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={"PYTHONPATH": str(REPOSITORY)})


def test_a_second_connection_works_by_itself(quick: ForkServer) -> None:
    second = ForkServerClient(quick.connect())
    assert description(second)["parent"] == os.getpid()
    second.close()
    assert description(quick)["parent"] == os.getpid()


@pytest.mark.parametrize("asks_for", ["a process", "a connection"])
def test_a_request_of_a_client_that_is_dead_does_not_end_the_server(quick: ForkServer, asks_for: str) -> None:
    pid, (soft, hard) = quick.process.pid, resource.getrlimit(resource.RLIMIT_NOFILE)
    client = quick.connect()
    os.kill(pid, signal.SIGSTOP)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with client, ours, theirs:
        if asks_for == "a connection":
            socket.send_fds(client, [b'{"connect": true}'], [theirs.fileno()])
        else:
            client.send(json.dumps({"target": f"{CHILDREN}:sleep", "args": {}, "group": 0}).encode())
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))  # the answer is an error
    os.kill(pid, signal.SIGCONT)
    for _ in range(2):  # after the second, whichever client was first in the first turn
        with contextlib.suppress(OperationalError):
            end(quick.spawn(f"{CHILDREN}:echo", {"out": "", "err": "", "code": 0}))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    assert description(quick)["parent"] == os.getpid()


# FORK-8
@pytest.mark.parametrize("num_bytes", [60_000, 70_000, 140_000, 4 << 20])
def test_a_request_may_be_longer_than_a_message(quick: ForkServer, num_bytes: int, tmp_path: Path) -> None:
    text = "x" * num_bytes
    with (tmp_path / "out").open("w+") as out:
        spawned = quick.spawn(f"{CHILDREN}:echo", {"out": text, "err": "", "code": 3}, stdio=[out.fileno()] * 2)
        assert end(spawned) == 3
        assert (tmp_path / "out").read_text().strip() == text
    assert description(quick)["parent"] == os.getpid()


def test_processes_go_on_without_the_server_and_none_starts(quick: ForkServer) -> None:
    spawned = quick.spawn(f"{CHILDREN}:sleep", {})
    quick.process.kill()
    quick.process.wait()
    with pytest.raises(OperationalError, match="fork server"):
        quick.spawn(f"{CHILDREN}:sleep", {})
    with pytest.raises(OperationalError, match="fork server has died"):
        quick.connect()
    assert wait_dead([spawned.pidfd], 0.0) == [spawned.pidfd]
    kill(spawned)


def test_the_server_forgets_exited_processes(quick: ForkServer) -> None:
    server = psutil.Process(quick.process.pid)
    before = server.num_fds()
    for _ in range(30):
        assert end(quick.spawn(f"{CHILDREN}:echo", {"out": "", "err": "", "code": 0}, stdio=[1, 1])) == 0
    wait_until(lambda: server.num_fds() == before, "the descriptors of the dead are closed")
    assert not server.children()


# FORK-1
def test_a_server_that_has_threads_refuses_to_fork() -> None:
    server = ForkServer(preload=("tests.integration.has_a_thread",), env={"PYTHONPATH": str(REPOSITORY)})
    with pytest.raises(OperationalError, match="2 threads are alive after the imports"):
        server.wait_ready()
    server.close()


# FORK-1
def test_a_server_that_has_cuda_refuses_to_fork_and_names_the_module() -> None:
    preload = ("torch", "tests.integration.has_cuda", "tests.integration.has_a_thread")
    server = ForkServer(preload=preload, env={"PYTHONPATH": str(REPOSITORY)})
    with pytest.raises(OperationalError, match=r"import of tests\.integration\.has_cuda has initialized CUDA"):
        server.wait_ready()
    server.close()


def test_a_server_that_cannot_import_says_what() -> None:
    server = ForkServer(preload=("tests.integration.no_such_module",))
    with pytest.raises(OperationalError, match=r"No module named 'tests\.integration\.no_such_module'"):
        server.wait_ready()
    server.close()


def test_a_server_that_dies_while_it_starts_is_noticed() -> None:
    server = ForkServer(preload=("tests.integration.imports_for_ever",), env={"PYTHONPATH": str(REPOSITORY)})
    server.process.kill()
    with pytest.raises(OperationalError, match="exited while it was starting"):
        server.wait_ready()
    server.close()


@contextlib.contextmanager
def owner(function: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process that owns a fork server, and what it says that it has started."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"from {CHILDREN} import {function}; {function}()"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert process.stdout is not None
    try:
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_all_processes_end_with_the_owner(number: signal.Signals) -> None:
    """FORK-3: processes that ignore signals, and their busy children that hold every descriptor."""
    with owner("own") as (process, pids):
        assert len(pids) == 1 + 2 * 3
        pidfds = [os.pidfd_open(pid) for pid in pids]
        assert len(wait_dead(pidfds, 0.0)) == len(pidfds)
        process.send_signal(number)
        assert wait_dead(pidfds, GUARD_S) == []
        for pidfd in pidfds:
            os.close(pidfd)


def test_a_server_that_is_still_importing_ends_with_its_owner() -> None:
    with owner("own_importing") as (process, pids):
        wait_until(lambda: "eg-forkserver" in psutil.Process(pids[0]).name(), "the server has begun to import")
        pidfds = [os.pidfd_open(pid) for pid in pids]
        process.kill()
        assert wait_dead(pidfds, GUARD_S) == []
        os.close(pidfds[0])


def test_a_pidfd_tells_of_the_end(quick: ForkServer) -> None:
    spawned = quick.spawn(f"{CHILDREN}:sleep", {})
    poll = select.poll()
    poll.register(spawned.pidfd, select.POLLIN)
    assert not poll.poll(0)
    kill(spawned)
