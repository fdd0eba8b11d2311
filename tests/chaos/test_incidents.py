"""What an agent leaves about each generation change that nobody planned, and `elasticgang explain`."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticgang.agent.incident_log import MAX_KEPT, IncidentLog
from elasticgang.agent.rank_processes import RankProcess
from elasticgang.observe.events import EventLog
from elasticgang.process.status_page import StatusPage
from tests.chaos.test_kills import BACK, JOB, Fault, at, soon
from tests.support import Command, Job

GUARD_S = 30.0
UNUSED: Any = None
GANGS = {"root, dp, rdp", "reduce", "control"}  # of ranks without any other axis


class Files:
    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def write(self, event: str, **fields: Any) -> None: ...

    def write_file(self, name: str, text: str) -> None:
        self.texts[name] = text


def incidents(tmp_path: Path, faults: list[Fault], *options: str) -> tuple[list[dict[str, Any]], Job]:
    arguments = ["--output-dir", str(tmp_path), "--faults", json.dumps(faults)]
    with Job(tmp_path, JOB, *arguments, ranks=3, options=options) as job:
        assert job.wait() == 0, job.stderr
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("incident-*"))]
    assert not list(tmp_path.glob("*.draft"))
    return found, job


def explain(tmp_path: Path, generation: int) -> str:
    command = [sys.executable, "-m", "elasticgang", "explain", str(tmp_path), str(generation)]
    with Command(tmp_path / "explain", command) as running:
        assert running.wait(GUARD_S) == 0, running.stderr
        assert running.stderr == ""
        return running.stdout


# INCIDENT-1
def test_a_kill_leaves_its_exit_and_the_collectives_of_all_ranks(tmp_path: Path) -> None:
    (found,), job = incidents(tmp_path, [at("totals_received", 1, step=6), BACK])
    (change,) = [each for each in job.events() if each["event"] == "generation_change" and each["kind"] == "killed"]
    assert {name: found[name] for name in ("generation", "cause", "phases_ms", "lost_s")} == {
        name: change[name] for name in ("generation", "cause", "phases_ms", "lost_s")
    }
    (lost,) = found["lost"]
    assert (lost["local_rank"], lost["status"], lost["step"], lost["stack"]) == (1, -9, 6, None)
    assert [rank["local_rank"] for rank in found["counters"]] == [0, 1, 2]
    assert [rank["committed"] for rank in found["counters"]] == [6] * 3
    groups = [set(rank["groups"]) for rank in found["counters"]]
    assert groups[0] == groups[1] == groups[2] != set(), "the same process groups, before any rank has left them"
    for rank in found["counters"]:
        assert any(counts["submitted"] > 0 for counts in rank["groups"].values())
        assert {counts["gangs"] for counts in rank["groups"].values()} == GANGS
    text = explain(tmp_path, found["generation"])
    assert "rank 1 was killed by SIGKILL" in text
    assert "collectives begun/completed on this host when it began" in text
    assert all(f"    {gangs}: rank 0 " in text for gangs in GANGS)


def test_a_failed_script_leaves_its_last_lines(tmp_path: Path) -> None:
    (found,), _ = incidents(tmp_path, [at("body", 1, "raise", step=6), BACK])
    (lost,) = found["lost"]
    assert found["kind"] == "failed"
    assert lost["status"] == 1
    assert "OSError: [Errno 5] a disk of this machine" in lost["traceback"]
    assert found["cause"] == "rank 1 raised OSError: [Errno 5] a disk of this machine"
    text = explain(tmp_path, found["generation"])
    assert found["cause"] in text
    assert "    | OSError: [Errno 5] a disk of this machine\n" in text


# py-spy, where it is installed, names the class of a method too.
@pytest.mark.parametrize(("how", "stack"), [("lock", r"in (Faults\.)?_do"), ("stop", r"stopped \(state T\)")])
def test_a_hung_rank_leaves_its_stack(tmp_path: Path, how: str, stack: str) -> None:
    (found,), _ = incidents(tmp_path, [at("body", 1, how, step=6), BACK], "--hang-timeout=3")  # no other rank hangs
    assert found["kind"] == "hung"
    (lost,) = found["lost"]
    assert (lost["local_rank"], lost["status"]) == (1, -9)
    assert re.search(stack, lost["stack"])
    behind = {rank["local_rank"]: rank["groups"] for rank in found["counters"]}
    assert set(behind) == {0, 1, 2}
    text = explain(tmp_path, found["generation"])
    assert f"rank 1 (process {lost['pid']}) hung; its stack" in text
    assert re.search(stack, text)


# INCIDENT-1
def test_a_rank_that_is_reaped_before_its_generation_ends_leaves_its_counters() -> None:
    """The agent learns of the exit before it learns that the exit began."""
    files = Files()
    log = IncidentLog(files)
    ranks = [RankProcess(f"a{n}", n, 1, -1, UNUSED, UNUSED, StatusPage(), -1, list) for n in range(3)]
    ranks[1].page.begin_step(6)
    log.exited(ranks[1])
    log.ending(4, [ranks[0], ranks[2]])
    log.write({"generation": 5, "kind": "killed", "left": ["a1"]})
    found = json.loads(files.texts["incident-5.json"])
    assert [(rank["local_rank"], rank["step"]) for rank in found["counters"]] == [(0, None), (1, 6), (2, None)]


# INCIDENT-2
def test_what_is_kept_for_later_changes_is_bounded() -> None:
    log = IncidentLog(EventLog(None, print))
    for number in range(3 * MAX_KEPT):
        log.hung(f"member-{number}", "stack")
        log.ending(number, [])
    assert len(log.stacks) == len(log.counters) == MAX_KEPT
    assert max(log.counters) == 3 * MAX_KEPT - 1


def test_planned_changes_leave_nothing(tmp_path: Path) -> None:
    """Nor if the process that leaves is gone before the others have the next record."""
    found, job = incidents(tmp_path, [at("body", 1, "leave", step=6), soon("requesting", 0, "see-off")])
    events = job.events()
    changes = [each for each in events if each["event"] == "generation_change"]
    assert [change["cause"] for change in changes] == ["the job starts", "rank 1 leaves"]
    assert [change["kind"] for change in changes] == ["start", "left"]
    (left,) = (index for index, each in enumerate(events) if each["event"] == "exited" and each["local_rank"] == 1)
    assert left < next(index for index, each in enumerate(events) if each.get("generation") == 2)
    assert found == []
