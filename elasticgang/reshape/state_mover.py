"""Moves the training state to the seats of another layout, from the ranks that hold it: no disk, and no collectives.

MOVE-1  A rank changes its state only after all of its part has arrived and every digest is right.
MOVE-2  A rank fetches the pieces that its part overlaps, from one holder of each part of the former layout. If the
    holder dies, another one of the same part sends the rest. It requests many pieces at once, of all parts, so that
    their holders send beside each other.
MOVE-3  Kept state is served to authenticated ranks only, by the attempt, layout and part that they name.
MOVE-4  Received data is never unpickled, and every size is checked before memory is allocated for it.
MOVE-5  Between layouts of other pipeline stages, a rank takes the tensors that its own stage has, by their names in the
    whole model, from whichever stages of the former layout have them (PLACED-1).
MOVE-6  A plain tensor that the ranks of a replica group have otherwise cannot move to another `sdp` or `tp` (LOADER-3).
    Once, after its first step, the first rank warns of buffers of floating-point numbers that the step has changed, as
    those of BatchNorm: they are likely to differ. Nothing is exchanged for that.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from elasticgang.checkpoint.block_reader import BlockReader, overlapping
from elasticgang.checkpoint.loader import differing_axes, state_of
from elasticgang.checkpoint.manifest import Manifest, Piece, TensorEntry, check_pieces, merge_tensors, tensor_from_json
from elasticgang.checkpoint.placed import Seated, place_name
from elasticgang.checkpoint.saved_objects import ModelMismatch
from elasticgang.errors import CheckpointError, WireError
from elasticgang.layout import ParallelLayout
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.coverage import Coverage
from elasticgang.protocol.record import FormerState, Holder, Model, Seat, layout_to_json
from elasticgang.reshape.kept_state import KeptState
from elasticgang.state import transport
from elasticgang.state.authentication import Authenticator
from elasticgang.state.heal_addresses import stripes
from elasticgang.state.serialization import as_bytes
from elasticgang.state.snapshot_server import READY_TIMEOUT_S, SnapshotServer
from elasticgang.state.transport import Channel
from elasticgang.testing import reached

log = logging.getLogger("elasticgang")

MOVE_TIMEOUT_S = 60.0
NUM_REQUESTED = 64  # pieces of one part at a time
KIND = "former"
_RETRY_S = 0.1
_NUM_NAMED = 3  # buffers in a warning
_MAX_REQUEST_BYTES = 1 << 16
_FAILURES = (OSError, WireError, CheckpointError, ValueError, KeyError, TypeError, IndexError, RecursionError)


class StateMover:
    """One rank's end. `move` runs on the training thread, the serving of kept state on threads of the server.
    `coverage`: of what was moved last, if it is of other stages."""

    def __init__(
        self, server: SnapshotServer, on_progress: Callable[[int, int], None] = lambda received, total: None
    ) -> None:
        """`on_progress`: gets the bytes received from others, and how many there are at most; at the end as many, and
        0 of 0 if the state has not moved."""
        self._server, self._on_progress = server, on_progress
        self.coverage: Coverage | None = None
        self._changed = threading.Condition()
        self._kept: KeptState | None = None
        self._num_checks = 2  # left for `check_buffers`: a rank that loads a checkpoint has not trained at the first
        server.serve_kind(KIND, self._serve)

    def keep(self, former: FormerState, layout: ParallelLayout, *, is_dropped: bool) -> None:
        """Keep the registered state, which is that of `former`. `is_dropped`: forward has changed it since."""
        if self._kept is not None and self._kept.former == former:
            return
        registered = self._server.registered
        if not is_dropped:
            registered.small.keep()  # it is from the beginning of the last step
        kept = KeptState(former, layout, registered.tree())
        with self._changed:
            self._kept = kept
            self._changed.notify_all()

    def drop(self) -> None:
        """Serve what is kept no longer."""
        with self._changed:
            self._kept = None

    def check_buffers(self, layout: ParallelLayout, layouts: Sequence[ParallelLayout]) -> None:
        """MOVE-6. Call it after each committed step, before the next one begins."""
        if not self._num_checks or layout.sdp * layout.tp == 1:
            return
        others = [each for each in layouts if (each.sdp, each.tp) != (layout.sdp, layout.tp)]
        names = self._server.registered.small.changed_buffers() if others else []
        self._num_checks = 0 if names else self._num_checks - 1
        if names:
            log.warning(
                "the state cannot move to the layout (%s), nor be loaded there, if the ranks differ in a plain tensor; "
                "the first step has changed %s: let all ranks of the replica group have the same values, for example "
                "their mean over `gangs.sdp`",
                others[0].text,
                ", ".join(names[:_NUM_NAMED]) + (", ..." if len(names) > _NUM_NAMED else ""),
            )

    def move(
        self,
        holders: Sequence[tuple[Seat, Holder]],
        former: ParallelLayout,
        attempt: Attempt,
        seat: tuple[ParallelLayout, Model],
        rank: int,
        cancelled: Callable[[], bool],
    ) -> bool:
        """Load this rank's part of `attempt` for `seat` from `holders`, which keep parts of the layout `former`. False:
        it was `cancelled`, or they cannot send it within `MOVE_TIMEOUT_S`. The state is then unchanged (MOVE-1).
        `rank`: of the seat; ranks begin with different holders of a part.

        Raises:
            ModelMismatch: the seat's model has other tensors than the holders'.
        """
        registered = self._server.registered
        registered.small.keep()  # what was built for this seat is not in it yet
        deadline = time.monotonic() + MOVE_TIMEOUT_S
        seated, turn, told = Seated(*seat), rank, ""
        most, num_received = registered.objects.num_bytes, 0

        def received(num_bytes: int) -> None:
            nonlocal num_received
            num_received += num_bytes
            self._on_progress(num_received, max(num_received, most))

        reached("moving")
        while not cancelled():
            try:
                with _Fetch(self._server, holders, attempt, self._kept, cancelled, turn, received) as fetch:
                    state, coverage = fetch.read(former, registered.tree(), seated)
                with self._server.exclusive():
                    registered.load(state)
                self.coverage = coverage
                self._on_progress(num_received, num_received)
                return True
            except ModelMismatch:
                raise
            except _FAILURES as exc:
                if str(exc) != told:  # a holder that is not ready yet is asked again
                    log.warning("could not move the state of step %d: %s", attempt.step, exc)
                told = str(exc)
            if time.monotonic() > deadline:
                break
            turn += 1
            time.sleep(_RETRY_S)
        self._on_progress(0, 0)
        return False

    def _serve(self, channel: Channel, request: dict[str, Any]) -> None:
        """MOVE-3. Until the peer closes the connection."""
        wanted = _former_from_json(request["former"])
        kept = self._await_kept(wanted)
        description = None if kept is None else kept.describe()
        if kept is None or description is None or self._kept is not kept:  # KEPT-2
            channel.send({"refused": f"it does not keep the state of step {wanted.attempt.step}"})
            return
        channel.send(description)
        while True:
            for offset in channel.receive(_MAX_REQUEST_BYTES):
                channel.sock.sendall(kept.data(offset))
                reached("piece_sent")

    def _await_kept(self, wanted: FormerState) -> KeptState | None:
        with self._changed:
            self._changed.wait_for(lambda: self._kept is not None and self._kept.former == wanted, READY_TIMEOUT_S)
            return self._kept if self._kept is not None and self._kept.former == wanted else None


def _former_from_json(data: Any) -> FormerState:
    """Raises TypeError or ValueError: `data` names no state."""
    attempt, layout, (pp, sdp, tp) = data
    return FormerState(Attempt(*attempt), int(layout), (int(pp), int(sdp), int(tp)))


class _Fetch:
    """One try to fetch a part. `turn`: which holder of each part to begin with. `received`: called with the bytes of
    each piece that arrives."""

    def __init__(
        self,
        server: SnapshotServer,
        holders: Sequence[tuple[Seat, Holder]],
        attempt: Attempt,
        kept: KeptState | None,
        cancelled: Callable[[], bool],
        turn: int,
        received: Callable[[int], None],
    ) -> None:
        self._parts: dict[str, _Part] = {}
        for _, (_, number, model) in holders:
            if place_name(model) not in self._parts:
                former = FormerState(attempt, number, model)
                texts = [seat.address for seat, holder in holders if holder.model == model]
                first = turn % len(texts)
                addresses, _ = stripes(texts[first:] + texts[:first], server.address)
                own = kept if kept is not None and kept.former == former else None
                self._parts[place_name(model)] = _Part(
                    server.authenticator, addresses, former, own, cancelled, received
                )

    def __enter__(self) -> _Fetch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for part in self._parts.values():
            part.close()

    def read(
        self, former: ParallelLayout, state: dict[str, Any], seated: Seated
    ) -> tuple[dict[str, Any], Coverage | None]:
        """As `loader.read_state`. Raises `_FAILURES` or ModelMismatch."""
        stages = {seated.model[0]} if former.pp == seated.layout.pp else set(range(former.pp))  # MOVE-5
        found = {name: part.describe() for name, part in self._parts.items() if part.former.model[0] in stages}
        tensors = merge_tensors(entries for entries, _ in found.values())
        for tensor in tensors:
            check_pieces(tensor)  # MOVE-4
        objects = {name: objects_of_part for name, (_, objects_of_part) in found.items()}
        attempt = next(iter(self._parts.values())).former.attempt
        manifest = Manifest("", attempt, "", layout_to_json(former), (), tensors, objects)
        other_axes = differing_axes(manifest, seated)
        lister = _PieceLister(manifest, other_axes)
        state_of(lister, state, seated)
        for name, part in self._parts.items():
            part.begin([piece for piece in lister.pieces if _place_of(piece) == name])
        return state_of(_PieceReader(manifest, other_axes, self._parts), state, seated)


def _tensors(place: str, data: list[Any]) -> list[TensorEntry]:
    """Raises KeyError, TypeError or ValueError: `data` describes no tensors of the part."""
    tensors = list(map(tensor_from_json, data))
    if any(_place_of(piece) != place for tensor in tensors for piece in tensor.pieces):
        raise ValueError(f"a holder of {place} describes pieces of another part")
    return tensors


def _place_of(piece: Piece) -> str:
    return piece.file.removeprefix("kept-").partition(".")[0]


class _PieceLister(BlockReader):
    """Lists the pieces that will be read, in their order, and reads none."""

    def __init__(self, manifest: Manifest, other_axes: Sequence[str]) -> None:
        super().__init__(manifest, other_axes)
        self.pieces: list[Piece] = []

    def read(self, entry: TensorEntry, start: Sequence[int], shape: Sequence[int]) -> Tensor:
        self.pieces += [piece for piece, _, _ in overlapping(entry, start, shape)]
        dtype = getattr(torch, entry.dtype)
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")  # of which no page is written


class _PieceReader(BlockReader):
    """Reads pieces from the holders of the parts."""

    def __init__(self, manifest: Manifest, other_axes: Sequence[str], parts: dict[str, _Part]) -> None:
        super().__init__(manifest, other_axes)
        self._parts = parts

    def read_piece(self, entry: TensorEntry, piece: Piece, block: Tensor) -> None:
        self._parts[_place_of(piece)].read(entry, piece, as_bytes(block))


class _Part:
    """One part of the former layout, and the connection to one of its holders at a time."""

    def __init__(
        self,
        authenticator: Authenticator,
        addresses: Sequence[str],
        former: FormerState,
        kept: KeptState | None,
        cancelled: Callable[[], bool],
        received: Callable[[int], None],
    ) -> None:
        """`kept`: what this rank keeps itself, if it is this part."""
        self.former = former
        self._authenticator, self._kept, self._cancelled = authenticator, kept, cancelled
        self._received = received
        self._left = list(addresses)
        self._due: deque[Piece] = deque()  # pieces that are not here yet, in the order in which they are read
        self._num_requested = 0  # of these, from the present holder
        self._channel: Channel | None = None

    def close(self) -> None:
        if self._channel is not None:
            self._channel.sock.close()
            self._channel, self._num_requested = None, 0

    def describe(self) -> tuple[list[TensorEntry], Any]:
        """Its tensors and its objects. Raises WireError: no holder describes it."""
        if self._kept is not None:
            return self._kept.entries(), self._kept.objects
        while True:
            try:
                description = self._connect()
                return _tensors(place_name(self.former.model), description["tensors"]), description["objects"]
            except (OSError, WireError, ValueError, KeyError, TypeError) as exc:
                self._next_after(exc)

    def begin(self, pieces: Sequence[Piece]) -> None:
        """`read` will be called for each of `pieces`, in this order. Request the first ones."""
        self._due = deque(pieces)
        if self._kept is None and self._channel is not None:
            with contextlib.suppress(OSError, WireError):  # `read` finds it, and takes another holder
                self._request(self._channel)

    def read(self, entry: TensorEntry, piece: Piece, data: memoryview) -> None:
        """MOVE-2. Raises WireError: no holder sends the piece with its digest."""
        if self._kept is not None:
            data[:] = self._kept.data(piece.offset)
            return
        while True:
            try:
                if self._channel is None:
                    self._connect()
                self._receive(entry, piece, data)
                return
            except (OSError, WireError, ValueError) as exc:
                self._next_after(exc)

    def _receive(self, entry: TensorEntry, piece: Piece, data: memoryview) -> None:
        assert self._channel is not None
        if not self._num_requested:
            self._request(self._channel)
        transport.receive_into(self._channel.sock, data)
        if transport.digest(data).hex() != piece.digest:
            raise WireError(f"the digest of a piece of {entry.name} is wrong")
        self._num_requested -= 1
        self._due.popleft()
        self._received(len(data))

    def _request(self, channel: Channel) -> None:
        wanted = [piece.offset for piece in itertools.islice(self._due, NUM_REQUESTED)]
        channel.send(wanted)
        self._num_requested = len(wanted)

    def _next_after(self, error: Exception) -> None:
        """Give the present holder up. Raises WireError: it was the last one, or the generation is over."""
        self.close()
        del self._left[:1]
        if not self._left or self._cancelled():
            raise WireError(f"no holder of the part {place_name(self.former.model)} is left: {error}") from error

    def _connect(self) -> dict[str, Any]:
        with contextlib.ExitStack() as failed:
            channel = failed.enter_context(self._authenticator.connect_unless(self._cancelled, self._left[0]))
            channel.send({"kind": KIND, "former": self.former})
            transport.await_answer(channel.sock, self._cancelled)
            description: dict[str, Any] = channel.receive(transport.MAX_MANIFEST_BYTES)
            if "refused" in description:
                raise WireError(description["refused"])
            failed.pop_all()
        self._channel = channel
        return description
