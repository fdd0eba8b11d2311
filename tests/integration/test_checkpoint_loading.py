"""The newest checkpoint that is sound is loaded; one that does not fit, or cannot be used, is named."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn

import elasticgang as eg
from elasticgang.checkpoint import listing, saver
from elasticgang.checkpoint.digest import digest_of
from elasticgang.checkpoint.files import LocalFolder, LocalStorage
from elasticgang.checkpoint.locations import storage_at
from elasticgang.checkpoint.manifest import MANIFEST
from elasticgang.errors import CheckpointError, NotSupportedError, OperationalError
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.sample_positions import NAME, BatchShape, SamplePositions
from tests.integration.saving import Model, Rank, same
from tests.support import run_preloaded

pytestmark = pytest.mark.usefixtures("small_shares", "no_writer_is_left")


def corrupt(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


# LOADER-1, LISTING-2
def test_a_corrupt_checkpoint_is_skipped_with_a_warning(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    newest = Path(next(listing.scan(storage_at(saved))).path)
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
    shutil.copytree(next(listing.scan(storage_at(elsewhere))).path, saved / "step-000000000020-1-0123456789abcdef")
    for ref in (named, other):  # both are there
        rank = Rank(saved)
        assert rank.checkpoints.load(ref, rank.state)


@pytest.mark.parametrize("damage", [lambda path: (path / MANIFEST).write_text("{}"), corrupt])
def test_a_manifest_that_is_damaged_is_skipped(
    saved: Path, damage: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    newest = Path(next(listing.scan(storage_at(saved))).path)
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
        (lambda path: rewritten(path, lambda content: content.update(format=4)), "its format is 4"),
        (lambda path: rewritten(path, lead_outside), "is no name of a file of a checkpoint"),
        (truncate, "shard-0-0-0-00000.safetensors has"),
        (lambda path: (path / "shard-0-0-0-00001.safetensors").unlink(), "shard-0-0-0-00001.safetensors: No such file"),
    ],
    ids=["newer format", "path outside", "truncated", "missing file"],
)
def test_the_one_before_is_loaded_in_place_of_one_that_cannot_be_used(
    saved: Path, damage: Callable[[Path], object], complaint: str, caplog: pytest.LogCaptureFixture
) -> None:
    newest = Path(next(listing.scan(storage_at(saved))).path)
    rewritten(newest, lambda content: None)
    assert Rank(saved).newest().attempt == Attempt(20, 1)  # rewriting changes nothing by itself
    damage(newest)
    rank = Rank(saved)
    assert rank.load(10)
    assert same(rank, Rank(saved).train(10))
    assert f"cannot use the checkpoint {newest}: " in caplog.text
    assert complaint in caplog.text
    assert "trying the one before" in caplog.text


def replace_optimizer(content: dict[str, Any], entries: Any) -> None:
    for objects in content["objects"].values():
        objects["optimizers"]["dict"] = [["optim", {"dict": entries}]]


def replace_others(content: dict[str, Any], entries: Any) -> None:
    for objects in content["objects"].values():
        objects["others"] = {"dict": entries}


# LOADER-8
def test_a_checkpoint_without_the_positions_of_samples_is_loaded(saved: Path) -> None:
    rank, positions = Rank(saved), SamplePositions()
    rank.server.register(None, **{NAME: positions})
    assert rank.load(20)
    assert positions.take(20, BatchShape(64, 8, 2, 0, is_sampled=False)) == 160


def add_empty_tensor(content: dict[str, Any]) -> None:
    """It has no bytes, and strides that no number holds."""
    entry = {"name": "x", "shape": [0, 1 << 59, 1 << 59], "dtype": "float32", "placement": "", "pieces": []}
    content["tensors"].append(entry)
    replace_others(content, [["counter", {"tensor": "x"}]])


# LOADER-1
@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(objects=[1]),
        lambda content: content.update(objects=dict.fromkeys(content["objects"], 5)),
        lambda content: content.update(layout={"pp": [], "sdp": "x"}),
        lambda content: replace_others(content, [["counter"]]),
        lambda content: replace_others(content, [[[1], 2]]),
        lambda content: replace_others(content, [["counter", {"tensor": 7}]]),
        lambda content: replace_optimizer(content, [["state"]]),
        lambda content: replace_optimizer(
            content, [["state", {"dict": []}], ["param_groups", [{"dict": [["params", [[]]]]}]]]
        ),
        add_empty_tensor,
    ],
    ids=["no objects", "numbers", "layout", "no pairs", "no keys", "no name", "optimizer", "groups", "strides"],
)
def test_objects_that_are_none_are_no_reason_to_end(
    saved: Path, change: Callable[[dict[str, Any]], object], caplog: pytest.LogCaptureFixture
) -> None:
    """Under a digest that matches, which does not say who has written it."""
    newest = Path(next(listing.scan(storage_at(saved))).path)
    rewritten(newest, change)
    rank = Rank(saved).train(3)
    if rank.newest().attempt.step == 20:  # it is found out when the objects are read
        assert not rank.load(20)
        assert same(rank, Rank(saved).train(3))  # unchanged
    assert f"the checkpoint {newest}: its manifest is invalid" in caplog.text
    assert rank.load(10)


def test_a_listing_that_fails_while_a_rank_loads_ends_its_generation_alone(
    saved: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(storage: LocalStorage) -> list[str]:
        raise OSError(errno.ESTALE, "Stale file handle", storage.path)

    rank = Rank(saved).train(3)
    newest = rank.newest()
    with monkeypatch.context() as failing:
        failing.setattr(LocalStorage, "names", fail)
        assert not rank.checkpoints.load(newest, rank.state)
    assert "cannot load the checkpoint of step 20: " in caplog.text
    assert same(rank, Rank(saved).train(3))  # unchanged
    assert rank.load(20)


# LISTING-4
@pytest.mark.parametrize("file", ["corrupt", MANIFEST, "shard"])
def test_a_checkpoint_that_a_save_deletes_while_it_is_read_is_not_in_the_way(
    tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`file`: what is read next of the only checkpoint, when the other rank deletes that for the one of step 20."""
    survivor = Rank(tmp_path, keep=1)
    survivor.enter(("a0",))
    survivor.save(10)
    restarted = Rank(tmp_path, "b0", keep=1)
    read, sizes = LocalFolder.read, LocalFolder.sizes

    def read_late(folder: LocalFolder, name: str, limit: int) -> bytes:
        if name == file and folder.path in first:
            first.clear()
            survivor.save(20)
        return read(folder, name, limit)

    def sizes_late(folder: LocalFolder, names: Iterable[str]) -> dict[str, int]:
        if file == "shard" and folder.path in first:
            first.clear()
            survivor.save(20)
        return sizes(folder, names)

    first = [found.path for found in listing.scan(storage_at(tmp_path))]
    monkeypatch.setattr(LocalFolder, "read", read_late)
    monkeypatch.setattr(LocalFolder, "sizes", sizes_late)
    assert restarted.newest().attempt == Attempt(20, 1)
    assert not first


# LISTING-4
def test_checkpoints_that_are_deleted_as_fast_as_they_are_read_are_unreadable(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = listing.names(storage_at(saved))
    monkeypatch.setattr(listing, "names", lambda _: names)
    for name in names[0]:
        (saved / name / MANIFEST).unlink()
    with pytest.raises(CheckpointError, match="they are deleted as fast as they are read"):
        Rank(saved).newest()


# SAVER-3
def test_a_job_does_not_start_anew_beside_checkpoints_that_cannot_be_used(saved: Path) -> None:
    empty = Rank(saved / "other")
    assert empty.checkpoints.newest(empty.state) is None
    for found in list(listing.scan(storage_at(saved))):
        corrupt(Path(found.path) / MANIFEST)
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used: step-0.* Remove them to start anew"):
        Rank(saved).newest()


# SAVER-5
def test_a_rank_with_the_state_goes_on_where_no_checkpoint_can_be_used(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for found in list(listing.scan(storage_at(saved))):
        corrupt(Path(found.path) / MANIFEST)
    rank = Rank(saved).train(10)
    assert rank.checkpoints.newest(rank.state) is None
    assert "no checkpoint in" in caplog.text


# SAVER-8
def test_a_rank_that_restarts_goes_on_where_no_checkpoint_can_be_read(
    saved: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a disk has errors: the list is there, and no file."""
    found = list(listing.scan(storage_at(saved)))
    for each in found:
        (Path(each.path) / "corrupt").mkdir()  # which cannot be read as a file
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used: .*: Is a directory$"):
        Rank(saved).newest()
    caplog.clear()
    rank = Rank(saved, has_trained=True)
    monkeypatch.setattr(saver, "LIST_S", 0.1)
    monkeypatch.setattr(saver, "LIST_AGAIN_S", 0.01)
    assert rank.checkpoints.newest(rank.state) is None
    assert caplog.text.count("trying the one before") == len(found)
    for each in found:
        (Path(each.path) / "corrupt").rmdir()
    assert rank.newest() == Rank(saved).newest()


def test_a_checkpoint_that_becomes_unreadable_again_is_told_of_again(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank(saved)
    corrupt_file = Path(next(iter(listing.scan(storage_at(saved)))).path) / "corrupt"
    for _ in range(2):
        corrupt_file.mkdir()  # which cannot be read as a file
        assert [rank.newest().attempt.step for _ in range(2)] == [10, 10]
        corrupt_file.rmdir()
        assert rank.newest().attempt.step == 20
    assert caplog.text.count("trying the one before") == 2


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


class Growing(Model):
    """Makes its buffers anew for a longer sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(1), persistent=False)
        self.register_buffer("mask", None)

    def grow(self, length: int) -> None:
        self.register_buffer("table", torch.arange(length))
        self.register_buffer("mask", torch.full((length,), 2.0))


# LOADER-7
def test_buffers_that_forward_has_replaced_are_loaded(tmp_path: Path) -> None:
    model = Growing()
    rank = Rank(tmp_path, model=model)
    rank.enter(("a0",))
    model.grow(4)
    rank.save(10)
    restarted = Rank(tmp_path, model=Growing())
    assert restarted.load(10)
    assert restarted.model.get_buffer("table").tolist() == [0, 1, 2, 3]
    assert restarted.model.get_buffer("mask").tolist() == [2.0] * 4
    with pytest.raises(CheckpointError, match=r"model\.mask is in it, and this job's model has none of that name"):
        Rank(tmp_path).load(10)


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


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"every_steps": None}, "give one of `every_steps` and `every_seconds`"),
        ({"every_seconds": 3.0}, "give one of `every_steps` and `every_seconds`"),
        ({"every_steps": 0}, "`every_steps` must be an integer of at least 1, but is 0"),
        ({"every_steps": 2.5}, "`every_steps` must be an integer of at least 1, but is 2.5"),
        ({"keep": 0}, "`keep` must be an integer of at least 1, but is 0"),
        ({"keep": True}, "`keep` must be an integer of at least 1, but is True"),
        ({"every_steps": None, "every_seconds": math.nan}, "`every_seconds` must be finite and greater than 0"),
        ({"every_steps": None, "every_seconds": 0}, "`every_seconds` must be finite and greater than 0"),
        ({"directory": ""}, "`directory` must be given"),
        ({"directory": None}, "`directory` must be given"),
    ],
)
def test_arguments_that_say_nothing_are_refused(changes: dict[str, Any], told: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        eg.join().checkpoints(**{"directory": tmp_path, "every_steps": 5, **changes})
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OperationalError, match="cannot make the checkpoint directory"):
        Rank(tmp_path / "file" / "checkpoints")


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """By another user than the one who made it."""
    code = (
        "import os, pathlib, sys, time\n"
        "from elasticgang.checkpoint.saver import DurableCheckpoints\n"
        "from elasticgang.checkpoint.schedule import Schedule\n"
        "from elasticgang.state import SnapshotServer\n"
        "server = SnapshotServer()\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "DurableCheckpoints(pathlib.Path(sys.argv[1]), Schedule(1, clock=time.monotonic), 2, server)"
    )
    (script := tmp_path / "script.py").write_text(code)
    with TemporaryDirectory() as name:
        os.chmod(name, 0o555)
        done = run_preloaded([sys.executable, str(script), name])
    assert f"OperationalError: cannot write to the checkpoint directory {name}" in done.stderr
