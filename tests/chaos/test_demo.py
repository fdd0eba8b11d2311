"""The demo itself: a short one with kills, one that must not pass, and its ways out."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.exhaustive import exhaustive
from tests.support import Command, wait_until

KEYS = (
    "steps", "ranks", "kills", "rejoins", "generations", "dropped_steps", "lost_samples", "duplicate_samples",
    "final_loss", "reference_final_loss", "recovery_ms", "rejoin_ms", "tokens_per_s",
)  # fmt: skip
MAX_KILLS = 4  # each delays the end, on a busy machine by more than the wait for the next one


def demo(directory: Path, *args: str, fresh: bool = False) -> Command:
    """`fresh`: all of its processes start as a user's do, and import torch."""
    given = ["--output-dir", str(directory / "run"), "--max-kills", str(MAX_KILLS), *args]
    command = [sys.executable, "-m", "scripts.demo_job.demo", *given]
    return Command(directory, command, preloaded=not fresh, ends_at_once=not fresh)


def trains(steps: int, kill_every_s: float) -> list[str]:
    """So many steps, for longer than the longest wait for the first kill (1.4 times the mean one), however quick the
    machine is."""
    pause_s = 1.5 * kill_every_s / steps
    return ["--steps", str(steps), "--kill-every", f"{kill_every_s:g}", "--pause", f"{pause_s:.4f}"]


def summary_of(command: Command) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((command.directory / "run" / "summary.json").read_text())
    return found


@pytest.mark.timeout(360)
def test_a_short_demo_survives_its_kills_and_says_so(tmp_path: Path) -> None:
    with demo(tmp_path, "--no-reference", *trains(30, 2), fresh=True) as command:
        assert command.wait(300.0) == 0, command.stdout + command.stderr
        command.assert_nothing_left()
        summary = summary_of(command)
        assert set(KEYS) <= set(summary)
        assert (summary["steps"], summary["ranks"]) == (30, 4)
        assert (summary["lost_samples"], summary["duplicate_samples"]) == (0, 0)
        schedule = summary["kill_schedule"]
        assert len(schedule["drawn"]) == summary["kills_asked"] == summary["kills"] >= 1
        events = [json.loads(line) for line in (tmp_path / "run" / "main" / "events.jsonl").read_text().splitlines()]
        sent = {kill["pid"] for kill in schedule["carried_out"]}
        retired = {event["member"] for event in events if event["event"] == "retired"}  # at the end, without state
        exited = [event for event in events if event["event"] == "exited"]
        exited = [event for event in exited if event["pid"] in sent or event["member"] not in retired]
        killed = [event["pid"] for event in exited if event["status"] == -signal.SIGKILL]
        assert sorted(killed) == sorted(kill["pid"] for kill in schedule["carried_out"] if kill["happened"])
        assert len(killed) == summary["kills"]
        assert summary["generations"] == sum(event["event"] == "generation" for event in events)
        num_measured = summary["kills"] - summary["not_measured"]["recovery_ms"]  # not before the first generation
        median_ms, longest_ms = (summary["recovery_ms"][name] for name in ("p50", "max"))
        assert (median_ms, longest_ms) == (None, None) if num_measured == 0 else median_ms <= longest_ms
        assert summary["final_loss"] < 4.0
        assert summary["reference_final_loss"] is None
        assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
        assert "PASSED" in command.stdout


@exhaustive  # tests of reproducible jobs compare the bits, too
@pytest.mark.timeout(360)
def test_a_reproducible_demo_ends_in_the_bits_of_one_undisturbed_rank(tmp_path: Path) -> None:
    with demo(tmp_path, "--reproducible", "--ranks", "3", *trains(20, 2)) as command:
        assert command.wait(300.0) == 0, command.stdout + command.stderr
        summary = summary_of(command)
        assert summary["kills"] >= 1
        assert summary["parameters"] == [summary["reference_parameters"]]


@exhaustive  # tests of reshapes and of reproducible jobs compare the bits of shards, too
@pytest.mark.timeout(600)
def test_a_reproducible_demo_of_shards_ends_in_the_bits_of_one_undisturbed_rank(tmp_path: Path) -> None:
    """Through a fallback layout and back."""
    layout = "sdp=2,min_replicas=2/sdp=1"
    with demo(tmp_path, "--reproducible", "--layout", layout, *trains(150, 6)) as command:
        assert command.wait(560.0) == 0, command.stdout + command.stderr
        assert "one undisturbed rank's: equal (" in command.stdout
    summary = summary_of(command)
    assert summary["kills"] >= 1
    assert summary["layouts"][:3] == ["sdp=2", "sdp=1", "sdp=2"]
    assert summary["whole_parameters"] == summary["reference_parameters"]


# PIPELINE-1, SHARDED-3
@exhaustive  # tests of repairs kill ranks of jobs of each layout, too
@pytest.mark.timeout(600)  # up to 18 processes, one job after another; every kill delays the end
@pytest.mark.parametrize(
    ("layout", "steps", "every_s"),
    [
        ("sdp=2", 40, 2),
        ("tp=2", 14, 3),
        ("pp=2", 20, 2),
        ("sdp=2,tp=2", 8, 3),
    ],
)
def test_a_demo_of_each_layout_survives_its_kills(layout: str, steps: int, every_s: int, tmp_path: Path) -> None:
    """Two replica groups and a spare; the losses are those of one rank that holds the whole model."""
    with demo(tmp_path, "--layout", layout, *trains(steps, every_s)) as command:
        assert command.wait(560.0) == 0, command.stdout + command.stderr
        command.assert_nothing_left()
    summary = summary_of(command)
    assert (summary["steps"], summary["faults"]) == (steps, [])
    assert (summary["lost_samples"], summary["duplicate_samples"]) == (0, 0)
    assert summary["kills"] >= 1
    assert summary["loss_difference"]["largest"] <= summary["loss_difference"]["tolerance"]
    assert summary["reference_final_loss"] == pytest.approx(summary["final_loss"], abs=1e-5)
    events = [json.loads(line) for line in (tmp_path / "run" / "main" / "events.jsonl").read_text().splitlines()]
    assert any(event["event"] == "generation" and event["spare"] for event in events)


# MANAGER-14
@exhaustive  # tests of reshapes lose a host and kill ranks, too
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("layout", "fallback", "steps"),
    [
        ("sdp=2,min_replicas=2/sdp=1", "sdp=1", 27),
        ("tp=2,min_replicas=2/sdp=2", "sdp=2", 30),
        ("pp=2,min_replicas=2/sdp=2", "sdp=2", 54),
    ],
)
def test_a_demo_takes_its_fallback_layout_under_kills(layout: str, fallback: str, steps: int, tmp_path: Path) -> None:
    """A host is lost while ranks of the other one are killed."""
    with demo(tmp_path, "--layout", layout, *trains(steps, 4)) as command:
        assert command.wait(560.0) == 0, command.stdout + command.stderr
        command.assert_nothing_left()
    summary = summary_of(command)
    assert (summary["steps"], summary["faults"]) == (steps, [])
    assert (summary["lost_samples"], summary["duplicate_samples"]) == (0, 0)
    assert min(summary["kills"], summary["hosts_lost"]) >= 1
    assert summary["layouts"][1] == fallback
    assert summary["loss_difference"]["largest"] <= summary["loss_difference"]["tolerance"]
    events = [json.loads(line) for line in (tmp_path / "run" / "main" / "events.jsonl").read_text().splitlines()]
    first = layout.partition("/")[0]
    changes = [event for event in events if event["event"] == "generation_change" and event["layout_before"]]
    assert (changes[0]["layout"], changes[0]["fallback_of"], changes[0]["layout_before"]) == (fallback, first, first)
    assert changes[0]["num_holders"], "the state comes from the ranks, not from a disk"


def test_a_demo_without_the_kills_that_were_asked_for_fails(tmp_path: Path) -> None:
    with demo(tmp_path, "--no-reference", "--ranks", "2", "--steps", "2", "--kill-every", "1000") as command:
        assert command.wait() == 1, command.stderr
        assert summary_of(command)["faults"] == ["0 kills happened, fewer than the 1 asked for"]
        assert "FAILED" in command.stdout


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_whatever_ends_the_demo_ends_the_job(tmp_path: Path, number: int, code: int) -> None:
    with demo(tmp_path, "--no-reference", "--ranks", "2", "--steps", "100000") as command:
        history = tmp_path / "run" / "main" / "history"
        wait_until(lambda: history.is_dir() and len(list(history.iterdir())) == 2, "both ranks to train")
        command.process.send_signal(number)
        assert command.wait(20.0) == code, command.stderr
        command.assert_nothing_left()
