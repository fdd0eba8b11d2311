"""The event file as its readers see it, whatever happens to it."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from elasticgang.observe import event_file
from elasticgang.observe.event_file import LineReader, parse_event
from elasticgang.watch.reader import JobReader
from tests.unit.test_summary import RUNS, STARTED, event, generation


def write(path: Path, events: Iterable[dict[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(each) + "\n" for each in events)


def is_alive() -> bool:
    return True


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def test_lines_are_read_once_and_when_they_are_complete(path: Path) -> None:
    reader = LineReader(path)
    assert list(reader.read()) == []
    path.write_bytes(b"one\ntwo\nthr")
    assert list(reader.read()) == [b"one\n", b"two\n"]
    assert reader.has_partial_line
    assert list(reader.read()) == []
    with path.open("ab") as file:
        file.write(b"ee\n")
    assert list(reader.read()) == [b"three\n"]
    assert not reader.has_partial_line
    assert list(LineReader(path, 4).read()) == [b"two\n", b"three\n"]


def truncate(path: Path) -> None:
    path.write_bytes(b"")


def truncate_and_go_on(path: Path) -> None:
    num_bytes = path.stat().st_size
    path.write_bytes(b"x" * num_bytes + b"\nmore\n")


def replace(path: Path) -> None:
    path.rename(path.with_suffix(".1"))
    path.write_bytes(b"another file\n" * 10)


# EVENTFILE-1
@pytest.mark.parametrize("damage", [truncate, truncate_and_go_on, replace])
@pytest.mark.parametrize("offset", [0, 4])
def test_a_file_that_is_no_longer_what_was_read_is_not_read_on(
    damage: Callable[[Path], None], offset: int, path: Path
) -> None:
    path.write_bytes(b"one\ntwo\nthree\n")
    reader = LineReader(path, offset)
    assert list(reader.read())[-1] == b"three\n"
    damage(path)
    for _ in range(2):
        with pytest.raises(OSError, match="it was truncated or replaced"):
            list(reader.read())


# EVENTFILE-1
def test_a_file_that_is_shorter_than_where_to_begin_is_not_read(path: Path) -> None:
    path.write_bytes(b"one\n")
    with pytest.raises(OSError, match="it was truncated or replaced"):
        list(LineReader(path, 5).read())


# EVENTFILE-1
def test_a_whole_copy_of_the_file_is_read_on(path: Path) -> None:
    path.write_bytes(b"one\ntwo\n")
    reader = LineReader(path)
    assert len(list(reader.read())) == 2
    path.rename(path.with_suffix(".1"))
    assert list(reader.read()) == [], "it is made again soon"
    shutil.copy(path.with_suffix(".1"), path)
    with path.open("ab") as file:
        file.write(b"three\n")
    assert list(reader.read()) == [b"three\n"]


def test_a_file_that_stays_away_cannot_be_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_file, "MISSING_S", 0.0)
    reader = LineReader(path)
    assert list(reader.read()) == [], "it was never there"
    path.write_bytes(b"one\n")
    assert list(reader.read()) == [b"one\n"]
    path.unlink()
    with pytest.raises(FileNotFoundError):
        list(reader.read())


# EVENTFILE-2
def test_a_large_file_takes_little_memory(path: Path) -> None:
    line = b"x" * 1000 + b"\n"
    path.write_bytes(line * 32_000)
    tracemalloc.start()
    try:
        assert sum(map(len, LineReader(path).read())) == 32_000 * len(line)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[1]",
        b'{"event": 3, "t": 1}',
        b'{"event": "hung"}',
        b'{"event": "hung", "t": "1"}',
        b'{"event": "hung", "t": NaN}',
        b'{"event": "hung", "t": 1, "wall": null}',
        b'{"event": "hung", "t": 1, "wall": 1e30}',
        b"[" * 100_000,
        b"\xff",
    ],
)
def test_what_is_no_event_is_refused(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"Expecting value|it has no name|it has no time|nested too deeply|decode"):
        parse_event(line)
    assert parse_event(b'{"event": "hung", "t": 1}')["event"] == "hung"


# READER-2
def test_nothing_is_reported_of_a_job_whose_events_are_incomplete(path: Path) -> None:
    write(path, RUNS)
    reader = JobReader(path, is_alive, pytest.fail)
    assert reader.read()["generation"] == 1
    os.truncate(path, 0)
    write(path, [event(20.0, "truncated"), generation(20.1, 2, 8)])
    for each in (reader, JobReader(path, is_alive, pytest.fail)):
        with pytest.raises(OSError, match="it was truncated"):
            each.read()
    write(path, [STARTED[0] | {"t": 21.0, "wall": 1_000_021.0}])
    reader = JobReader(path, is_alive, pytest.fail)
    with pytest.raises(OSError, match="it was truncated"):
        reader.read()  # the agent has rejoined
    write(path, [{**each, "t": each["t"] + 60, "wall": each["wall"] + 60} for each in RUNS[1:]])
    write(path, [STARTED[0] | {"t": 90.0, "wall": 1_000_090.0, "monotonic": 88.0, "pid": 8, "job": "next"}])
    assert reader.read()["job"] == "next"


def test_events_of_another_version_are_refused_with_the_reason(path: Path) -> None:
    seats = [{"agent": "h-1", "seats": [[0, 0, "active"]]}]
    write(path, [*STARTED, {**generation(12.0, 1, 0), "seats": seats}])
    with pytest.raises(OSError, match="it has an event of another version: KeyError\\('host'\\)"):
        JobReader(path, is_alive, pytest.fail).read()
