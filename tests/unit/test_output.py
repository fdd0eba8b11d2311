"""What passes the ranks' output on, and the log of events: neither costs the job whatever there is to write."""

from __future__ import annotations

import io
import json
import os
import resource
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from elasticgang.errors import OperationalError
from elasticgang.launch.output import PrefixedOutput
from elasticgang.observe.events import EventLog
from tests.support import wait_until


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


def test_a_full_disk_ends_the_log_and_nothing_else(tmp_path: Path) -> None:
    said: list[str] = []
    log = EventLog(str(tmp_path), said.append)
    log.write("first", number=1)
    file = tmp_path / "events.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size, hard))
    try:
        log.write("second")
        log.write("third")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert said == [f"elasticgang: stopped writing events to {file}: File too large"]
    assert [json.loads(line)["event"] for line in file.read_text().splitlines()] == ["first"]


def test_a_log_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OperationalError, match=r"cannot write events to --log-dir .*: Not a directory"):
        EventLog(str(tmp_path / "file" / "below"), print)
