"""`elasticgang status` beside real jobs: it says what their events say, and how they end."""

from __future__ import annotations

import json
import re
import socket
import sys
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.chaos.job import BATCH_SIZE
from tests.chaos.test_kills import JOB, at, histories
from tests.integration.test_scalars import points_of
from tests.support import Command, Job, kill, wait_until

GUARD_S = 30.0
HOLD = 20


def status(directory: Path, *options: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "elasticgang", "status", *options]
    with Command(directory, command) as running:
        code = running.wait(GUARD_S)
        assert running.stderr == ""
        return code, running.stdout


def wait_until_held(job: Job, ranks: int) -> None:
    """All ranks are in the step in which they wait, and the agent has told of all that was before: from now on no
    number changes."""
    wait_until(
        lambda: len(list(job.directory.glob(f"at-{HOLD}-*"))) == ranks, "all ranks in the step in which they wait"
    )
    generations = [line["generation"] for history in histories(job.directory) for line in history]
    job.expect("generation_change", generation=max(generations))


def start(directory: Path, faults: list[Any], ranks: int = 2, options: Sequence[str] = ()) -> Job:
    arguments = ["--output-dir", str(directory), "--holds", f"[{HOLD}]", "--faults", json.dumps(faults)]
    return Job(directory, JOB, *arguments, ranks=ranks, options=["--job-id", f"job-{directory.name}", *options])


def test_the_status_follows_a_job_through_a_kill_to_its_end(tmp_path: Path) -> None:
    faults = [at("body", 1), at("body", 1, "paused", **{"for": 0.01})]  # the others wait for it to come back
    with start(tmp_path, faults, ranks=3) as job:
        wait_until_held(job, 3)
        code, text = status(tmp_path / "status", str(tmp_path), "--json")
        found = json.loads(text)
        assert (code, found["state"], found["job"]) == (0, "running", f"job-{tmp_path.name}")
        assert found["step"] == HOLD
        assert found["seats"] == {"active": 3, "learner": 0, "spare": 0, "gone": 0}
        assert [seat["doing"] for seat in found["hosts"][0]["seats"]] == ["USER_CODE"] * 3
        assert found["numbers"]["index"] == HOLD - 1
        assert found["tokens_per_s"] > 0
        assert found["healed_bytes"] == sum(event["bytes"] for event in job.events() if event["event"] == "healed") > 0

        changes = [event for event in job.events() if event["event"] == "generation_change"]
        assert found["generation"] == changes[-1]["generation"]
        assert found["num_changes"] == Counter(change["kind"] for change in changes)
        assert (found["num_changes"]["start"], found["num_changes"]["killed"]) == (1, 1)
        lost = {kind: sum(each["lost_s"] for each in changes if each["kind"] == kind) for kind in found["num_changes"]}
        assert found["lost_s"] == {kind: round(seconds, 3) for kind, seconds in sorted(lost.items())}
        assert 0 < found["goodput"] < 1

        watching = [sys.executable, "-m", "elasticgang", "status", "--watch", "--json", found["job"]]
        with Command(tmp_path / "watch", watching) as watch:
            wait_until(lambda: watch.stdout, "the first reading")
            (tmp_path / f"go-{HOLD}").touch()
            assert job.wait() == 0, job.stderr
            assert watch.wait(GUARD_S) == 1, "the job runs no more"
            assert json.loads(watch.stdout.splitlines()[-1])["state"] == "finished"
    *_, reported, ending = [event for event in job.events() if event["event"] in ("reported", "exiting")]
    assert (ending["event"], reported["numbers"]["index"]) == ("exiting", ending["step"] - 1)
    code, text = status(tmp_path / "after", str(tmp_path))
    assert code == 1
    assert f"job job-{tmp_path.name}: finished" in text
    assert "step 30," in text
    assert re.search(r"rank 1 was killed by SIGKILL; 1 left(, 1 joined)?; lost", text)


def test_a_killed_agent_is_said_to_be_dead(tmp_path: Path) -> None:
    with start(tmp_path, []) as job:
        wait_until_held(job, 2)
        code, text = status(tmp_path / "running")
        assert code == 0
        assert f"job job-{tmp_path.name}: running" in text, "it is found without its name"
        assert f"index {HOLD - 1}" in text
        kill(job.process.pid)
        job.wait()
    code, text = status(tmp_path / "dead", f"job-{tmp_path.name}")
    assert code == 1
    assert f"job job-{tmp_path.name}: died (the agent ended without a word" in text


def test_tokens_are_counted_once_for_each_sample(tmp_path: Path) -> None:
    """The ranks' mean tokens a step add up to the batch, however the ranks share it."""
    with start(tmp_path, []) as job:
        wait_until_held(job, 2)
        found = json.loads(status(tmp_path / "status", str(tmp_path), "--json")[1])
        assert abs(found["tokens_per_s"] / found["steps_per_s"] - BATCH_SIZE) < 1
        (tmp_path / f"go-{HOLD}").touch()
        assert job.wait() == 0, job.stderr


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=GUARD_S) as response:
        return str(response.read().decode())


def urls(job: Job) -> dict[str, str]:
    job.expect_line("the metrics of this job")
    return dict(re.findall(r"elasticgang: the (page|metrics) of this job: (http://\S+)", job.stderr))


def test_page_metrics_and_terminal_show_the_same_numbers(tmp_path: Path) -> None:
    faults = [at("body", 1), at("body", 1, "paused", **{"for": 0.01})]
    with start(tmp_path, faults, ranks=3, options=["--status-port", "0", "--metrics-port", "0"]) as job:
        at_url = urls(job)
        wait_until_held(job, 3)
        _, text = status(tmp_path / "status", str(tmp_path), "--json")
        terminal = json.loads(text)

        def page() -> Any:
            """What was read later than that: before, some ranks may not have been in that step."""
            found = json.loads(read(at_url["page"] + "status.json"))
            is_later = found["status"]["elapsed_s"] > terminal["elapsed_s"]
            return found if is_later and len(found["history"]) > 1 else None

        shown = wait_until(page, "the page of that step")["status"]
        assert shown["step"] == HOLD
        timed = ("elapsed_s", "wall", "goodput", "last_commit_age_s")
        assert {name: shown[name] for name in shown if name not in timed} == {
            name: terminal[name] for name in terminal if name not in timed
        }
        found = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(read(at_url["metrics"]))
            for sample in family.samples
        }
        assert found["elasticgang_committed_steps",] == terminal["step"]
        assert found["elasticgang_steps_per_second",] == terminal["steps_per_s"]
        assert found["elasticgang_generation_changes_total", "killed"] == 1
        for kind, seconds in terminal["lost_s"].items():
            assert found["elasticgang_lost_seconds_total", kind] == seconds
        (tmp_path / f"go-{HOLD}").touch()
        assert job.wait() == 0, job.stderr
        job.assert_nothing_left()


def test_tensorboard_shows_the_same_numbers(tmp_path: Path) -> None:
    faults = [at("body", 1), at("body", 1, "paused", **{"for": 0.01})]
    with start(tmp_path, faults, ranks=3, options=["--tensorboard-dir", str(tmp_path / "scalars")]) as job:
        wait_until_held(job, 3)
        _, text = status(tmp_path / "status", str(tmp_path), "--json")
        terminal = json.loads(text)
        directory, wanted = tmp_path / "scalars" / terminal["job"], terminal["num_changes"]
        assert wanted["killed"] == 1

        def found() -> dict[str, Any] | None:
            if not directory.exists():
                return None
            last = {tag: points[-1] for tag, points in points_of(directory).items()}
            changes = [(last.get(f"elasticgang/generation_changes/{kind}"), num) for kind, num in wanted.items()]
            is_there = all(point is not None and (point.step, point.value) == (HOLD, num) for point, num in changes)
            return {tag: point.value for tag, point in last.items()} if is_there else None

        shown = wait_until(found, "the scalars of that step")
        assert shown["elasticgang/generation"] == terminal["generation"]
        assert shown["elasticgang/seats/active"] == terminal["seats"]["active"] == 3
        for kind, seconds in terminal["lost_s"].items():
            assert shown[f"elasticgang/lost_seconds/{kind}"] == pytest.approx(seconds, rel=1e-6)
        # Of the moment in which the first rank was seen in that step; `test_scalars.py` compares these numbers.
        assert shown["elasticgang/steps_per_second"] > 0
        assert 0 < shown["reported/index"] <= HOLD - 1
        (tmp_path / f"go-{HOLD}").touch()
        assert job.wait() == 0, job.stderr
        job.assert_nothing_left()


def test_a_directory_for_scalars_that_cannot_be_made_is_an_error_before_the_job_starts(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    directory = tmp_path / "file" / "scalars"
    with start(tmp_path / "job", [], options=["--tensorboard-dir", str(directory)]) as job:
        assert job.wait() == 2
        assert job.stderr == f"elasticgang: error: --tensorboard-dir: cannot write to {directory}: Not a directory\n"
        assert not (job.directory / "events.jsonl").exists()


def test_the_page_ends_with_a_killed_agent(tmp_path: Path) -> None:
    with start(tmp_path, [], options=["--status-port", "0", "--metrics-port", "0"]) as job:
        at_url = urls(job)
        wait_until_held(job, 2)
        assert "<title>elasticgang</title>" in read(at_url["page"])
        kill(job.process.pid)
        job.wait()
        job.assert_nothing_left()


def test_the_job_goes_on_without_the_process_that_serves_the_page(tmp_path: Path) -> None:
    with start(tmp_path, [], options=["--status-port", "0", "--metrics-port", "0"]) as job:
        wait_until_held(job, 2)
        kill(job.page_server().pid)
        (tmp_path / f"go-{HOLD}").touch()
        assert job.wait() == 0, job.stderr
        assert [event["generation"] for event in job.events() if event["event"] == "generation"] == [1]
        job.assert_nothing_left()


def test_a_port_in_use_is_an_error_before_the_job_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for option in ("--status-port", "--metrics-port"):
            with start(tmp_path / option, [], options=[option, str(port)]) as job:
                assert job.wait() == 2
                message = f"elasticgang: error: {option}: cannot listen on 127.0.0.1:{port}: Address already in use\n"
                assert job.stderr == message
                assert not (job.directory / "events.jsonl").exists()
