"""Every generation change is told once: as a record in events.jsonl, and as a line of the agent's."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from elasticgang.observe.change_report import PHASES
from elasticgang.observe.story import tell
from tests.chaos.test_kills import JOB, at
from tests.support import Command, Job, wait_until

GUARD_S = 30.0


def test_a_kill_in_doubt_and_the_return_are_told(tmp_path: Path) -> None:
    # Both others have prepared the step; the second fault waits until rank 1 is back.
    faults = json.dumps([at("totals_received", 1, voted=2, without=True), at("applied", 2)])
    with Job(tmp_path, JOB, "--output-dir", str(tmp_path), "--faults", faults, ranks=3) as job:
        assert job.wait() == 0, job.stderr
        events, stderr = job.events(), job.stderr
    generations = [event for event in events if event["event"] == "generation"]
    changes = [event for event in events if event["event"] == "generation_change"]
    assert [change["digest"] for change in changes] == [generation["digest"] for generation in generations]
    assert [change["parent"] for change in changes] == ["", *(change["digest"] for change in changes[:-1])]

    victim = next(event["member"] for event in events if event["event"] == "exited" and event["status"] == -9)
    (loss,) = (change for change in changes if change["cause"] == "rank 1 was killed by SIGKILL")
    assert loss["left"] == [victim]
    assert loss["joined"] == []
    assert len(loss["in_doubt"]) == 1, "the victim had not voted when the others had"
    assert loss["in_doubt"][0]["outcome"] == "rolled forward"
    assert {name for name, ms in loss["phases_ms"].items() if ms is None} == {"heal"}
    back = changes[changes.index(loss) + 1]
    assert back["cause"] == "a rank waits to join"
    assert len(back["joined"]) == 1
    assert back["phases_ms"]["heal"] is not None  # 0 where another rank was configured only after the heal
    assert tuple(back["phases_ms"]) == PHASES

    said = [line for line in stderr.splitlines() if line.startswith("elasticgang: generation ")]
    assert len(said) == len(changes)
    told = [line for line in stderr.splitlines() if "was killed by SIGKILL" in line]
    assert len(told) == 2 * 2, "each death, and what came of it"

    story = "\n".join(tell(events))
    assert f"generation {loss['generation']} began: rank 1 was killed by SIGKILL" in story
    assert f"{victim} left: process " in story
    assert "was in doubt, and was rolled forward" in story
    assert "was started in its place" in story
    assert f"and joined in generation {back['generation']}" in story


def test_events_are_followed_while_the_job_writes_them(tmp_path: Path) -> None:
    arguments = ["--output-dir", str(tmp_path), "--faults", json.dumps([at("body", 0)])]
    with Job(tmp_path, JOB, *arguments, ranks=2) as job:
        wait_until(lambda: (tmp_path / "events.jsonl").exists(), "the log of events")
        command = [sys.executable, "-m", "elasticgang", "events", str(tmp_path), "--follow", "--json"]
        with Command(tmp_path / "followed", command, preloaded=True) as following:
            assert job.wait() == 0, job.stderr
            events = job.events()
            wait_until(lambda: following.stdout.count("\n") == len(events), "the last event")
            following.process.send_signal(signal.SIGINT)
            assert following.wait(GUARD_S) == 130, following.stderr
    assert [json.loads(line) for line in following.stdout.splitlines()] == events
    assert following.stderr == ""


def test_the_lines_can_be_left_out(tmp_path: Path) -> None:
    arguments = ["--output-dir", str(tmp_path), "--faults", json.dumps([at("body", 0)])]
    with Job(tmp_path, JOB, *arguments, ranks=2, options=["--log-level", "warning"]) as job:
        assert job.wait() == 0, job.stderr
        (line,) = job.stderr.splitlines()
    assert line.endswith("was killed by SIGKILL")
