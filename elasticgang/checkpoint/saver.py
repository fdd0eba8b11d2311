"""A rank's part in saving and loading durable checkpoints.

SAVER-1  A save holds the step only until the rank's share is copied, beside forward and backward: an apply waits for
    the copy (SNAPSHOT-2). A process beside the rank writes it.
SAVER-2  A save that fails costs that save: training goes on, with a warning.
SAVER-3  A job never starts anew beside checkpoints of which none can be used.
SAVER-4  A rank loads the checkpoint that the record names by its manifest's digest, and no other one of that attempt.
SAVER-5  A rank that holds the state of a committed step goes on where no checkpoint can be read, with a warning.
SAVER-6  The committing writer waits for no share that will never come. A rank leaves a save out while its former one is
    under way, and its writer may fail; no message says so. Each vote counts the ranks that save: once the committing
    rank is the only one, all shares are written that will be, and it waits `ALONE_S` more: a shared file system may
    show a file so late. The save of the final state supersedes the one before.
SAVER-7  A relative directory is that of the working directory at the start, for the rank and for its writer, which has
    the working directory of a later time.
SAVER-8  A rank that starts where ranks of its host have trained goes on where no checkpoint can be written, or listed
    and read, with a warning: it heals, and its saves may succeed later. As an error of the script, which comes again at
    once, it would be given up for good (RESTART-3) for what the others survive (SAVER-2, SAVER-5). It looks for
    `LIST_S` before it says that there are none: if nobody is left from whom it could heal, that ends the job.
    It makes no directory: that of the job was there, and where its file system is not mounted any more, nobody would
    look for what is saved in its place.
SAVER-9  No rank begins a save while the last vote of its generation has counted one under way, except the final one: a
    rank whose former save has ended would write a share to which no manifest comes. While the committing writer hangs,
    as on a mount whose server is away, nobody would delete these.
SAVER-10  A rank that does not write the manifest of the final state, and cannot list the checkpoints for `LIST_S`,
    leaves it to the others whether the save is complete. Else all would wait for it for `FINISH_TIMEOUT_S`. The rank
    that writes it knows from its writer.
SAVER-11  A rank that waits for a storage that does not answer (TIMELY-1) goes on after `LIST_S`, as if it could not be
    read, unless it may need a checkpoint: a rank without state in a job that has not trained waits, and says so.
SAVER-12  A save at the end of the loop that takes longer than `SLOW_S` has a line: the job waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, TypeAlias, TypeVar

from elasticgang.checkpoint import listing
from elasticgang.checkpoint.capture import Captured, capture
from elasticgang.checkpoint.loader import read_state
from elasticgang.checkpoint.locations import absolute, storage_at
from elasticgang.checkpoint.placed import Seated, place_name
from elasticgang.checkpoint.plan import SavePlan, save_plan
from elasticgang.checkpoint.saved_objects import ModelMismatch
from elasticgang.checkpoint.schedule import Schedule
from elasticgang.checkpoint.shard import part_name
from elasticgang.checkpoint.storage import Storage
from elasticgang.checkpoint.timely import TimelyCalls
from elasticgang.checkpoint.unsaved import UnsavedSteps
from elasticgang.checkpoint.writer import Outcome
from elasticgang.checkpoint.writer_process import WriterProcess
from elasticgang.errors import CheckpointError, OperationalError
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.coverage import Coverage
from elasticgang.protocol.member_state import MemberState
from elasticgang.protocol.record import CheckpointRef, Record, layout_to_json
from elasticgang.state.registered_state import RegisteredState
from elasticgang.testing import reached

log = logging.getLogger("elasticgang")

FINISH_TIMEOUT_S = 600.0
ALONE_S = 60.0  # NFS keeps that a file is missing for up to so long
LIST_S = 10.0
LIST_AGAIN_S = 1.0
SLOW_S = 10.0
_ROUND_S = 1.0
_LOOK_S = 0.1
_FINAL = "final"  # what is told of that save
_COMMITTER = ((0, 0, 0), 0)  # the part and the number of the writer that writes the manifest


_T = TypeVar("_T")

OnSaving: TypeAlias = Callable[[int, int], None]
"""Of the save under way: so many of so many bytes of this rank's share are written. 0 of 0: it has ended."""
OnSaved: TypeAlias = Callable[[CheckpointRef, str, int, float], None]
"""Of a complete checkpoint: its name, its directory or URL, its bytes, and the seconds that the save took."""


class StateLender(Protocol):
    """What a save needs of `SnapshotServer`."""

    @property
    def registered(self) -> RegisteredState: ...

    def lend(self, reader: Any) -> None: ...

    def give_back(self, reader: Any) -> None: ...


class DurableCheckpoints:
    """The durable checkpoints of a rank. All methods run on the training thread. `coverage`: of what was loaded last,
    if it was saved by other stages."""

    def __init__(
        self,
        location: str | os.PathLike[str],
        schedule: Schedule,
        keep: int,
        server: StateLender,
        on_saved: OnSaved = lambda ref, path, num_bytes, duration_s: None,
        on_saving: OnSaving = lambda num_written, num_bytes: None,
        has_trained: bool = False,
    ) -> None:
        """`location`: a directory, or a URL of fsspec. `on_saved`: called on the thread of a save whose writer has
        made the checkpoint complete. `on_saving`: called on the thread of the save under way. `has_trained`: whether
        the job has (SAVER-8).

        Raises:
            OperationalError: the directory cannot be written, or the URL cannot be listed (but see SAVER-8).
            NotSupportedError: what fsspec needs for the URL is missing.
        """
        self._location, self.keep = absolute(location), keep  # SAVER-7
        self._storage: Storage = storage_at(self._location)
        self._has_trained = has_trained
        self._calls = TimelyCalls(self._storage.path)
        self._told: dict[str, str] = {}  # the last warning of a checkpoint, by its path; "": of all; or `_FINAL`
        try:
            self._call(lambda: self._storage.prepare(makes=not has_trained), has_trained)
        except (OperationalError, TimeoutError) as exc:
            if not has_trained:
                raise
            log.warning("%s; this rank takes part all the same", _reason(exc))  # SAVER-8
        self._schedule, self._server, self._on_saved, self._on_saving = schedule, server, on_saved, on_saving
        self._writer: WriterProcess | None = None
        self._save: _Save | None = None
        self._num_saving = 0.0  # ranks with a save under way, by the last vote
        self._counted_in = 0  # the generation of that vote
        self._last: str = ""  # the directory of the plan that was followed last
        self._loaded: Attempt | None = None
        self._failed: str = ""  # the directory of a plan that could not be followed
        self._final: tuple[int, float] = 0, 0.0  # the generation that saves the final state, and its deadline
        self._has_begun_last = self._has_given_up = False  # in that generation
        self._commits = False  # whether this rank writes the manifest of the newest save
        self._unlisted_s: float | None = None  # since when the checkpoints cannot be listed, and why (SAVER-10)
        self._why_unlisted = ""
        self._unusable: set[str] = set()  # paths
        self._unsaved = UnsavedSteps()
        self.coverage: Coverage | None = None

    # -- saving

    @property
    def proposes(self) -> bool:
        """Whether this rank's vote proposes a save (SCHEDULE-1)."""
        return self._schedule.proposes

    @property
    def schedule(self) -> str:
        """Which steps are saved, in words."""
        return self._schedule.words

    def is_due(self, state: MemberState) -> bool:
        """Whether all ranks of the generation save the state that `state` describes, unless it is saved already."""
        return state.record is not None and self._schedule.is_due(state.committed, state.record.generation)

    def count(self, num_proposals: float, num_saving: float, generation: int) -> None:
        """A vote of `generation` has been counted: so many ranks proposed a save, and had one under way."""
        self._schedule.count(num_proposals, generation)
        self._num_saving, self._counted_in = num_saving, generation
        if num_saving == 1:
            self._stop_waiting()

    def begin(self, member: str, state: MemberState, *, is_last: bool = False) -> None:
        """A step begins, or the job is finished if `is_last`. Start to save the state, if it is due. Raises
        NotSupportedError or TypeError: a checkpoint cannot hold it."""
        record, tip = state.record, state.tip
        if tip is None:
            self._stop_copy()
        if record is None:
            return
        self._give_up_incomplete(record, state.committed)
        is_due = self.is_due(state) or (is_last and state.committed.step > 0)
        if not is_due or state.committed == self._loaded:
            if self._writer is None and tip is not None and tip.step > 0:
                self._prepare(member, state.active, record, tip)
            return
        plan = save_plan(record, state.active, state.committed)
        if plan is None or plan.directory == self._last:
            return
        self._schedule.begun()
        is_again = self._last.startswith(_prefix(plan.attempt))
        self._last = plan.directory
        place = plan.place(member)
        self._commits, self._unlisted_s = place == _COMMITTER, None
        if tip is None or place is None or (is_again and place == _COMMITTER and self._is_complete(tip)):
            return
        if self._save is not None and self.is_saving:
            former = self._save.plan
            what = f"its save in {former.directory}" if former.attempt == tip else f"that of step {former.attempt.step}"
            self._unsaved.left_out(tip.step, f"{what} has not ended")
            return
        if self._num_saving and self._counted_in == state.entered and not is_last:  # SAVER-9
            if place == _COMMITTER:
                self._unsaved.left_out(tip.step, "a rank had not ended the save before at the last vote")
            return
        self._start(plan, place, record)

    def _prepare(self, member: str, active: Collection[str], record: Record, tip: Attempt) -> None:
        """Start the writer, and allocate the memory for this rank's share, before the first save (SAVER-1)."""
        plan = save_plan(record, active, tip)
        place = None if plan is None else plan.place(member)
        if plan is None or place is None:
            return
        model, number = place
        seated, tree = Seated(record.layout, model), self._server.registered.tree()
        captured = capture(tree, seated, number, len(plan.holders[model]))
        with contextlib.suppress(OSError, RuntimeError):  # the first save says so
            self._writer = WriterProcess()
            if captured is not None:
                self._writer.allocate(captured.shard.num_bytes)

    def _give_up_incomplete(self, record: Record, committed: Attempt) -> None:
        """WRITER-2. A save that its generation has not outlived by a step is given up: a rank may not have begun it
        (SCHEDULE-2)."""
        save = self._save
        if save is None or not self.is_saving or save.generation == record.generation:
            return
        save.generation = record.generation
        if save.plan.attempt == committed:
            save.cancel()
        else:
            save.lose({seat.member for seat in record.seats})

    def _stop_waiting(self) -> None:
        """SAVER-6. The save under way, if this rank has one, has the shares that it will get."""
        if self._save is not None and self.is_saving:
            self._save.end_within(ALONE_S)

    def _start(self, plan: SavePlan, place: tuple[tuple[int, int, int], int], record: Record) -> None:
        (model, number), registered = place, self._server.registered
        seated = Seated(record.layout, model)
        captured = capture(registered.tree(), seated, number, len(plan.holders[model]))
        if captured is None:
            return
        request: dict[str, Any] = {
            "root": self._location,
            "directory": plan.directory,
            "shard": captured.shard.to_json(),
            "commit": None,
            "lost": [],
            "within_s": None,
        }
        if self._commits:
            request["commit"] = {
                "places": [place_name(each) for each in plan.holders],
                "attempt": list(plan.attempt),
                "job": record.job,
                "record": record.digest,
                "layout": layout_to_json(record.layout),
                "keep": self.keep,
                "is_alone": not self._num_saving,
            }
        try:
            if self._writer is not None and self._writer.is_dead:
                self._writer.close()
                self._writer = None
            self._writer = self._writer or WriterProcess()
            memory = self._writer.memory(captured.shard.num_bytes)
            told = self._on_saved, self._on_saving
            save = _Save(
                plan, record.generation, captured, request, memory, self._writer, self._server, *told, self._unsaved
            )
            save.start()
        except (OSError, RuntimeError) as exc:  # SAVER-2: a RuntimeError says that no thread is left
            self._unsaved.failed(plan.attempt.step, str(exc))
            self._failed = plan.directory
            return
        self._save = save

    def _stop_copy(self) -> None:
        """What follows may overwrite the state."""
        if self._save is not None and not self._save.has_read.is_set():
            self._save.shut()
            while not self._save.has_read.wait(_LOOK_S):  # SIGNAL-LATE
                pass

    def _is_complete(self, attempt: Attempt) -> bool:
        if self._save is not None and self._save.is_complete(attempt):  # SAVER-10
            return True
        try:
            complete, _ = self._calls.within(LIST_S, lambda: listing.names(self._storage))
        except OSError as exc:
            self._unlisted_s = self._unlisted_s or time.monotonic()
            self._why_unlisted = exc.strerror or str(exc)
            return False
        self._unlisted_s = None
        return any(name.startswith(_prefix(attempt)) for name in complete)

    def save_last(self, member: str, state: MemberState) -> tuple[bool, bool]:
        """Save the final state, and wait up to `_ROUND_S` for that (MANAGER-12). Returns whether it is being saved, and
        whether that has failed. Raises as `begin` does.

        A rank without a share waits for the manifest too: if its peers leave and it does not know of that, it finds the
        checkpoint complete."""
        assert state.record is not None
        self._give_up_incomplete(state.record, state.committed)
        if self._final[0] != state.entered:
            self._final = state.entered, time.monotonic() + FINISH_TIMEOUT_S
            self._has_begun_last = self._has_given_up = False
        if not self._await_save(_ROUND_S) and not self._has_begun_last:
            self._has_begun_last = True
            self._server.registered.small.keep()  # it is from the beginning of the last step
            self.begin(member, state, is_last=True)
            self._await_save(_ROUND_S)
        is_late = time.monotonic() > self._final[1]
        if self.is_saving and time.monotonic() > self._final[1] - FINISH_TIMEOUT_S + SLOW_S:
            self._tell_slow()
        if not self._has_begun_last and not is_late:  # the save of an earlier step is under way
            self._stop_waiting()
            return True, False
        if self._has_begun_last and not self._last.startswith(_prefix(state.committed)):  # there is nothing to save
            return False, False
        if self._failed == self._last or (self._save is not None and self._save.has_failed(self._last)):
            self._has_given_up = True
        elif self._await_manifest(state.committed):
            return self.is_saving and not is_late, False
        elif is_late:
            log.warning("the final state is not saved: its save has not ended in %g s", FINISH_TIMEOUT_S)
            self._has_given_up = True
            return False, True
        return not self._has_given_up or self.is_saving, self._has_given_up

    def _await_manifest(self, attempt: Attempt) -> bool:
        """Wait up to `_ROUND_S` for the manifest. Returns whether it is there, or others know that (SAVER-10)."""
        deadline = time.monotonic() + _ROUND_S
        while not (self._is_complete(attempt) or self._leaves_it_to_others(attempt)):
            if self._has_given_up or time.monotonic() > deadline:
                return False
            time.sleep(self._storage.poll_s)
        return True

    def _leaves_it_to_others(self, attempt: Attempt) -> bool:
        """SAVER-10."""
        if self._commits or self._has_given_up or self._unlisted_s is None:
            return False
        if time.monotonic() < self._unlisted_s + LIST_S:
            return False
        why = self._why_unlisted
        self._warn_once(_FINAL, f"this rank cannot look whether step {attempt.step} is saved: {why}; the others do")
        return True

    def _warn_once(self, of: str, text: str) -> None:
        """Unless it was the last warning of that."""
        if text != self._told.get(of):
            self._told[of] = text
            log.warning("%s", text)

    def _call(self, call: Callable[[], _T], can_do_without: bool) -> _T:
        """Call the storage. Raises TimeoutError: it does not answer, and this rank `can_do_without` (SAVER-11)."""
        if can_do_without:
            return self._calls.within(LIST_S, call)
        what = f"waiting for {self._storage.path}, which does not answer: the checkpoints of the job are to be there"
        slow = threading.Timer(SLOW_S, self._warn_once, ("", what))
        slow.daemon = True
        with contextlib.suppress(RuntimeError):  # no thread is left
            slow.start()
        try:
            return call()
        finally:
            slow.cancel()

    def has(self, attempt: Attempt) -> bool:
        """Whether a checkpoint of `attempt` is complete, as far as its manifest and file sizes say."""
        with contextlib.suppress(CheckpointError, TimeoutError):
            found = self._calls.within(LIST_S, lambda: list(listing.scan(self._storage)))
            return any(each.attempt == attempt and not each.problem for each in found)
        return False

    def drop(self) -> None:
        """Give up the save under way."""
        self._has_given_up = True
        if self._save is not None and self.is_saving:
            self._save.cancel()

    def close(self, member: str, state: MemberState, *, saves: bool = True) -> None:
        """Save the state, if it is due and `saves`, and wait until the save under way has ended."""
        if not (self._has_begun_last and self._final[0] == state.entered):
            self._await_slowly()
            if saves:
                self._server.registered.small.keep()  # it is from the beginning of the last step
                self.begin(member, state)
            if self._await_slowly():
                log.warning("the last save has not ended in %g s", FINISH_TIMEOUT_S)
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _await_save(self, wait_s: float) -> bool:
        """Wait for the end of the save under way. Returns whether it still is."""
        if self._save is not None:
            self._save.join(wait_s)
        return self.is_saving

    def _await_slowly(self) -> bool:
        """As `_await_save`, for the whole time limit."""
        if self._await_save(SLOW_S):
            self._tell_slow()
            self._await_save(FINISH_TIMEOUT_S - SLOW_S)
        return self.is_saving

    def _tell_slow(self) -> None:
        """SAVER-12."""
        if self._save is not None:
            step = self._save.plan.attempt.step
            what = f"this rank ends once its save of step {step} in {self._storage.path} has ended, or after"
            self._warn_once("slow", f"{what} {FINISH_TIMEOUT_S:g} s")

    @property
    def is_saving(self) -> bool:
        """Whether this rank's share of a save is not written yet."""
        return self._save is not None and self._save.is_alive()

    # -- loading

    def newest(self, state: MemberState) -> CheckpointRef | None:
        """The newest checkpoint that this rank can load, as far as its manifest and file sizes say.

        Raises:
            CheckpointError: there are checkpoints, and none can be used (SAVER-3), or they cannot be listed (but see
                SAVER-8); and this rank does not hold the state of a committed step.
        """
        lacks_state = state.tip is None or state.tip.step == 0
        until_s = time.monotonic() + LIST_S
        while True:
            try:
                newest = self._call(self._newest, self._has_trained or not lacks_state)
            except (CheckpointError, TimeoutError) as exc:
                is_late = isinstance(exc, TimeoutError)
                survives = self._has_trained and (is_late or isinstance(exc, listing.UnreadableError))  # SAVER-8
                if lacks_state and survives and not is_late and time.monotonic() < until_s:
                    time.sleep(LIST_AGAIN_S)
                    continue
                if lacks_state and not survives:
                    raise
                self._warn_once("", _reason(exc))  # SAVER-5
                return None
            self._told.pop("", None)
            return newest

    def _newest(self) -> CheckpointRef | None:
        problems, may_pass = [], False
        for found in listing.scan(self._storage):
            problem = "this rank could not load it" if found.path in self._unusable else found.problem
            if found.manifest is not None and not problem:
                self._told.pop(found.path, None)
                return CheckpointRef(found.attempt, found.manifest.digest)
            problems.append(f"{found.folder.name}: {problem}")
            may_pass = may_pass or found.is_unreadable
            self._warn_once(found.path, f"cannot use the checkpoint {found.path}: {problem}; trying the one before")
        what = f"no checkpoint in {self._storage.path} can be used: {'; '.join(problems)}"
        if may_pass:  # SAVER-8
            raise listing.UnreadableError(what)
        if problems:
            raise CheckpointError(f"{what}. Remove them to start anew")
        return None

    def load(self, ref: CheckpointRef, state: MemberState) -> bool:
        """Load a checkpoint into the registered state. False: it cannot be used, and the state is unchanged.

        Raises:
            ModelMismatch: it is of another model.
            CheckpointError: SAVER-4.
        """
        assert state.record is not None
        self._stop_copy()
        seated = Seated(state.record.layout, state.record.model_coordinates(state.member))
        registered = self._server.registered
        registered.small.keep()  # what was built for this seat is not in it yet
        try:
            usable = {
                each.manifest.digest: each
                for each in listing.scan(self._storage)
                if each.attempt == ref.attempt and each.manifest is not None
            }
        except listing.UnreadableError as exc:
            log.warning("cannot load the checkpoint of step %d: %s", ref.attempt.step, exc)
            return False
        if not usable:
            log.warning("there is no usable checkpoint of step %d in %s", ref.attempt.step, self._storage.path)
            return False
        if ref.digest not in usable:  # SAVER-4
            raise CheckpointError(_exchanged(ref, state.record, usable))
        found = usable[ref.digest]
        assert found.manifest is not None
        path = found.path
        try:
            loaded, self.coverage = read_state(found.folder, found.manifest, registered.tree(), seated)
            registered.load(loaded)
        except ModelMismatch as exc:
            raise ModelMismatch(f"cannot load the checkpoint {path}: {exc}") from exc
        except CheckpointError as exc:
            log.warning("cannot load the checkpoint %s: %s", path, exc)
            self._unusable.add(path)
            if not isinstance(exc, listing.UnreadableError):
                with contextlib.suppress(OSError):
                    listing.mark_corrupt(found.folder, str(exc))
            return False
        self._loaded = ref.attempt
        log.info("loaded the checkpoint %s", path)
        return True


def _exchanged(ref: CheckpointRef, record: Record, usable: Mapping[str, listing.Found]) -> str:
    here = ", ".join(f"{found.path} with the manifest digest {digest}" for digest, found in usable.items())
    return (
        f"generation {record.generation} continues at the checkpoint of step {ref.attempt.step} with the manifest "
        f"digest {ref.digest}, but this rank's is {here}: give all hosts the same checkpoint directory, and replace no "
        "checkpoint in it while the job runs"
    )


def _reason(exc: Exception) -> str:
    """For messages."""
    return f"cannot read the checkpoints of {exc.filename}: {exc.strerror}" if isinstance(exc, OSError) else str(exc)


def _prefix(attempt: Attempt) -> str:
    return f"step-{attempt.step:012d}-{attempt.generation}-"


class _Save(threading.Thread):
    """One save: a reader of the state until it is copied."""

    def __init__(
        self,
        plan: SavePlan,
        generation: int,
        captured: Captured,
        request: dict[str, Any],
        memory: mmap.mmap,
        writer: WriterProcess,
        server: StateLender,
        on_saved: OnSaved,
        on_saving: OnSaving,
        unsaved: UnsavedSteps,
    ) -> None:
        super().__init__(name="checkpoint", daemon=True)
        self.plan, self.generation = plan, generation
        self._captured: Captured | None = captured  # until it is copied: its sources may be of a former seat
        self._num_bytes, self._request, self._memory = captured.shard.num_bytes, request, memory
        self._writer, self._server, self._on_saved, self._on_saving = writer, server, on_saved, on_saving
        self._unsaved = unsaved
        self._written = server.registered.small.written
        self._cancelled = threading.Event()
        self._sending = threading.Lock()
        self._is_sent = False
        self._problem = self._digest = ""
        self._began_s = time.monotonic()
        self.has_read = threading.Event()

    def start(self) -> None:
        """Raises RuntimeError: no thread is left, and nothing has begun."""
        self._server.lend(self)
        try:
            super().start()
        except RuntimeError:
            self._server.give_back(self)
            raise

    def has_failed(self, directory: str) -> bool:
        """Whether this was the save in `directory`, and has failed."""
        return self.plan.directory == directory and bool(self._problem)

    def is_complete(self, attempt: Attempt) -> bool:
        """Whether this was a save of `attempt`, and its writer has made the checkpoint complete."""
        return self.plan.attempt == attempt and bool(self._digest)

    def shut(self) -> None:
        """SNAPSHOT-2: an apply waits too long for the copy."""
        self._cancelled.set()

    def cancel(self) -> None:
        with self._sending:
            self._cancelled.set()
            if self._is_sent:
                self._writer.send({"cancel": True})

    def lose(self, members: Collection[str]) -> None:
        """Only `members` are left: no others will write their shares."""
        lost = [
            part_name(place_name(model), number)
            for model, holders in self.plan.holders.items()
            for number, member in enumerate(holders)
            if member not in members
        ]
        with self._sending:
            self._request["lost"] += lost
            if self._is_sent and lost:
                self._writer.send({"lost": lost})

    def end_within(self, seconds: float) -> None:
        """SAVER-6"""
        with self._sending:
            if self._request["within_s"] is None:
                self._request["within_s"] = seconds
                if self._is_sent:
                    self._writer.send({"within_s": seconds})

    def run(self) -> None:
        attempt, outcome = self.plan.attempt, Outcome()
        try:
            try:
                reached("checkpoint_copying")
                assert self._captured is not None
                memory = memoryview(self._memory)
                is_copied = self._captured.copy_to(memory, self._cancelled.is_set, self._written)
            finally:
                self._captured = None
                self._server.give_back(self)  # SAVER-1
                self.has_read.set()
            reached("checkpoint_copied")
            with self._sending:
                self._is_sent = is_copied and not self._cancelled.is_set()
                if self._is_sent:
                    self._writer.send(self._request)
            too_late = Outcome("the copy took too long, or a rank has left")
            outcome = self._writer.answer(self._tell_written) if self._is_sent else too_late
        except Exception as exc:  # SAVER-2
            outcome = Outcome(f"{type(exc).__name__}: {exc}")
        self._on_saving(0, 0)
        self._problem, self._digest = outcome.problem, outcome.digest
        if outcome.problem:
            self._unsaved.failed(attempt.step, outcome.problem, outcome.problem.replace(self.plan.directory, ""))
        else:
            self._unsaved.succeeded(attempt.step)
        if outcome.digest:
            log.info("saved step %d in %s", attempt.step, self.plan.directory)
            path = f"{self._request['root'].rstrip('/')}/{self.plan.directory}"
            duration_s = time.monotonic() - self._began_s
            ref = CheckpointRef(attempt, outcome.digest)
            self._on_saved(ref, path, outcome.num_bytes, duration_s)

    def _tell_written(self, num_bytes: int) -> None:
        self._on_saving(num_bytes, self._num_bytes)
