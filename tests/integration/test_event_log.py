"""An event log whose disk takes nothing delays nobody, and says what it has dropped (EVENTLOG-1, EVENTLOG-2). One agent
at a time writes to a directory (LOGLOCK-1)."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elasticgang.errors import OperationalError
from elasticgang.observe import events, log_lock
from elasticgang.observe.events import EventLog
from tests.chaos.training_scripts import training
from tests.support import DEADLINE_S, PROMPT_S, Job, wait_until

TEXT = "x" * 1000
_PIPE_BYTES = 4096


class Pipe:
    """In place of the file of events: a pipe that is read by hand."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "events.jsonl"
        os.mkfifo(self.path)
        self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)

    def read(self) -> bytes:
        """What there is."""
        try:
            return os.read(self._fd, 1 << 20)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        os.close(self._fd)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a log waits for its thread, however late that gets a core."""
    monkeypatch.setattr(events, "FLUSH_S", PROMPT_S)


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    made = Pipe(tmp_path)
    yield made
    made.close()


def fill(log: EventLog, num: int) -> None:
    for number in range(num):
        log.write("warned", number=number, text=TEXT)


def read_all(pipe: Pipe, is_over: Callable[[list[int]], bool]) -> list[int]:
    """The numbers of the events that are read until `is_over` of these."""
    data = b""

    def numbers() -> list[int]:
        nonlocal data
        data += pipe.read()
        return [json.loads(line)["number"] for line in data[: data.rfind(b"\n") + 1].splitlines()]

    return wait_until(lambda: found if is_over(found := numbers()) else None, "the events")


def dropped(line: str) -> int:
    return int(line.rpartition("; ")[2].split()[0])


# EVENTLOG-1
def test_a_blocked_disk_delays_nobody_and_drops_what_is_too_much(
    pipe: Pipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_QUEUED_BYTES", 1 << 20)
    said: list[str] = []
    log = EventLog(str(tmp_path), said.append)
    fill(log, 3000)  # of which the pipe takes 64, and the queue 1000
    assert said == [f"elasticgang: events are dropped: the disk of {pipe.path} takes none"]
    kept = read_all(pipe, lambda found: len(said) == 2 and len(found) + dropped(said[1]) == 3000)
    assert said[1].startswith(f"elasticgang: the disk of {pipe.path} takes events again; ")
    assert kept == sorted(set(kept))
    assert 900 < len(kept) < 1200
    fill(log, 1)
    assert read_all(pipe, bool) == [0]
    log.close()
    assert len(said) == 2


# EVENTLOG-2
def test_what_is_queued_is_written_at_the_end(tmp_path: Path) -> None:
    said: list[str] = []
    log = EventLog(str(tmp_path), said.append)
    fill(log, 1000)
    log.write_file("incident-2.json", "{}")
    log.close()
    log.write("warned")
    log.close()
    assert [json.loads(line)["number"] for line in (tmp_path / "events.jsonl").read_text().splitlines()] == [
        *range(1000)
    ]
    assert (tmp_path / "incident-2.json").read_text() == "{}"
    assert said == []


# EVENTLOG-2
# EVENTLOG-6
# EVENTLOG-2
def test_the_end_tries_once_more_to_make_a_file_that_could_not_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "RETRY_S", DEADLINE_S)
    directory, said = tmp_path / "log", list[str]()
    log = EventLog(str(directory), said.append)
    log.write("started")
    wait_until(lambda: (directory / "events.jsonl").stat().st_size > 0, "the first event")
    directory.rename(tmp_path / "former")
    log.write("spawned")
    wait_until(lambda: said, "a warning")
    assert "cannot be made again yet" in said[0]
    directory.mkdir()
    log.close()
    lines = (directory / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["started", "spawned"]


def test_files_that_cannot_be_written_are_told_of_once_and_counted(tmp_path: Path) -> None:
    told: list[str] = []
    log = EventLog(str(tmp_path), told.append)
    for number in (3, 4, 6):
        (tmp_path / f"incident-{number}.json").mkdir()
    for number in range(2, 8):
        log.write_file(f"incident-{number}.json", "{}")
    log.close()
    first, again, second, last = told
    assert first.startswith(f"elasticgang: warning: {tmp_path}/incident-3.json cannot be written: ")
    assert again == f"elasticgang: {tmp_path}/incident-5.json is written; files before it that were not: 2"
    assert second.startswith(f"elasticgang: warning: {tmp_path}/incident-6.json cannot be written: ")
    assert last == f"elasticgang: {tmp_path}/incident-7.json is written; files before it that were not: 1"
    kept = sorted(path.name for path in tmp_path.iterdir() if path.is_file())
    assert kept == ["events.jsonl", "events.lock", *(f"incident-{number}.json" for number in (2, 5, 7))]


def test_the_end_does_not_wait_for_a_blocked_disk(pipe: Pipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "FLUSH_S", 0.05)
    said: list[str] = []
    log = EventLog(str(tmp_path), said.append)
    fill(log, 500)
    log.close()
    written = read_all(pipe, lambda found: len(found) == 500)  # the process might go on
    assert written == list(range(500))
    (line,) = said
    assert line.endswith(f"events were not written to {pipe.path} within 0.05 s")
    assert 400 < int(line.split()[1]) <= 500


WRITER = """
import os, sys
from elasticgang.observe.events import EventLog
log = EventLog(sys.argv[1], print)
if os.fork() == 0:  # as the fork server does: what it inherits must not keep the lock
    os.close(1), os.read(0, 1), os._exit(0)
print("writes", flush=True)
sys.stdin.read(1)
"""


@contextmanager
def writer(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that writes events to `directory`."""
    command = [sys.executable, "-c", WRITER, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writes\n"
        yield process
        process.kill()


# LOGLOCK-1
def test_a_directory_is_one_agents_until_that_has_ended(tmp_path: Path) -> None:
    refusal = f"another agent writes its events to --log-dir {tmp_path}: each agent needs a directory of its own"
    assert log_lock.holder(str(tmp_path)) is None
    with writer(tmp_path) as first:
        for _ in range(2):
            with pytest.raises(OperationalError, match=re.escape(refusal)):
                EventLog(str(tmp_path), print)
            assert log_lock.holder(str(tmp_path)) == first.pid
        first.kill()  # its fork, which has inherited the descriptor, lives on
        first.wait()
        assert log_lock.holder(str(tmp_path)) is None
        with writer(tmp_path) as second:
            assert log_lock.holder(str(tmp_path)) == second.pid


# LOGLOCK-2
def test_a_reader_keeps_no_agent_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lockf(fd: int, operation: int) -> None:
        pytest.fail("a lock is taken")

    with writer(tmp_path) as process:
        monkeypatch.setattr(fcntl, "lockf", lockf)
        assert log_lock.holder(str(tmp_path)) == process.pid


# LOGLOCK-3
def test_events_are_written_where_there_are_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lockf(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", lockf)
    log = EventLog(str(tmp_path), print)
    fill(log, 1)
    log.close()
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) == 1
    assert log_lock.holder(str(tmp_path)) is None


# LOGLOCK-1
@pytest.mark.timeout(240)
def test_a_second_agent_with_the_same_directory_is_refused_before_its_job_starts(tmp_path: Path) -> None:
    with writer(tmp_path), Job(tmp_path, training(tmp_path, steps=3)) as job:
        assert job.wait() == 2
        assert "each agent needs a directory of its own" in job.stderr
    assert (tmp_path / "events.jsonl").read_bytes() == b""


# EVENTLOG-1
@pytest.mark.timeout(240)
def test_a_job_goes_on_while_its_log_takes_nothing(tmp_path: Path) -> None:
    body = """
                if rank == 1 and step.index == 5 and not (here / "killed").exists():
                    (here / "killed").touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                while step.index == 20 and not (manager.num_members == 2 or manager.join_noticed or manager.poisoned):
                    time.sleep(0.01)  # the job does not end before the rank is back
    """
    pipe = Pipe(tmp_path)
    writer = os.open(pipe.path, os.O_WRONLY)
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    os.write(writer, bytes(_PIPE_BYTES))  # the first event blocks
    os.close(writer)
    with Job(tmp_path, training(tmp_path, steps=40, body=body), ranks=2) as job:
        assert job.wait() == 0, job.stderr
    assert "rank 1" in job.stderr
    (line,) = (line for line in job.stderr.splitlines() if "events were not written" in line)
    assert int(line.split()[1]) > 10
    pipe.close()
