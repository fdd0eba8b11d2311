"""What a change of the members does, and how `elasticgang plan` tells it."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticgang.launch import plan as plan_command
from elasticgang.launch.cli import main
from elasticgang.layout import Member, ModelCoordinates, ParallelLayout, is_filled, plan
from elasticgang.layout.overlap import Part, common_share, sizes_of
from elasticgang.layout.plan_change import change_plan


def members(*names: str) -> list[Member]:
    return [Member(name, name[0]) for name in names]


def test_a_spare_takes_the_seat_of_a_lost_member_and_fetches_its_part() -> None:
    layout = ParallelLayout(sdp=2, within_host=())
    before = plan(members("a0", "a1", "b0", "b1", "c0"), layout, max_replicas=2)
    assert before.spares == ("c0",)
    change = change_plan(members("a0", "b0", "b1", "c0"), layout, before, max_replicas=2)
    part = before.part_of("a1")
    assert (change.left, change.waiting, change.lost) == (("a1",), (), ())
    assert change.fetching == {"c0": part}
    assert change.sources == {part: 1}


def test_the_rest_of_a_broken_group_waits() -> None:
    layout = ParallelLayout(tp=2)
    before = plan(members("a0", "a1", "b0", "b1"), layout)
    change = change_plan(members("a0", "a1", "b0"), layout, before)
    assert (change.left, change.waiting, change.fetching) == (("b1",), ("b0",), {})


def test_a_part_that_nobody_holds_is_lost() -> None:
    layout = ParallelLayout(sdp=2, within_host=())
    before = plan(members("a0", "a1", "b0"), layout)
    (gone,) = [member for member in before.ranks if before.part_of(member) == ModelCoordinates(0, 1, 0)]
    rest = [member for member in members("a0", "a1", "b0") if member.id != gone]
    change = change_plan(rest, layout, before)
    assert change.lost == (ModelCoordinates(0, 1, 0),)
    assert set(change.sources.values()) == {0}


@settings(max_examples=150)
@given(data=st.data())
def test_it_says_what_the_plans_differ_in(data: Any) -> None:
    layout = ParallelLayout(sdp=data.draw(st.sampled_from([1, 2])), tp=data.draw(st.sampled_from([1, 2])))
    names = [f"{host}{rank}" for host in "abcd" for rank in range(4)]
    before = plan(members(*names), layout)
    staying = data.draw(st.lists(st.sampled_from(names), min_size=12, unique=True))
    change = change_plan(members(*staying), layout, before)
    assert set(change.left) == set(names) - set(staying)
    for member in change.plan.ranks:
        stays = member in before.ranks and before.part_of(member) == change.plan.part_of(member)
        assert stays != (member in change.fetching)
    for part in change.sources:
        holders = [name for name in staying if name in before.ranks and before.part_of(name) == part]
        assert change.sources[part] == len(holders)


# -- the command


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


FLEET = ("--hosts", "16", "--ranks-per-host", "8", "--layout", "tp=8")


def test_a_lost_and_returned_rank_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *FLEET, "--kill", "host3/rank2", "--join", "host3/rank2")
    assert (code, err) == (0, "")
    assert "at the start: 16 replica groups of 8 (pp=1, sdp=1, tp=8), 0 spares" in out
    assert "--kill host3/rank2: 15 replica groups of 8" in out
    assert "  gone: host3/rank2\n" in out
    assert "wait as spares: host3/rank0, host3/rank1, host3/rank3" in out
    assert "--join host3/rank2: 16 replica groups of 8" in out
    assert "host3/rank2 takes rdp=15, pp=0, sdp=0, tp=7 and heals from 15 holders" in out


def test_sizes_are_given_by_options_of_their_own_or_in_a_layout(capsys: pytest.CaptureFixture[str]) -> None:
    kill = ("--kill", "host3/rank2")
    assert run(capsys, *FLEET[:4], "--tp", "8", *kill) == run(capsys, *FLEET, *kill)
    assert run(capsys, *FLEET[:4], "--sdp=2", "--tp=2") == run(capsys, *FLEET[:4], "--layout", "sdp=2,tp=2")
    code, _, err = run(capsys, *FLEET, "--pp", "2")
    assert (code, err) == (2, "elasticgang: error: --pp is a part of --layout: give the one or the other\n")


def test_what_is_lost_for_good_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--hosts", "3", "--ranks-per-host", "1", "--layout", "sdp=2", "--kill", "host1")
    assert code == 0
    assert "LOST: no rank holds (pp=0, sdp=1, tp=0)" in out
    assert "heals from a checkpoint" in out


def test_json_has_the_whole_plans(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *FLEET, "--kill", "host3", "--json")
    first, second = map(json.loads, out.splitlines())
    assert len(first["plan"]["seats"]) == 128
    assert second["after"] == "--kill host3"
    assert second["left"] == [f"host3/rank{rank}" for rank in range(8)]
    _, out, _ = run(capsys, *FLEET, "--kill", "host3/rank0", "--join", "host3/rank0", "--json")
    assert json.loads(out.splitlines()[2])["fetching"][0]["sources"] == 15, "host3/rank0 heals from 15 holders"


def test_a_layout_that_cannot_be_filled_any_more_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--hosts", "2", "--ranks-per-host", "4", "--layout", "pp=8", "--kill", "host1/rank3")
    assert code == 1
    assert len(out.splitlines()) == 1
    assert "--kill host1/rank3: the layout (pp=8) needs 8 ranks" in err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--kill", "hosts3"), "but 'hosts3' was given"),
        (("--kill", "host3/rank8"), "host0/rank0 to host0/rank7"),
        (("--kill", "host16"), "--kill host16: it is not there"),
        (("--kill", "host1", "--kill", "host1"), "--kill host1: it is not there"),
        (("--join", "host1"), "--join host1: host1/rank0 is there already"),
        (("--kill", "host0,"), "but '' was given"),
    ],
)
def test_wrong_names_are_refused(arguments: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, *FLEET, *arguments)
    assert code == 2
    assert named in err


# -- fallback layouts

PAIRS_ELSE_ONES = ParallelLayout(sdp=2, min_replicas=2, within_host=(), fallback=(ParallelLayout(),))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--hosts", "100000", "--ranks-per-host", "8"), "at most 100,000 ranks, but --hosts 100000 times"),
        (("--hosts", "10", "--ranks-per-host", "10000", "--join", "host10"), "--join host10: a plan is of at most"),
    ],
)
def test_a_fleet_that_would_take_minutes_is_refused(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if "--join" in arguments:
        monkeypatch.setattr(plan_command, "MAX_RANKS", 100)
        arguments = tuple("10" if each == "10000" else each for each in arguments)
    assert main(["plan", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_lost_rank_changes_the_layout_and_every_other_one_fetches_what_it_lacks() -> None:
    before = plan(members("a0", "a1", "b0", "b1"), PAIRS_ELSE_ONES.options[0])
    change = change_plan(members("a0", "a1", "b0"), PAIRS_ELSE_ONES, before)
    assert change.layout == ParallelLayout()
    assert (change.left, change.lost, change.waiting) == (("b1",), (), ())
    assert change.fetching == dict.fromkeys(("a0", "a1", "b0"), ModelCoordinates(0, 0, 0))
    assert change.moved == Fraction(3, 2), "each has one half of the model"
    back = change_plan(members("a0", "a1", "b0", "b2"), PAIRS_ELSE_ONES, change.plan)
    assert back.layout == PAIRS_ELSE_ONES.options[0]
    assert set(back.fetching) == {"b2"}, "the others have the whole model"
    assert back.moved == Fraction(1, 2)


def test_a_layout_that_is_still_filled_stays() -> None:
    layout = ParallelLayout(sdp=2, within_host=(), fallback=(ParallelLayout(),))
    before = plan(members("a0", "a1", "b0", "b1"), layout.options[0])
    change = change_plan(members("a0", "a1", "b0"), layout, before)
    assert (change.layout, change.moved) == (layout.options[0], None)


@settings(max_examples=150)
@given(data=st.data())
def test_what_is_fetched_and_what_is_there_are_all_that_the_seats_hold(data: Any) -> None:
    sizes = st.builds(ParallelLayout, sdp=st.sampled_from([1, 2, 3, 4]), tp=st.sampled_from([1, 2]))
    first, other = data.draw(sizes), data.draw(sizes)
    if (first.sdp, first.tp) == (other.sdp, other.tp):
        return
    layout = replace(first, min_replicas=16 // first.unit, fallback=(other,))
    names = [f"{host}{rank}" for host in "abcd" for rank in range(4)]
    before = plan(members(*names), layout.options[0])
    staying = data.draw(st.lists(st.sampled_from(names), min_size=8, max_size=15, unique=True))
    on_host = Counter(name[0] for name in staying)
    if is_filled(layout.options[0], on_host) or not is_filled(other, on_host):
        return
    change = change_plan(members(*staying), layout, before)
    assert change.layout == other
    after = sizes_of(change.plan.shape)
    there = sum(
        common_share(Part(sizes_of(before.shape), before.part_of(name)), Part(after, change.plan.part_of(name)))
        for name in change.plan.ranks
        if name in before.ranks
    )
    assert change.moved is not None
    assert change.moved + there == change.held


def test_the_layout_that_follows_and_what_moves_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--hosts", "2", "--ranks-per-host", "2", "--layout", "sdp=2,min_replicas=2/sdp=1")
    kill, join = ("--kill", "host1/rank1"), ("--join", "host1/rank1")
    code, out, err = run(capsys, *given, "--state-bytes", "1000", *kill, *join)
    assert (code, err) == (0, "")
    assert "at the start: 2 replica groups of 2 (pp=1, sdp=2, tp=1), 0 spares\n" in out
    assert "3 replica groups of 1 (pp=1, sdp=1, tp=1) in a fallback of sdp=2,min_replicas=2, 0 spares\n" in out
    assert "  the job takes the layout sdp=1\n" in out
    assert "3 ranks, 1.50 of the 3 copies of the state that the seats then hold, about 1,500 bytes\n" in out
    assert "  the job takes the layout sdp=2,min_replicas=2\n" in out
    assert "1 ranks, 0.50 of the 2 copies" in out
    _, out, _ = run(capsys, *given, *kill, "--json")
    found = json.loads(out.splitlines()[1])
    assert (found["layout"], found["moved_copies"]) == ("sdp=1", 1.5)
    assert [each["sources"] for each in found["fetching"]] == [None] * 3, "parts of that layout have no holders yet"


def test_a_part_that_is_lost_with_its_layout_comes_from_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--hosts", "2", "--ranks-per-host", "1", "--layout", "sdp=2/sdp=1", "--kill", "host1")
    _, out, _ = run(capsys, *given)
    assert "  LOST: no rank holds (pp=0, sdp=1, tp=0); the job goes back to its newest checkpoint, or ends\n" in out
    assert out.endswith("  the job takes the layout sdp=1\n")


@pytest.mark.parametrize("given", ["sdp", "sdp=2,sdp=4", "cp=2", "sdp=2/sdp=2", "sdp=0", "sdp=2/", ""])
def test_every_command_refuses_a_layout_that_is_none(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["plan", "--hosts", "1", "--ranks-per-host", "1"], ["run"]):
        with pytest.raises(SystemExit) as ended:
            main([*command, "--layout", given, "script.py"])
        assert ended.value.code == 2
        assert "argument --layout: " in capsys.readouterr().err
