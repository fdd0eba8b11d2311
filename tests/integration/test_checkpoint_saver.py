"""What a rank does for durable checkpoints: it saves its share beside the steps."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from elasticgang import testing
from elasticgang.checkpoint import listing, saver, writer_process
from elasticgang.checkpoint.locations import storage_at
from elasticgang.checkpoint.schedule import Schedule
from elasticgang.errors import CheckpointError
from elasticgang.protocol.commit import Attempt
from tests.integration.saving import MEMBERS, Model, Rank, same, writers
from tests.preloaded import PreloadedProcess
from tests.support import PROMPT_S, environment, is_alive, wait_until

pytestmark = pytest.mark.usefixtures("small_shares", "no_writer_is_left")


@contextlib.contextmanager
def held_after_the_copy() -> Iterator[tuple[threading.Event, threading.Event]]:
    """Each save stops once its share is copied, and sets the first event. It goes on once the second one is set."""
    copied, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        copied.set()
        assert go_on.wait(60)

    with testing.fail_at("checkpoint_copied", hold):
        yield copied, go_on


def test_a_save_tells_how_far_it_is(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    rank = Rank(tmp_path, on_saving=lambda num_written, num_bytes: told.append((num_written, num_bytes)))
    rank.enter(("a0",))
    rank.save(10)
    first, *later, last = told
    size = first[1]
    assert (first[0], last) == (0, (0, 0))
    assert later, "the writer has told of no piece"
    assert all(0 < written <= of == size for written, of in later)
    assert later == sorted(later)


# SAVER-7
def test_a_relative_directory_is_that_of_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rank = Rank("checkpoints")
    rank.enter(("a0",))
    (tmp_path / "later").mkdir()
    monkeypatch.chdir(tmp_path / "later")
    rank.save(10)
    (found,) = listing.scan(storage_at(tmp_path / "checkpoints"))
    assert Rank(tmp_path / "checkpoints").newest().attempt == found.attempt == rank.newest().attempt
    assert os.listdir(tmp_path / "later") == []


def test_a_save_keeps_nothing_alive_that_it_has_copied(tmp_path: Path) -> None:
    """The state of a former seat goes when the objects of the seat do, also while its save is still written."""
    rank = Rank(tmp_path)
    rank.enter(("a0",))
    with held_after_the_copy() as (copied, go_on):
        rank.train(10).begin()
        assert copied.wait(60)
        kept = [weakref.ref(each.untyped_storage()) for each in rank.model.parameters()]
        rank.server.unregister(["model", "optim", "counter"])
        del rank.model, rank.optim
        gc.collect()
        assert [each() for each in kept] == [None] * len(kept)
        go_on.set()
        rank.close()


def test_two_ranks_save_what_one_loads(saved: Path) -> None:
    newest, older = listing.scan(storage_at(saved))
    assert (newest.attempt, older.attempt) == (Attempt(20, 1), Attempt(10, 1))
    for found in (newest, older):
        assert found.manifest is not None
        listing.verify(found.folder, found.manifest)
        sizes = [file.size - file.header_size for file in found.manifest.files]
        assert len(sizes) == 2
        assert min(sizes) > sum(sizes) / 4
        assert found.manifest.job == "job"
    rank = Rank(saved)
    assert rank.load(20)
    assert same(rank, Rank(saved).train(20))
    assert rank.counter.state["note"] == (20, None)
    assert writers() == []


# SAVER-2
def test_a_save_for_which_no_thread_is_left_costs_that_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank(tmp_path)
    rank.enter(("a0",))
    usual = threading.stack_size(1 << 47)  # more than there is
    try:
        rank.train(9).begin()  # which allocates memory for the first save
        rank.train(10).begin()
        with rank.server.exclusive():  # no apply waits for the save
            pass
    finally:
        threading.stack_size(usual)
    (warning,) = [record.getMessage() for record in caplog.records if "is not saved" in record.getMessage()]
    assert warning == "step 10 is not saved: can't start new thread"
    rank.save(20)
    assert [found.attempt for found in listing.scan(storage_at(tmp_path))] == [Attempt(20, 1)]


# SAVER-1
def test_an_apply_waits_for_the_copy_alone(tmp_path: Path) -> None:
    rank = Rank(tmp_path, keep=1)
    rank.enter(("a0",))
    copying, go_on = threading.Event(), threading.Event()
    rank.train(10)
    before = repr(rank.content())

    def hold() -> None:
        copying.set()
        assert go_on.wait(60)

    with testing.fail_at("checkpoint_copying", hold):
        rank.begin()
        assert copying.wait(60)
        applied = threading.Event()

        def apply() -> None:
            with rank.server.exclusive():
                applied.set()

        applying = threading.Thread(target=apply)
        applying.start()
        assert not applied.wait(0.2)
        go_on.set()
        applying.join(60)
        assert applied.is_set()
    with torch.no_grad():
        for parameter in rank.model.parameters():
            parameter.add_(1)  # what is saved is a copy
    rank.close()
    other = Rank(tmp_path)
    assert other.load(10)
    assert repr(other.content()) == before


# SAVER-1
def test_memory_and_writer_are_there_before_the_first_save(tmp_path: Path) -> None:
    """The pages of the share's memory are allocated: the first save finds them."""
    rank = Rank(tmp_path, model=Model(width=1 << 20))
    rank.enter(("a0",))
    rank.train(1).begin()
    (writer,) = writers()
    num_bytes = sum(each.nbytes for each in rank.model.parameters())

    def allocated() -> int:
        sizes = [os.stat(path).st_blocks * 512 for path in Path("/proc/self/fd").iterdir() if is_memory(path)]
        return sum(sizes)

    wait_until(lambda: allocated() >= 3 * num_bytes, "the pages")  # with what AdamW keeps
    rank.train(10).begin().close()
    assert [found.attempt.step for found in listing.scan(storage_at(tmp_path))] == [10]
    assert not writer.is_running()


def is_memory(descriptor: Path) -> bool:
    with contextlib.suppress(OSError):
        return "eg-checkpoint" in os.readlink(descriptor)
    return False


# SAVER-2
def test_the_death_of_the_writer_costs_one_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rank = Rank(tmp_path)
    rank.enter(("a0",))

    def kill() -> None:
        (process,) = writers()
        process.kill()
        process.wait()

    with testing.fail_at("checkpoint_copied", kill):
        rank.train(10).begin()
        wait_until(lambda: "step 10 is not saved" in caplog.text, "the warning")
    assert list(listing.scan(storage_at(tmp_path))) == []
    wait_until(lambda: not rank.checkpoints.is_saving, "the end of the save")
    rank.save(20)
    assert [found.attempt.step for found in listing.scan(storage_at(tmp_path))] == [20]
    assert len(os.listdir(tmp_path)) == 1


# WRITER-1
def test_the_writer_ends_with_its_rank(tmp_path: Path) -> None:
    """Also one that does not come to read that its rank is gone: here it is stopped."""
    code = (
        "import sys, pathlib; from tests.integration.saving import Rank, writers\n"
        "rank = Rank(pathlib.Path(sys.argv[1])); rank.enter(('a0', 'b0')); rank.train(10).begin()\n"
        "print(writers()[0].pid, flush=True); sys.stdin.read()"
    )
    (script := tmp_path / "script.py").write_text(code)
    (root := tmp_path / "checkpoints").mkdir()
    with PreloadedProcess(
        [sys.executable, str(script), str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=2,
        env=environment(),
        text=True,
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        writer = psutil.Process(pid)
        wait_until(lambda: writer.nice() > os.nice(0), "the writer's beginning")
        writer.suspend()
        try:
            process.send_signal(signal.SIGKILL)
            process.wait()
            wait_until(lambda: not is_alive(pid), "the writer's end", PROMPT_S)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                writer.kill()


def test_the_writer_ends_while_a_child_that_the_rank_has_forked_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data worker, for example, which has the descriptors of the rank."""
    monkeypatch.setattr(writer_process, "EXIT_TIMEOUT_S", 2 * PROMPT_S)  # after which it would be killed
    rank = Rank(tmp_path)
    rank.enter(("a0",))
    rank.train(10).begin()
    (writer,) = writers()
    child = multiprocessing.get_context("fork").Process(target=signal.pause)
    child.start()
    try:
        begun_at = time.monotonic()
        rank.close()
        assert time.monotonic() - begun_at < PROMPT_S
        assert child.is_alive()
        assert not writer.is_running()
    finally:
        child.kill()
        child.join()
    assert [found.attempt.step for found in listing.scan(storage_at(tmp_path))] == [10]


def test_a_step_is_saved_once_and_only_if_it_is_due(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.enter(("a0",))
    for steps in (1, 9, 10, 11):
        rank.train(steps).begin()
        wait_until(lambda: not rank.checkpoints.is_saving, "the end of the save")
    rank.train(10).begin()  # the next attempt at the same step
    rank.close()
    assert [found.attempt.step for found in listing.scan(storage_at(tmp_path))] == [10]
    assert len(os.listdir(tmp_path)) == 1


def test_the_state_after_the_last_step_is_saved(tmp_path: Path) -> None:
    """With what its forward has changed: no step begins after it, so that nothing else keeps that aside."""
    rank = Rank(tmp_path)
    rank.enter(("a0",))
    rank.train(9).begin()
    rank.train(10).close()
    other = Rank(tmp_path)
    assert other.load(10)
    assert same(other, rank)
    assert other.counter.state["seen"] == 10


def rounds(*ranks: Rank) -> list[tuple[bool, bool]]:
    """Of `save_last`, until no rank saves any more: as MANAGER-12 says."""
    while True:
        outcomes = [rank.checkpoints.save_last(rank.member, rank.state) for rank in ranks]
        if not any(is_saving for is_saving, _ in outcomes):
            return outcomes
        if any(has_failed for _, has_failed in outcomes):
            for rank in ranks:
                rank.checkpoints.drop()


@pytest.mark.parametrize("schedule", [{"every_steps": 10}, {"every_seconds": 9e9}])
def test_the_final_state_is_saved_when_it_is_not_due(tmp_path: Path, schedule: dict[str, Any]) -> None:
    clock = time.monotonic
    ranks = [Rank(tmp_path, member, schedule=Schedule(**schedule, clock=clock)).train(9) for member in MEMBERS]
    for rank in ranks:
        rank.begin()
    for rank in ranks:
        rank.train(13)
    assert rounds(*ranks) == [(False, False)] * 2
    for rank in ranks:
        rank.close()
    assert [found.attempt for found in listing.scan(storage_at(tmp_path))] == [Attempt(13, 1)]
    resumed = Rank(tmp_path)
    assert resumed.load(13)
    assert same(resumed, ranks[0])
    assert resumed.counter.state["seen"] == 13
    resumed.state.tip = resumed.state.committed = Attempt(13, 1)
    resumed.enter(("a0",))
    assert rounds(resumed) == [(False, False)]  # it is saved already
    resumed.close()
    assert len(os.listdir(tmp_path)) == 1


def test_the_final_state_is_saved_after_a_save_that_is_still_under_way(tmp_path: Path) -> None:
    """It lasts longer than a round."""
    rank = Rank(tmp_path)
    rank.enter(("a0",))
    rank.train(10)
    go_on = threading.Event()
    with testing.fail_at("checkpoint_copied", lambda: go_on.wait(60)):
        rank.begin()
        rank.train(13)
        assert rank.checkpoints.save_last(rank.member, rank.state) == (True, False)
        go_on.set()
        assert rounds(rank) == [(False, False)]
    rank.close()
    assert Attempt(13, 1) in [found.attempt for found in listing.scan(storage_at(tmp_path))]


# MANAGER-22
def test_a_rank_that_goes_on_after_such_a_save_waits_for_a_later_one_when_it_leaves(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.enter(("a0",))
    rank.train(9)
    assert rounds(rank) == [(False, False)]
    rank.enter(("a0",), 2)
    with testing.fail_at("checkpoint_copied", lambda: time.sleep(1)):
        rank.train(10).begin()
        rank.state.tip = rank.state.committed = Attempt(11, 2)
        rank.close()
    assert [found.attempt.step for found in listing.scan(storage_at(tmp_path))] == [10, 9]


def test_a_failed_share_of_the_final_save_ends_it_on_all_ranks(tmp_path: Path) -> None:
    """The committing rank does not wait for a share that never comes."""
    ranks = [Rank(tmp_path, member).train(13) for member in MEMBERS]
    ranks[0].begin()
    (first,) = writers()
    ranks[1].begin()
    (second,) = (writer for writer in writers() if writer != first)
    copied: list[None] = []

    def kill() -> None:
        copied.append(None)
        if len(copied) == 2:
            second.kill()
            second.wait()

    with testing.fail_at("checkpoint_copied", kill):
        assert rounds(*ranks) == [(False, True)] * 2
    assert list(listing.scan(storage_at(tmp_path))) == []
    for rank in ranks:
        rank.close()


def test_the_ranks_that_are_left_save_the_step_again(tmp_path: Path) -> None:
    """Rank b0 has died before it wrote its share."""
    rank = Rank(tmp_path)
    go_on = threading.Event()
    with testing.fail_at("checkpoint_copied", lambda: go_on.wait(60)):
        rank.train(10).begin()
        rank.enter(("a0",), 2)
        rank.begin()  # the save under way is given up, because a share of it is missing
        go_on.set()
        wait_until(lambda: not rank.checkpoints.is_saving, "the end of the save")
    assert list(listing.scan(storage_at(tmp_path))) == []
    rank.enter(("a0",), 3)
    rank.begin()
    wait_until(lambda: not rank.checkpoints.is_saving, "the end of the save")
    assert [found.attempt for found in listing.scan(storage_at(tmp_path))] == [Attempt(10, 1)]
    rank.enter(MEMBERS, 4)
    rank.begin()  # it is complete
    assert not rank.checkpoints.is_saving
    rank.state.tip = rank.state.committed = Attempt(11, 4)
    rank.close()


# WRITER-2
@pytest.mark.parametrize("moment", ["before the request", "during the save"])
def test_a_save_is_given_up_at_once_when_a_writer_is_lost_in_a_later_step(
    tmp_path: Path, moment: str, caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank(tmp_path)
    with held_after_the_copy() as (copied, go_on):
        rank.train(10).begin()
        assert copied.wait(60)
        if moment == "during the save":
            go_on.set()
            wait_until(lambda: any(tmp_path.glob("*/part-0-0-0-00000.json")), "the first share")
        rank.train(11).begin()  # b0 has a share of the save, and dies before it is written
        rank.enter(("a0",), 2)
        rank.begin()
        go_on.set()
        wait_until(lambda: not rank.checkpoints.is_saving, "the end of the save")
    assert "a share of step-000000000010-1-" in caplog.text
    assert "is missing: part-0-0-0-00001.json" in caplog.text
    rank.train(20).begin()
    rank.close()
    assert [found.attempt.step for found in listing.scan(storage_at(tmp_path))] == [20]


# SAVER-6
def test_a_save_that_another_rank_has_left_out_is_given_up_once_no_other_rank_saves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "ALONE_S", 0.0)
    rank, other = Rank(tmp_path).train(10).begin(), Rank(tmp_path, "b0")
    rank.checkpoints.count(0.0, 2.0, 1)  # the share of b0 may come
    wait_until(lambda: any(tmp_path.glob("*/part-0-0-0-00000.json")), "the own share")
    assert rank.checkpoints.is_saving
    rank.checkpoints.count(0.0, 1.0, 1)
    wait_until(lambda: not rank.checkpoints.is_saving, "the end of the save")
    assert "is missing: part-0-0-0-00001.json" in caplog.text
    rank.checkpoints.count(0.0, 0.0, 1)
    other.train(20).begin()
    rank.save(20)
    other.close()
    assert [found.attempt.step for found in listing.scan(storage_at(tmp_path))] == [20]


# SAVER-9
def test_no_rank_begins_a_save_while_one_is_under_way(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The shares that the others would write would have no manifest."""
    ranks = [Rank(tmp_path, member) for member in MEMBERS]
    for rank in ranks:
        rank.checkpoints.count(0.0, 1.0, 1)
        rank.train(10).begin()
        assert not rank.checkpoints.is_saving
    assert [record.getMessage() for record in caplog.records] == [
        "step 10 is not saved: a rank had not ended the save before at the last vote"
    ]
    for rank in ranks:
        rank.enter(MEMBERS, 2)  # whose first save is after no vote of it
        rank.begin()
        assert rank.checkpoints.is_saving
    for rank in ranks:
        rank.close()
        rank.checkpoints.count(0.0, 1.0, 2)
        rank.train(13)
    rounds(*ranks)  # the final state does not wait for that
    for rank in ranks:
        rank.close()
    assert [found.attempt.step for found in listing.scan(storage_at(tmp_path))] == [13, 10]


# SAVER-6
def test_a_share_that_is_seen_late_completes_the_save(tmp_path: Path) -> None:
    """As on a shared file system, which shows a file a while after it was written."""
    rank, other = Rank(tmp_path).train(10).begin(), Rank(tmp_path, "b0")
    wait_until(lambda: any(tmp_path.glob("*/part-0-0-0-00000.json")), "the own share")
    for _ in range(3):
        rank.checkpoints.count(0.0, 1.0, 1)
    other.train(10).begin().close()
    rank.close()
    assert [found.attempt.step for found in listing.scan(storage_at(tmp_path))] == [10]


# SAVER-6
def test_a_save_is_complete_with_the_shares_of_ranks_that_save_no_more(tmp_path: Path) -> None:
    """The committing rank is the slowest."""
    rank, other = Rank(tmp_path), Rank(tmp_path, "b0")
    other.train(10).begin().close()
    with held_after_the_copy() as (copied, go_on):
        rank.train(10).begin()
        assert copied.wait(60)
        rank.checkpoints.count(0.0, 1.0, 1)
        go_on.set()
        rank.close()
    assert [found.attempt.step for found in listing.scan(storage_at(tmp_path))] == [10]


def test_remains_that_cannot_be_removed_are_told_of_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for step in (1, 2, 3):
        (tmp_path / f"step-{step:012d}-1-0123456789abcdef" / "a directory").mkdir(parents=True)
    rank = Rank(tmp_path)
    rank.enter(("a0",))
    rank.save(10)
    told = [line for line in capfd.readouterr().err.splitlines() if "could not remove" in line]
    assert len(told) == 1
    assert " and 2 more: Is a directory" in told[0]


# SAVER-10
def test_a_rank_that_cannot_list_the_checkpoints_does_not_hold_up_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "LIST_S", 0.1)
    (tmp_path / "here").mkdir()
    (tmp_path / "there").symlink_to("here")
    ranks = [Rank(tmp_path / "here", "a0"), Rank(tmp_path / "there", "b0")]
    for rank in ranks:
        rank.train(7)
    assert ranks[1].checkpoints.save_last("b0", ranks[1].state) == (True, False)
    wait_until(lambda: not ranks[1].checkpoints.is_saving, "the rank's share")
    (tmp_path / "there").unlink()
    (tmp_path / "there").symlink_to("there")
    assert rounds(*ranks) == [(False, False)] * 2
    assert caplog.text.count("this rank cannot look whether step 7 is saved: Too many levels of symbolic links") == 1
    assert [found.attempt.step for found in listing.scan(storage_at(tmp_path / "here"))] == [7]
    for rank in ranks:
        rank.close()


# SAVER-10
def test_a_rank_that_leaves_it_to_the_others_says_that_the_save_has_failed_once_they_give_it_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "LIST_S", 0.1)
    (tmp_path / "there").symlink_to(".")
    rank = Rank(tmp_path / "there", "b0").train(7)
    assert rank.checkpoints.save_last("b0", rank.state) == (True, False)
    wait_until(lambda: not rank.checkpoints.is_saving, "the rank's share")
    (tmp_path / "there").unlink()
    (tmp_path / "there").symlink_to("there")
    assert rounds(rank) == [(False, False)]
    rank.checkpoints.drop()  # another one has failed
    assert rank.checkpoints.save_last("b0", rank.state) == (False, True)
    rank.close()


# SAVER-10
def test_the_rank_that_writes_the_manifest_need_not_list_the_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there").symlink_to("here")
    rank = Rank(tmp_path / "there")
    rank.enter(("a0",))
    rank.train(7)
    rank.server.begin(rank.state.tip)
    rank.checkpoints.begin("a0", rank.state, is_last=True)
    wait_until(lambda: not rank.checkpoints.is_saving, "the save")
    (tmp_path / "there").unlink()
    (tmp_path / "there").symlink_to("there")
    assert rounds(rank) == [(False, False)]
    rank.close()


@contextlib.contextmanager
def place_that_does_not_answer(root: Path) -> Iterator[Callable[[], None]]:
    """Whoever lists the checkpoints there waits until the function is called."""
    folder = root / "step-000000000020-1-0123456789abcdef"
    folder.mkdir()
    (folder / "manifest.json").touch()
    os.mkfifo(folder / "corrupt")

    def answer() -> None:
        (folder / "corrupt").write_text("it is damaged")

    yield answer
    for thread in threading.enumerate():
        if thread.name == "storage":
            thread.join(60)
    shutil.rmtree(folder)


# SAVER-11
@pytest.mark.parametrize("holds_state", [True, False])
def test_a_rank_that_can_do_without_checkpoints_does_not_wait_for_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, holds_state: bool
) -> None:
    monkeypatch.setattr(saver, "LIST_S", 0.1)
    rank = Rank(tmp_path, has_trained=not holds_state)
    if holds_state:
        rank.train(20)
    with place_that_does_not_answer(tmp_path) as answer:
        assert [rank.checkpoints.newest(rank.state) for _ in range(3)] == [None] * 3
        assert not rank.checkpoints.has(Attempt(20, 1))
        assert caplog.messages == [f"cannot read the checkpoints of {tmp_path}: it does not answer"]
        answer()
    rank.train(30).enter(("a0",))
    rank.begin().close()
    assert rank.newest().attempt == Attempt(30, 1)


# SAVER-11
def test_a_job_that_begins_waits_for_its_checkpoints_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "LIST_S", 0.0)
    monkeypatch.setattr(saver, "SLOW_S", 0.0)
    rank = Rank(tmp_path)
    with place_that_does_not_answer(tmp_path) as answer:

        def answer_later() -> None:
            wait_until(lambda: f"waiting for {tmp_path}, which does not answer" in caplog.text, "a line")
            answer()

        answering = threading.Thread(target=answer_later)
        answering.start()
        with pytest.raises(CheckpointError, match="it is damaged"):
            rank.newest()
        answering.join()


# SAVER-8
def test_a_rank_that_starts_again_makes_no_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As where a file system is not mounted any more."""
    rank = Rank(tmp_path / "gone", has_trained=True)
    assert not (tmp_path / "gone").exists()
    told = f"cannot use the checkpoint directory {tmp_path}/gone: No such file or directory"
    assert caplog.messages == [f"{told}; this rank takes part all the same"]
    rank.enter(("a0",))
    rank.save(10)
    assert "step 10 is not saved" in caplog.text
    assert not (tmp_path / "gone").exists()
    (tmp_path / "gone").mkdir()
    rank.save(20)
    assert rank.newest().attempt == Attempt(20, 1)


# SAVER-12
def test_a_rank_that_ends_says_that_it_waits_for_its_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "SLOW_S", 0.0)
    rank = Rank(tmp_path)
    rank.enter(("a0",))
    with held_after_the_copy() as (copied, go_on):
        rank.train(10).begin()
        assert copied.wait(60)
        closing = threading.Thread(target=rank.close)
        closing.start()
        wait_until(lambda: "this rank ends once its save of step 10" in caplog.text, "a line")
        go_on.set()
        closing.join()
    assert rank.newest().attempt == Attempt(10, 1)


# SAVER-6
def test_the_final_state_waits_for_no_save_that_another_rank_has_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saver, "ALONE_S", 0.0)
    ranks = [Rank(tmp_path, member) for member in MEMBERS]
    ranks[0].train(10).begin()
    for rank in ranks:
        rank.train(13)
    assert rounds(*ranks) == [(False, False)] * 2
    for rank in ranks:
        rank.close()
    assert [found.attempt.step for found in listing.scan(storage_at(tmp_path))] == [13]


def test_a_save_outlives_a_rank_that_leaves_after_its_share_is_written(tmp_path: Path) -> None:
    rank, other = Rank(tmp_path), Rank(tmp_path, "b0")
    other.train(10).begin().close()
    with held_after_the_copy() as (copied, go_on):
        rank.train(10).begin()
        assert copied.wait(60)
        rank.train(11).enter(("a0",), 2)
        rank.begin()
        go_on.set()
        rank.close()
    assert [found.attempt.step for found in listing.scan(storage_at(tmp_path))] == [10]


# SAVER-6
def test_a_step_whose_save_of_the_generation_before_has_not_ended_is_told_with_that(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank(tmp_path)
    with held_after_the_copy() as (copied, go_on):
        rank.train(10).begin()
        assert copied.wait(60)
        rank.enter(MEMBERS, 2)
        rank.begin()
        (warning,) = [record.getMessage() for record in caplog.records if "is not saved" in record.getMessage()]
        go_on.set()
        rank.close()
    assert re.fullmatch(r"step 10 is not saved: its save in step-0+10-1-\w+ has not ended", warning)


def test_saves_follow_the_clock_of_any_rank(tmp_path: Path) -> None:
    """Two ranks whose clocks differ save the same steps."""
    ranks = [
        Rank(tmp_path, member, schedule=Schedule(every_seconds=each, clock=time.monotonic))
        for member, each in (("a0", 1e-9), ("b0", 9e9))
    ]
    for steps in range(1, 4):
        for rank in ranks:
            rank.train(steps).begin()
        for rank in ranks:
            wait_until(lambda rank=rank: not rank.checkpoints.is_saving, "the end of the save")  # type: ignore[misc]
        num_proposals = float(sum(rank.checkpoints.proposes for rank in ranks))
        assert num_proposals == 1
        for rank in ranks:
            rank.checkpoints.count(num_proposals, 0.0, 1)
    assert [found.attempt.step for found in listing.scan(storage_at(tmp_path))] == [3, 2]
    for rank in ranks:
        rank.checkpoints.count(0.0, 0.0, 1)
        rank.close()
