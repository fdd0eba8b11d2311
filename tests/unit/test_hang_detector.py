"""Who is found hung, by what the pages say over time; and, more often, who is not."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import pytest

from elasticgang.protocol.hang_detector import (
    BlockedOn,
    Comm,
    CommHung,
    HangDetector,
    HangReport,
    Hung,
    Reached,
    Reading,
    goes_on,
)

LIMIT_MS = 2000
DP, CONTROL, TP = 1, 2, 3


@dataclass
class Rank:
    """One rank's page. Everything that is not stopped pulses."""

    name: str
    groups: dict[int, Reached] = field(default_factory=dict)
    reading: Reading = field(default_factory=lambda: Reading("", 1, 0, 0, steps=10))
    stopped: bool = False
    comm_stopped: bool = False
    comm_pid: int = 7
    comm_beats: int = 0

    def live(self) -> None:
        if not self.stopped:
            self.set(pulses=self.reading.pulses + 1)
        if not self.comm_stopped:
            self.comm_beats += 1

    def set(self, **changes: object) -> None:
        self.reading = replace(self.reading, **changes)  # type: ignore[arg-type]

    def beat(self) -> None:
        self.set(beats=self.reading.beats + 1)

    def submit(self, group: int) -> None:
        before = self.groups.get(group, Reached(0, 0))
        self.groups[group] = replace(before, submitted=before.submitted + 1)

    def complete(self, group: int) -> None:
        self.groups[group] = replace(self.groups[group], completed=self.groups[group].submitted)

    def page(self) -> Reading:
        comm = Comm(self.comm_pid, self.comm_beats, dict(self.groups))
        return replace(self.reading, member=self.name, comm=comm)


class Host:
    """Ranks under one agent that looks every 50 ms."""

    def __init__(self, *names: str, limit_ms: int | None = LIMIT_MS) -> None:
        self.progress = HangDetector(limit_ms)
        self.ranks = [Rank(name, {DP: Reached(0, 0), CONTROL: Reached(0, 0)}) for name in names]
        self.now_ms = 0
        self.told: tuple[BlockedOn, ...] = ()
        self.finished = False
        self.looked_ms = self.progressed_ms = 0  # by this clock of the looks, when a page showed progress last
        self._signs: Sequence[object] = []

    def __getitem__(self, index: int) -> Rank:
        return self.ranks[index]

    def run(self, for_ms: int, each: Callable[[], None] = lambda: None) -> list[HangReport]:
        """What is found within that time; `each` happens before every look. The first finding ends it."""
        end_ms = self.now_ms + for_ms
        while self.now_ms < end_ms:
            self.now_ms += self.progress.interval_ms
            each()
            for rank in self.ranks:
                rank.live()
            pages = [rank.page() for rank in self.ranks]
            self._look([rank for rank in self.ranks if not rank.reading.has_left])
            if found := self.progress.detect(self.now_ms, pages, self.told, finished=self.finished):
                return found
        return []

    def _look(self, ranks: list[Rank]) -> None:
        self.looked_ms += self.progress.interval_ms
        signs = [
            (rank.reading.beats, rank.reading.generation, {key: each.submitted for key, each in rank.groups.items()})
            for rank in ranks
        ]
        if signs != self._signs or any(rank.reading.paused for rank in ranks):
            self._signs, self.progressed_ms = signs, self.looked_ms

    def all_reduce(self, ranks: Iterable[Rank], group: int = DP) -> None:
        for rank in ranks:
            rank.submit(group)
        if len({rank.groups[group].submitted for rank in self.ranks if group in rank.groups}) == 1:
            for rank in self.ranks:
                rank.complete(group)

    def steps(self, num_steps: int, step_ms: int) -> None:
        for _ in range(num_steps):
            assert self.run(step_ms) == []
            for rank in self.ranks:
                rank.set(steps=rank.reading.steps + 1)
                rank.beat()


@pytest.fixture
def host() -> Host:
    host = Host("a", "b", "c", "d")
    host.steps(1, 200)
    return host


def names(found: list[HangReport]) -> list[str]:
    return [report.member for report in found]


# -- who is hung


# RULE-8
def test_a_rank_stopped_in_user_code_hangs_within_the_limit(host: Host) -> None:
    host[2].stopped = True
    began_ms = host.now_ms
    host.all_reduce([host[0], host[1], host[3]])
    (report,) = host.run(10_000)
    assert isinstance(report, Hung)
    assert report.member == "c"
    assert LIMIT_MS - 150 <= host.now_ms - began_ms <= LIMIT_MS


def test_a_rank_with_a_pulse_but_no_progress_hangs(host: Host) -> None:
    """A lock that nobody releases: its other threads run."""
    host.all_reduce([host[0], host[1], host[3]])
    assert names(host.run(10_000)) == ["c"]


def test_a_rank_stopped_while_waiting_hangs_once_its_wait_is_over(host: Host) -> None:
    host.all_reduce([host[0], host[2]])
    assert host.run(LIMIT_MS // 2) == []
    host[2].stopped = True
    host.all_reduce([host[1], host[3]])  # it completes everywhere
    host.all_reduce([host[0], host[1], host[3]], CONTROL)
    assert names(host.run(10_000)) == ["c"]


@pytest.mark.parametrize("asks", [True, False])
def test_a_rank_stopped_in_a_runtime_wait_hangs(host: Host, asks: bool) -> None:
    for rank in host.ranks:
        rank.set(is_waiting=True, is_requesting=asks)
    assert host.run(3 * LIMIT_MS) == []  # all live
    host[2].stopped = True
    for other in (host[0], host[1], host[3]):
        other.set(is_waiting=True, is_requesting=True)
    assert names(host.run(10_000)) == ["c"]


def test_a_newcomer_stopped_while_it_enters_hangs(host: Host) -> None:
    host[2].set(generation=0, steps=0, is_waiting=True, is_requesting=True)
    host[2].stopped = True
    for other in (host[0], host[1], host[3]):
        other.set(is_waiting=True, is_requesting=True)
    assert names(host.run(10_000)) == ["c"]


def test_two_stopped_ranks_hang_and_no_other(host: Host) -> None:
    host[1].stopped = host[2].stopped = True
    host.all_reduce([host[0], host[3]])
    assert names(host.run(10_000)) == ["b", "c"]


# HANG-2
def test_the_rank_at_the_end_of_a_chain_of_waits_hangs(host: Host) -> None:
    """a waits for b, in a tp gang; c and d for both, in dp."""
    host[0].groups[TP] = host[1].groups[TP] = Reached(4, 4)
    host[0].submit(TP)
    host.all_reduce([host[2], host[3]])
    assert names(host.run(10_000)) == ["b"]


def test_a_rank_that_waits_for_a_message_is_blocked_on_all_that_do_not(host: Host) -> None:
    host[0].groups = {DP: Reached(0, 0, messages_submitted=1)}
    for rank in (host[2], host[3]):
        del rank.groups[DP]
    assert names(host.run(10_000)) == ["b"]


def test_an_edge_from_another_agent_counts(host: Host) -> None:
    host.told = (BlockedOn("z", 1, CONTROL, 1),)
    host.all_reduce([host[0], host[1], host[2]], CONTROL)
    assert names(host.run(10_000)) == ["d"]
    assert BlockedOn("a", 1, CONTROL, 1) in host.progress.blocked_on()


def test_an_edge_of_another_generation_or_group_does_not_count(host: Host) -> None:
    host.told = (BlockedOn("z", 2, DP, 1), BlockedOn("z", 1, 99, 1))
    assert host.run(10_000) == []


def test_works_of_a_dead_comm_process_do_not_excuse_a_rank(host: Host) -> None:
    """The generation is over, the others ask; it does not come, and has collectives that will never end."""
    host[2].submit(DP)
    host[2].comm_stopped, host[2].comm_pid = True, 0
    for other in (host[0], host[1], host[3]):
        other.set(is_waiting=True, is_requesting=True)
    assert names(host.run(10_000)) == ["c"]


# -- comm processes


# HANG-4
def test_a_hung_comm_process_is_killed_alone(host: Host) -> None:
    host[2].comm_stopped = True
    for rank in host.ranks:
        rank.submit(DP)  # and none completes
    began_ms = host.now_ms
    (report,) = host.run(10_000)
    assert isinstance(report, CommHung)
    assert (report.member, report.pid) == ("c", 7)
    assert host.now_ms - began_ms <= LIMIT_MS
    host[2].comm_stopped, host[2].comm_pid = False, 8
    for rank in host.ranks:
        rank.complete(DP)
    assert host.run(10_000) == []


def test_a_rank_that_hangs_after_its_comm_process_was_killed_is_killed(host: Host) -> None:
    host[2].comm_stopped = True
    host.all_reduce([host[0], host[1], host[3]])
    host[2].submit(DP)
    assert isinstance(host.run(10_000)[0], CommHung)
    assert host.run(LIMIT_MS - 100) == []
    assert names(host.run(10_000)) == ["c"]


def test_a_rank_that_hangs_with_its_comm_process_is_killed(host: Host) -> None:
    """Stopped together, after the rank had submitted what the others wait in."""
    host[2].stopped = host[2].comm_stopped = True
    for rank in host.ranks:
        rank.submit(DP)
    (report,) = host.run(10_000)
    assert isinstance(report, Hung)
    assert report.member == "c"


def test_an_unneeded_comm_process_may_make_no_progress(host: Host) -> None:
    host[2].comm_stopped = True
    assert host.run(10_000, host[2].beat) == []


# -- who is not


def test_equally_slow_ranks_do_not_hang(host: Host) -> None:
    """A data loader: each comes a little later than the other, after much longer than the limit."""
    for _ in range(3):
        assert host.run(5 * LIMIT_MS) == []
        for rank in host.ranks:
            host.all_reduce([rank])
            assert host.run(LIMIT_MS // 8) == []


# HANG-1
def test_ranks_blocked_on_each_other_do_not_hang(host: Host) -> None:
    """A deadlock of the script's own collectives: the collective timeout's to end."""
    host.all_reduce([host[0], host[1]], DP)
    host.all_reduce([host[2], host[3]], CONTROL)
    assert host.run(60_000) == []


# HANG-3
def test_paused_time_does_not_count(host: Host) -> None:
    host.all_reduce([host[0], host[1], host[3]])
    host[2].set(paused=True)
    assert host.run(60_000) == []
    host[2].set(paused=False)
    assert host.run(LIMIT_MS - 100) == []
    assert names(host.run(10_000)) == ["c"]


def test_a_long_compile_in_the_first_steps_is_no_hang() -> None:
    host = Host("a", "b")
    host[1].set(steps=0)
    host.all_reduce([host[0]])
    assert host.run(500_000) == []
    assert names(host.run(200_000)) == ["b"]  # and yet not for ever


def test_a_rank_stopped_in_its_first_steps_hangs_within_the_floor() -> None:
    host = Host("a", "b")
    host[1].set(steps=0)
    host[1].stopped = True
    host.all_reduce([host[0]])
    assert host.run(29_000) == []
    assert names(host.run(2_000)) == ["b"]


def test_a_rank_that_builds_or_has_left_blocks_no_other(host: Host) -> None:
    host[2].set(takes_part=False)
    for other in (host[0], host[1], host[3]):
        other.set(is_waiting=True, is_requesting=True)
    assert host.run(60_000) == []


@pytest.mark.parametrize("how", ["stopped", "busy"])
def test_after_the_job_a_rank_without_progress_hangs(host: Host, how: str) -> None:
    host[2].stopped = how == "stopped"
    for other in (host[0], host[1], host[3]):
        other.set(takes_part=False)
    assert host.run(10_000) == []
    host.finished = True
    assert names(host.run(10_000)) == ["c"]


def test_after_the_job_paused_waiting_and_left_ranks_do_not_hang(host: Host) -> None:
    host[0].set(takes_part=False)
    host[1].set(paused=True)
    host[2].set(is_waiting=True)
    host[3].set(is_waiting=True, is_requesting=True)
    host.finished = True
    assert host.run(60_000) == []


def test_a_newcomer_waits_for_no_rank_in_its_step() -> None:
    host = Host("a", "b")
    host[1].set(generation=0, is_waiting=True, is_requesting=True)
    assert host.run(60_000) == []


def test_slow_progress_is_not_a_hang(host: Host) -> None:
    host.all_reduce([host[0], host[1], host[3]])
    for _ in range(10):
        assert host.run(LIMIT_MS - 200) == []
        host[2].beat()


def test_time_in_which_the_agent_did_not_run_does_not_count(host: Host) -> None:
    host.all_reduce([host[0], host[1], host[3]])
    assert host.run(LIMIT_MS // 2) == []
    host.now_ms += 60_000  # it was stopped itself
    assert host.run(LIMIT_MS // 4) == []
    host.all_reduce([host[2]])
    assert host.run(60_000) == []


# -- the adaptive limit


def test_without_a_limit_the_floor_holds() -> None:
    host = Host("a", "b", limit_ms=None)
    host.steps(8, 250)
    assert host.progress.limit_ms == 30_000
    began_ms = host.now_ms
    host.all_reduce([host[0]])
    assert names(host.run(100_000)) == ["b"]
    assert host.now_ms - began_ms == pytest.approx(30_000, abs=500)


def test_long_steps_raise_it() -> None:
    host = Host("a", "b", limit_ms=None)
    host.steps(8, 20_000)
    assert host.progress.limit_ms == pytest.approx(200_000, rel=0.01)


def test_a_long_pause_raises_the_adaptive_limit() -> None:
    host = Host("a", "b", limit_ms=None)
    host.steps(8, 250)
    assert host.run(40_000) == []  # both load data
    host[0].beat()
    host[1].beat()
    host.all_reduce([host[0]])
    assert host.run(70_000) == []
    assert names(host.run(100_000)) == ["b"]


def test_the_first_steps_raise_nothing() -> None:
    host = Host("a", "b", limit_ms=None)
    for rank in host.ranks:
        rank.set(steps=0)
    host.steps(1, 120_000)
    host.steps(8, 250)
    assert host.progress.limit_ms == 30_000


# -- nobody makes progress


def reports(host: Host, for_ms: int, each: Callable[[], None] = lambda: None) -> list[int]:
    """When a standstill was reported, in ms from now; it has lasted for so long, and names all members."""
    began_ms, found = host.now_ms, []

    def look() -> None:
        each()
        if (standstill := host.progress.standstill()) is not None:
            assert standstill.members == tuple(rank.name for rank in host.ranks)
            assert standstill.stalled_ms == host.looked_ms - host.progressed_ms
            found.append(host.now_ms - began_ms)

    assert host.run(for_ms, look) == []
    return found


# HANG-5
def test_a_standstill_of_all_in_their_own_code_is_reported_at_growing_intervals(host: Host) -> None:
    found = reports(host, 20 * LIMIT_MS)
    assert [round(at_ms / LIMIT_MS) for at_ms in found] == [1, 2, 4, 8, 16]
    assert found[0] >= LIMIT_MS


def test_a_standstill_of_stopped_ranks_is_reported_wherever_they_stand(host: Host) -> None:
    host.all_reduce(host.ranks[:3])  # they had asked their comm process for something
    host[0].set(is_waiting=True)
    for rank in host.ranks:
        rank.stopped = rank.comm_stopped = True
    assert [round(at_ms / LIMIT_MS) for at_ms in reports(host, 5 * LIMIT_MS)] == [1, 2, 4]


def test_a_new_standstill_is_reported_after_the_limit_again(host: Host) -> None:
    assert len(reports(host, 9 * LIMIT_MS)) == 4
    host[1].beat()
    assert [round(at_ms / LIMIT_MS) for at_ms in reports(host, 3 * LIMIT_MS)] == [1, 2]


def test_progress_of_one_rank_is_no_standstill(host: Host) -> None:
    assert reports(host, 5 * LIMIT_MS, host[3].beat) == []


def test_a_pause_of_one_is_no_standstill(host: Host) -> None:
    host[3].set(paused=True)
    assert reports(host, 5 * LIMIT_MS) == []
    host[3].set(paused=False)
    assert len(reports(host, LIMIT_MS + 200)) == 1


def test_waits_of_the_runtime_alone_are_no_standstill(host: Host) -> None:
    """They have deadlines, and reports, of their own."""
    for rank in host.ranks:
        rank.set(is_waiting=True)
    assert reports(host, 5 * LIMIT_MS) == []


def test_a_hung_rank_is_no_standstill(host: Host) -> None:
    host.all_reduce(host.ranks[:3])
    reported = []
    assert names(host.run(10_000, lambda: reported.append(host.progress.standstill()))) == ["d"]
    assert set(reported) == {None}


def test_ranks_that_have_left_do_not_count_for_a_standstill(host: Host) -> None:
    for rank in host.ranks:
        rank.set(takes_part=False, has_left=True)
    assert reports(host, 5 * LIMIT_MS) == []


def test_a_standstill_before_the_first_steps_is_reported_late() -> None:
    """Data is loaded, and code compiled."""
    host = Host("a", "b")
    for rank in host.ranks:
        rank.set(takes_part=False, generation=0, steps=0)
    assert [round(at_ms / 600_000) for at_ms in reports(host, 1_300_000)] == [1, 2]


def test_time_in_which_the_agent_did_not_run_is_no_standstill(host: Host) -> None:
    assert reports(host, LIMIT_MS // 2) == []
    host.now_ms += 100 * LIMIT_MS
    assert reports(host, LIMIT_MS // 4) == []


# HANG-6
def test_a_member_goes_on_once_it_acts_pauses_or_leaves_but_not_by_its_pulse_alone() -> None:
    before = Reading("m", generation=1, beats=5, pulses=7, steps=2)
    assert not goes_on(before, replace(before, pulses=8))
    assert goes_on(before, replace(before, beats=6))
    assert goes_on(before, replace(before, generation=2))
    assert goes_on(before, replace(before, paused=True))
    assert goes_on(before, replace(before, takes_part=False))
