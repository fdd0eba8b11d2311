"""What a rank does for durable checkpoints: it saves its share beside the steps, and loads the newest that is sound."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from elasticgang import testing
from elasticgang.checkpoint import listing, plan
from elasticgang.checkpoint.digest import digest_of
from elasticgang.checkpoint.manifest import MANIFEST
from elasticgang.checkpoint.saver import DurableCheckpoints
from elasticgang.checkpoint.schedule import Schedule
from elasticgang.errors import CheckpointError, NotSupportedError, OperationalError
from elasticgang.layout import Member, ParallelLayout
from elasticgang.layout import plan as plan_seats
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.member_state import MemberState
from elasticgang.protocol.record import ACTIVE, CheckpointRef, Record, Seat
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

    def __init__(
        self,
        directory: Path,
        member: str = "a0",
        model: nn.Module | None = None,
        keep: int = 2,
        schedule: Schedule | None = None,
    ) -> None:
        self.server = SnapshotServer()
        torch.manual_seed(0)
        self.model = model or Model()
        self.optim = torch.optim.AdamW(self.model.parameters())
        self.counter = Counter()
        self.server.register(model=self.model, optim=self.optim, counter=self.counter)
        self.checkpoints = DurableCheckpoints(
            directory, schedule or Schedule(EVERY, clock=time.monotonic), keep, self.server
        )
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
            loss: Tensor = self.model(torch.randn(4, self.model.get_parameter("layer.weight").shape[1]))
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
        ref = self.newest()
        assert ref.attempt == Attempt(steps, 1)
        return self.checkpoints.load(ref, self.state)

    def newest(self) -> CheckpointRef:
        ref = self.checkpoints.newest()
        assert ref is not None
        return ref

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
    assert [found.attempt.step for found in listing.scan(tmp_path)] == [10]
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
    assert Rank(saved).newest().attempt == Attempt(10, 1)  # other ranks do not try it


# SAVER-4
def test_another_checkpoint_of_the_same_attempt_is_refused(
    saved: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The rank's directory is not the one of the rank that has reported the checkpoint, or it was exchanged since."""
    named = Rank(saved).newest()
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    alone = Rank(elsewhere)
    alone.enter(("a0",))
    alone.save(20)
    other = alone.newest()
    assert (other.attempt, other.digest != named.digest) == (named.attempt, True)
    rank = Rank(elsewhere).train(3)
    with pytest.raises(CheckpointError) as refused:
        rank.checkpoints.load(named, rank.state)
    for part in (named.digest, other.digest, str(elsewhere), "generation 1 ", "step 20 "):
        assert part in str(refused.value)
    assert same(rank, Rank(elsewhere).train(3))  # unchanged
    shutil.copytree(next(listing.scan(elsewhere)).path, saved / "step-000000000020-1-0123456789abcdef")
    for ref in (named, other):  # both are there
        rank = Rank(saved)
        assert rank.checkpoints.load(ref, rank.state)


@pytest.mark.parametrize("damage", [lambda path: (path / MANIFEST).write_text("{}"), corrupt])
def test_a_manifest_that_is_damaged_is_skipped(
    saved: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    newest = next(listing.scan(saved)).path
    damage(newest / MANIFEST if damage is corrupt else newest)
    rank = Rank(saved)
    assert rank.load(10)
    assert f"cannot use the checkpoint {newest}: its manifest is" in caplog.text


def rewritten(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest in the directory `path`, under a digest that matches."""
    content = json.loads((path / MANIFEST).read_text())
    del content["digest"]
    change(content)
    rest = b'",' + json.dumps(content).encode()[1:]
    (path / MANIFEST).write_bytes(b'{"digest":"' + digest_of(rest).encode() + rest)


def truncate(path: Path) -> None:
    file = path / "shard-0-0-0-00000.safetensors"
    os.truncate(file, file.stat().st_size - 1)


def lead_outside(content: dict[str, Any]) -> None:
    content["files"][0]["name"] = "../../outside.safetensors"


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda path: rewritten(path, lambda content: content.update(format=2)), "its format is 2"),
        (lambda path: rewritten(path, lead_outside), "is no name of a file of a checkpoint"),
        (truncate, "shard-0-0-0-00000.safetensors has"),
        (lambda path: (path / "shard-0-0-0-00001.safetensors").unlink(), "shard-0-0-0-00001.safetensors: No such file"),
    ],
    ids=["newer format", "path outside", "truncated", "missing file"],
)
def test_the_one_before_is_loaded_in_place_of_one_that_cannot_be_used(
    saved: Path, damage: Callable[[Path], object], complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    newest = next(listing.scan(saved)).path
    rewritten(newest, lambda content: None)
    assert Rank(saved).newest().attempt == Attempt(20, 1)  # rewriting changes nothing by itself
    damage(newest)
    rank = Rank(saved)
    assert rank.load(10)
    assert same(rank, Rank(saved).train(10))
    assert f"cannot use the checkpoint {newest}: " in caplog.text
    assert complaint in caplog.text
    assert "trying the one before" in caplog.text


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
    rank.state.tip = rank.state.committed = Attempt(10, 1)
    with pytest.raises(NotSupportedError, match=r"a checkpoint cannot hold counter\.wave: it is complex128"):
        rank.begin()


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OperationalError, match="cannot make the checkpoint directory"):
        Rank(tmp_path / "file" / "checkpoints")


def test_a_directory_that_cannot_be_written_is_refused() -> None:
    """By another user than the one who made it."""
    code = (
        "import os, pathlib, sys, time\n"
        "from elasticgang.checkpoint.saver import DurableCheckpoints\n"
        "from elasticgang.checkpoint.schedule import Schedule\n"
        "from elasticgang.state import SnapshotServer\n"
        "import xxhash\n"
        "server = SnapshotServer()\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "DurableCheckpoints(pathlib.Path(sys.argv[1]), Schedule(1, clock=time.monotonic), 2, server)"
    )
    with TemporaryDirectory() as name:
        os.chmod(name, 0o555)
        command = [sys.executable, "-c", code, name]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert f"OperationalError: cannot write to the checkpoint directory {name}" in done.stderr


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
    assert [found.attempt for found in listing.scan(tmp_path)] == [Attempt(13, 1)]
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
    assert Attempt(13, 1) in [found.attempt for found in listing.scan(tmp_path)]


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
    assert list(listing.scan(tmp_path)) == []
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
    assert list(listing.scan(tmp_path)) == []
    rank.enter(("a0",), 3)
    rank.begin()
    wait_until(lambda: not rank.checkpoints.is_saving, "the end of the save")
    assert [found.attempt for found in listing.scan(tmp_path)] == [Attempt(10, 1)]
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
    copied, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        copied.set()
        assert go_on.wait(60)

    with testing.fail_at("checkpoint_copied", hold):
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
    assert [found.attempt.step for found in listing.scan(tmp_path)] == [20]


def test_a_save_outlives_a_rank_that_leaves_after_its_share_is_written(tmp_path: Path) -> None:
    rank, other = Rank(tmp_path), Rank(tmp_path, "b0")
    copied, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        copied.set()
        assert go_on.wait(60)

    other.train(10).begin().close()
    with testing.fail_at("checkpoint_copied", hold):
        rank.train(10).begin()
        assert copied.wait(60)
        rank.train(11).enter(("a0",), 2)
        rank.begin()
        go_on.set()
        rank.close()
    assert [found.attempt.step for found in listing.scan(tmp_path)] == [10]


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
            rank.checkpoints.count(num_proposals, 1)
    assert [found.attempt.step for found in listing.scan(tmp_path)] == [3, 2]
    for rank in ranks:
        rank.checkpoints.count(0.0, 1)
        rank.close()


@pytest.fixture(autouse=True)
def no_writer_is_left(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.INFO, "elasticgang")
    yield
    for writer in writers():
        writer.kill()
        writer.wait()
