"""The process beside a rank that writes its share of checkpoints. No torch.

The rank sends one line of JSON for each save, and has put the bytes into shared memory before. The writer answers each
with one line, the `Outcome`.

WRITER-1  The writer ends with its rank: a share that is not written then is never written.
WRITER-2  The committing writer waits up to `PARTS_TIMEOUT_S` for the others' shares, and gives up once the rank says
    that the writer of a missing one is lost, or that the save is. Nothing that was complete is touched before the new
    checkpoint is.
WRITER-3  The committing writer of a later save may delete a save that is still under way. A committing writer that
    finds files of its own checkpoint missing deletes the rest, so that no manifest is left without them.
WRITER-4  The committing writer of a save that fails deletes what there is of it. If no rank had another save under way
    when this one began, it also deletes the incomplete saves of earlier attempts: before that already if the disk is
    full, and then it writes its share once more.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elasticgang.checkpoint import listing, plan
from elasticgang.checkpoint.locations import storage_at
from elasticgang.checkpoint.manifest import Manifest
from elasticgang.checkpoint.shard import Shard, part_name, read_parts, write_manifest, write_shard
from elasticgang.checkpoint.storage import Folder, Storage
from elasticgang.errors import CheckpointError, NotSupportedError, OperationalError
from elasticgang.process.parent_death import signal_at_parent_death
from elasticgang.process.stop_signals import ignore_stop_signals
from elasticgang.progress import no_progress
from elasticgang.protocol.commit import Attempt

PARTS_TIMEOUT_S = 600.0
_REPORT_S = 0.25
_POLL_S = 0.05
_NICE = 10
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Outcome:
    """`problem`: why the save failed, or "". `digest` and `num_bytes`: of the manifest and of all files, if this writer
    has made the checkpoint complete."""

    problem: str = ""
    digest: str = ""
    num_bytes: int = 0


def save(
    memory: int,
    request: dict[str, Any],
    news: Callable[[float], dict[str, Any]] = lambda _: {},
    wrote: Callable[[int], None] = no_progress,
) -> Outcome:
    """Write the share of one save and, if this writer commits it, the manifest. `news`: waits for so many seconds for
    what the rank says of the save meanwhile. `wrote`: see `write_shard`."""
    try:
        storage = storage_at(request["root"])
    except (NotSupportedError, OperationalError) as exc:
        return Outcome(str(exc))
    outcome = _save(storage, memory, request, news, wrote)
    if outcome.problem and request["commit"] is not None:
        _remove_incomplete(storage, request, has_failed=True)  # WRITER-4
    return outcome


def _save(
    storage: Storage,
    memory: int,
    request: dict[str, Any],
    news: Callable[[float], dict[str, Any]],
    wrote: Callable[[int], None],
) -> Outcome:
    shard, folder = Shard.from_json(request["shard"]), storage.folder(request["directory"])
    try:
        data = memoryview(b"")
        if shard.num_bytes:  # not closed here: the traceback of an error still refers to parts of it
            data = memoryview(mmap.mmap(memory, shard.num_bytes, prot=mmap.PROT_READ))
        try:
            folder.make()
            write_shard(folder, shard, data, wrote)
        except OSError as exc:
            is_full = exc.errno in _FULL and request["commit"] is not None
            if not (is_full and _remove_incomplete(storage, request, has_failed=False)):  # WRITER-4
                raise
            folder.make()
            write_shard(folder, shard, data)
        return Outcome() if request["commit"] is None else _commit(storage, folder, request, news)
    except OSError as exc:
        return Outcome(f"{exc.filename or request['directory']}: {exc.strerror or exc}")
    except (NotSupportedError, OperationalError) as exc:
        return Outcome(str(exc))
    except (CheckpointError, KeyError, TypeError, ValueError) as exc:
        return Outcome(f"the shares of {folder.path} do not fit together: {exc}")


def _commit(
    storage: Storage, folder: Folder, request: dict[str, Any], news: Callable[[float], dict[str, Any]]
) -> Outcome:
    commit, lost, within_s = request["commit"], set(request["lost"]), request.get("within_s")
    deadline = time.monotonic() + (PARTS_TIMEOUT_S if within_s is None else within_s)
    said: dict[str, Any] = {}
    while True:
        parts, missing = read_parts(folder, commit["places"])
        if not missing:
            break
        if missing & lost or "cancel" in said or time.monotonic() > deadline:  # WRITER-2
            return Outcome(f"a share of {folder.name} is missing: {min(missing)}")
        said = news(max(_POLL_S, storage.poll_s))
        lost.update(said.get("lost", ()))
        if "within_s" in said:  # SAVER-6
            deadline = min(deadline, time.monotonic() + said["within_s"])
    attempt = Attempt(*commit["attempt"])
    manifest = write_manifest(folder, attempt, commit["job"], commit["record"], commit["layout"], parts)
    try:
        if not _has_files(folder, manifest):
            folder.remove()  # WRITER-3
            return Outcome(f"{folder.path} was deleted beside a later checkpoint")
        for part in parts:
            folder.unlink(part_name(part["place"], part["number"]))
        _remove_obsolete(storage, folder.name, commit["keep"])
    except OSError as exc:  # the checkpoint is complete
        _warn(f"could not remove what {folder.path} has made obsolete", exc)
    return Outcome("", manifest.digest, manifest.num_bytes)


def _has_files(folder: Folder, manifest: Manifest) -> bool:
    """Raises OSError: that cannot be found out."""
    try:
        folder.sizes(file.name for file in manifest.files)
    except FileNotFoundError:
        return False
    return True


def _remove_obsolete(storage: Storage, saved: str, keep: int) -> None:
    complete, incomplete = listing.names(storage)
    corrupt = {name for name in complete if listing.is_marked(storage.folder(name))}
    _remove(storage, plan.obsolete(saved, complete, incomplete, keep, corrupt))


def _remove_incomplete(storage: Storage, request: dict[str, Any], *, has_failed: bool) -> bool:
    """WRITER-4. Returns whether anything is deleted. `has_failed`: also the save of this request."""
    own, commit = request["directory"], request["commit"]
    try:
        _, incomplete = listing.names(storage)
    except OSError:  # the rank says why the save has failed
        return False
    found = plan.remains(own, incomplete) if commit["is_alone"] else []
    return _remove(storage, [*found, *([own] if has_failed and own in incomplete else [])])


def _remove(storage: Storage, names: Sequence[str]) -> bool:
    """Returns whether any is deleted."""
    left: list[tuple[Folder, OSError]] = []
    for name in names:
        folder = storage.folder(name)
        try:
            folder.remove()
        except OSError as exc:
            left.append((folder, exc))
    if left:
        (newest, why), num_more = left[-1], len(left) - 1
        _warn(f"could not remove {newest.path}" + (f" and {num_more} more" if num_more else ""), why)
    return len(left) < len(names)


def _warn(what: str, exc: OSError) -> None:
    print(f"elasticgang: {what}: {exc.strerror}", file=sys.stderr)


class _Requests:
    """The lines of stdin. `None` after the last: stdin may stay open, in a child that the rank has forked."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._buffer, self._has_ended = descriptor, b"", False

    def next(self) -> dict[str, Any] | None:
        if self._has_ended:
            return None
        while b"\n" not in self._buffer:
            data = os.read(self._descriptor, 1 << 20)
            if not data:
                return None
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        request: dict[str, Any] = json.loads(line)
        self._has_ended = "end" in request
        return None if self._has_ended else request

    def news(self, wait_s: float) -> dict[str, Any]:
        """What the rank says next, if it does within `wait_s`. The end of the rank is a cancellation."""
        if b"\n" not in self._buffer and not select.select([self._descriptor], [], [], wait_s)[0]:
            return {}
        said = self.next()
        return {"cancel": True} if said is None else said


class _Report:
    """Tells the rank how many bytes of its share are written, for the first piece and then now and then."""

    def __init__(self) -> None:
        self._written, self._next_s = 0, 0.0

    def wrote(self, num_bytes: int) -> None:
        self._written += num_bytes
        if (now_s := time.monotonic()) >= self._next_s:
            self._next_s = now_s + _REPORT_S
            _answer({"written": self._written})


def _answer(answer: dict[str, Any]) -> None:
    os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")


def main(argv: list[str]) -> int:
    memory, parent = int(argv[1]), int(argv[2])
    signal_at_parent_death(signal.SIGKILL)  # WRITER-1
    if os.getppid() != parent:
        return 1
    ignore_stop_signals()  # the rank ends this process
    os.nice(_NICE)
    requests = _Requests(sys.stdin.fileno())
    while (request := requests.next()) is not None:
        if "shard" in request:  # the rest is about a save that has ended
            report = _Report()
            outcome = save(memory, request, requests.news, report.wrote)
            _answer(asdict(outcome))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
