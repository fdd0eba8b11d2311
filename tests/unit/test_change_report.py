"""What is told of a generation change, from the events of one agent."""

from __future__ import annotations

from typing import Any

import pytest

from elasticgang.layout import ParallelLayout
from elasticgang.observe.change_report import PHASES, ChangeReporter, format_change
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.record import Holder
from tests.unit.agent_hosts import record_of


def enter(changes: ChangeReporter, member: str, generation: int, began: float) -> None:
    names = ("began", "aborted", "agreed", "resolved", "configured")
    changes.entered(member, generation, {name: began + 0.01 * step for step, name in enumerate(names)})


def started() -> ChangeReporter:
    """Three ranks in generation 1, which has committed."""
    changes = ChangeReporter()
    assert list(changes.agreed(record_of(["a0", "a1", "a2"]), "a")) == []
    for member in ("a0", "a1", "a2"):
        enter(changes, member, 1, 1.0)
    told = [change for member in ("a0", "a1", "a2") for change in changes.committed(member, Attempt(1, 1), 2.0)]
    assert [change["cause"] for change in told] == ["the job starts"]
    return changes


# CHANGE-1
@pytest.mark.parametrize("is_late", [False, True])
def test_a_rank_that_leaves_because_its_script_has_raised_is_reported_with_the_error(is_late: bool) -> None:
    """Also if the others have agreed before the agent knows of the error."""
    changes = started()
    changes.caused("rank 1 left before the last step", "failed", 10.0, leaver="a1")
    if not is_late:
        changes.caused("rank 1 raised ValueError: boom", "failed", 10.01, is_root=True, exiting="a1")
    assert list(changes.agreed(record_of(["a0", "a2"], 2), "a")) == []
    changes.failed("a2", "rank 2 raised KeyError: not the cause", "a2")
    if is_late:
        changes.failed("a1", "rank 1 raised ValueError: boom", "a1")
    for member in ("a0", "a2"):
        enter(changes, member, 2, 10.03)
        assert list(changes.committed(member, Attempt(2, 2), 10.2)) == [], "the exit is not complete"
    (change,) = changes.exited("a1", "rank 1 raised ValueError: boom", "failed")
    assert (change["cause"], change["kind"]) == ("rank 1 raised ValueError: boom", "failed")
    assert change["began_at"] == 10.0


@pytest.mark.parametrize("is_late", [False, True])
def test_a_rank_whose_script_exits_in_its_loop_is_reported_with_the_code(is_late: bool) -> None:
    """Nothing waits for its exit, which may take long."""
    changes = started()
    changes.caused("rank 1 left before the last step", "failed", 10.0, leaver="a1")
    if not is_late:
        changes.caused("rank 1 exited with code 3", "failed", 10.01, is_root=True)
    assert list(changes.agreed(record_of(["a0", "a2"], 2), "a")) == []
    if is_late:
        changes.failed("a1", "rank 1 exited with code 3", None)
    told: list[dict[str, Any]] = []
    for member in ("a0", "a2"):
        enter(changes, member, 2, 10.03)
        told += changes.committed(member, Attempt(2, 2), 10.2)
    assert [(change["cause"], change["kind"]) for change in told] == [("rank 1 exited with code 3", "failed")]


# CHANGE-5
def test_an_agent_that_joins_a_running_job_does_not_say_that_the_job_starts() -> None:
    changes = ChangeReporter()
    assert list(changes.agreed(record_of(["a0", "a1", "b0"], 5, spares=["b1"]), "b")) == []
    enter(changes, "b0", 5, 1.0)
    (change,) = changes.committed("b0", Attempt(9, 5), 2.0)
    assert (change["cause"], change["kind"]) == ("this host joins", "join")
    assert (change["joined"], change["left"], change["moved"]) == (["b0", "b1"], [], [])
    assert list(changes.agreed(record_of(["a0", "b0"], 6), "b")) == []
    (later,) = changes.ended()
    assert (later["cause"], later["left"], later["joined"]) == ("a change elsewhere", ["a1", "b1"], [])


# CHANGE-2
def test_a_death_is_reported_with_its_cause_and_phases() -> None:
    changes = started()
    changes.caused("rank 1 lost a peer", "abort", 10.01)
    changes.caused("rank 2 was killed by SIGKILL", "killed", 10.02, is_root=True)
    changes.caused("rank 0 exited with code 1", "failed", 10.03, is_root=True)
    changes.requested("a0", Attempt(2, 1))
    changes.requested("a1", None)
    assert list(changes.agreed(record_of(["a0", "a1"], 2, committed=Attempt(2, 1), rolled_forward=True), "a")) == []
    enter(changes, "a0", 2, 10.03)
    enter(changes, "a1", 2, 10.05)
    assert list(changes.committed("a0", Attempt(3, 2), 10.2)) == []
    (change,) = changes.committed("a1", Attempt(3, 2), 10.3)
    assert (change["cause"], change["kind"]) == ("rank 2 was killed by SIGKILL", "killed")
    assert (change["left"], change["joined"], change["moved"]) == (["a2"], [], [])
    assert change["in_doubt"] == [{"step": 2, "generation": 1, "outcome": "rolled forward"}]
    # From the first sign, at 10.01; the slower rank, a1, ends each phase.
    expected = {
        "leave": 40.0,
        "abort": 10.0,
        "quorum": 10.0,
        "resolve": 10.0,
        "configure": 10.0,
        "first_commit": 110.0,
    }
    assert change["phases_ms"] == {**expected, "heal": None}
    assert tuple(change["phases_ms"]) == PHASES
    assert format_change(change, {"active": 2, "learner": 0}) == (
        "generation 2 (rank 2 was killed by SIGKILL): 2 active; 1 left; step 2 in doubt was rolled forward; "
        "190 ms (leave 40, abort 10, quorum 10, resolve 10, configure 10, first_commit 110)"
    )


def test_a_newcomer_that_heals_is_no_late_survivor() -> None:
    changes = started()
    changes.caused("a rank waits to join", "join", 10.0)
    assert list(changes.agreed(record_of(["a0", "a1", "a2", "a3"], 2), "a")) == []
    told: list[dict[str, Any]] = []
    for member in ("a0", "a1", "a2"):  # what a3 says may come last
        enter(changes, member, 2, 10.02)
        told += changes.committed(member, Attempt(2, 2), 11.0)
    assert told == []
    enter(changes, "a3", 2, 9.0)  # it has asked since then
    changes.healed("a3", 2, 10.5)
    told += changes.committed("a3", Attempt(2, 2), 11.0)
    assert [change["joined"] for change in told] == [["a3"]]
    assert told[0]["phases_ms"]["leave"] == 20.0
    assert told[0]["phases_ms"]["heal"] == 440.0


def test_a_spare_that_takes_a_seat_has_moved() -> None:
    changes = ChangeReporter()
    list(changes.agreed(record_of(["a0", "a1"], spares=["a2"]), "a"))
    (_,) = changes.agreed(record_of(["a0", "a2"], 2), "a")
    (change,) = changes.ended()
    assert change["moved"] == [{"member": "a2", "from": None, "to": {"pp": 0, "sdp": 0, "tp": 0}}]
    assert change["left"] == ["a1"]


def test_a_checkpoint_that_no_rank_has_gone_on_from_was_only_tried() -> None:
    changes = started()
    list(changes.agreed(record_of(["a0"], 2, committed=Attempt(400, 1), checkpoint="digest"), "a"))
    enter(changes, "a0", 2, 10.0)
    (tried,) = changes.agreed(record_of(["a0"], 3, committed=Attempt(300, 1), checkpoint="older"), "a")
    enter(changes, "a0", 3, 11.0)
    (loaded,) = changes.committed("a0", Attempt(301, 3), 12.0)
    assert "; tries the checkpoint of step 400" in format_change(tried, {"active": 1})
    assert "; continues at the checkpoint of step 300" in format_change(loaded, {"active": 1})


# CHANGE-1
def test_a_change_overtaken_by_the_next_one_is_reported_as_far_as_it_came() -> None:
    changes = started()
    changes.requested("a0", Attempt(2, 1))
    list(changes.agreed(record_of(["a0", "a1"], 2, committed=Attempt(1, 1)), "a"))
    enter(changes, "a0", 2, 10.0)
    (change,) = changes.agreed(record_of(["a0"], 3, committed=Attempt(1, 1)), "a")
    assert change["cause"] == "a change elsewhere"
    assert change["in_doubt"] == [{"step": 2, "generation": 1, "outcome": "dropped"}]
    assert change["phases_ms"]["first_commit"] is None
    (last,) = changes.ended()
    assert last["in_doubt"] == []
    assert set(last["phases_ms"].values()) == {None}
    assert list(changes.ended()) == []


def test_events_of_another_generation_do_not_count() -> None:
    changes = started()
    list(changes.agreed(record_of(["a0"], 2), "a"))
    enter(changes, "a0", 1, 10.0)
    changes.healed("a0", 2, 10.0)
    assert list(changes.committed("a0", Attempt(2, 1), 10.0)) == []
    (change,) = changes.ended()
    none: dict[str, Any] = dict.fromkeys(PHASES)
    assert change["phases_ms"] == none


def test_a_lost_agent_is_the_root_cause() -> None:
    changes = started()
    changes.caused("rank 1 lost a peer", "abort", 10.01)
    changes.agent_lost("b", 10.02)  # it has no seats
    changes.agent_lost("a", 10.03)
    list(changes.agreed(record_of(["a0"], 2), "a"))
    (change,) = changes.ended()
    assert change["cause"] == "agent a is lost"
    changes.caused("agent a exits on SIGTERM", "abort", 11.0, agents=("a",))
    changes.agent_lost("a", 11.01)
    list(changes.agreed(record_of(["a0"], 3), "a"))
    (change,) = changes.ended()
    assert change["cause"] == "agent a exits on SIGTERM"
    changes.caused("rank 0 of agent a died", "abort", 12.0)
    changes.agent_lost("a", 12.01)
    list(changes.agreed(record_of(["a0"], 4), "a"))
    (change,) = changes.ended()
    assert change["cause"] == "agent a is lost"


# CHANGE-4
@pytest.mark.parametrize("hang_comes_first", [True, False])
def test_the_end_of_an_agent_and_a_hang_do_not_hide_each_other(hang_comes_first: bool) -> None:
    changes = started()
    end = "agent b exits on SIGTERM: 2 of its ranks had not left within 1 s"
    causes: list[tuple[str, str, tuple[str, ...]]] = [("rank 1 (pid 7) hung", "hung", ()), (end, "abort", ("b",))]
    for text, kind, agents in causes if hang_comes_first else reversed(causes):
        for _ in range(2):  # said again
            changes.caused(text, kind, 10.0, is_root=not agents, agents=agents)
    changes.caused("rank 0 lost a peer", "abort", 10.1, is_effect=True)
    changes.caused("rank 1 was killed by SIGKILL", "killed", 10.2, is_root=True)
    list(changes.agreed(record_of(["a0", "a2"], 2), "a"))
    (change,) = changes.ended()
    assert (change["cause"], change["kind"]) == (f"rank 1 (pid 7) hung; also {end}", "hung")
    assert f"({change['cause']})" in format_change(change, {"active": 2, "learner": 0})


# CHANGE-4
def test_what_a_death_has_caused_is_not_beside_it() -> None:
    changes = started()
    changes.caused("agent b, which lost a peer", "abort", 10.0, is_effect=True, agents=("b",))
    changes.caused("rank 2 died", "killed", 10.1, is_root=True)
    changes.caused("agent b exits on SIGINT", "abort", 10.2, agents=("b",))
    list(changes.agreed(record_of(["a0", "a1"], 2), "a"))
    (change,) = changes.ended()
    assert change["cause"] == "rank 2 died"


# CHANGE-6
def test_a_host_that_was_cut_off_does_not_say_that_its_ranks_died() -> None:
    changes = ChangeReporter()
    changes.cut_off(0.5)  # there is no generation that could end
    list(changes.agreed(record_of(["a0", "a1"]), "a"))
    assert [change["cause"] for change in changes.ended()] == ["the job starts"]
    changes.caused("a rank of another agent lost a peer", "abort", 10.0, is_effect=True)
    changes.caused("rank 0 died", "killed", 10.1, is_root=True, exiting="a0")
    changes.cut_off(10.2)
    list(changes.exited("a0", "rank 0 was killed by SIGKILL", "killed"))
    list(changes.agreed(record_of(["a0", "a1"], 2), "a"))
    (change,) = changes.ended()
    assert (change["cause"], change["kind"]) == ("this host lost its connection to the coordinator", "agent_lost")
    changes.caused("rank 1 was killed by SIGKILL", "killed", 11.0, is_root=True)  # and the coordinator was away
    changes.cut_off(19.0)
    list(changes.agreed(record_of(["a0"], 3), "a"))
    assert [change["cause"] for change in changes.ended()] == ["rank 1 was killed by SIGKILL"]


def test_an_agent_that_has_left_is_the_cause_only_if_there_is_no_other() -> None:
    changes = started()
    changes.agent_left("b", 10.01)  # it has no seats
    changes.agent_left("a", 10.02)
    list(changes.agreed(record_of(["a0"], 2), "a"))
    (change,) = changes.ended()
    assert (change["cause"], change["kind"]) == ("agent a has left", "left")
    changes.caused("agent a exits on SIGINT", "abort", 11.0, agents=("a",))
    changes.agent_left("a", 11.01)
    list(changes.agreed(record_of(["a0"], 3), "a"))
    (change,) = changes.ended()
    assert (change["cause"], change["kind"]) == ("agent a exits on SIGINT", "abort")
    changes.caused(
        "agent a has left", "abort", 12.0, agents=("a",)
    )  # as the coordinator says when it ends the generation
    changes.agent_left("a", 12.01)
    list(changes.agreed(record_of(["a0"], 4), "a"))
    (change,) = changes.ended()
    assert (change["cause"], change["kind"]) == ("agent a has left", "left")


# CHANGE-1
def test_a_change_is_reported_once_the_exit_that_caused_it_is_complete() -> None:
    changes = started()
    changes.caused("rank 2 died", "killed", 10.0, is_root=True, exiting="a2")
    changes.caused("rank 2 was killed by SIGKILL", "killed", 10.5, is_root=True)
    assert list(changes.agreed(record_of(["a0", "a1"], 2), "a")) == []
    for member in ("a0", "a1"):
        enter(changes, member, 2, 10.01)
        assert list(changes.committed(member, Attempt(2, 2), 10.2)) == []
    assert list(changes.exited("a1", "rank 1 was killed by SIGKILL", "killed")) == []
    (change,) = changes.exited("a2", "rank 2 was killed by SIGKILL", "killed")
    assert change["cause"] == "rank 2 was killed by SIGKILL"
    assert change["phases_ms"]["leave"] == 10.0


def test_an_exit_that_is_complete_first_names_the_cause() -> None:
    changes = started()
    changes.caused("rank 2 died", "killed", 10.0, is_root=True, exiting="a2")
    assert list(changes.exited("a2", "rank 2 was killed by SIGKILL", "killed")) == []
    assert list(changes.agreed(record_of(["a0", "a1"], 2), "a")) == []
    for member in ("a0", "a1"):
        enter(changes, member, 2, 10.01)
    told = [change for member in ("a0", "a1") for change in changes.committed(member, Attempt(2, 2), 10.2)]
    assert [change["cause"] for change in told] == ["rank 2 was killed by SIGKILL"]


def test_the_next_generation_waits_for_no_exit() -> None:
    changes = started()
    changes.caused("rank 2 died", "killed", 10.0, is_root=True, exiting="a2")
    assert list(changes.agreed(record_of(["a0", "a1"], 2), "a")) == []
    (change,) = changes.agreed(record_of(["a0"], 3), "a")
    assert change["cause"] == "rank 2 died"
    assert list(changes.exited("a2", "rank 2 was killed by SIGKILL", "killed")) == []


def test_a_change_of_the_layout_is_reported_with_what_it_falls_back_from() -> None:
    pairs, ones = ParallelLayout(sdp=2, min_replicas=2), ParallelLayout()
    members = ["a0", "a1", "a2", "a3"]
    changes = ChangeReporter()
    list(changes.agreed(record_of(members, layout=pairs, layouts=(pairs, ones)), "a"))
    holders = tuple(Holder(member, 0, (0, at % 2, 0)) for at, member in enumerate(members[:3]))
    fallback = record_of(members[:3], 2, layout=ones, layouts=(pairs, ones), holders=holders)
    (first,) = changes.agreed(fallback, "a")
    assert (first["layout"], first["fallback_of"], first["layout_before"]) == ("sdp=2,min_replicas=2", None, None)
    (second,) = changes.agreed(record_of(members, 3, layout=pairs, layouts=(pairs, ones)), "a")
    assert (second["layout"], second["fallback_of"]) == ("sdp=1", "sdp=2,min_replicas=2")
    assert (second["layout_before"], second["num_holders"]) == ("sdp=2,min_replicas=2", 3)
    said = "takes the layout sdp=1, a fallback of sdp=2,min_replicas=2, in place of sdp=2,min_replicas=2"
    assert said in format_change(second, {"active": 0, "learner": 3})
    (third,) = changes.ended()
    assert (third["layout"], third["fallback_of"], third["layout_before"]) == ("sdp=2,min_replicas=2", None, "sdp=1")


# CHANGE-3
@pytest.mark.parametrize(
    ("left", "expected"),
    [
        (["b1"], ("rank 1 of agent b left", "elsewhere")),
        (["b0", "b1"], ("rank 0 of agent b and 1 more left", "elsewhere")),
        (["a1"], ("rank 0 lost a peer", "abort")),
        (["a1", "b1"], ("rank 0 lost a peer", "abort")),
        ([], ("rank 0 lost a peer", "abort")),
    ],
)
def test_a_peer_that_was_lost_on_another_host_is_named(left: list[str], expected: tuple[str, str]) -> None:
    members = ["a0", "a1", "b0", "b1"]
    changes = ChangeReporter()
    list(changes.agreed(record_of(members), "a"))
    list(changes.ended())
    changes.caused("rank 0 lost a peer", "abort", 10.0, is_effect=True)
    list(changes.agreed(record_of([member for member in members if member not in left], 2), "a"))
    (change,) = changes.ended()
    assert (change["cause"], change["kind"]) == expected


# CHANGE-3
def test_a_rank_that_has_left_another_host_is_named_where_nobody_has_said_so() -> None:
    changes = ChangeReporter()
    list(changes.agreed(record_of(["a0", "b0", "b1"]), "a"))
    list(changes.ended())
    list(changes.agreed(record_of(["a0", "b0"], 2), "a"))
    (change,) = changes.ended()
    assert (change["cause"], change["kind"]) == ("rank 1 of agent b left", "elsewhere")


def test_a_host_without_a_rank_in_the_generation_says_that_its_own_rank_joins() -> None:
    """Whose agent announces it to nobody."""
    changes = ChangeReporter()
    list(changes.agreed(record_of(["a0", "b0"]), "a"))
    changes.caused("rank 0 was killed by SIGKILL", "killed", 10.0, is_root=True)
    list(changes.agreed(record_of(["b0"], 2), "a"))
    list(changes.ended())
    list(changes.agreed(record_of(["a1", "b0"], 3), "a"))
    (change,) = changes.ended()
    assert (change["cause"], change["kind"]) == ("a rank waits to join", "join")


def test_what_another_agent_says_of_its_end_is_the_cause() -> None:
    members = ["a0", "b0"]
    changes = ChangeReporter()
    list(changes.agreed(record_of(members), "a"))
    list(changes.ended())
    changes.caused("agent b, which lost a peer", "abort", 10.0)  # whatever its text
    list(changes.agreed(record_of(["a0"], 2), "a"))
    (change,) = changes.ended()
    assert (change["cause"], change["kind"]) == ("agent b, which lost a peer", "abort")
