"""A rank's part in saving and loading durable checkpoints.

SAVER-1  A save holds the step only until the rank's share is copied, beside forward and backward: an apply waits for
    the copy (SNAPSHOT-2). A process beside the rank writes it.
SAVER-2  A save that fails costs that save: training goes on, with a warning.
SAVER-3  A job never starts anew beside checkpoints of which none can be used.
"""

from __future__ import annotations

import contextlib
import json
import logging
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Protocol

from elasticgang.checkpoint import listing
from elasticgang.checkpoint.capture import Captured, capture
from elasticgang.checkpoint.digest import new_digest
from elasticgang.checkpoint.loader import ModelMismatch, read_state
from elasticgang.checkpoint.placed import Seated
from elasticgang.checkpoint.plan import SavePlan, save_plan
from elasticgang.errors import CheckpointError, OperationalError
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.member_state import MemberState
from elasticgang.protocol.record import Record, layout_to_json
from elasticgang.state.registered_state import RegisteredState
from elasticgang.testing import reached

log = logging.getLogger("elasticgang")

FINISH_TIMEOUT_S = 600.0
_EXIT_TIMEOUT_S = 5.0


class StateLender(Protocol):
    """What a save needs of `SnapshotServer`."""

    @property
    def registered(self) -> RegisteredState: ...

    def lend(self, reader: Any) -> None: ...

    def give_back(self, reader: Any) -> None: ...


class DurableCheckpoints:
    """The durable checkpoints of a rank. All methods run on the training thread."""

    def __init__(self, directory: Path, every_steps: int, keep: int, server: StateLender) -> None:
        """Raises:
        OperationalError: the directory cannot be written.
        NotSupportedError: the package xxhash is missing.
        """
        new_digest()
        self.directory, self.every_steps, self.keep = directory, every_steps, keep
        self._server = server
        self._writer: _Writer | None = None
        self._save: _Save | None = None
        self._last: str = ""  # the directory of the plan that was followed last
        self._loaded: Attempt | None = None
        self._unusable: set[Path] = set()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            is_writable = os.access(directory, os.W_OK | os.X_OK)
        except OSError as exc:
            raise OperationalError(f"cannot make the checkpoint directory {directory}: {exc.strerror}") from exc
        if not is_writable:
            raise OperationalError(f"cannot write to the checkpoint directory {directory}")

    # -- saving

    def begin(self, member: str, state: MemberState) -> None:
        """A step begins. Start to save the state, if it is due. Raises NotSupportedError or TypeError: a checkpoint
        cannot hold it."""
        record, tip = state.record, state.tip
        if tip is None:
            self._stop_copy()
        if record is None or tip is None or tip.step == 0 or tip.step % self.every_steps:
            return
        plan = save_plan(record, state.active, tip)
        if plan is None or plan.directory == self._last or tip == self._loaded:
            return
        is_again = self._last.startswith(_prefix(tip))
        self._last = plan.directory
        place = plan.place(member)
        if place is None or (is_again and self._is_complete(tip)):
            return
        if self._save is not None and self.is_saving:
            if self._save.plan.attempt == tip:
                self._save.cancel()  # a rank of its plan has left
            log.warning(
                "step %d is not saved: the save of step %d is under way", tip.step, self._save.plan.attempt.step
            )
            return
        self._start(plan, place, record)

    def _start(self, plan: SavePlan, place: tuple[tuple[int, int, int], int], record: Record) -> None:
        (model, number), registered = place, self._server.registered
        seated = Seated(record.layout, model)
        captured = capture(registered.tree(), seated, number, len(plan.holders[model]))
        if captured is None:
            return
        request = {
            "root": str(self.directory),
            "directory": plan.directory,
            "shard": captured.shard.to_json(),
            "commit": None,
        }
        if (model, number) == ((0, 0, 0), 0):
            request["commit"] = {
                "places": [Seated(record.layout, each).place for each in plan.holders],
                "attempt": list(plan.attempt),
                "job": record.job,
                "record": record.digest,
                "layout": layout_to_json(record.layout),
                "keep": self.keep,
            }
        try:
            if self._writer is not None and self._writer.is_dead:
                self._writer.close()
                self._writer = None
            self._writer = self._writer or _Writer()
            memory = self._writer.memory(captured.shard.num_bytes)
        except OSError as exc:
            log.warning("step %d is not saved: %s", plan.attempt.step, exc)
            return
        self._save = _Save(plan, captured, request, memory, self._writer, self._server)
        self._save.start()

    def _stop_copy(self) -> None:
        """What follows may overwrite the state."""
        if self._save is not None and not self._save.has_read.is_set():
            self._save.shut()
            self._save.has_read.wait()

    def _is_complete(self, attempt: Attempt) -> bool:
        with contextlib.suppress(OSError):
            return any(name.startswith(_prefix(attempt)) for name in listing.names(self.directory)[0])
        return False

    def close(self, member: str, state: MemberState) -> None:
        """Save the last state, if it is due, and wait until the save under way has ended."""
        self._await_save()
        self._server.registered.keep_snapshot()  # it is from the beginning of the last step
        self.begin(member, state)
        self._await_save()
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _await_save(self) -> None:
        if self._save is not None:
            self._save.join(FINISH_TIMEOUT_S)
            if self._save.is_alive():
                step = self._save.plan.attempt.step
                log.warning("the save of step %d has not ended in %g s", step, FINISH_TIMEOUT_S)

    @property
    def is_saving(self) -> bool:
        """Whether this rank's share of a save is not written yet."""
        return self._save is not None and self._save.is_alive()

    # -- loading

    def newest(self) -> Attempt | None:
        """The newest checkpoint that this rank can load, as far as its manifest and file sizes say.

        Raises:
            CheckpointError: there are checkpoints, and none can be used (SAVER-3).
        """
        problems = []
        for found in listing.scan(self.directory):
            problem = "this rank could not load it" if found.path in self._unusable else found.problem
            if not problem:
                return found.attempt
            problems.append(f"{found.path.name}: {problem}")
            log.warning("cannot use the checkpoint %s: %s; trying the one before", found.path, problem)
        if problems:
            raise CheckpointError(
                f"no checkpoint in {self.directory} can be used: {'; '.join(problems)}. Remove them to start anew"
            )
        return None

    def load(self, attempt: Attempt, state: MemberState) -> bool:
        """Load a checkpoint into the registered state. False: it cannot be used, and the state is unchanged.

        Raises:
            ModelMismatch: it is of another model.
        """
        assert state.record is not None
        self._stop_copy()
        seated = Seated(state.record.layout, state.record.model_coordinates(state.member))
        registered = self._server.registered
        usable = (each for each in listing.scan(self.directory) if each.attempt == attempt and not each.problem)
        found = next(usable, None)
        if found is None or found.manifest is None:
            log.warning("there is no usable checkpoint of step %d in %s", attempt.step, self.directory)
            return False
        try:
            loaded = read_state(found.path, found.manifest, registered.tree(), seated)
            registered.load(loaded)
        except ModelMismatch as exc:
            raise ModelMismatch(f"cannot load the checkpoint {found.path}: {exc}") from exc
        except CheckpointError as exc:
            log.warning("cannot load the checkpoint %s: %s", found.path, exc)
            self._unusable.add(found.path)
            if not isinstance(exc, listing.UnreadableError):
                with contextlib.suppress(OSError):
                    listing.mark_corrupt(found.path, str(exc))
            return False
        self._loaded = attempt
        log.info("loaded the checkpoint %s", found.path)
        return True


def _prefix(attempt: Attempt) -> str:
    return f"step-{attempt.step:012d}-{attempt.generation}-"


class _Save(threading.Thread):
    """One save: a reader of the state until it is copied."""

    def __init__(
        self,
        plan: SavePlan,
        captured: Captured,
        request: dict[str, Any],
        memory: mmap.mmap,
        writer: _Writer,
        server: StateLender,
    ) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self.plan = plan
        self._captured, self._request, self._memory = captured, request, memory
        self._writer, self._server = writer, server
        self._cancelled = threading.Event()
        self.has_read = threading.Event()
        server.lend(self)

    def shut(self) -> None:
        """SNAPSHOT-2: an apply waits too long for the copy."""
        self._cancelled.set()

    def cancel(self) -> None:
        self._cancelled.set()
        self._writer.cancel()

    def run(self) -> None:
        step = self.plan.attempt.step
        try:
            try:
                reached("checkpoint_copying")
                copied = self._captured.copy_to(memoryview(self._memory), self._cancelled.is_set)
            finally:
                self._server.give_back(self)  # SAVER-1
                self.has_read.set()
            reached("checkpoint_copied")
            problem = self._writer.save(self._request) if copied else "the copy took too long, or a rank has left"
        except Exception as exc:  # SAVER-2
            problem = f"{type(exc).__name__}: {exc}"
        if problem:
            log.warning("step %d is not saved: %s", step, problem)
        elif self._request["commit"] is not None:
            log.info("saved step %d in %s", step, self.plan.directory)


class _Writer:
    """The process that writes. `save` blocks, on the thread of a save; all else runs on the training thread."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("eg-checkpoint", os.MFD_CLOEXEC)
        self._mapped: mmap.mmap | None = None
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "elasticgang.checkpoint.writer", str(self._descriptor), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._descriptor],
        )

    @property
    def is_dead(self) -> bool:
        return self._process.poll() is not None

    def memory(self, num_bytes: int) -> mmap.mmap:
        """Shared memory of at least so many bytes. Raises OSError."""
        if self._mapped is None or len(self._mapped) < num_bytes:
            size = max(num_bytes, mmap.PAGESIZE)
            os.ftruncate(self._descriptor, size)
            self._mapped = mmap.mmap(self._descriptor, size)
        return self._mapped

    def save(self, request: dict[str, Any]) -> str:
        """Why the save failed, or "". Raises OSError or ValueError: the writer has died."""
        assert self._process.stdout is not None
        self._send(request)
        line = self._process.stdout.readline()
        if not line:
            raise OSError("the process that writes checkpoints has died")
        return str(json.loads(line))

    def cancel(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._send({"cancel": True})

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """End the process, or a save under way."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.close()
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        os.close(self._descriptor)
