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
    Record,
    RecordRef,
    Seat,
    Undecided,
    canonical_json,
    report_from_json,
    report_to_json,
)
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
    assert (PROTOCOL, FIXED.digest) == (10, "a81d8ea7a8a81bec")


@pytest.mark.parametrize(
    "changed",
    [
        {"generation": 3},
        {"draining_members": ("a0",)},
        {"parent": ""},
        {"committed": Attempt(7, 2)},
        {"rolled_back": True},
        {"ancestors": ("fedcba9876543210",)},
        {"addresses": ("10.0.0.1:1",)},
        {"dead_agents": ("d",)},
    ],
)
def test_digest_tells_records_apart(changed: dict[str, Any]) -> None:
    assert dataclasses.replace(FIXED, digest="", **changed).digest != FIXED.digest


def test_record_survives_being_written() -> None:
    full = dataclasses.replace(FIXED, digest="", ancestors=("0", "1"), dead_agents=("d", "e"))
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
        checkpoint=Attempt(1, 1),
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
        {"checkpoint": [1, "x"]},
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


@pytest.mark.parametrize("absent", ["job", "shape", "committed", "rolled_back"])
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


# RECORD-2
@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "[]",
        '["h1"]',  # nobody has rank 0
        '["h1",["a0",0,"h1:7000",0]]',
        '["h1",["a0",0,"h1:7000",3,0]]',
        '["h1",["a0",0,"h1:7000",0,1]]',  # two have rank 1
        '["h1",["b0",0,"h1:7000",0,0]]',  # somebody has two
    ],
)
def test_what_are_not_its_seats_say_so_when_they_are_asked_for(line: str) -> None:
    head, _, *lines = FIXED.text.split("\n")
    record = Record.from_text("\n".join((head, line, *lines)))
    assert record.seats_of("b") == FIXED.seats_of("b")
    with pytest.raises((KeyError, TypeError, ValueError)):
        _ = record.plan


def test_the_order_of_the_proposal_does_not_matter() -> None:
    record, tip = trained("a", "b", "c")
    asked = [report(agent, member(f"{agent}0", tip, Attempt(4, 2), entered=2), seen=record) for agent in "abc"]
    answers = {agreed(record, *order, report("j", member("j0"))).digest for order in itertools.permutations(asked)}
    assert len(answers) == 1
