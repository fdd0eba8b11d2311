"""The form of records and reports: digests, what is sent, what is refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
from dataclasses import replace
from typing import Any

import pytest

from elasticgang.layout import Member, ParallelLayout, Plan
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.next_record import next_record
from elasticgang.protocol.record import (
    ACTIVE,
    LEARNER,
    PROTOCOL,
    SPARE,
    CheckpointRef,
    CutOff,
    Holder,
    Record,
    RecordRef,
    Seat,
    Undecided,
    layout_from_json,
    layout_to_json,
    report_from_json,
    report_to_json,
)
from elasticgang.protocol.record_delta import apply_delta, delta_of
from elasticgang.protocol.record_form import canonical_json
from tests.unit.proposals import agreed, member, report, trained

# --- the form of records and reports

FIXED = Record(
    job="job",
    generation=2,
    parent="0123456789abcdef",
    layout=ParallelLayout(sdp=2, min_replicas=1),
    plan=Plan((1, 1, 2, 1), (Member("a0", "h1"), Member("b0", "h2")), ("c0",)),
    seats=(
        Seat("a0", "a", "h1", 0, "h1:7000", ACTIVE),
        Seat("b0", "b", "h2", 0, "h2:7000", LEARNER),
        Seat("c0", "c", "h3", 1, "h3:7000", SPARE),
    ),
    agents=("a", "b", "c"),
    committed=Attempt(7, 1),
    rolled_forward=True,
)


def test_hosts_need_not_have_as_many_ranks_each() -> None:
    layout = ParallelLayout(min_replicas=3)
    hosts = [report("a", member("a0")), report("b", member("b0"), member("b1"))]
    told = [replace(host, layout=layout, max_agents=2, num_ranks=len(host.members)) for host in hosts]
    assert len(agreed(None, *told).seats) == 3


def test_when_all_hosts_are_here_and_too_small_each_is_told_all_numbers() -> None:
    layout = ParallelLayout(tp=2, min_replicas=2)
    hosts = [report("a", member("a0")), report("b", member("b0"), member("b1"))]
    told = [replace(host, layout=layout, max_agents=2, num_ranks=len(host.members)) for host in hosts]
    waiting = next_record(None, told)
    assert isinstance(waiting, Undecided)
    why = "the layout needs 4 ranks (min_replicas 2 x pp 1 x sdp 1 x tp 2), but the job has 3, 1 + 2 on its 2 hosts"
    assert waiting.refused == (("a", why), ("b", why))
    waiting = next_record(None, [replace(host, max_agents=3) for host in told])
    assert isinstance(waiting, Undecided)
    assert waiting.refused == ()


# RECORD-1
def test_digest_is_the_same_everywhere() -> None:
    """It is part of the rendezvous prefix: when this changes, so must PROTOCOL."""
    assert (PROTOCOL, FIXED.digest) == (29, "cffef47a7285ba8b")


@pytest.mark.parametrize(
    "changed",
    [
        {"generation": 3},
        {"draining_members": ("a0",)},
        {"parent": ""},
        {"committed": Attempt(7, 2)},
        {"rolled_back": True},
        {"checkpoint": "0123456789abcdef"},
        {"ancestors": ("fedcba9876543210",)},
        {"addresses": ("10.0.0.1:1",)},
        {"dead_agents": ("d",)},
        {"layout": ParallelLayout(), "layouts": (ParallelLayout(sdp=2), ParallelLayout())},
        {"layouts": (ParallelLayout(sdp=2), ParallelLayout())},
        {"holders": (Holder("a0", 0, (0, 0, 0)),)},
        {"cut_off": (CutOff("a", ("b",)),)},
    ],
)
def test_digest_tells_records_apart(changed: dict[str, Any]) -> None:
    assert dataclasses.replace(FIXED, digest="", **changed).digest != FIXED.digest


def test_record_survives_being_written() -> None:
    full = dataclasses.replace(FIXED, digest="", ancestors=("0", "1"), dead_agents=("d", "e"), checkpoint="d")
    unplanned = Seat("c1", "c", "h3", 2, "h3:7001", SPARE)  # of a host that is one too many
    empty = dataclasses.replace(FIXED, digest="", agents=("a", "b", "c", "d"), seats=(*FIXED.seats, unplanned))
    for record in (FIXED, full, empty):
        back = Record.from_text(record.text)
        assert [back.seats_of(agent) for agent in "abcde"] == [record.seats_of(agent) for agent in "abcde"]
        assert back == record
        assert back.digest == record.digest
        assert dataclasses.replace(back, digest="").text == record.text


def test_report_survives_json() -> None:
    full = report(
        "a",
        member("a0", Attempt(3, 2), Attempt(4, 2), entered=2, active=True),
        member("a1"),
        member("a2", Attempt(3, 2), Attempt(4, 2), entered=2, active=True, draining=True),
        seen=RecordRef(2, "0123456789abcdef"),
        newest_commit=Attempt(4, 2),
        exited=("a9",),
        checkpoint=CheckpointRef(Attempt(1, 1), "0123456789abcdef"),
    )
    for sent in (full, report("b")):
        assert report_from_json(json.loads(json.dumps(report_to_json(sent)))) == sent


@pytest.mark.parametrize(
    "broken",
    [
        {"members": None},
        {"seen": 2},
        {"seen": ["x", ""]},
        {"known": [1]},
        {"known": 5},
        {"checkpoint": [1, 1]},
        {"checkpoint": [[1, "x"], "d"]},
        {"checkpoint": [[1, 1], 5]},
        {"checkpoint": [[1, 1], ""]},
        {"checkpoint": [None, "d"]},
        {"layout": {"tp": 0}},
        {"layout": {"qp": 1}},
        {"more": 1},
        {"members": [{"id": "a0"}]},
        {"members": [["a0", 0, "", [0, 0], 0]], "states": [[None, None, 0, False]]},
        {"members": [["a0", 0, "", None, 0]]},
        {"members": [["a0", 0, "", None, 1]], "states": [[None, None, 0, False]]},
        {"states": [[None, None, 0]]},
    ],
)
def test_what_is_not_a_report_says_so(broken: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        report_from_json({**report_to_json(report("a")), **broken})


def test_a_layout_that_was_read_before_is_read_as_strictly() -> None:
    data = layout_to_json(ParallelLayout(sdp=2))
    assert layout_from_json(data) == ParallelLayout(sdp=2)
    assert {**data, "tp": True} == data
    for wrong in (True, 1.0):
        with pytest.raises(ValueError, match="`tp` must be an integer"):
            layout_from_json({**data, "tp": wrong})


@pytest.mark.parametrize("absent", ["job", "shape", "committed", "rolled_back", "checkpoint"])
def test_what_is_not_a_record_says_so(absent: str) -> None:
    head, *lines = FIXED.text.split("\n")
    data = json.loads(head)
    del data[absent]
    with pytest.raises((KeyError, TypeError, ValueError)):
        Record.from_text("\n".join((canonical_json(data), *lines)))


@pytest.mark.parametrize("text", ["", "{}", FIXED.text.rpartition("\n")[0], f"{FIXED.text}\n[]"])
def test_neither_is_a_part_of_one_or_more_than_one(text: str) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        Record.from_text(text)


# DELTA-SENT
def test_a_record_that_a_delta_does_not_make_is_sent_whole() -> None:
    parent = dataclasses.replace(FIXED, digest="", addresses=("h1:1", "h2:1", "h3:1"))
    child = dataclasses.replace(
        parent, digest="", parent=parent.digest, generation=parent.generation + 1, ancestors=parent.ancestor_digests()
    )
    assert delta_of(parent, child) is not None
    assert delta_of(parent, dataclasses.replace(child, digest="", addresses=())) is None


def test_the_first_change_of_a_large_job_is_a_delta_of_its_places() -> None:
    """All learners have become active: no line of an agent is sent again."""
    asked = [report(f"agent{n:03}", *(member(f"agent{n:03}/{rank}") for rank in range(8))) for n in range(100)]
    founding = agreed(None, *asked)
    assert len(founding.members(ACTIVE)) == 1
    tip = Attempt(3, 1)
    again = [
        replace(each, newest_record=founding.ref, members=tuple(member(m.id, tip, entered=1) for m in each.members))
        for each in asked
    ]
    first = agreed(founding, *again)
    assert len(first.members(ACTIVE)) == 800
    delta = delta_of(founding, first)
    assert delta is not None
    assert delta["lines"] == {}
    assert len(canonical_json(delta)) < 4000 < len(first.text) / 5
    made = apply_delta(founding, json.loads(canonical_json(delta)))
    assert made.seats_of("agent000") == first.seats_of("agent000")
    assert made.seats == first.seats


# RECORD-2
@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "[]",
        '["h1"]',  # nobody has rank 0
        '["h1",["a0",0]]',
        '["h1",["a0",0,"h1:7000",0]]',
        '["h1",["b0",0,"h1:7000"]]',  # somebody has two
        "",
        '["h1",["a0",0,"h1:7000"]],["h2",["b0",0,"h2:7000"]]',
    ],
)
def test_what_are_not_its_seats_say_so_when_they_are_asked_for(line: str) -> None:
    head, agents, addresses, _, *lines = FIXED.text.split("\n")
    _has_no_seats("\n".join((head, agents, addresses, line, *lines)))


@pytest.mark.parametrize(
    "span",
    [
        "[]",
        '["a",0,1]',
        '["a",0,1,3]',
        '["a",0,2,0]',
        '["a",1,1,0]',
        '["a",-1,1,0]',
        '["a",0,0,0]',
        '["b",0,1,1]',
        '["d",0,1,0]',
    ],
)
def test_what_is_not_their_order_says_so_then_too(span: str) -> None:
    *lines, _, second, third = FIXED.text.split("\n")
    _has_no_seats("\n".join((*lines, span, second, third)))


def _has_no_seats(text: str) -> None:
    record = Record.from_text(text)
    assert record.seats_of("b") == FIXED.seats_of("b")
    with pytest.raises((KeyError, TypeError, ValueError)):
        _ = record.plan


# FORM-DIGEST
def test_every_line_changes_the_digest() -> None:
    lines = FIXED.text.split("\n")
    assert Record.from_text(FIXED.text).digest == FIXED.digest
    for number, line in enumerate(lines):
        changed = "\n".join((*lines[:number], f"{line} ", *lines[number + 1 :]))
        assert Record.from_text(changed).digest != FIXED.digest
    lines[3], lines[4] = lines[4], lines[3]
    assert Record.from_text("\n".join(lines)).digest != FIXED.digest


def test_the_order_of_the_proposal_does_not_matter() -> None:
    record, tip = trained("a", "b", "c")
    asked = [report(agent, member(f"{agent}0", tip, Attempt(4, 2), entered=2), seen=record) for agent in "abc"]
    answers = {agreed(record, *order, report("j", member("j0"))).digest for order in itertools.permutations(asked)}
    assert len(answers) == 1
