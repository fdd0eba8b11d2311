"""What passes the ranks' output on, and the log of events: neither costs the job whatever there is to write."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elasticgang.errors import OperationalError
from elasticgang.launch.output import PrefixedOutput
from elasticgang.observe import events
from elasticgang.observe.events import EventLog
from tests.support import wait_until

GUARD_S = 30.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a log waits for its thread, however late that gets a core."""
    monkeypatch.setattr(events, "FLUSH_S", GUARD_S)


class Screen(io.BytesIO):
    def holds(self, text: bytes) -> bool:
        return text in self.getvalue()


@pytest.fixture
def screen() -> Screen:
    return Screen()


@pytest.fixture
def output(screen: Screen) -> Iterator[PrefixedOutput]:
    made = PrefixedOutput(screen, screen)
    yield made
    made.close()


def test_what_cannot_be_encoded_is_written_escaped(output: PrefixedOutput, screen: Screen) -> None:
    output.write_line("file \udcff is bad")
    output.write_line("after it")
    wait_until(lambda: screen.holds(b"file \\udcff is bad\nafter it\n"), "both lines")


def test_the_last_lines_of_each_process_are_kept(output: PrefixedOutput) -> None:
    tails = []
    lines = [b"line %d" % number for number in range(60)]
    for on_stdout, on_stderr in ((b"first\n", b"error\n"), (b"\n".join(lines) + b"\n" + b"\xff" * 3000, b"")):
        stdout, stderr = output.open(0)
        tails.append(output.tail(0))
        with open(stdout, "wb", buffering=0) as out, open(stderr, "wb", buffering=0) as err:
            out.write(on_stdout)
            err.write(on_stderr)
    cut = "\\xff" * 2048
    wait_until(lambda: tails[1]()[-1:] == [cut], "the last line, which is cut")
    assert tails[1]() == [*(line.decode() for line in lines[-49:]), cut]
    wait_until(lambda: sorted(tails[0]()) == ["error", "first"], "the lines of the first process")


# OUTPUT-1
@pytest.mark.parametrize(
    ("writes", "lines"),
    [
        ([b"\r0/9", b"\r1/9\r2/9", b"\n"], [b"0/9", b"2/9"]),
        ([b"\r0/9", b"\n", b"after\n"], [b"0/9", b"after"]),
        ([b"0/9\r", b"1/9\r"], [b"0/9", b"1/9"]),
        ([b"ends by both\r\n", b"\n"], [b"ends by both", b""]),
        ([b"waits for its end"], [b"waits for its end"]),
    ],
)
def test_a_progress_bar_is_shown_before_its_line_ends(
    output: PrefixedOutput, screen: Screen, writes: list[bytes], lines: list[bytes]
) -> None:
    stdout, stderr = output.open(0)
    os.close(stderr)
    first = b"[rank 0 step 0] " + lines[0] + b"\n"
    with open(stdout, "wb", buffering=0) as out:
        out.write(writes[0])
        if b"\r" in writes[0]:
            wait_until(lambda: screen.holds(first), "the first state, at once")
        for data in writes[1:]:
            out.write(data)
    whole = b"".join(b"[rank 0 step 0] " + line + b"\n" for line in lines)
    wait_until(lambda: screen.getvalue() == whole, "all lines")


class HeldScreen(Screen):
    """Its first write waits."""

    def __init__(self) -> None:
        super().__init__()
        self.is_held, self.let_go = threading.Event(), threading.Event()

    def write(self, data: Any) -> int:
        self.is_held.set()
        assert self.let_go.wait(GUARD_S)
        return super().write(data)


# RANK-2
def test_lines_of_a_rank_are_kept_when_it_is_said_that_they_are_read() -> None:
    screen, is_read = HeldScreen(), threading.Event()
    output = PrefixedOutput(screen, screen)
    stdout, stderr = output.open(0)
    tail, lines = output.tail(0), []

    def on_read() -> None:
        lines.extend(tail())
        is_read.set()

    others, others_stderr = output.open(1)
    with (
        open(stdout, "wb"),
        open(others, "wb"),
        open(stderr, "wb", buffering=0) as err,
        open(others_stderr, "wb", buffering=0) as others_err,
    ):
        others_err.write(b"of another rank\n")
        assert screen.is_held.wait(GUARD_S)  # the thread has looked for output, and not found the next
        err.write(b"last words\n")
        output.when_read(0, on_read)
        screen.let_go.set()
        assert is_read.wait(GUARD_S)
        assert lines == ["last words"]
    output.close()


# OUTPUT-2
def test_no_line_is_lost_to_a_slow_reader_of_a_stdout_that_another_process_made_non_blocking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    lines = [f"line {number} " + "x" * 200 for number in range(1000)]  # three times what a pipe takes
    with open(reader, "rb") as read, open(writer, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        output = PrefixedOutput()
        monkeypatch.undo()
        for line in lines:
            output.write_line(line)
        assert [read.readline().decode() for _ in lines] == [f"{line}\n" for line in lines]
        output.close()


class FullScreen(Screen):
    """Its disk is full until `has_room`."""

    def __init__(self) -> None:
        super().__init__()
        self.num_refused, self.has_room = 0, False

    def write(self, data: Any) -> int:
        if not self.has_room:
            self.num_refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


# OUTPUT-2
def test_lost_lines_are_told_once_there_is_room() -> None:
    screen = FullScreen()
    output = PrefixedOutput(screen, screen)
    output.write_line("lost")
    wait_until(lambda: screen.num_refused == 1, "a write that fails")
    output.write_line("lost too")
    wait_until(lambda: screen.num_refused == 2, "another one")
    screen.has_room = True
    output.write_line("after")
    output.write_line("the end")
    warning = b"elasticgang: warning: lines before this one were lost: No space left on device"
    wait_until(lambda: screen.getvalue() == b"\n" + warning + b"\nafter\nthe end\n", "what follows")
    output.close()


def test_an_error_is_told_once_and_the_next_line_passes(output: PrefixedOutput, screen: Screen) -> None:
    def step() -> int:
        raise RuntimeError("no step")

    stdout, stderr = output.open(0)
    with open(stdout, "wb", buffering=0) as out:
        os.close(stderr)
        output.track_steps(0, step)
        for line in (b"[rank 0 step 7] passed\n", b"[rank 0 step 7] passed too\n"):
            out.write(b"lost\n")
            wait_until(lambda: screen.holds(b"RuntimeError: no step"), "the error")
            output.track_steps(0, lambda: 7)
            out.write(line.partition(b"] ")[2])
            wait_until(partial(screen.holds, line), "the next line")
            output.track_steps(0, step)
    assert screen.getvalue().count(b"Traceback") == 1


@contextlib.contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file can become longer than that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# EVENTLOG-5
@pytest.mark.parametrize("num_bytes", [0, 10])
def test_a_full_disk_makes_events_wait(num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`num_bytes` of the first line have room."""
    monkeypatch.setattr(events, "RETRY_S", 0.01)
    said: list[str] = []
    log, file = log_of_one_event(tmp_path, said)
    warning = f"elasticgang: warning: events wait, because they cannot be written to {file}: File too large"
    with full_disk(file.stat().st_size + num_bytes):
        log.write("spawned")
        log.write("exited")
        wait_until(lambda: said == [warning], "the warning")
        assert names_in(file) == ["started"]
    wait_until(lambda: names_in(file) == ["started", "spawned", "exited"], "the events that have waited")
    log.write("signal")
    log.close()
    assert names_in(file) == ["started", "spawned", "exited", "signal"]
    assert said == [warning, f"elasticgang: events are written to {file} again"]


# EVENTLOG-2
def test_the_end_does_not_wait_for_a_full_disk(tmp_path: Path) -> None:
    said: list[str] = []
    log, file = log_of_one_event(tmp_path, said)
    with full_disk(file.stat().st_size):
        log.write("spawned")
        log.write("exited")
        log.close()
    assert said[0].endswith(": File too large")
    assert said[1:] == [f"elasticgang: 2 events were not written to {file} within {GUARD_S:g} s"]
    assert names_in(file) == ["started"]


# EVENTLOG-4
def test_a_line_of_which_a_part_was_written_is_whole_after_the_mark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "RETRY_S", 0.01)
    said: list[str] = []
    log, file = log_of_one_event(tmp_path, said)
    with full_disk(file.stat().st_size + 10):
        log.write("spawned")
        wait_until(lambda: said, "the warning")
        os.truncate(file, 0)
    wait_until(lambda: names_in(file) == ["truncated", "spawned"], "the rest")
    log.close()


def names_in(file: Path) -> list[str]:
    return [json.loads(line)["event"] for line in file.read_text().splitlines() if line.endswith("}")]


def log_of_one_event(directory: Path, said: list[str]) -> tuple[EventLog, Path]:
    log, file = EventLog(str(directory), said.append), directory / "events.jsonl"
    log.write("started", number=1)
    wait_until(file.read_text, "the first event")
    return log, file


def rename(file: Path) -> None:
    file.rename(file.with_suffix(".1"))


def replace(file: Path) -> None:
    """As logrotate does with `create`."""
    rename(file)
    file.touch()


# EVENTLOG-3
@pytest.mark.parametrize("displace", [rename, Path.unlink, replace])
def test_a_log_that_was_renamed_or_deleted_is_made_again_with_all_events(
    displace: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    log, file = log_of_one_event(tmp_path, said)
    displace(file)
    log.write("spawned")
    log.close()
    warning = f"elasticgang: warning: {file} was renamed, deleted or replaced, and is made again, with all events"
    assert said == [warning]
    assert names_in(file) == ["started", "spawned"]
    monkeypatch.setattr(events, "LOOK_S", 0.01)
    log = EventLog(str(tmp_path), said.append)
    displace(file)  # no event follows
    wait_until(lambda: file.exists() and names_in(file) == ["started", "spawned"], "the file again")
    log.write("exited")
    log.close()
    assert names_in(file) == ["started", "spawned", "exited"]
    assert said == [warning, warning]


# EVENTLOG-3
def test_a_log_that_cannot_be_made_again_goes_on_in_the_old_file(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "log").mkdir()
    log, file = log_of_one_event(tmp_path / "log", said)
    (tmp_path / "log").rename(tmp_path / "moved")
    log.write("spawned")
    log.write("exited")
    log.close()
    what = "was renamed, deleted or replaced, and cannot be made again yet: No such file or directory"
    assert said == [f"elasticgang: warning: {file} {what}"]
    assert names_in(tmp_path / "moved" / "events.jsonl") == ["started", "spawned", "exited"]


# EVENTLOG-3
def test_a_log_whose_directory_is_there_again_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "RETRY_S", 0.01)
    monkeypatch.setattr(events, "LOOK_S", 0.01)
    said: list[str] = []
    (tmp_path / "log").mkdir()
    log, file = log_of_one_event(tmp_path / "log", said)
    (tmp_path / "log").rename(tmp_path / "moved")
    log.write("spawned")
    wait_until(lambda: said, "the warning")
    (tmp_path / "log").mkdir()
    wait_until(lambda: file.exists() and names_in(file) == ["started", "spawned"], "the file again")
    log.write("exited")
    log.close()
    assert names_in(file) == ["started", "spawned", "exited"]
    assert [line.rpartition(", and ")[2] for line in said] == [
        "cannot be made again yet: No such file or directory",
        "is made again, with all events",
    ]


# EVENTLOG-4
@pytest.mark.parametrize("num_bytes", [0, 10])
def test_a_log_that_was_truncated_says_so(num_bytes: int, tmp_path: Path) -> None:
    said: list[str] = []
    log, file = log_of_one_event(tmp_path, said)
    os.truncate(file, num_bytes)
    log.write("spawned")
    log.write("exited")
    log.close()
    text = "was truncated: `elasticgang status`, the page and the metrics do not show this job any more"
    assert said == [f"elasticgang: warning: {file} {text}"]
    assert names_in(file) == ["truncated", "spawned", "exited"]


def test_a_directory_that_nobody_has_given_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_BYTES", 1 << 20)
    said: list[str] = []
    log = EventLog(str(tmp_path), said.append, is_bounded=True)
    for number in range(events.MAX_FILES + 2):
        log.write_file(f"incident-{number}.json", "{}")
    for _ in range(20):
        log.write("warned", text="x" * (1 << 16))
    log.close()
    file = tmp_path / "events.jsonl"
    assert said == [f"elasticgang: stopped writing events to {file}: it has 1 MiB; with --log-dir there is no limit"]
    assert len(file.read_text().splitlines()) == 15
    kept = {path.name for path in tmp_path.glob("incident-*")}
    assert kept == {f"incident-{number}.json" for number in range(2, events.MAX_FILES + 2)}


def test_a_log_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OperationalError, match=r"cannot write events to --log-dir .*: Not a directory"):
        EventLog(str(tmp_path / "file" / "below"), print)


def pipes() -> set[str]:
    """What this process has open. Threads of other tests may open and close something else meanwhile."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the list itself
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {link for link in found if link.startswith("pipe:")}


def test_a_closed_output_keeps_no_descriptor_and_takes_further_lines(screen: Screen) -> None:
    before = pipes()
    made = PrefixedOutput(screen, screen)
    for number in made.open(0):
        os.close(number)
    own = pipes() - before
    assert own
    made.close()
    wait_until(lambda: not own & pipes(), "the end of its pipes", GUARD_S)
    made.write_line("after the end")
    made.close()
