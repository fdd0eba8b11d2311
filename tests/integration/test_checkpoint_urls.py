"""Checkpoints at URLs of fsspec: `file://`, which processes share, and `memory://`, which has no directories."""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import elasticgang as eg
from elasticgang import testing
from elasticgang.checkpoint import listing, saver
from elasticgang.checkpoint.export import export
from elasticgang.checkpoint.locations import storage_at
from elasticgang.checkpoint.manifest import MANIFEST
from elasticgang.checkpoint.object_store import ObjectFolder, ObjectStorage
from elasticgang.errors import CheckpointError, NotSupportedError, OperationalError
from elasticgang.launch.cli import main
from tests.integration import checkpoint_writer
from tests.integration.checkpoint_writer import directory
from tests.integration.saving import Rank, same
from tests.support import DEADLINE_S, REPOSITORY, run_preloaded

SHARDS = ["shard-0-0-0-00000.safetensors", "shard-0-0-0-00001.safetensors"]


@pytest.fixture
def in_memory() -> Iterator[str]:
    """A URL of an object store in this process."""
    from fsspec.implementations.memory import MemoryFileSystem

    MemoryFileSystem.store.clear()
    yield "memory://run"
    MemoryFileSystem.store.clear()


def url_of(path: Path) -> str:
    return f"file://{path}"


def folder(url: str, step: int) -> ObjectFolder:
    return ObjectStorage(url).folder(directory(step))


def run_writer(url: str, last: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.integration.checkpoint_writer", url, str(last), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=REPOSITORY,
    )


def usable(url: str) -> list[int]:
    """The steps of the complete checkpoints, newest first. Each has the right digests, and the data of its step."""
    steps = []
    for found in listing.scan(storage_at(url)):
        assert found.manifest is not None, found.problem
        listing.verify(found.folder, found.manifest)
        for entry in found.manifest.files:
            data = memoryview(bytearray(entry.size - entry.header_size))
            found.folder.read_into(entry.name, entry.header_size, data)
            assert set(data) == {found.attempt.step}
        steps.append(found.attempt.step)
    return steps


def kill_before_each_call(url_named: Callable[[str], str]) -> None:
    """The previous checkpoint is there or the new one, and the next save deletes what the killed writer has left."""
    assert checkpoint_writer.save(url_named("whole"), 10) == ""
    done = run_writer(url_named("whole"), 0)
    assert done.returncode == 0, done.stderr
    num_calls = int(done.stdout)
    assert num_calls > 12
    assert usable(url_named("whole")) == [20]
    newest = []
    for last in range(1, num_calls + 1):
        url = url_named(str(last))
        assert checkpoint_writer.save(url, 10) == ""
        assert run_writer(url, last).returncode == -signal.SIGKILL
        steps = usable(url)
        assert steps in ([10], [20, 10], [20])
        newest.append(steps[0])
        assert checkpoint_writer.save(url, 30) == ""
        storage = ObjectStorage(url)
        assert storage.names() == [directory(30)]
        assert sorted(storage.folder(directory(30)).list()) == [MANIFEST, *SHARDS]
    assert newest == sorted(newest)
    assert set(newest) == {10, 20}


# LISTING-1
def test_a_writer_killed_before_any_call_leaves_the_previous_checkpoint_or_the_new_one(tmp_path: Path) -> None:
    def url_named(name: str) -> str:
        ObjectStorage(url := url_of(tmp_path / name)).prepare()
        return url

    kill_before_each_call(url_named)


# OBJECTS-1
def test_a_writer_killed_within_a_file_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    """The kernel kills it at a limit on the size of files. The manifest is the largest file."""
    url = url_of(tmp_path)
    checkpoint_writer.save(url, 20)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / directory(20)).iterdir()}
    assert max(sizes, key=lambda name: sizes[name]) == MANIFEST
    for size in sorted(sizes.values()):
        shutil.rmtree(tmp_path / directory(20))
        assert checkpoint_writer.save(url, 10) == ""
        assert run_writer(url, 0, str(size - 1)).returncode == -signal.SIGXFSZ
        assert usable(url) == [10]
    assert MANIFEST not in os.listdir(tmp_path / directory(20))
    assert f".{MANIFEST}.tmp" in os.listdir(tmp_path / directory(20))


def test_a_store_without_directories_has_the_same_files(in_memory: str) -> None:
    checkpoint_writer.save(in_memory, 10)
    checkpoint_writer.save(in_memory, 20)
    assert usable(in_memory) == [20]
    assert ObjectStorage(in_memory).names() == [directory(20)]
    assert sorted(folder(in_memory, 20).list()) == [MANIFEST, *SHARDS]


def test_ranges_are_read_where_the_second_argument_is_a_version(
    in_memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of s3fs."""
    from fsspec.implementations.memory import MemoryFileSystem

    checkpoint_writer.save(in_memory, 10)
    cat_file = MemoryFileSystem.cat_file

    def with_version(
        fs: MemoryFileSystem, path: str, version_id: object = None, start: int | None = None, end: int | None = None
    ) -> bytes:
        assert version_id is None
        data: bytes = cat_file(fs, path, start=start, end=end)
        return data

    monkeypatch.setattr(MemoryFileSystem, "cat_file", with_version)
    assert usable(in_memory) == [10]


# WRITER-3
def test_a_save_that_a_later_one_has_deleted_leaves_no_manifest(in_memory: str) -> None:
    """The committing writer of step 10 is about to write its manifest, and step 20 becomes complete."""
    missing = [True]

    def overtake() -> None:
        if missing and SHARDS[0] in (listed := set(_files(in_memory, 10))) and "part-0-0-0-00000.json" in listed:
            missing.clear()
            assert checkpoint_writer.save(in_memory, 20) == ""
            assert not _files(in_memory, 10)

    with testing.fail_at("checkpoint_io", overtake):
        problem = checkpoint_writer.save(in_memory, 10)
    assert not missing
    assert problem == f"{in_memory}/{directory(10)} was deleted beside a later checkpoint"
    assert usable(in_memory) == [20]
    assert ObjectStorage(in_memory).names() == [directory(20)]


def _files(url: str, step: int) -> list[str]:
    try:
        return sorted(folder(url, step).list())
    except FileNotFoundError:
        return []


# OBJECTS-2
def test_what_a_writer_adds_to_a_checkpoint_that_is_deleted_goes_too(in_memory: str) -> None:
    checkpoint_writer.save(in_memory, 10)
    removed = folder(in_memory, 10)
    late = [MANIFEST]

    def write() -> None:
        if late and not set(SHARDS) <= set(_files(in_memory, 10)):
            removed.put(late.pop(), b"late")

    with testing.fail_at("checkpoint_io", write):
        removed.remove()
    assert not late
    assert _files(in_memory, 10) == []


# OBJECTS-2
def test_a_deletion_begins_with_the_manifest_and_ends_though_files_are_added(in_memory: str) -> None:
    checkpoint_writer.save(in_memory, 10)
    removed = folder(in_memory, 10)
    seen: list[bool] = []
    is_busy = [False]

    def write() -> None:
        if not is_busy[0]:
            is_busy[0] = True
            seen.append(MANIFEST in _files(in_memory, 10))
            removed.put(f"more-{len(seen)}", b"late")
            is_busy[0] = False

    with (
        testing.fail_at("checkpoint_io", write),
        pytest.raises(OSError, match="files are written to it while it is deleted"),
    ):
        removed.remove()
    assert seen[0]
    assert not any(seen[1:])


def test_a_save_of_a_later_step_is_not_deleted(in_memory: str) -> None:
    """Another rank has begun it."""
    folder(in_memory, 30).put("part-0-0-0-00000.json", b"{}")
    checkpoint_writer.save(in_memory, 20)
    assert usable(in_memory) == [20]
    assert _files(in_memory, 30) == ["part-0-0-0-00000.json"]


# OBJECTS-3
def test_a_store_that_cannot_be_listed_is_an_error_with_the_url_and_the_reason() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        host = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(OperationalError) as caught:
            Rank(f"webhdfs://user:secret@{host}/run")
        listed = subprocess.run(
            [sys.executable, "-m", "elasticgang", "checkpoints", f"webhdfs://{host}/run"],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
    assert str(caught.value).startswith(f"cannot list the checkpoints of webhdfs://{host}/run: ConnectionError: ")
    assert "secret" not in str(caught.value)
    assert listed.returncode == 1
    assert f"elasticgang: error: cannot read the checkpoints of webhdfs://{host}/run: " in listed.stderr
    assert "Connection refused" in listed.stderr
    assert "Traceback" not in listed.stderr


# OBJECTS-3, SAVER-2
def test_a_save_that_the_store_refuses_costs_that_save_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = url_of(tmp_path / "store")
    rank = Rank(url)
    (tmp_path / "store").rmdir()
    (tmp_path / "store").write_bytes(b"")  # no folder can be made
    rank.train(10).begin().close()
    (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert warning.startswith(f"step 10 is not saved: {url}/step-000000000010-1-")
    (tmp_path / "store").unlink()
    (tmp_path / "store").mkdir()
    rank.save(20)
    assert [found.attempt.step for found in listing.scan(storage_at(url))] == [20]


# SAVER-5
def test_a_rank_with_the_state_goes_on_where_the_store_cannot_be_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "store").mkdir()
    rank = Rank(url_of(tmp_path / "store"))
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    (tmp_path / "store").symlink_to("store")
    with pytest.raises(CheckpointError, match="cannot read the checkpoints of file://"):
        rank.checkpoints.newest(rank.state)
    rank.train(10)
    assert rank.checkpoints.newest(rank.state) is None
    assert "cannot read the checkpoints of file://" in caplog.text


# SAVER-8
def test_a_rank_that_restarts_goes_on_where_the_store_cannot_be_listed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store").symlink_to("store")
    with pytest.raises(OperationalError, match="cannot list the checkpoints of file://"):
        Rank(url_of(tmp_path / "store"))
    rank = Rank(url_of(tmp_path / "store"), has_trained=True)
    monkeypatch.setattr(saver, "LIST_S", 0.1)
    assert rank.checkpoints.newest(rank.state) is None
    assert "; this rank takes part all the same" in caplog.text
    (tmp_path / "store").unlink()
    rank.enter(("a0",))
    rank.save(10)
    assert rank.newest().attempt.step == 10


# SAVER-8
def test_a_rank_without_state_lists_a_store_again_that_could_not_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the job ends as one without checkpoints, where nobody is left from whom it could heal."""
    store, away = tmp_path / "store", tmp_path / "away"
    first = Rank(url_of(store))
    first.enter(("a0",))
    first.save(10)
    store.rename(away)
    store.symlink_to("store")
    rank = Rank(url_of(store), has_trained=True)
    monkeypatch.setattr(saver, "LIST_AGAIN_S", 0.01)
    failed = threading.Event()

    def come_back() -> None:
        assert failed.wait(DEADLINE_S)
        store.unlink()
        away.rename(store)

    def failing(storage: object) -> Iterator[listing.Found]:
        try:
            yield from scan(storage)  # type: ignore[arg-type]
        except CheckpointError:
            failed.set()
            raise

    scan = listing.scan
    monkeypatch.setattr(listing, "scan", failing)
    thread = threading.Thread(target=come_back)
    thread.start()
    assert rank.newest().attempt.step == 10
    thread.join()


# OBJECTS-4
def test_a_link_is_no_file_of_a_checkpoint(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    checkpoint_writer.save(url, 10)
    path = tmp_path / directory(10) / SHARDS[1]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    (found,) = listing.scan(storage_at(url))
    assert found.problem == f"{url}/{directory(10)}/{SHARDS[1]}: it is not a plain file"


# OBJECTS-4
def test_names_that_a_store_lists_do_not_lead_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.local import LocalFileSystem

    url = url_of(tmp_path / "store")
    checkpoint_writer.save(_made(url), 10)
    outside = tmp_path / "outside"
    outside.write_bytes(b"kept")
    listed = LocalFileSystem.ls
    monkeypatch.setattr(
        LocalFileSystem,
        "ls",
        lambda *arguments, **options: [
            *listed(*arguments, **options),
            {"name": f"{tmp_path}/store/{directory(10)}/../../outside", "type": "file", "size": 4},
        ],
    )
    with pytest.raises(OSError, match="files are written to it"):
        folder(url, 10).remove()  # the store lists a file that is not below the folder
    assert outside.read_bytes() == b"kept"


def _made(url: str) -> str:
    ObjectStorage(url).prepare()
    return url


@pytest.mark.parametrize("missing", ["shard-0-0-0-00001.safetensors", "a byte"])
def test_a_damaged_checkpoint_is_not_used(tmp_path: Path, missing: str) -> None:
    url = url_of(tmp_path)
    checkpoint_writer.save(url, 10)
    path = tmp_path / directory(10) / SHARDS[1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    if missing == SHARDS[1]:
        path.unlink()
        (found,) = listing.scan(storage_at(url))
        assert found.problem == f"{url}/{directory(10)}/{missing}: {os.strerror(errno.ENOENT)}"
    else:
        with pytest.raises(CheckpointError, match=r"model\.w in shard-0-0-0-00001\.safetensors is corrupt"):
            export(url, tmp_path / "weights.pt")
    assert not (tmp_path / "weights.pt").exists()


def test_a_rank_saves_and_loads(tmp_path: Path) -> None:
    url = url_of(tmp_path / "new" / "store")
    Rank(url).save(10)
    rank = Rank(url).train(3)
    assert rank.load(10)
    assert same(rank, Rank(tmp_path / "other").train(10))


def test_the_commands_take_a_url(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    checkpoint_writer.save(url, 10)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "elasticgang", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)

    listed = run("checkpoints", url, "--verify")
    assert listed.returncode == 0, listed.stderr
    (line,) = listed.stdout.splitlines()
    assert line.startswith(f"{directory(10)}  step 10  ")
    assert line.endswith("every digest matches")
    output = tmp_path / "weights.pt"

    def check(done: subprocess.CompletedProcess[str]) -> None:
        assert done.returncode == 0, done.stderr
        assert done.stdout == f"2 tensors of {url}/{directory(10)} are in {output}\n"
        weights = torch.load(output, weights_only=True)
        assert torch.equal(weights["w"], torch.full((6, 2), 10, dtype=torch.uint8))
        output.unlink()

    check(run("export", url, str(output)))
    started_by_it = [sys.executable, "-m", "elasticgang.checkpoint.export"]
    check(run_preloaded([*started_by_it, f"{url}/{directory(10)}", str(output)]))


def test_a_url_that_fsspec_cannot_open_is_an_error_that_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotSupportedError, match=r"fsspec cannot open nothing://run: Protocol not known: nothing"):
        storage_at("nothing://run")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    message = "checkpoints at s3://bucket/run need fsspec: pip install 'elasticgang[fsspec]'"
    with pytest.raises(NotSupportedError, match=re.escape(message)):
        storage_at("s3://bucket/run")


def test_fsspec_is_imported_for_urls_alone(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from elasticgang.checkpoint import writer\n"
        "from elasticgang.checkpoint.locations import storage_at\n"
        "storage_at(sys.argv[1])\n"
        "assert 'fsspec' not in sys.modules\n"
        "storage_at('file://' + sys.argv[1])\n"
        "assert 'fsspec' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, timeout=DEADLINE_S)


@pytest.mark.parametrize("url", ["memory://run", "simplecache::memory://run"])
def test_a_job_does_not_save_to_the_memory_of_a_process(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--checkpoint-dir", url, __file__]) == 2
    said = capsys.readouterr()
    assert f"--checkpoint-dir: {url} is the memory of the process that writes to it" in said.err
    assert said.out == ""
    with pytest.raises(NotSupportedError, match="is the memory of the process that writes to it"):
        eg.join().checkpoints(url, every_steps=1)
