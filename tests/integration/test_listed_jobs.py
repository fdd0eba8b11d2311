"""Which jobs run on this host. The agents here are processes that list themselves and end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elasticgang.environment import RUN_DIR
from elasticgang.errors import OperationalError
from elasticgang.launch.cli import main
from elasticgang.watch import registry
from elasticgang.watch.reader import JobReader
from tests.support import DEADLINE_S, Command
from tests.unit.test_summary import STARTED, generation

AGENT = """
import os, sys
from elasticgang.watch import registry
with registry.listed(sys.argv[1], *sys.argv[2:] or [None]) as log_dir:
    if os.fork() == 0:  # as the fork server does: what it inherits must not keep the job alive
        os.close(1), os.read(0, 1), os._exit(0)
    print(log_dir, flush=True)
    sys.stdin.read(1)
"""


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(RUN_DIR, str(tmp_path / "run"))
    return tmp_path / "run"


@contextmanager
def agent(job: str, *log_dir: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    command = [sys.executable, "-c", AGENT, job, *log_dir]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def alive(what: str | None = None) -> list[tuple[Path, bool | None]]:
    return [(path, is_alive()) for path, is_alive in registry.find(what)]


def write_events(log_dir: Path, cause: str) -> None:
    """Of a job that has changed to generation 2."""
    log_dir.mkdir(parents=True, exist_ok=True)
    event = {"t": 1.0, "wall": 1.0, "event": "generation_change", "generation": 2, "cause": cause, "left": ["a/0/b"]}
    (log_dir / registry.EVENTS).write_text(json.dumps(event) + "\n")


def test_the_events_of_a_job_are_found_without_its_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*arguments: str) -> tuple[int, str, str]:
        code = main([*arguments])
        return code, *capsys.readouterr()

    assert said("explain")[0] == said("events")[0] == 2
    assert "name a JOB" in said("explain")[2]
    with agent("one") as (_, first), agent("12", str(tmp_path / "log")) as (second_process, second):
        write_events(first, "the first")
        assert "the first" in said("explain")[1], "the second has no events yet"
        write_events(second, "the second")
        for named in ((), ("2",), ("12",), ("12", "2"), (str(second), "2")):
            code, out, error = said("explain", *named)
            assert (code, "the second" in out) == (0, True), named
            assert (str(second) in error) == (named in ((), ("2",))), "which one, if it was not named"
        assert "the first" in said("explain", "one")[1]
        assert "the second" in said("events", "--event", "generation_change")[1]
        code, _, error = said("explain", "7")
        assert (code, "there is no generation change 7" in error) == (2, True)
        second_process.kill()
        second_process.wait()
        assert "the first" in said("explain")[1], "of those that run"
        assert "the second" in said("explain", "12")[1]
    assert "the second" in said("explain")[1], "none runs: the one that began last"
    assert said("explain", "nosuch")[0] == 2


def test_an_agent_that_was_killed_is_told_to_have_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(job: str) -> str:
        assert main(["explain", job]) == 0
        return capsys.readouterr().out

    with agent("one", str(tmp_path / "log")) as (process, log_dir):
        write_events(log_dir, "a cause")
        assert "the agent ended without a word" not in said("one")
        process.kill()
        process.wait()
        for named in ("one", str(log_dir)):
            assert said(named).endswith("the agent ended without a word: it was killed, or its host went down\n")
    write_events(tmp_path / "copy", "a cause")
    assert "the agent ended without a word" not in said(str(tmp_path / "copy")), "nobody knows"


def test_a_job_whose_log_directory_is_a_file_is_not_listed(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("no directory")
    (tmp_path / "script.py").touch()
    run = [sys.executable, "-m", "elasticgang", "run", "--log-dir", str(tmp_path / "log"), str(tmp_path / "script.py")]
    with Command(tmp_path / "out", run, preloaded=True) as job:
        assert job.wait() == 2, job.stderr
        assert "cannot write events to --log-dir" in job.stderr
    assert list((tmp_path / "run").glob("*.agent.json")) == []


def test_events_that_cannot_be_read_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(job: str) -> tuple[int, str]:
        code = main(["status", job])
        return code, capsys.readouterr().err

    (tmp_path / "log").write_text("no directory")
    with agent("one", str(tmp_path / "log")):
        assert said("one") == (0, ""), "it has no events yet"
    (tmp_path / "log").unlink()
    (tmp_path / "log" / registry.EVENTS).mkdir(parents=True)  # as a file that may not be read, also for root
    path = tmp_path / "log" / registry.EVENTS
    assert said("one") == (1, f"elasticgang: error: {path} cannot be read: Is a directory\n")


def test_a_job_that_cannot_be_read_hides_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "log" / registry.EVENTS
    with agent("one", str(tmp_path / "log")), agent("two"):
        path.mkdir(parents=True)
        assert main(["status", "--json"]) == 0
        out, error = capsys.readouterr()
        assert error == f"elasticgang: error: {path} cannot be read: Is a directory\n"
        (line,) = out.splitlines()
        assert json.loads(line)["state"] == "starting"


# LISTED-1
def test_a_job_is_listed_while_its_agent_lives(run_dir: Path, tmp_path: Path) -> None:
    assert alive() == []
    with agent("one") as (first, own), agent("two", str(tmp_path / "log")) as (_, given):
        assert own.parent == run_dir
        assert given == tmp_path / "log"
        assert alive() == [(own / "events.jsonl", True), (given / "events.jsonl", True)]
        assert alive("two") == alive(str(given)) == [(given / "events.jsonl", True)]
        first.kill()  # its fork, which has inherited the file, lives on
        first.wait()
        assert alive() == [(given / "events.jsonl", True)]
        assert alive("one") == [(own / "events.jsonl", False)]
    assert alive() == []
    assert alive("nobody") == []


def test_an_agent_that_runs_is_newer_than_one_of_a_clock_that_was_set_back(run_dir: Path, tmp_path: Path) -> None:
    log_dir = tmp_path / "log"
    with agent("one", str(log_dir)):
        pass
    (entry,) = run_dir.glob("*.agent.json")
    began_at = json.loads(entry.read_text())["began_at"]
    entry.write_text(json.dumps({**json.loads(entry.read_text()), "began_at": began_at + 3600.0}))
    with agent("one", str(log_dir)):
        assert alive(str(log_dir)) == [(log_dir / registry.EVENTS, True)]
        assert registry.is_running(log_dir / registry.EVENTS)


def test_events_of_an_unlisted_job_are_found_by_their_directory(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    assert alive(str(tmp_path)) == []
    events.touch()
    assert alive(str(tmp_path)) == alive(str(events)) == [(events, None)]


UNLISTED = """
import sys
from elasticgang.observe import log_lock
from elasticgang.process.status_page import StatusPage
log_lock.hold(sys.argv[1])
StatusPage(StatusPage.create()).commit(5, 1)
print(flush=True)
sys.stdin.read(1)
"""


@contextmanager
def unlisted(log_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """An agent that writes to `log_dir`, and is not listed, and its rank, which has committed five steps."""
    log_dir.mkdir(exist_ok=True)
    command = [sys.executable, "-c", UNLISTED, str(log_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def write_start(log_dir: Path, pid: int, rank_pid: int) -> None:
    """`pid`: of the agent."""
    seats = [{"agent": "h-1", "host": "h", "seats": [[0, 0, "active"]]}]
    started = [
        {**STARTED[0], "pid": pid},
        {**STARTED[1], "pid": rank_pid},
        {**generation(12.0, 1, 0), "seats": seats},
    ]
    (log_dir / registry.EVENTS).write_text("".join(json.dumps(each) + "\n" for each in started))


# LISTED-3
def test_an_agent_that_is_not_listed_runs_while_it_has_its_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(directory: Path) -> tuple[int, str]:
        code = main(["status", str(directory)])
        return code, capsys.readouterr().out.partition("\n")[0]

    log, copy = tmp_path / "log", tmp_path / "copy"
    with unlisted(log) as process:
        write_start(log, process.pid, process.pid)
        shutil.copytree(log, copy)
        assert said(log) == (0, "job demo: running")
        shutil.copy(log / registry.EVENTS, log / "events.jsonl.1")
        assert said(log / "events.jsonl.1")[1].startswith("job demo: unknown"), "it is not the one that grows"
        assert registry.is_running(log / registry.EVENTS) is True
        process.kill()
        process.wait()
        for directory in (log, copy):
            code, line = said(directory)
            assert (code, line.partition(" (")[0]) == (1, "job demo: unknown")
            assert "it has ended, or it runs elsewhere" in line
            assert registry.is_running(directory / registry.EVENTS) is None


# READER-3
def test_the_ranks_of_an_agent_elsewhere_are_not_looked_for_here(tmp_path: Path) -> None:
    """Its process ids are those of other processes here."""
    with unlisted(tmp_path) as process:
        for pid, step in ((process.pid, 5), (process.pid + 1, 0)):
            write_start(tmp_path, pid, process.pid)
            ((path, is_alive),) = registry.find(str(tmp_path))
            found = JobReader(path, is_alive, pytest.fail).read()
            assert (found["state"], found["step"]) == ("running", step)
    elapsed_s = time.time() - (STARTED[0]["wall"] - STARTED[0]["t"] + STARTED[0]["monotonic"])
    assert found["elapsed_s"] == pytest.approx(elapsed_s, abs=DEADLINE_S), "by the clock of the agent's host"


def test_the_files_of_jobs_that_ended_long_ago_are_deleted(run_dir: Path) -> None:
    with agent("old") as (_, old), agent("running") as (_, running):
        for directory in (old, running):
            directory.mkdir()
            (directory / "events.jsonl").touch()
        _age(run_dir)
        with agent("next"):
            assert old.exists(), "it runs"
    _age(run_dir)
    with agent("last") as (_, last):
        assert not old.exists()
        assert not running.exists()
        assert [path.name for path in run_dir.iterdir()] == [f"{last.name}.agent.json"]


def test_a_file_that_is_gone_when_it_is_to_be_deleted_ends_no_agent(run_dir: Path) -> None:
    run_dir.mkdir(mode=0o700)
    (run_dir / "gone.agent.json").symlink_to(run_dir / "gone")  # it is listed, and cannot be found
    with agent("job") as (_, own):
        assert alive() == [(own / "events.jsonl", True)]


def _age(directory: Path) -> None:
    ancient = time.time() - 2 * 24 * 3600
    for path in directory.rglob("*.json*"):
        os.utime(path, (ancient, ancient))


# LISTED-2
@pytest.mark.parametrize("problem", ["writable", "link"])
def test_a_directory_that_others_control_lists_nothing(run_dir: Path, tmp_path: Path, problem: str) -> None:
    with agent("job"):
        assert len(alive()) == len(alive("job")) == 1
        if problem == "writable":
            run_dir.chmod(0o777)
        else:
            run_dir.rename(tmp_path / "target")
            run_dir.symlink_to(tmp_path / "target")
        assert alive() == alive("job") == []


def test_what_is_no_file_is_not_read(run_dir: Path) -> None:
    with agent("job") as (_, own):
        entry = run_dir / f"{own.name}.agent.json"
        (run_dir / "link.agent.json").symlink_to(entry)
        os.mkfifo(run_dir / "fifo.agent.json")  # nobody writes to it
        assert alive() == [(own / "events.jsonl", True)]


# LISTED-2
@pytest.mark.parametrize("problem", ["writable", "link", "file"])
def test_a_directory_that_others_control_is_refused(run_dir: Path, tmp_path: Path, problem: str) -> None:
    match problem:
        case "writable":
            run_dir.mkdir()
            run_dir.chmod(0o777)
        case "link":
            (tmp_path / "target").mkdir()
            run_dir.symlink_to(tmp_path / "target")
        case "file":
            run_dir.touch()
    with pytest.raises(OperationalError, match=str(run_dir)), registry.listed("job", None):
        pytest.fail("listed")
