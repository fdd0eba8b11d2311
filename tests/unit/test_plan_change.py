"""What a change of the members does, and how `elasticgang plan` tells it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticgang.launch.cli import main
from elasticgang.layout import Member, ModelCoordinates, ParallelLayout, plan
from elasticgang.layout.plan_change import change_plan, part_of


def members(*names: str) -> list[Member]:
    return [Member(name, name[0]) for name in names]


def test_a_spare_takes_the_seat_of_a_lost_member_and_fetches_its_part() -> None:
    layout = ParallelLayout(sdp=2, within_host=())
    before = plan(members("a0", "a1", "b0", "b1", "c0"), layout, max_replicas=2)
    assert before.spares == ("c0",)
    change = change_plan(members("a0", "b0", "b1", "c0"), layout, before, max_replicas=2)
    part = part_of(before, "a1")
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
    (gone,) = [member for member in before.ranks if part_of(before, member) == ModelCoordinates(0, 1, 0)]
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
        stays = member in before.ranks and part_of(before, member) == part_of(change.plan, member)
        assert stays != (member in change.fetching)
    for part in change.sources:
        holders = [name for name in staying if name in before.ranks and part_of(before, name) == part]
        assert change.sources[part] == len(holders)


# -- the command


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


FLEET = ("--hosts", "16", "--ranks-per-host", "8", "--tp", "8")


def test_a_lost_and_returned_rank_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *FLEET, "--kill", "host3/rank2", "--join", "host3/rank2")
    assert (code, err) == (0, "")
    assert "at the start: 16 replica groups of 8 (pp=1, sdp=1, tp=8), 0 spares" in out
    assert "--kill host3/rank2: 15 replica groups of 8" in out
    assert "  gone: host3/rank2\n" in out
    assert "wait as spares: host3/rank0, host3/rank1, host3/rank3" in out
    assert "--join host3/rank2: 16 replica groups of 8" in out
    assert "host3/rank2 takes rdp=15, pp=0, sdp=0, tp=7 and heals from 15 holders" in out


def test_what_is_lost_for_good_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--hosts", "3", "--ranks-per-host", "1", "--sdp", "2", "--kill", "host1")
    assert code == 0
    assert "LOST: no rank holds (pp=0, sdp=1, tp=0)" in out
    assert "heals from a checkpoint" in out


def test_json_has_the_whole_plans(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, *FLEET, "--kill", "host3", "--json")
    first, second = map(json.loads, out.splitlines())
    assert len(first["plan"]["seats"]) == 128
    assert second["after"] == "--kill host3"
    assert second["left"] == [f"host3/rank{rank}" for rank in range(8)]


def test_a_layout_that_cannot_be_filled_any_more_ends_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--hosts", "2", "--ranks-per-host", "4", "--pp", "8", "--kill", "host1/rank3")
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
        (("--within-host", "rdp"), "`within_host`"),
    ],
)
def test_wrong_names_are_refused(arguments: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, *FLEET, *arguments)
    assert code in (1, 2)
    assert named in err
