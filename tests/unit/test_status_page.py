"""What is stamped on one mapping of a page is read on another."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import cast

import pytest

from elasticgang.agent.hang_monitor import read_status
from elasticgang.process.status_page import CommBlock, GroupStamps, ReportedNumber, StatusPage, ThreadState, key_of
from elasticgang.protocol.hang_detector import Comm, Reached, Reading


@pytest.fixture
def page() -> Iterator[StatusPage]:
    fd = StatusPage.create()
    yield StatusPage(fd)
    os.close(fd)


@pytest.fixture
def agents(page: StatusPage) -> StatusPage:
    assert page.fd is not None
    return StatusPage(page.fd)


def take(page: StatusPage) -> CommBlock:
    return cast(CommBlock, page.take_block())


def test_a_new_page_says_that_the_rank_starts(agents: StatusPage) -> None:
    assert read_status("a", agents) == Reading("a", 0, 0, 0, 0, takes_part=False)


# STATUS-2
def test_values_of_a_rank_and_its_comm_process_are_read_together(page: StatusPage, agents: StatusPage) -> None:
    block = take(page)
    theirs = agents.block(block.index)
    theirs.start()
    block.configure(["dp", "control"])
    theirs.set_groups(["dp", "control"])
    page.use(block)
    page.set_thread_state(ThreadState.USER_CODE)
    page.entered(3)
    page.step_done()
    page.pulse()
    block.submitted("dp", False)
    block.submitted("control", False)
    block.submitted("control", True)
    theirs.beat()
    theirs.completed("dp", False)
    groups = {key_of("dp"): Reached(1, 1), key_of("control"): Reached(1, 0, 1, 0)}
    assert read_status("a", agents) == Reading("a", 3, page.beats, 1, 1, comm=Comm(os.getpid(), 1, groups))


def test_a_rank_reads_how_many_could_follow_it(page: StatusPage, agents: StatusPage) -> None:
    agents.set_successors(2)
    assert page.successors == 2


def test_a_committed_attempt_is_read_whole(page: StatusPage, agents: StatusPage) -> None:
    assert agents.committed == (0, 0)
    page.commit(3_000_000_000, 70_000)
    assert agents.committed == (3_000_000_000, 70_000)


def test_the_thread_state_is_restored(page: StatusPage, agents: StatusPage) -> None:
    page.set_thread_state(ThreadState.USER_CODE)
    with page.in_thread_state(ThreadState.REQUESTING):
        assert read_status("a", agents).is_requesting
        with page.in_thread_state(ThreadState.USER_CODE):
            assert not read_status("a", agents).is_waiting
        assert read_status("a", agents).is_requesting
    assert not read_status("a", agents).is_waiting


def test_pauses_nest(page: StatusPage, agents: StatusPage) -> None:
    with page.paused(), page.paused():
        pass
    with page.paused():
        assert agents.is_paused
    assert not agents.is_paused


def test_a_group_that_comes_again_is_at_its_start(page: StatusPage, agents: StatusPage) -> None:
    block = take(page)
    block.configure(["dp"])
    block.submitted("dp", False)
    block.configure(["tp", "dp"])
    assert agents.block(block.index).groups() == [
        GroupStamps(key_of("tp"), 0, 0, 0, 0),
        GroupStamps(key_of("dp"), 0, 0, 0, 0),
    ]
    block.clear()
    assert agents.block(block.index).groups() == []
    block.submitted("dp", False)  # by a thread that comes too late
    assert agents.block(block.index).groups() == []


# INCIDENT-1
def test_the_counters_of_closed_groups_stay_until_others_are_configured(page: StatusPage, agents: StatusPage) -> None:
    assert agents.last_comm is None
    block = take(page)
    block.configure(["dp", "tp"])
    page.use(block)
    block.submitted("dp", False)
    block.clear()
    page.use(None)
    page.use(None)
    assert agents.comm is None
    assert agents.last_comm is not None
    assert agents.last_comm.last_groups() == [
        GroupStamps(key_of("dp"), 1, 0, 0, 0),
        GroupStamps(key_of("tp"), 0, 0, 0, 0),
    ]
    block.configure(["pp"])
    page.use(block)
    assert agents.last_comm.last_groups() == agents.last_comm.groups() == [GroupStamps(key_of("pp"), 0, 0, 0, 0)]


def test_groups_have_the_names_of_their_gangs(page: StatusPage, agents: StatusPage) -> None:
    block = take(page)
    block.configure(["0-1-2", "0-2"], {"0-1-2": "root, dp", "0-2": ""})
    block.add("mine")
    block.add("1-2", 40 * "ä")
    page.use(block)
    assert agents.last_comm is not None
    names = {"0-1-2": "root, dp", "0-2": "0-2", "mine": "mine", "1-2": 16 * "ä"}
    assert agents.last_comm.last_names() == {key_of(name): shown for name, shown in names.items()}
    block.configure(["0-1"])
    assert agents.last_comm.last_names() == {key_of("0-1"): "0-1"}


def test_groups_beyond_the_limit_are_not_counted(page: StatusPage) -> None:
    first, second = take(page), take(page)
    names = [str(number) for number in range(100)]
    first.configure(names)
    first.add("more")
    for name in [*names, "more"]:
        first.submitted(name, False)
    assert len(first.groups()) == 64
    assert second.groups() == []
    assert second.pid == 0


# STATUS-3
def test_blocks_are_given_back(page: StatusPage) -> None:
    blocks = []
    while (block := page.take_block()) is not None:
        blocks.append(block)
    page.give_back(blocks[2])
    assert take(page).index == blocks[2].index
    page.use(blocks[1])
    found = page.comm
    assert found is not None
    assert found.index == blocks[1].index
    page.use(None)
    assert page.comm is None


def test_the_last_commits_are_read_with_their_times(page: StatusPage, agents: StatusPage) -> None:
    page.commit(1, 1)
    before = agents.commit_times()
    page.commit(1, 1)
    assert agents.commit_times() == before, "the same step again"
    for step in (2, 3, 5):  # 4 was rolled forward
        page.commit(step, 1)
    times = agents.commit_times()
    assert [step for step, _ in times] == [1, 2, 3, 5]
    assert times[0] == before[0]
    assert sorted(at for _, at in times) == [at for _, at in times]
    for step in (*range(6, 40), 41):
        page.commit(step, 1)
    steps = [step for step, _ in agents.commit_times()]
    assert steps == [*range(11, 40), 41], "no time of an earlier lap stands for step 40"


def test_a_heal_is_read_while_it_goes_on(page: StatusPage, agents: StatusPage) -> None:
    assert agents.healing == (0, 0)
    page.set_healing(5, 20)
    assert agents.healing == (5, 20)
    assert agents.saving == (0, 0)
    page.set_saving(7, 30)
    assert (agents.healing, agents.saving) == ((5, 20), (7, 30))


def test_reported_numbers_are_read_with_their_names(page: StatusPage, agents: StatusPage) -> None:
    assert agents.numbers() == {}
    page.report("loss", 2.5)
    page.report("größe", -1.0)
    page.report("loss", 1.5)
    page.report("loss", float("inf"))
    assert agents.numbers() == {"loss": ReportedNumber(3, float("inf"), 4.0), "größe": ReportedNumber(1, -1.0, -1.0)}


@pytest.mark.parametrize("name", ["", "x" * 33, "ü" * 17])
def test_a_name_that_does_not_fit_is_refused(page: StatusPage, name: str) -> None:
    with pytest.raises(ValueError, match="must have 1 to 32 bytes"):
        page.report(name, 1.0)
    assert page.numbers() == {}


def test_too_many_names_are_refused(page: StatusPage) -> None:
    for number in range(8):
        page.report(f"n{number}", number)
    with pytest.raises(ValueError, match="at most 8 names"):
        page.report("n8", 1.0)
    page.report("n7", 9.0)
    assert page.numbers()["n7"].last == 9.0


# READER-1
def test_the_page_of_another_process_can_only_be_read(page: StatusPage) -> None:
    found = StatusPage.of_process(os.getpid())
    assert found is not None
    page.commit(3, 1)
    assert found.committed == (3, 1)
    with pytest.raises(TypeError):
        found.beat()
    assert StatusPage.of_process(1 << 30) is None
