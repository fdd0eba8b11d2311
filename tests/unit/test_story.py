"""Events told to a person."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from elasticgang.launch.cli import main
from elasticgang.observe.story import NoSuchChange, line_of, tell

PHASES = {"leave": 3.1, "abort": 0.4, "quorum": 5.0, "resolve": None, "configure": 9.0, "heal": None}


def event(at: float, name: str, **fields: Any) -> dict[str, Any]:
    return {"t": at, "wall": 1_000_000.0 + at, "event": name, **fields}


def change(at: float, generation: int, cause: str, **fields: Any) -> dict[str, Any]:
    known = {"left": [], "joined": [], "moved": [], "in_doubt": [], "committed": [7, 1], "phases_ms": PHASES}
    return event(at, "generation_change", generation=generation, cause=cause, **{**known, **fields})


MOVE = {"member": "h/0/a", "from": {"tp": 1}, "to": None}
LOSS = [
    event(1.0, "spawned", member="h/0/a", local_rank=0, pid=10),
    event(1.0, "spawned", member="h/1/b", local_rank=1, pid=11),
    event(2.0, "generation", generation=1, active=2, learner=0, spare=0),
    change(2.5, 1, "the job starts", joined=["h/0/a", "h/1/b"]),
    event(8.0, "exit_began", member="h/1/b", local_rank=1),
    event(8.05, "exited", member="h/1/b", local_rank=1, pid=11, status=-9),
    event(8.06, "generation", generation=2, active=1, learner=0, spare=0),
    change(
        8.1,
        2,
        "rank 1 was killed by SIGKILL",
        left=["h/1/b"],
        in_doubt=[{"step": 8, "generation": 1, "outcome": "rolled forward"}],
    ),
    event(8.2, "spawned", member="h/1/c", local_rank=1, pid=12),
    event(9.0, "generation", generation=3, active=1, learner=1, spare=0),
    change(
        9.5, 3, "a rank waits to join", joined=["h/1/c"], moved=[{"member": "h/0/a", "from": {"tp": 1}, "to": None}]
    ),
]


def test_a_loss_is_told_from_its_cause_to_the_return() -> None:
    text = "\n".join(tell(LOSS))
    assert "generation 2 began: rank 1 was killed by SIGKILL" in text
    assert "h/1/b left: process 11, killed by signal 9; its memory was freed 50 ms later" in text
    assert "step 8 was in doubt, and was rolled forward" in text
    assert "the job went on after 7 committed steps, with 1 active" in text
    assert "     3.1 ms until the ranks had left the old generation" in text
    assert "h/1/c was started in its place 150 ms after the exit, and joined in generation 3" in text
    assert "generation 3" not in text.replace("joined in generation 3", "")
    assert "generation 1 began" not in text


def test_one_change_is_told_although_nobody_was_lost() -> None:
    text = "\n".join(tell(LOSS, 3))
    assert "generation 3 began: a rank waits to join" in text
    assert "h/1/c joined" in text
    assert "h/0/a moved from tp=1 to a spare's wait" in text
    assert "killed" not in text


def test_a_change_that_there_is_not_is_refused_with_those_there_are() -> None:
    with pytest.raises(NoSuchChange, match="no generation change 9; those of this host: 1, 2, 3"):
        list(tell(LOSS, 9))


def test_events_are_read_once_however_many_changes_there_are() -> None:
    """Each of thousands of losses would otherwise take longer than the one before."""
    assert list(tell(iter(LOSS), 2)) == list(tell(LOSS, 2))


def test_a_second_job_of_a_log_has_changes_of_its_own() -> None:
    (first,) = [line for line in tell(LOSS) if "generation 2 began" in line]
    later = [{**each, "t": each["t"] + 60, "wall": each["wall"] + 60} for each in LOSS]
    assert [line[:12] for line in tell([*LOSS, *later]) if "generation 2 began" in line] == [
        first[:12],
        line_of(later[6])[:12],
    ]


def test_the_end_of_the_job_is_told() -> None:
    end = event(10.0, "failed", code=1, reason="the job's state is lost")
    assert list(tell([*LOSS, end]))[-1].endswith("the job failed: the job's state is lost")
    assert list(tell(LOSS[:4])) == ["no rank was lost"]


def test_an_agent_that_ended_without_a_word_is_told() -> None:
    runs = [event(0.5, "started"), *LOSS[:4]]
    died = "the agent ended without a word: it was killed, or its host went down"
    assert list(tell(runs, is_alive=False))[-1] == f"{line_of(runs[-1])[:12]}  {died}"
    assert list(tell([*runs, *LOSS[4:]], is_alive=False))[-1].endswith(died)
    for is_alive in (True, None):
        assert list(tell(runs, is_alive=is_alive)) == ["no rank was lost"]
    for last in (event(10.0, "exiting", code=0), event(10.0, "signal", signal="SIGINT")):
        assert list(tell([*runs, last], is_alive=False)) == ["no rank was lost"]
    assert died not in "\n".join(tell([*runs, *LOSS[4:]], 2, is_alive=False))
    earlier = event(0.1, "failed", code=1, reason="of the job before")
    assert list(tell([event(0.0, "started"), earlier, *runs], is_alive=False))[-1].endswith(died)


def test_what_came_before_a_change_is_told_with_it() -> None:
    events = [*LOSS[:4], event(7.9, "hung", member="h/1/b", pid=11), *LOSS[4:]]
    (line,) = [line for line in tell(events) if "before it" in line]
    assert "hung  member=h/1/b, pid=11" in line


def test_a_member_of_another_host_is_told_without_its_exit() -> None:
    (line,) = [line for line in tell([LOSS[6], change(8.1, 2, "agent g is lost", left=["g/0/x"])]) if "g/0/x" in line]
    assert line.endswith("g/0/x left, on another host or before this log")


def test_a_line_has_the_time_the_name_and_the_details() -> None:
    assert line_of(event(0.25, "exited", status=-9, seconds=0.5)).endswith(".250  exited  status=-9, seconds=0.500")
    assert line_of(event(0.25, "requested")).endswith(".250  requested")


def test_a_change_of_the_layout_is_told_also_when_nobody_was_lost() -> None:
    fields = {"layout": "sdp=2", "fallback_of": None, "layout_before": "sdp=1", "num_holders": 3}
    text = "\n".join(tell([change(9.5, 3, "a rank waits to join", **fields)]))
    assert "  the job took the layout sdp=2, in place of sdp=1\n" in text
    assert "  the state moved between the ranks in memory, from 3 that held it\n" in text
    fields = {"layout": "sdp=1", "fallback_of": "sdp=2", "layout_before": "sdp=2", "num_holders": 0}
    text = "\n".join(tell([change(9.5, 3, "agent b is lost", left=["b0"], checkpoint=5, **fields)]))
    assert "the job took the layout sdp=1, a fallback of sdp=2, in place of sdp=2\n" in text
    assert "moved between the ranks" not in text


INCIDENT: dict[str, Any] = {
    "generation": 2,
    "lost": [
        {
            "member": "h/1/b",
            "local_rank": 1,
            "pid": 11,
            "stack": '  File "train.py", line 3 in load',
            "tail": [f"line {number}" for number in range(20)],
        }
    ],
    "counters": [
        {"local_rank": 0, "groups": {"abcdef0123456789": {"gangs": "root, dp", "submitted": 8, "completed": 7}}},
        {"local_rank": 1, "groups": {"abcdef0123456789": {"gangs": "root, dp", "submitted": 7, "completed": 7}}},
        {"local_rank": 2, "groups": {"9876543210abcdef": {"submitted": 5, "completed": 5}}},
    ],
}


def test_what_the_agent_has_left_about_a_change_is_told_with_it() -> None:
    text = "\n".join(tell(LOSS, incident={2: INCIDENT}.get))
    assert 'rank 1 (process 11) hung; its stack, innermost frame first:\n    File "train.py", line 3 in load' in text
    assert "the last lines of rank 1 (process 11):\n    | line 10\n" in text
    assert "| line 9\n" not in text
    assert "of a process group:\n    root, dp: rank 0 8/7, rank 1 7/7\n    98765432: rank 2 5/5" in text


def test_the_last_lines_of_the_traceback_of_a_lost_rank_are_told() -> None:
    frames = "".join(f'  File "train.py", line {number}, in step\n' for number in range(20))
    lost = {**INCIDENT["lost"][0], "stack": None, "tail": [], "traceback": f"{frames}ValueError: boom at 10\n"}
    text = "\n".join(tell(LOSS, incident={2: {**INCIDENT, "lost": [lost]}}.get))
    assert "  the last lines of the traceback of rank 1 (process 11):\n" in text
    assert "line 19, in step\n    | ValueError: boom at 10\n" in text
    assert "line 10, in step" not in text


def test_control_characters_are_shown_and_not_obeyed() -> None:
    attack = 'we"ird\n<b>\x1b[31m\udcff'
    shown = 'we"ird\\n<b>\\x1b[31m\\udcff'
    assert line_of(event(0.25, "started", job=attack)).endswith(f"  started  job={shown}")
    lost = {**INCIDENT["lost"][0], "stack": "\x1b[2J", "tail": ["\x1b]0;title\x07"], "traceback": "\x9b31m"}
    lines = list(tell([*LOSS[:7], {**LOSS[7], "cause": attack}], incident={2: {**INCIDENT, "lost": [lost]}}.get))
    assert lines[0].endswith(f"generation 2 began: {shown}")
    assert {"    \\x1b[2J", "    | \\x1b]0;title\\x07", "    | \\x9b31m"} <= set(lines)
    assert all(map(str.isprintable, lines))


# -- the commands


@pytest.mark.parametrize("damage", ["", "[]", '{"lost": [{}], "counters": []}', '{"lost": [], "counters": [1]}'])
def test_a_damaged_file_of_an_incident_is_left_out_with_a_warning(
    damage: str, log_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = log_dir / "incident-2.json"
    path.write_text(damage)
    assert main(["explain", str(log_dir)]) == 0
    said = capsys.readouterr()
    assert said.err.startswith(f"elasticgang: warning: {path} is left out: ")
    assert "rank 1 was killed by SIGKILL" in said.out
    path.write_text(json.dumps(INCIDENT))
    assert main(["explain", str(log_dir)]) == 0
    assert "    | line 19" in capsys.readouterr().out


def test_a_loss_of_many_ranks_stays_a_short_story() -> None:
    far = [f"g{number:02}/0/x" for number in range(40)]
    lost = {**LOSS[7], "left": [*far, "h/1/b"], "joined": far, "moved": [{**MOVE, "member": each} for each in far]}
    lines = list(tell([*LOSS[:7], lost, *LOSS[8:]], 2))
    assert lines[1].startswith("  h/1/b left: process 11, killed by signal 9"), "what this host knows comes first"
    assert "  and 29 more left, on other hosts" in lines
    assert "  and 28 more joined" in lines
    assert "  and 28 more moved" in lines
    assert len(lines) < 50
    assert line_of(event(1.0, "generation", seats=[{"agent": each} for each in far])).endswith("  seats=[40 items]")


@pytest.fixture
def log_dir(tmp_path: Path) -> Path:
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in LOSS))
    return tmp_path


def test_explain_tells_and_events_prints(log_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(log_dir)]) == 0
    assert "rank 1 was killed by SIGKILL" in capsys.readouterr().out
    assert main(["explain", str(log_dir / "events.jsonl"), "3"]) == 0
    assert "a rank waits to join" in capsys.readouterr().out
    assert main(["events", str(log_dir), "--event", "exited", "--event", "spawned"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert main(["events", str(log_dir), "--json"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == LOSS


def test_a_file_that_was_cut_or_damaged_is_read_as_far_as_it_goes(
    log_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = log_dir / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"{not json}\n", b"[1]\n", *lines[1:], lines[0][:20]]))
    assert main(["events", str(log_dir)]) == 0
    said = capsys.readouterr()
    assert len(said.out.splitlines()) == len(LOSS)
    assert [line.rpartition(": ")[2] for line in said.err.splitlines()] == [
        "line 2 is no event; left out",
        "line 3 is no event; left out",
        "its last line is incomplete; left out",
    ]


@pytest.mark.parametrize("command", ["events", "explain", "status"])
def test_a_file_that_cannot_be_read_is_named_in_one_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = "/proc/self/mem"  # its first bytes are no memory of a process
    assert main([command, path]) == 1
    assert capsys.readouterr() == ("", f"elasticgang: error: {path} cannot be read: Input/output error\n")


@pytest.mark.parametrize(
    ("damaged", "why"),
    [
        (change(9.5, 3, "cause") | {"phases_ms": {"leave": "long"}}, "ValueError"),
        (event(9.5, "generation_change"), "KeyError"),
        (event(9.5, "exited", member=["a"]), "TypeError"),
    ],
)
def test_an_event_of_another_version_is_an_error_in_one_line(
    damaged: dict[str, Any], why: str, log_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = log_dir / "events.jsonl"
    with path.open("a") as file:
        file.write(json.dumps(damaged | {"left": ["a/0/b"]}) + "\n")
    assert main(["explain", str(log_dir)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"elasticgang: error: {path} has an event of another version: {why}(")


@pytest.mark.parametrize("command", ["events", "explain"])
def test_a_directory_without_events_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(tmp_path)]) == 2
    assert "`elasticgang run --log-dir DIR` writes them" in capsys.readouterr().err


def test_an_unknown_event_is_refused_with_the_names(log_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["events", str(log_dir), "--event", "nosuch"])
    said = capsys.readouterr().err
    assert "argument --event: there is no event 'nosuch'; the names are started, spawned, " in said
    assert {each["event"] for each in LOSS} <= set(re.findall(r"[\w ]+?(?=,|\n)", said.replace(", ", ",")))


@pytest.mark.parametrize("command", ["run", "plan", "events", "status", "coordinator"])
def test_an_unknown_option_shows_the_usage_of_its_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([command, "--nosuch"])
    said = capsys.readouterr().err
    assert said.startswith(f"usage: elasticgang {command} ")
    assert f"elasticgang {command}: error: " in said
    with pytest.raises(SystemExit, match="2"):
        main(["events", "directory", "--nosuch"])
    assert "elasticgang events: error: unrecognized arguments: --nosuch\n" in capsys.readouterr().err


def test_an_unknown_generation_is_refused(log_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(log_dir), "77"]) == 2
    assert "no generation change 77" in capsys.readouterr().err
