"""What a job does, from its events and status pages."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

import pytest

from elasticgang.observe.pace import Pace
from elasticgang.watch.summary import NUM_CHANGES, RankStatus, Summary
from elasticgang.watch.terminal import lines_of


def event(at: float, name: str, **fields: Any) -> dict[str, Any]:
    return {"t": at, "wall": 1_000_000.0 + at, "event": name, **fields}


def generation(
    at: float, number: int, step: int, *, learner: int = 0, counted_to: tuple[int, float] | None = None
) -> dict[str, Any]:
    """`counted_to`: by default, the last one of `COMMITS` until then."""
    last = max((commit for commit in COMMITS if commit[1] <= at), default=(0, 8.0))
    here = {"agent": "h-1", "host": "h", "seats": [[0, 0, "active"], [1, 1, "learner" if learner else "active"]]}
    there = {"agent": "k-1", "host": "k", "seats": [[0, None, "spare"]]}
    counts = {"active": 2 - learner, "learner": learner, "spare": 1}
    pace = {"counted_to": list(counted_to or last), "step_s": 1.0}
    return event(
        at, "generation", generation=number, committed=[step, number - 1], seats=[here, there], **counts, **pace
    )


def change(at: float, number: int, kind: str, lost_s: float) -> dict[str, Any]:
    phases = {"leave": 10.0, "abort": None, "first_commit": 200.0}
    fields = {"left": ["h-1/1/b"], "joined": [], "moved": [], "in_doubt": [], "checkpoint": None}
    return event(
        at,
        "generation_change",
        generation=number,
        cause=f"cause {number}",
        kind=kind,
        phases_ms=phases,
        lost_s=lost_s,
        step_s=1.0,
        **fields,
    )


STARTED = [
    event(10.0, "started", agent="h-1", job="demo", host="h", pid=7, ranks=2, monotonic=8.0),
    event(10.1, "spawned", member="h-1/0/a", local_rank=0, pid=70),
    event(10.1, "spawned", member="h-1/1/b", local_rank=1, pid=71),
]


def exited(at: float, local_rank: int, status: int = -9) -> dict[str, Any]:
    """One of the ranks of `STARTED` and `PAGES`."""
    member = ("h-1/0/a", "h-1/1/b")[local_rank]
    last = {"committed": [8, 1], "newest_commit": [8, 20.0]}
    return event(at, "exited", member=member, local_rank=local_rank, pid=70, status=status, **last)


COMMITS = [(step, 12.0 + step) for step in range(1, 9)]  # the last at 20.0
RUNS = [*STARTED, generation(12.0, 1, 0), change(13.0, 1, "start", 4.5)]
PAGES = {
    "h-1/0/a": RankStatus(8, 1, "WAITING", COMMITS, (0, 0), {"loss": (2.0, 3.0), "tokens": (10.0, 12.0)}),
    "h-1/1/b": RankStatus(8, 1, "USER_CODE", COMMITS, (30, 120), {"loss": (4.0, 3.0), "tokens": (10.0, 8.0)}),
}


def summary(events: list[dict[str, Any]]) -> Summary:
    found = Summary()
    for each in events:
        found.add(each)
    return found


def report(
    events: list[dict[str, Any]], pages: dict[str, RankStatus], now_s: float, *, is_alive: bool = True
) -> dict[str, Any]:
    found = summary(events).report(pages, now_s, is_alive=is_alive)
    json.dumps(found, allow_nan=False)
    return found


# SUMMARY-4
def test_what_was_reported_last_is_known_from_the_events_once_there_are_no_pages() -> None:
    reported = [
        event(15.0, "reported", step=3, numbers={"loss": 5.0}),
        event(25.0, "reported", step=23, numbers={"loss": "nan", "tokens": 8.0}),
    ]
    events = [*RUNS, *reported]
    assert report(events, {}, 30.0, is_alive=False)["numbers"] == {"loss": "nan", "tokens": 8.0}
    assert report(events, PAGES, 30.0)["numbers"] == {"loss": 3.0, "tokens": 10.0}
    assert report([*events, *STARTED], {}, 30.0)["numbers"] == {"loss": "nan", "tokens": 8.0}
    assert report([*events, {**STARTED[0], "pid": 8}], {}, 30.0)["numbers"] == {}, "another job"
    first, last = summary(events[:-1]).reported(), summary(events).reported()
    assert first == {"elapsed_s": 7.0, "step": 3, "steps_per_s": 0.0, "numbers": {"loss": 5.0}}
    assert last == {"elapsed_s": 17.0, "step": 23, "steps_per_s": 2.0, "numbers": {"loss": "nan", "tokens": 8.0}}
    assert summary(RUNS).reported() is None


def test_the_newest_checkpoint_is_the_one_saved_here_or_the_one_that_the_record_names() -> None:
    def checkpoint(*events: dict[str, Any]) -> Any:
        return summary([*RUNS, *events]).report(PAGES, 40.0, is_alive=True)["checkpoint"]

    def record(at: float, step: int, saved: int | None) -> dict[str, Any]:
        return {**generation(at, 2, step), "saved": saved}

    here = event(30.0, "saved", step=20, generation=1, digest="d", path="/c/step-20", bytes=2_500_000, duration_s=1.25)
    known = {
        "step": 20,
        "age_s": 10.0,
        "wall": 1_000_030.0,
        "bytes": 2_500_000,
        "duration_s": 1.25,
        "path": "/c/step-20",
    }
    elsewhere = {"step": 24, "age_s": None, "wall": None, "bytes": None, "duration_s": None, "path": None}
    assert checkpoint() is None
    for later in ([], [record(31.0, 22, 20)], [record(31.0, 22, None)]):
        assert checkpoint(here, *later) == known
    assert checkpoint(here, record(31.0, 25, 24)) == elsewhere
    assert checkpoint(here, record(31.0, 12, 12)) == {**elsewhere, "step": 12}, "the job has gone back"
    assert checkpoint(here, record(31.0, 0, None)) is None
    lines = list(lines_of(summary([*RUNS, here]).report(PAGES, 40.0, is_alive=True)))
    assert "  newest checkpoint: step 20, 0:00:10 ago, 2.5 MB in 1.2 s: /c/step-20" in lines
    ended = list(lines_of(summary([*RUNS, here]).report({}, 4000.0, is_alive=False)))
    at = datetime.fromtimestamp(1_000_030.0).strftime("%Y-%m-%d %H:%M:%S")
    assert f"  newest checkpoint: step 20, saved at {at}, 2.5 MB in 1.2 s: /c/step-20" in ended
    told = list(lines_of(summary([*RUNS, record(31.0, 25, 24)]).report(PAGES, 40.0, is_alive=True)))
    assert "  newest checkpoint: step 24" in told


def test_a_running_job() -> None:
    found = report(RUNS, PAGES, 20.25)
    assert (found["job"], found["agent"], found["state"], found["generation"]) == ("demo", "h-1", "running", 1)
    assert (found["step"], found["steps_per_s"], found["last_commit_age_s"]) == (8, 1.0, 0.25)
    assert found["tokens_per_s"] == 20.0, "the ranks' mean tokens a step, added"
    assert found["numbers"] == {"loss": 3.0, "tokens": 10.0}
    assert found["goodput"] == pytest.approx(1 - 4.5 / 12.25, abs=1e-4)
    assert found["lost_s"] == {"start": 4.5}
    assert found["phase_s"] == {"leave": 0.01, "abort": 0.0, "first_commit": 0.2}
    assert found["seats"] == {"active": 2, "learner": 0, "spare": 1, "gone": 0}
    assert found["healing"] == [{"local_rank": 1, "received_bytes": 30, "bytes": 120}]
    here, there = found["hosts"]
    assert here["is_here"]
    assert here["seats"][0] == {"local_rank": 0, "rank": 0, "status": "active", "step": 8, "doing": "WAITING"}
    assert there["seats"] == [{"local_rank": 0, "rank": None, "status": "spare"}]


# SUMMARY-5
def test_the_step_is_the_highest_one_that_was_committed_also_once_the_ranks_are_gone() -> None:
    def step(*events: dict[str, Any], is_alive: bool = True) -> Any:
        return report([*RUNS, *events], {}, 30.0, is_alive=is_alive)["step"]

    numbers = event(15.0, "reported", step=3, generation=1, numbers={"loss": 5.0})
    saved = event(16.0, "saved", step=4, generation=1, digest="d", path="/c", bytes=10, duration_s=0.5)
    assert step() == 0
    for is_alive in (True, False):
        assert step(numbers, is_alive=is_alive) == 3
        assert step(saved, numbers, is_alive=is_alive) == 4
        assert step(saved, exited(20.3, 0), exited(20.3, 1), is_alive=is_alive) == 8


# SUMMARY-5
def test_a_job_that_goes_back_shows_the_step_to_which_it_has_gone_back() -> None:
    """Whatever is still known of the steps that it has lost."""
    events = [*RUNS, exited(20.3, 0), {**generation(21.0, 2, 5), "saved": 5}]
    lost = [
        exited(21.1, 1),
        event(21.2, "reported", step=8, generation=1, numbers={"loss": 5.0}),
        event(21.3, "saved", step=7, generation=1, digest="d", path="/c", bytes=10, duration_s=0.5),
    ]
    assert report([*events, *lost], PAGES, 22.0)["step"] == 5
    assert report([*events, *lost], {**PAGES, "h-1/0/a": RankStatus(6, 2)}, 22.0)["step"] == 6


# SUMMARY-2
def test_a_learner_is_active_once_its_generation_has_committed() -> None:
    events = [*RUNS, generation(20.1, 2, 8, learner=1)]
    found = report(events, PAGES, 20.2)
    assert found["is_changing"]
    assert found["seats"] == {"active": 1, "learner": 1, "spare": 1, "gone": 0}
    assert found["hosts"][0]["seats"][1]["status"] == "learner"
    pages = {member: RankStatus(9, 2, "WAITING", [*COMMITS, (9, 21.0)]) for member in PAGES}
    for known in (events, [*events, change(21.0, 2, "join", 0.1)]):
        found = report(known, pages, 21.1)
        assert found["seats"] == {"active": 2, "learner": 0, "spare": 1, "gone": 0}
        assert found["hosts"][0]["seats"][1]["status"] == "active"


# SUMMARY-6
def test_a_seat_whose_rank_has_exited_is_gone() -> None:
    def counts(*events: dict[str, Any], is_alive: bool = True) -> tuple[int, int, int]:
        found = report([*RUNS, *events], {}, 26.0, is_alive=is_alive)
        statuses = [seat["status"] for host in found["hosts"] for seat in host["seats"]]
        assert found["seats"] == {status: statuses.count(status) for status in ("active", "learner", "spare", "gone")}
        return found["seats"]["active"], found["seats"]["spare"], found["seats"]["gone"]

    again = event(20.5, "spawned", member="h-1/1/c", local_rank=1, pid=72)
    assert counts() == (2, 1, 0)
    assert counts(exited(20.3, 1)) == counts(exited(20.3, 1), again) == (1, 1, 1)
    assert counts(exited(20.3, 1), again, generation(21.0, 2, 8)) == (2, 1, 0)
    assert counts(exited(20.3, 1), again, generation(21.0, 2, 8), exited(22.0, 1)) == (2, 1, 0), "another one has it"
    assert counts(exited(20.3, 1), {**STARTED[0], "t": 25.0, "agent": "h-9"}) == (1, 1, 1), "it rejoins"
    assert counts(is_alive=False) == (0, 1, 2), "nobody here knows of other hosts"
    assert counts(event(21.0, "exiting", step=8, code=0), is_alive=False) == (0, 0, 3)
    lines = list(lines_of(report([*RUNS, exited(20.3, 1)], ONE_LEFT, 26.0)))
    assert any(line.endswith(": 1 active, 1 spare, 1 gone") for line in lines)
    assert "  h (h-1, this agent): 0 X1" in lines


def test_of_many_hosts_those_that_differ_are_shown() -> None:
    seats = [
        {"agent": f"h-{number}", "host": f"h{number:02}", "seats": [[0, number, "active"]]} for number in range(64)
    ]
    seats[40]["seats"], seats[50]["seats"] = [[0, 40, "learner"], [1, None, "spare"]], [[0, None, "spare"]]
    named = {**STARTED[0], "agent": "h-63"}
    found = report([named, {**generation(12.0, 1, 0), "seats": seats, "learner": 1}], {}, 13.0)
    lines = [line.strip() for line in lines_of(found)]
    shown = [line.split(" ")[0] for line in lines if re.match(r"h\d\d ", line)]
    assert shown == [*(f"h{number:02}" for number in range(13)), "h40", "h50", "h63"]
    assert "h40 (h-40): L40 spare" in lines
    assert "h63 (h-63, this agent): 63" in lines
    assert "and 48 more hosts: 48 active" in lines


def test_the_time_of_a_change_under_way_is_lost_while_it_lasts() -> None:
    events = [*RUNS, generation(20.5, 2, 8)]
    assert report(events, PAGES, 20.8)["lost_s"]["under_way"] == 0.0, "no longer than a step"
    assert report(events, PAGES, 26.0)["lost_s"]["under_way"] == pytest.approx(5.0)
    found = report([*events, change(26.0, 2, "killed", 5.25)], PAGES, 26.0)
    assert found["lost_s"] == {"killed": 5.25, "start": 4.5}
    assert found["num_changes"] == {"killed": 1, "start": 1}


# SUMMARY-3
def test_a_change_under_way_has_cost_what_it_costs_once_it_is_over() -> None:
    """From its first commit on, although not all ranks have committed."""
    events = [*RUNS, generation(20.5, 2, 8)]
    pace = Pace(8.0)
    pace.read(COMMITS)
    pace.begin(8, 20.5)
    commits = [*COMMITS, (9, 24.5), (10, 25.5)]
    pages = {"h-1/0/a": RankStatus(10, 2, "WAITING", commits)}
    found = report(events, pages, 25.6)["lost_s"]["under_way"]
    pace.read(commits)
    assert found == pytest.approx(pace.cost(25.6)) == pytest.approx(3.5)


ONE_LEFT = {"h-1/0/a": PAGES["h-1/0/a"]}
REQUESTED = event(20.4, "requested", newest_commit=[8, 20.0])


# SUMMARY-3
@pytest.mark.parametrize(
    ("events", "pages"),
    [
        ([exited(20.3, 1)], ONE_LEFT),
        ([exited(20.3, 0), exited(20.3, 1)], {}),
        ([REQUESTED], PAGES),
        ([exited(20.3, 0), exited(20.3, 1), REQUESTED, event(21.0, "requested", newest_commit=[8, 20.0])], {}),
    ],
)
def test_a_change_that_waits_for_its_record_is_under_way(
    events: list[dict[str, Any]], pages: dict[str, RankStatus]
) -> None:
    """As without a coordinator. Its record then takes nothing back."""
    pace = Pace(8.0)
    pace.read(COMMITS)
    pace.begin(8, 30.0)
    agreed = generation(30.0, 2, 8, counted_to=pace.counted_to)
    for now_s in (21.0, 26.0, 30.0):
        found = report([*RUNS, *events], pages, now_s)
        assert (found["state"], found["is_changing"], found["step"]) == ("running", True, 8)
        assert found["lost_s"] == {"start": 4.5, "under_way": pytest.approx(now_s - 20.0 - 1.0)}
        assert ", which has ended; the next one is not agreed yet: " in "\n".join(lines_of(found))
    after = report([*RUNS, *events, agreed], pages, 30.0)
    assert (after["lost_s"], after["goodput"]) == (found["lost_s"], found["goodput"])
    assert "has ended" not in "\n".join(lines_of(after))
    commits = [*COMMITS, (9, 31.0)]
    later = report([*RUNS, *events, agreed], {"h-1/0/a": RankStatus(9, 2, commits=commits)}, 31.0)
    pace.read(commits)
    assert later["lost_s"]["under_way"] == pytest.approx(pace.cost(31.0)) == pytest.approx(10.0)


# SUMMARY-3
def test_a_change_that_waits_adds_to_one_that_is_not_over() -> None:
    commits = [*COMMITS, (9, 24.5), (10, 25.5)]
    pages = {"h-1/0/a": RankStatus(10, 2, commits=commits)}
    pace = Pace(8.0)
    pace.read(COMMITS)
    pace.begin(8, 20.5)
    pace.read(commits)
    waiting = event(26.0, "requested", newest_commit=[10, 25.5])
    found = report([*RUNS, generation(20.5, 2, 8), waiting], pages, 30.0)["lost_s"]["under_way"]
    first_s = pace.cost(26.0)
    assert found == pytest.approx(first_s + pace.cost(30.0) - 1.0) == pytest.approx(3.5 + 3.5)


# SUMMARY-3
@pytest.mark.parametrize(
    "events",
    [
        [event(20.3, "coordinator unreachable", reason="closed")],
        [exited(20.3, 0, status=0), exited(20.3, 1, status=0)],  # at the end of the job
        [event(19.5, "requested", newest_commit=[7, 19.0])],  # a step was committed since
        [exited(20.3, 1), generation(20.5, 2, 8), change(20.6, 2, "killed", 0.1)],
    ],
)
def test_no_change_is_under_way_while_steps_are_committed_nor_at_the_end(events: list[dict[str, Any]]) -> None:
    found = report([*RUNS, *events], PAGES, 26.0)
    assert (found["is_changing"], found["has_ended"]) == (False, False)
    assert "under_way" not in found["lost_s"]


# SUMMARY-3
def test_a_host_of_spares_does_not_wait_for_a_change() -> None:
    """Their agent requests the next record as soon as it has one."""
    agreed = {**generation(12.0, 1, 0), "seats": [{"agent": "h-1", "host": "h", "seats": [[0, None, "spare"]]}]}
    found = report([*STARTED, agreed, REQUESTED, exited(20.6, 0), change(21.0, 1, "start", 4.5)], {}, 26.0)
    assert not found["is_changing"]


def test_ranks_that_were_all_replaced_do_not_turn_the_time_before_into_a_loss() -> None:
    events = [*RUNS, generation(1000.0, 2, 988, counted_to=(988, 999.5))]
    assert report(events, {"h-1/0/a": RankStatus()}, 1003.5)["lost_s"]["under_way"] == pytest.approx(3.0)


def test_a_save_is_shown_while_it_is_under_way() -> None:
    found = report(RUNS, {"h-1/0/a": RankStatus(8, saving=(30, 120)), "h-1/1/b": RankStatus(8, saving=(5, 5))}, 20.25)
    assert found["saving"] == [{"local_rank": 0, "written_bytes": 30, "bytes": 120}]
    lines = list(lines_of(found))
    assert "  local rank 0 saves: [#######.......................] 25 % of 120 bytes" in lines
    assert not any("local rank 1 saves" in line for line in lines)


def test_lost_data_workers_are_counted_by_kind() -> None:
    lost = [
        event(19.0, "data_worker_lost", member="h-1/0/a", local_rank=0, kind=kind) for kind in ("died", "hung", "died")
    ]
    found = report([*RUNS, *lost], PAGES, 20.25)
    assert found["data_workers_lost"] == {"died": 2, "hung": 1, "failed": 0}
    assert "  data workers of this agent's ranks that were lost, and replaced: 2 died, 1 hung" in lines_of(found)
    assert "data workers" not in "\n".join(lines_of(report(RUNS, PAGES, 20.25)))


@pytest.mark.parametrize(
    ("last", "code", "state", "reason"),
    [
        (event(30.0, "warned", text="..."), 0, "finished", ""),
        (event(30.0, "ended", reason="all ranks left"), 0, "ended", "all ranks left"),
        (event(30.0, "failed", code=1, reason="rank 1 raised"), 1, "failed", "rank 1 raised"),
        (event(30.0, "signal", signal="SIGINT"), 130, "stopped", "SIGINT"),
        (event(30.0, "warned", text="..."), None, "died", "killed"),
    ],
)
def test_a_job_that_is_over_says_how_it_ended(last: dict[str, Any], code: int | None, state: str, reason: str) -> None:
    found = report([*RUNS, last, event(30.5, "exiting", step=18, code=code)], {}, 1e6, is_alive=False)
    assert found["state"] == state
    assert reason in found["reason"]
    assert (found["step"], found["steps_per_s"], found["elapsed_s"]) == (18, 0.0, 22.5)
    assert f"job demo: {state}" in next(lines_of(found))


def test_an_agent_that_has_left_no_events_is_unknown() -> None:
    found = report([], {}, 11.0, is_alive=False)
    assert (found["state"], found["agent"]) == ("unknown", None)
    first, second = list(lines_of(found))[:2]
    assert (
        first == "a job without events: unknown (its events could not be written, or it was killed before it wrote any)"
    )
    assert "agent" not in second
    assert next(lines_of(report([], {}, 11.0))) == "a job that has not started: starting"


def test_an_agent_that_nobody_sees_is_unknown_unless_its_events_tell_its_end() -> None:
    def found(*events: dict[str, Any]) -> dict[str, Any]:
        return summary([*RUNS, *events]).report({}, 11.0, is_alive=None)

    assert (found()["state"], found()["is_changing"]) == ("unknown", False)
    assert found()["seats"]["active"] == 2, "as it was last known"
    assert next(lines_of(found())).startswith("job demo: unknown (no agent that writes its events is seen from here")
    assert found(event(21.0, "exiting", step=8, code=0))["state"] == "finished"


def test_a_job_that_starts_has_nothing_to_show() -> None:
    for events in ([], STARTED):
        found = report(events, {}, 11.0)
        assert (found["state"], found["generation"], found["step"]) == ("starting", 0, 0)
        assert "no seats" in "\n".join(lines_of(found))


# SUMMARY-1
def test_what_is_kept_does_not_grow_with_the_job() -> None:
    events = list(RUNS)
    for number in range(2, 3 * NUM_CHANGES):
        events += [generation(20.0 + number, number, number), change(20.5 + number, number, "killed", 0.5)]
        events += [event(20.6 + number, "exited", member="h-1/1/b", local_rank=1, pid=71, status=-9)]
        events += [event(20.7 + number, "spawned", member="h-1/1/b", local_rank=1, pid=71)]
    found = summary(events)
    assert len(found.pids) == 2
    told = found.report(PAGES, 1000.0, is_alive=True)
    assert [each["generation"] for each in told["changes"]] == list(range(2 * NUM_CHANGES, 3 * NUM_CHANGES))
    assert told["num_changes"]["killed"] == 3 * NUM_CHANGES - 2


@pytest.mark.parametrize("pid", [7, 8])
def test_a_job_that_follows_in_the_same_file_is_shown_alone(pid: int) -> None:
    """Also if its agent has the pid of the one before, as the only process of each container."""
    again = {**STARTED[0], "t": 100.0, "monotonic": 99.0, "pid": pid, "agent": "h-2", "job": "next"}
    found = report([*RUNS, event(50.0, "failed", reason="x"), again], {}, 101.0)
    assert (found["job"], found["state"], found["num_changes"], found["elapsed_s"]) == ("next", "starting", {}, 2.0)


def test_an_agent_that_rejoins_is_the_same_job() -> None:
    again = {**STARTED[0], "t": 30.0, "monotonic": 8.0, "agent": "h-9"}
    found = report([*RUNS, again], {}, 40.0)
    assert (found["agent"], found["num_changes"], found["elapsed_s"]) == ("h-9", {"start": 1}, 32.0)


def test_the_terminal_obeys_no_text_of_a_job() -> None:
    found = report([*RUNS, {**change(20.2, 2, "failed", 0.25), "cause": "rank 1: \x1b]0;title\x07\nä\x9b"}], {}, 20.3)
    lines = list(lines_of(found))
    assert all(line.isprintable() for line in lines)
    assert r"rank 1: \x1b]0;title\x07\nä\x9b" in lines[-1]


def test_the_terminal_says_that_a_job_stands_still() -> None:
    """Its rate is that of the last steps, before it stood still."""
    early, late = ("\n".join(lines_of(report(RUNS, PAGES, now_s))) for now_s in (20.25, 40.25))
    assert "1.00 steps/s, last commit" in early
    assert "stands still" not in early
    assert re.search(r"1\.00 steps/s, last commit \d+\.\d s ago \(stands still\)\n", late)


def test_a_coordinator_that_is_away_is_shown_until_it_is_back() -> None:
    away = event(20.5, "coordinator unreachable", reason="it has not answered for 3 s")
    found = report([*RUNS, away], PAGES, 24.0)
    assert "\n  no session with the coordinator for 3.5 s: it has not answered for 3 s\n" in "\n".join(lines_of(found))
    rejoined = {**STARTED[0], "t": 30.0, "monotonic": 8.0, "agent": "h-9"}
    for back in (event(24.0, "coordinator reachable"), rejoined):
        assert report([*RUNS, away, back], PAGES, 31.0)["coordinator_away"] is None
    assert report([*RUNS, away], {}, 24.0, is_alive=False)["coordinator_away"] is None


def test_a_host_that_is_left_out_is_shown_with_those_that_it_does_not_reach() -> None:
    record = generation(11.0, 1, 0)
    record["seats"][1]["out_of_reach"] = ["10.0.0.1", "10.0.0.2"]
    found = report([*STARTED, record], PAGES, 12.0)
    assert [host["out_of_reach"] for host in found["hosts"]] == [[], ["10.0.0.1", "10.0.0.2"]]
    line = "  k (k-1): spare (left out: it and 10.0.0.1, 10.0.0.2 do not reach each other)"
    assert line in lines_of(found)


def test_the_terminal_shows_it_in_a_few_lines() -> None:
    pages = {**PAGES, "h-1/0/a": RankStatus(8, 1, "WAITING", COMMITS, (0, 0), {"loss": (float("nan"), 0.0)})}
    text = "\n".join(lines_of(report(RUNS, pages, 20.25)))
    assert "step 8, 1.00 steps/s" in text
    assert re.search(r"\n  reported by this agent's ranks: .*loss nan\n", text)
    assert "  h (h-1, this agent): 0 1\n  k (k-1): spare\n" in text
    assert "local rank 1 heals: [#######.......................] 25 % of 120 bytes" in text
    assert "goodput 63.3 %; lost by cause: start 4.50 s (1)" in text
    assert "generation 1: cause 1; 1 left; lost 4.50 s; leave 10, first_commit 200 ms" in text


def test_the_layout_in_force_is_shown_with_what_it_falls_back_from() -> None:
    fallback = {"layout": "sdp=1", "fallback_of": "sdp=2"}
    events = [*RUNS, {**generation(20.1, 2, 8), **fallback}]
    events.append({**change(20.2, 2, "agent_lost", 0.25), **fallback, "layout_before": "sdp=2"})
    found = report(events, PAGES, 20.3)
    assert (found["layout"], found["fallback_of"]) == ("sdp=1", "sdp=2")
    text = "\n".join(lines_of(found))
    assert "\n  layout sdp=1, a fallback of sdp=2\n" in text
    assert "cause 2; 1 left; takes the layout sdp=1, a fallback of sdp=2; lost 0.25 s" in text
    back = report([*events, {**generation(30.0, 3, 9), "layout": "sdp=2", "fallback_of": None}], PAGES, 30.1)
    assert "\n  layout sdp=2\n" in "\n".join(lines_of(back))
    assert "layout" not in "\n".join(lines_of(report(RUNS, PAGES, 20.25))), "an older log does not say it"
