"""The files of a checkpoint: kills at every system call, corruption of any byte, disks that fill."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pty
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from elasticgang import progress
from elasticgang.checkpoint import listing, writer
from elasticgang.checkpoint.export import export
from elasticgang.checkpoint.files import LocalFolder
from elasticgang.checkpoint.listing import Found
from elasticgang.checkpoint.locations import storage_at
from elasticgang.checkpoint.manifest import MANIFEST
from elasticgang.checkpoint.plan import directory_name
from elasticgang.errors import CheckpointError
from elasticgang.protocol.commit import Attempt
from scripts.demo_job.processes import ELASTICGANG
from tests.exhaustive import exhaustive
from tests.integration import checkpoint_writer
from tests.preloaded import PreloadedProcess
from tests.support import DEADLINE_S, REPOSITORY, environment, run_preloaded

COMMAND_LINE = [sys.executable, "-m", "elasticgang"]
EXPORT = [sys.executable, "-m", "elasticgang.checkpoint.export"]  # what `elasticgang export` starts
WRITER = [sys.executable, "-m", "tests.integration.checkpoint_writer"]


def run_writer(root: Path, last: int, *, max_file_bytes: int | None = None) -> subprocess.CompletedProcess[str]:
    def limit() -> None:
        if max_file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))

    return subprocess.run(
        [*WRITER, str(root), str(last)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=REPOSITORY,
        preexec_fn=limit,
    )


def usable(root: Path) -> list[Found]:
    """Newest first. What is complete has the right digests."""
    found = list(listing.scan(storage_at(root)))
    for each in found:
        assert each.manifest is not None, each.problem
        listing.verify(each.folder, each.manifest)
    return found


def content(found: Found) -> set[int]:
    """The values in all tensors of a checkpoint."""
    return {value for file in Path(found.path).glob("*.safetensors") for value in _data(file.read_bytes())}


def _data(file: bytes) -> bytes:
    return file[8 + int.from_bytes(file[:8], "little") :]


# FILES-1, FILES-2, SHARD-2, WRITER-2
def test_a_writer_killed_before_any_system_call_leaves_the_previous_checkpoint_or_the_new_one(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    assert checkpoint_writer.save(whole, 10) == ""
    done = run_writer(whole, 0)
    assert done.returncode == 0, done.stderr
    num_calls = int(done.stdout)
    assert num_calls > 25
    assert [found.attempt.step for found in usable(whole)] == [20]  # `keep=1`
    newest = []
    for last in range(1, num_calls + 1):
        root = tmp_path / str(last)
        root.mkdir()
        assert checkpoint_writer.save(root, 10) == ""
        assert run_writer(root, last).returncode == -signal.SIGKILL
        found = usable(root)
        assert {each.attempt.step for each in found} in ({10}, {10, 20}, {20})
        for each in found:
            assert content(each) == {each.attempt.step}
        newest.append(found[0].attempt.step)
        assert checkpoint_writer.save(root, 30) == ""  # what is left of the killed one goes
        assert sorted(os.listdir(root)) == [checkpoint_writer.directory(30)]
        assert sorted(os.listdir(usable(root)[0].path)) == [
            MANIFEST,
            "shard-0-0-0-00000.safetensors",
            "shard-0-0-0-00001.safetensors",
        ]
    assert newest == sorted(newest)
    assert set(newest) == {10, 20}


# MANIFEST-1
def test_a_change_of_any_byte_of_any_file_is_found(tmp_path: Path) -> None:
    assert checkpoint_writer.save(tmp_path, 10) == ""
    assert checkpoint_writer.save(tmp_path, 20) == ""
    (found,) = usable(tmp_path)
    for file in Path(found.path).iterdir():
        data = file.read_bytes()
        for position in range(len(data)):
            changed = bytearray(data)
            changed[position] ^= 1 << position % 8
            file.write_bytes(changed)
            with pytest.raises(CheckpointError):
                listing.verify(found.folder, listing.read_manifest(found.folder))
        for size in (0, len(data) // 2, len(data) - 1):
            file.write_bytes(data[:size])
            with pytest.raises(CheckpointError):
                listing.read_manifest(found.folder)
        file.write_bytes(data + b" ")
        with pytest.raises(CheckpointError):
            listing.read_manifest(found.folder)
        file.unlink()
        if file.name == MANIFEST:
            assert list(listing.scan(storage_at(tmp_path))) == []  # LISTING-1
        else:
            with pytest.raises(CheckpointError, match="No such file"):
                listing.read_manifest(found.folder)
        file.write_bytes(data)
    assert usable(tmp_path) == [found]


# LISTING-2
def test_a_checkpoint_that_is_marked_is_not_used_again(tmp_path: Path) -> None:
    checkpoint_writer.save(tmp_path, 10)
    listing.mark_corrupt(storage_at(tmp_path).folder(checkpoint_writer.directory(10)), "model.w is corrupt")
    (found,) = listing.scan(storage_at(tmp_path))
    assert (found.manifest, found.problem) == (None, "model.w is corrupt")


# SAVEPLAN-3
def test_a_checkpoint_that_is_marked_is_none_of_those_that_are_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        for request, data in checkpoint_writer.requests(tmp_path, step):
            if request["commit"] is not None:
                request["commit"]["keep"] = 2
            assert checkpoint_writer.save_share(request, data) == ""
        if step == 20:
            listing.mark_corrupt(storage_at(tmp_path).folder(checkpoint_writer.directory(20)), "model.w is corrupt")
    assert [(found.attempt.step, found.problem) for found in listing.scan(storage_at(tmp_path))] == [
        (30, ""),
        (20, "model.w is corrupt"),
        (10, ""),
    ]


def test_a_manifest_under_another_name_is_refused(tmp_path: Path) -> None:
    checkpoint_writer.save(tmp_path, 10)
    (tmp_path / checkpoint_writer.directory(10)).rename(tmp_path / checkpoint_writer.directory(20))
    (found,) = listing.scan(storage_at(tmp_path))
    assert found.problem == "its manifest is of step 10, and its name says otherwise"


def test_a_link_is_no_file_of_a_checkpoint(tmp_path: Path) -> None:
    checkpoint_writer.save(tmp_path, 10)
    path = tmp_path / checkpoint_writer.directory(10) / "shard-0-0-0-00001.safetensors"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    (found,) = listing.scan(storage_at(tmp_path))
    assert found.manifest is None


@pytest.mark.parametrize("max_file_bytes", [0, 100, 300])
def test_a_disk_that_fills_costs_the_save_alone(tmp_path: Path, max_file_bytes: int) -> None:
    """A limit on the size of files stands for it: writes end early, then fail."""
    assert checkpoint_writer.save(tmp_path, 10) == ""
    done = run_writer(tmp_path, 0, max_file_bytes=max_file_bytes)
    assert done.returncode == 1
    assert "File too large" in done.stderr
    (found,) = usable(tmp_path)
    assert found.attempt == Attempt(10, 1)
    assert not list(tmp_path.glob("*/.*"))  # no part of a file is left


def test_a_disk_that_fills_within_the_data_of_a_tensor_costs_the_save_alone(tmp_path: Path) -> None:
    """The error still refers to the memory of the share."""
    assert checkpoint_writer.save(tmp_path, 10) == ""
    (found,) = usable(tmp_path)
    assert found.manifest is not None
    done = run_writer(tmp_path, 0, max_file_bytes=min(entry.size for entry in found.manifest.files) - 1)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False), done.stderr
    assert "File too large" in done.stderr
    assert [each.attempt.step for each in usable(tmp_path)] == [10]


@pytest.mark.parametrize("news", [{"cancel": True}, {"lost": ["part-0-0-0-00001.json"]}])
def test_a_share_that_never_comes_is_given_up(tmp_path: Path, news: dict[str, Any]) -> None:
    """WRITER-2: once the rank says so."""
    ((first, first_data), (second, second_data)) = checkpoint_writer.requests(tmp_path, 10)
    del first, first_data
    memory = os.memfd_create("share")
    os.write(memory, second_data)
    problem = writer.save(memory, second, lambda wait_s: news).problem
    os.close(memory)
    assert problem == f"a share of {checkpoint_writer.directory(10)} is missing: part-0-0-0-00001.json"
    assert os.listdir(tmp_path) == []  # WRITER-4


# WRITER-4
@pytest.mark.parametrize("is_alone", [True, False])
def test_a_disk_that_is_full_of_remains_has_room_once_they_are_deleted(
    tmp_path: Path, is_alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The remains may be a save that another rank still writes, unless no rank has one under way."""
    assert checkpoint_writer.save(tmp_path, 10) == ""
    remains = tmp_path / checkpoint_writer.directory(15)
    remains.mkdir()
    write = LocalFolder.write

    def write_if_there_is_room(folder: LocalFolder, file: str, chunks: Iterable[memoryview]) -> None:
        if remains.exists():
            raise OSError(errno.ENOSPC, "No space left on device", file)
        write(folder, file, chunks)

    ((other, other_data), (request, data)) = checkpoint_writer.requests(tmp_path, 20)
    request["commit"]["is_alone"] = is_alone
    assert checkpoint_writer.save_share(other, other_data) == ""
    with monkeypatch.context() as full:
        full.setattr(LocalFolder, "write", write_if_there_is_room)
        problem = checkpoint_writer.save_share(request, data)
    if is_alone:
        assert (problem, [content(each) for each in usable(tmp_path)]) == ("", [{20}])
    else:
        assert problem == "shard-0-0-0-00000.safetensors: No space left on device"
        assert sorted(os.listdir(tmp_path)) == [checkpoint_writer.directory(10), remains.name]


# WRITER-4
def test_a_failed_save_leaves_its_room_to_the_next_one(tmp_path: Path) -> None:
    assert checkpoint_writer.save(tmp_path, 10) == ""
    again = directory_name(Attempt(20, 1), "0123456789abcdef")  # the next generation's, of the same attempt
    for name in (*map(checkpoint_writer.directory, (5, 15, 25)), again):
        (tmp_path / name).mkdir()
    (_, (request, data)) = checkpoint_writer.requests(tmp_path, 20)
    request["lost"] = ["part-0-0-0-00001.json"]
    assert "is missing" in checkpoint_writer.save_share(request, data)
    left = [checkpoint_writer.directory(step) for step in (10, 25)]
    assert sorted(os.listdir(tmp_path)) == sorted([again, *left])


def test_two_removals_of_one_checkpoint_do_not_disturb_each_other(tmp_path: Path) -> None:
    checkpoint_writer.save(tmp_path, 10)
    storage_at(tmp_path).folder(checkpoint_writer.directory(10)).remove()
    with pytest.raises(FileNotFoundError):
        storage_at(tmp_path).folder(checkpoint_writer.directory(10)).remove()
    assert os.listdir(tmp_path) == []


# SHARD-1
def test_others_read_the_files(tmp_path: Path) -> None:
    """The library safetensors, and torch.distributed.checkpoint's reader, which joins the shares."""
    from safetensors.torch import load_file

    checkpoint_writer.save(tmp_path, 10)
    (found,) = usable(tmp_path)
    share = load_file(Path(found.path) / "shard-0-0-0-00001.safetensors")
    assert torch.equal(share["model.w"], torch.full((3, 2), 10, dtype=torch.uint8))
    state = {"model": {"w": torch.zeros(6, 2, dtype=torch.uint8), "step": torch.zeros((), dtype=torch.uint8)}}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        load(state, storage_reader=HuggingFaceStorageReader(found.path), no_dist=True)
    assert torch.equal(state["model"]["w"], torch.full((6, 2), 10, dtype=torch.uint8))
    assert state["model"]["step"] == 10


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_the_weights_are_exported(tmp_path: Path, suffix: str) -> None:
    from safetensors.torch import load_file

    checkpoint_writer.save(tmp_path, 10)
    output = tmp_path / f"weights{suffix}"
    assert export(tmp_path, output) == (str(tmp_path / checkpoint_writer.directory(10)), 2)
    weights = load_file(output) if suffix == ".safetensors" else torch.load(output, weights_only=True)
    assert torch.equal(weights["w"], torch.full((6, 2), 10, dtype=torch.uint8))
    assert weights["step"] == 10
    assert sorted(weights) == ["step", "w"]
    with pytest.raises(CheckpointError, match="name one of the modules of the checkpoint by `--module`: model"):
        export(tmp_path, output, "other")


def on_terminal(command: list[str], *, preloaded: bool) -> str:
    """What a command writes to its standard error, which is a terminal."""
    ours, theirs = pty.openpty()
    start = PreloadedProcess if preloaded else subprocess.Popen
    null = subprocess.DEVNULL
    try:
        with start(command, stdin=null, stdout=null, stderr=theirs, env=environment()) as process:
            assert process.wait(DEADLINE_S) == 0
    finally:
        os.close(theirs)
    drawn = b""
    with open(ours, "rb") as file, contextlib.suppress(OSError):  # EIO: the other end is closed, and all is read
        while part := file.read1():
            drawn += part
    return drawn.decode()


def test_a_terminal_shows_the_progress_of_an_export_and_of_a_verification(tmp_path: Path) -> None:
    checkpoint_writer.save(tmp_path, 10)
    name = checkpoint_writer.directory(10)
    for command, what in (
        ([*COMMAND_LINE, "checkpoints", str(tmp_path), "--verify"], name),
        ([*COMMAND_LINE, "export", str(tmp_path), str(tmp_path / "weights.pt")], "weights.pt"),
        ([*EXPORT, str(tmp_path), str(tmp_path / "weights.safetensors")], "weights.safetensors"),
    ):
        drawn = on_terminal(command, preloaded="elasticgang.checkpoint.export" in command).split("\r\x1b[K")
        assert drawn[1].startswith(f"{what}: [..............................] 0 % of ")
        assert (drawn[0], drawn[-1]) == ("", ""), "it is erased"


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_an_export_tells_how_many_bytes_it_has_read(
    tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    checkpoint_writer.save(tmp_path, 10)
    file = io.StringIO()
    export(tmp_path, tmp_path / f"weights{suffix}", progress_on=file)
    assert file.getvalue().splitlines()[-1] == f"weights{suffix}: 100 % of 13 bytes"


def test_a_verification_tells_how_many_bytes_it_has_read(tmp_path: Path) -> None:
    checkpoint_writer.save(tmp_path, 10)
    (found,) = listing.scan(storage_at(tmp_path))
    assert found.manifest is not None
    parts: list[int] = []
    listing.verify(found.folder, found.manifest, parts.append)
    assert sum(parts) == found.manifest.num_bytes


def test_a_corrupt_checkpoint_is_not_exported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint_writer.save(tmp_path, 10)
    file = tmp_path / checkpoint_writer.directory(10) / "shard-0-0-0-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    for name in ("weights.safetensors", "weights.pt"):
        with pytest.raises(CheckpointError, match=r"model\.w in shard-0-0-0-00001\.safetensors is corrupt"):
            export(tmp_path, tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == [checkpoint_writer.directory(10)]
    checkpoint_writer.save(tmp_path, 5)
    for name in ("weights.safetensors", "weights.pt"):
        assert export(tmp_path, tmp_path / name) == (str(tmp_path / checkpoint_writer.directory(5)), 2)
        assert "is corrupt: the digest does not match; trying the one before" in caplog.text
        caplog.clear()
        with pytest.raises(CheckpointError, match="name one of the modules"):  # which says nothing of the files
            export(tmp_path, tmp_path / name, "other")
    with pytest.raises(CheckpointError, match="is corrupt"):  # named, it is the only one
        export(tmp_path / checkpoint_writer.directory(10), tmp_path / "weights.pt")


# OWN-PATH
@pytest.mark.parametrize("suffix", [pytest.param(".safetensors", marks=exhaustive), ".pt"])
def test_an_output_that_cannot_be_written_is_an_error_that_says_why(
    tmp_path: Path, suffix: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A limit on the size of files stands for a full disk. What was there stays. A file of the working directory is not
    taken for a module of Python."""
    (cwd := tmp_path_factory.mktemp("cwd")).joinpath("queue.py").write_text("raise RuntimeError")
    checkpoint_writer.save(tmp_path, 10)
    missing, file = str(tmp_path / "missing" / f"weights{suffix}"), tmp_path / f"weights{suffix}"
    file.write_text("before")
    on_a_full_disk = f"trap '' XFSZ; ulimit -f 0; exec {ELASTICGANG} export {tmp_path} {file}"
    for done, told in (
        (run_preloaded([*EXPORT, str(tmp_path), missing]), "No such file"),
        (subprocess.run(["sh", "-c", on_a_full_disk], cwd=cwd, capture_output=True, text=True), "File too large"),
    ):
        assert done.returncode == 1
        assert done.stderr.startswith("elasticgang: error: ")
        assert told in done.stderr
        assert file.name in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert file.read_text() == "before"
    assert sorted(os.listdir(tmp_path)) == [checkpoint_writer.directory(10), file.name]


# LISTING-3
def test_no_more_of_a_manifest_is_read_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_writer.save(tmp_path, 10)
    folder = storage_at(tmp_path).folder(checkpoint_writer.directory(10))
    size = (Path(folder.path) / MANIFEST).stat().st_size
    monkeypatch.setattr(listing, "MAX_MANIFEST_BYTES", size)
    listing.read_manifest(folder)
    monkeypatch.setattr(listing, "MAX_MANIFEST_BYTES", size - 1)
    with pytest.raises(CheckpointError, match=f"its manifest is over the limit of {size - 1} bytes"):
        listing.read_manifest(folder)
