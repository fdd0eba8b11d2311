"""What a rank does for durable checkpoints: it saves its share beside the steps, and loads the newest that is sound."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from elasticgang import testing
from elasticgang.checkpoint import listing, plan
from elasticgang.checkpoint.manifest import MANIFEST
from elasticgang.checkpoint.saver import DurableCheckpoints
from elasticgang.errors import CheckpointError, NotSupportedError, OperationalError
from elasticgang.layout import Member, ParallelLayout
from elasticgang.layout import plan as plan_seats
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.member_state import MemberState
from elasticgang.protocol.record import ACTIVE, Record, Seat
from elasticgang.state import SnapshotServer
from tests.support import REPOSITORY, wait_until

MEMBERS = ("a0", "b0")
EVERY = 10


class Counter:
    """A registered object that is neither module nor optimizer."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"seen": 0, "mean": torch.zeros(2), "note": (1, None)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


class Model(nn.Module):
    running: Tensor

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 3)
        self.low = nn.Parameter(torch.zeros(7, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("running", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layer(inputs).sum() + self.low.sum() + self.empty.sum()
        return output


class Rank:
    """One member of a job of two hosts, without the job."""

    def __init__(self, directory: Path, member: str = "a0", model: nn.Module | None = None, keep: int = 2) -> None:
        self.server = SnapshotServer()
        torch.manual_seed(0)
        self.model = model or Model()
        self.optim = torch.optim.AdamW(self.model.parameters())
        self.counter = Counter()
        self.server.register(model=self.model, optim=self.optim, counter=self.counter)
        self.checkpoints = DurableCheckpoints(directory, EVERY, keep, self.server)
        self.member = member
        self.state = MemberState(member)
        self.enter(MEMBERS)

    def enter(self, members: tuple[str, ...], generation: int = 1) -> None:
        layout = ParallelLayout()
        planned = plan_seats([Member(each, each[0]) for each in members], layout)
        seats = tuple(Seat(each, each[0], each[0], 0, "", ACTIVE) for each in members)
        agents = tuple(each[0] for each in members)
        committed = self.state.tip or Attempt(0, 1)
        self.state.record = Record("job", generation, "", layout, planned, seats, agents, committed)
        self.state.active, self.state.entered = set(members), generation

    def train(self, steps: int) -> Rank:
        """Equal calls leave equal state."""
        torch.manual_seed(steps)
        for _ in range(2):
            loss: Tensor = self.model(torch.randn(4, 5))
            loss.backward()  # type: ignore[no-untyped-call]
            self.optim.step()
            self.optim.zero_grad()
        self.model.get_buffer("running").fill_(steps)
        self.counter.state = {"seen": steps, "mean": torch.full((2,), float(steps)), "note": (steps, None)}
        self.state.tip = self.state.committed = Attempt(steps, 1)
        return self

    def begin(self) -> Rank:
        self.server.begin(self.state.tip)
        self.checkpoints.begin(self.member, self.state)
        return self

    def close(self) -> None:
        self.checkpoints.close(self.member, self.state)

    def save(self, steps: int) -> Rank:
        self.train(steps).begin().close()
        return self

    def load(self, steps: int) -> bool:
        attempt = Attempt(steps, 1)
        assert self.checkpoints.newest() == attempt
        return self.checkpoints.load(attempt, self.state)

    def content(self) -> list[object]:
        optim = self.optim.state_dict()
        tensors = [*self.model.state_dict().items()]
        states = [(index, key, value) for index, each in optim["state"].items() for key, value in each.items()]
        return [*tensors, *states, optim["param_groups"], *self.counter.state.items()]


def same(one: Rank, other: Rank) -> bool:
    return repr(one.content()) == repr(other.content())


@pytest.fixture(autouse=True)
def small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that both ranks of a small model write."""
    monkeypatch.setattr(plan, "MIN_SHARE_BYTES", 16)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Steps 10 and 20, by both ranks."""
    for steps in (10, 20):
        other = Rank(tmp_path, "b0").train(steps).begin()
        Rank(tmp_path).save(steps)
        other.close()
    return tmp_path


def writers() -> list[psutil.Process]:
    """Live ones. Other tests of this process may have left a child that is not reaped."""
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if "elasticgang.checkpoint.writer" in child.cmdline():
                found.append(child)
    return found


def test_two_ranks_save_what_one_loads(saved: Path) -> None:
    newest, older = listing.scan(saved)
    assert (newest.attempt, older.attempt) == (Attempt(20, 1), Attempt(10, 1))
    for found in (newest, older):
        assert found.manifest is not None
        listing.verify(found.path, found.manifest)
        sizes = [file.size - file.header_size for file in found.manifest.files]
        assert len(sizes) == 2
        assert min(sizes) > sum(sizes) / 4
        assert found.manifest.job == "job"
    rank = Rank(saved)
    assert rank.load(20)
    assert same(rank, Rank(saved).train(20))
    assert rank.counter.state["note"] == (20, None)
    assert writers() == []


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
    assert list(listing.scan(tmp_path)) == []
    wait_until(lambda: not rank.checkpoints.is_saving, "the end of the save")
    rank.save(20)
    assert [found.attempt.step for found in listing.scan(tmp_path)] == [20]
    assert len(os.listdir(tmp_path)) == 1


# WRITER-1
def test_the_writer_ends_with_its_rank(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from tests.integration.test_checkpoint_saver import Rank, writers\n"
        "rank = Rank(pathlib.Path(sys.argv[1])); rank.enter(('a0', 'b0')); rank.train(10).begin()\n"
        "print(writers()[0].pid, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=REPOSITORY,
        text=True,
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        writer = psutil.Process(pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
        wait_until(lambda: not writer.is_running() or writer.status() == psutil.STATUS_ZOMBIE, "the writer's end")


def corrupt(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


# LOADER-1, LISTING-2
def test_a_corrupt_checkpoint_is_skipped_with_a_warning(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    newest = next(listing.scan(saved)).path
    corrupt(newest / "shard-0-0-0-00001.safetensors")
    rank = Rank(saved).train(3)
    assert not rank.load(20)
    assert same(rank, Rank(saved).train(3))  # unchanged
    assert "the digest does not match" in caplog.text
    assert rank.load(10)
    assert same(rank, Rank(saved).train(10))
    assert Rank(saved).checkpoints.newest() == Attempt(10, 1)  # other ranks do not try it


@pytest.mark.parametrize("damage", [lambda path: (path / MANIFEST).write_text("{}"), corrupt])
def test_a_manifest_that_is_damaged_is_skipped(
    saved: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    newest = next(listing.scan(saved)).path
    damage(newest / MANIFEST if damage is corrupt else newest)
    rank = Rank(saved)
    assert rank.load(10)
    assert f"cannot use the checkpoint {newest}: its manifest is" in caplog.text


# SAVER-3
def test_a_job_does_not_start_anew_beside_checkpoints_that_cannot_be_used(saved: Path) -> None:
    assert Rank(saved / "other").checkpoints.newest() is None
    for found in list(listing.scan(saved)):
        corrupt(found.path / MANIFEST)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used: step-0.* Remove them to start anew"):
        Rank(saved).checkpoints.newest()


class Other(Model):
    def __init__(self, change: str) -> None:
        super().__init__(6 if change == "shape" else 5)
        if change == "dtype":
            self.low = nn.Parameter(torch.zeros(7, dtype=torch.float16))
        if change == "more":
            self.register_buffer("further", torch.zeros(1))
        if change == "fewer":
            del self.low


# LOADER-2
@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ("shape", r"model.layer.weight is \[3, 5\] in it, but \[3, 6\] in this job"),
        ("dtype", "model.low is bfloat16 in it, but float16 in this job"),
        ("more", "the buffer model.further of this job's model is not in it"),
        ("fewer", "model.low is in it, and this job's model has none of that name"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(saved: Path, change: str, difference: str) -> None:
    rank = Rank(saved, model=Other(change))
    before = repr(rank.content())
    with pytest.raises(CheckpointError, match=difference):
        rank.load(20)
    assert repr(rank.content()) == before
    assert Rank(saved).load(20)  # it is not taken for corrupt


def test_a_checkpoint_of_another_optimizer_is_refused(saved: Path) -> None:
    rank = Rank(saved)
    rank.server.unregister(["optim"])
    rank.server.register(sgd=torch.optim.SGD(rank.model.parameters()))
    with pytest.raises(CheckpointError, match="it has the optimizer 'optim', and this job has none of that name"):
        rank.load(20)


def test_what_has_no_place_in_safetensors_is_refused(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.counter.state["wave"] = torch.zeros(2, dtype=torch.complex128)
    rank.state.tip = Attempt(10, 1)
    with pytest.raises(NotSupportedError, match=r"a checkpoint cannot hold counter\.wave: it is complex128"):
        rank.begin()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OperationalError, match="cannot make the checkpoint directory"):
        Rank(tmp_path / "file" / "checkpoints")


def test_a_step_is_saved_once_and_only_if_it_is_due(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.enter(("a0",))
    for steps in (1, 9, 10, 11):
        rank.train(steps).begin()
        wait_until(lambda: not rank.checkpoints.is_saving, "the end of the save")
    rank.train(10).begin()  # the next attempt at the same step
    rank.close()
    assert [found.attempt.step for found in listing.scan(tmp_path)] == [10]
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


def test_the_ranks_that_are_left_save_the_step_again(tmp_path: Path) -> None:
    """Rank b0 has died before it wrote its share."""
    rank = Rank(tmp_path)
    rank.train(10).begin()
    rank.enter(("a0",), 2)
    rank.begin()  # the save under way is given up, because a share of it is missing
    wait_until(lambda: not rank.checkpoints.is_saving, "the end of the save")
    assert list(listing.scan(tmp_path)) == []
    rank.enter(("a0",), 3)
    rank.begin()
    wait_until(lambda: not rank.checkpoints.is_saving, "the end of the save")
    assert [found.attempt for found in listing.scan(tmp_path)] == [Attempt(10, 1)]
    rank.enter(MEMBERS, 4)
    rank.begin()  # it is complete
    assert not rank.checkpoints.is_saving
    rank.state.tip = Attempt(11, 4)
    rank.close()


@pytest.fixture(autouse=True)
def no_writer_is_left(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO, "elasticgang")
    yield
    for writer in writers():
        writer.kill()
        writer.wait()
