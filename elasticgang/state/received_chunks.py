"""The chunks of the large state that a rank has received, in the memory of its own tensors.

RECEIVED-1  A chunk for a tensor on the host is received in the tensor's own memory. One for a device goes through a
    pinned buffer, and one for a tensor that is not contiguous through a copy of that tensor, dropped once it is whole.
RECEIVED-2  A chunk counts as received once its digest is right. One from an earlier fetch counts only if its bytes have
    that digest still, and it is expected still: so a state that takes longer than one generation arrives over several,
    and a state that has been written to since is fetched again. Threads that receive compute these digests, each when
    it is about to request the chunk, and without the lock: others make progress meanwhile.
    So does a chunk that this rank has by itself: frozen parameters, and pretrained or seeded ones in a job that starts,
    are the same on all ranks. The first chunk of a tensor tells whether the others are looked at. After
    `MAX_STRANGE` tensors in a row whose first chunk differs, no more are: nothing is, once all have been trained.
RECEIVED-3  A chunk may be received before its digest is known. It counts once the expected digest is that of the bytes
    that were received; otherwise it is missing still.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from elasticgang.errors import WireError
from elasticgang.state import staging
from elasticgang.state.digests import Digest
from elasticgang.state.registered_objects import is_same_memory
from elasticgang.state.serialization import as_bytes

Targets: TypeAlias = Callable[[Any, list[Any], int | None, list[Tensor]], tuple[list[Tensor], list[Tensor | None]]]

MAX_STRANGE = 32


class Place(NamedTuple):
    """Where a chunk goes: the number of its tensor, and its bytes there."""

    tensor: int
    start: int
    end: int


class ReceivedChunks:
    """`changed` guards all fields. `targets`: as `RegisteredState.targets`. `on_progress` gets the bytes received, and
    those of the whole large state; 0 of 0 between two fetches."""

    def __init__(
        self, targets: Targets, digest: Digest, on_progress: Callable[[int, int], None] = lambda received, total: None
    ) -> None:
        self._find_targets, self._digest_of, self._on_progress = targets, digest, on_progress
        self.changed = threading.Condition()
        self.tensors: list[Tensor] = []
        self.missing: set[int] = set()
        self._own: list[Tensor | None] = []  # this rank's tensors in the places of `tensors`
        self._unchecked: set[int] = set()  # of the missing: they may be here (RECEIVED-2)
        self._num_strange = 0  # tensors of this rank that differ, in a row
        self._early: set[int] = set()  # of the missing: this fetch has received them (RECEIVED-3)
        self.num_digested = 0  # digests that a holder has computed, as it says
        self._shapes: list[Any] | None = None
        self._places: list[Place] = []
        self._digests: list[str] | None = None  # expected; None: not known yet
        self._found: dict[int, str] = {}  # the digests of the bytes that were received, by chunks
        self._copies: dict[int, Tensor] = {}  # of tensors that are not contiguous, by their numbers (RECEIVED-1)
        self._after = staging.device.mark()  # this rank's own use of the tensors
        self._bytes = (0, 0)  # received, of

    def expect(self, spec: Any, shapes: list[Any], num_digests: int | None = None) -> list[int]:
        """Expect the chunks of tensors of `shapes`. `num_digests`: as many are said to be. Returns the chunks that may
        be received before the digests are known: no earlier fetch has received them. Raises WireError: they are not
        those of this rank's state. Nothing is written then."""
        is_same = shapes == self._shapes
        tensors, self._own = self._find_targets(spec, shapes, num_digests, self.tensors if is_same else [])
        copies = self._copies if is_same and all(map(is_same_memory, tensors, self.tensors)) else {}
        devices = {tensor.device for tensor in tensors if staging.device.holds(tensor)}
        for mark in (self._after, *map(staging.device.mark, devices)):  # PINNED-4
            if mark is not None:
                mark.synchronize()
        self.tensors, self._places, self._copies = tensors, list(_places(tensors)), copies
        self._shapes, self._after = shapes, None
        self._digests, self._unchecked, self._early, self._num_strange = None, set(), set(), 0
        if not is_same:
            self._found = {}
        self.missing = set(range(len(self._places)))
        self._count(0, sum(place.end - place.start for place in self._places))
        return sorted(self.missing - self._found.keys())

    def expect_digests(self, digests: list[str]) -> None:
        """The chunks are those with these `digests`. Raises WireError: there are more or fewer."""
        if len(digests) != len(self._places):
            raise WireError(f"{len(digests)} digests do not match {len(self._places)} chunks")
        self._digests = digests
        early, self._early = self._early, set()
        for index in early:
            _, start, end = self._places[index]
            self._count(self._bytes[0] - (end - start), self._bytes[1])  # `_finish` adds them
            if self._found[index] == digests[index]:  # RECEIVED-3
                self._finish(index)
        for index in [index for index, found in self._found.items() if found != digests[index]]:
            del self._found[index]
        firsts = {
            index
            for index, place in enumerate(self._places)
            if place.start == 0 and self._own[place.tensor] is not None
        }
        self._unchecked = (self._found.keys() | firsts) & self.missing

    @property
    def num_here(self) -> int:
        """Chunks that have been received, and are not known to be wrong, or not those of the expected state."""
        return len(self._found)

    def place(self, index: int) -> Place:
        return self._places[index]

    def is_here(self, index: int, reader: staging.Reader) -> bool:
        """RECEIVED-2: whether this missing chunk is here: an earlier fetch has received it, or this rank has it by
        itself. It is then no longer missing."""
        with self.changed:
            if index not in self._unchecked:
                return False
            number, start, end = self._places[index]
            target, own = self.tensors[number], self._own[number]
            apart = None if index in self._found or own is target else own
        # The copy of RECEIVED-1 replaces the tensor's own bytes; and a reader would make another copy of all of it.
        data = reader.read(self._on_host(number, target) if apart is None else apart, start, end)
        found = self._digest_of(data)
        with self.changed:
            self._unchecked.discard(index)
            is_right = self._digests is not None and found == self._digests[index]
        if is_right and apart is not None:  # HEALER-4
            as_bytes(target)[start:end] = data
        with self.changed:
            if is_right:
                self._found[index] = found
                self._finish(index)
            if start == 0 and own is not None:
                self._has_looked(index, is_right)
        return is_right

    def _has_looked(self, first: int, is_right: bool) -> None:
        """RECEIVED-2. At the first chunk of one of this rank's tensors."""
        self._num_strange = 0 if is_right else self._num_strange + 1
        if is_right:
            number = self._places[first].tensor
            following = itertools.takewhile(
                lambda index: self._places[index].tensor == number, range(first + 1, len(self._places))
            )
            self._unchecked |= self.missing.intersection(following)
        elif self._num_strange == MAX_STRANGE:
            self._unchecked &= self._found.keys()

    def _finish(self, index: int) -> None:
        number, start, end = self._places[index]
        self.missing.discard(index)
        self._finish_copy(number)
        self._count(self._bytes[0] + end - start, self._bytes[1])
        if not self.missing:  # a waiter looks for more to do now and then
            self.changed.notify_all()

    def _count(self, received: int, total: int) -> None:
        self._bytes = (received, total)
        self._on_progress(received, total)

    def pause(self) -> None:
        """The fetch is over without the whole state."""
        with self.changed:
            self._on_progress(0, 0)

    def receive(self, index: int, writer: staging.ChunkWriter, into: Callable[[memoryview], None]) -> None:
        """Have `into` write a chunk to the memory that it gets, and keep it. One thread at a time receives a chunk.
        Raises WireError: its digest is wrong."""
        number, start, end = self._places[index]
        target = self.tensors[number]
        is_staged = staging.device.holds(target) and target.is_contiguous()
        if is_staged:
            data = as_bytes(writer.buffer(end - start))
        else:
            data = as_bytes(self._on_host(number, target))[start:end]
        into(data)
        found = self._digest_of(data)
        self._check(index, found)
        if is_staged:
            writer.write(target, start, end - start)
        with self.changed:
            self._check(index, found)  # they may be known now
            self._found[index] = found
            if self._digests is None:
                self._early.add(index)
                self._count(self._bytes[0] + end - start, self._bytes[1])
            else:
                self._finish(index)

    def _check(self, index: int, found: str) -> None:
        digests = self._digests
        if digests is not None and found != digests[index]:
            raise WireError(f"the digest of chunk {index} is wrong")

    def _on_host(self, number: int, target: Tensor) -> Tensor:
        """RECEIVED-1."""
        if target.is_contiguous():
            return target
        with self.changed:
            if number not in self._copies:
                self._copies[number] = target.detach().cpu().contiguous()  # with the chunks that it has
            return self._copies[number]

    def _finish_copy(self, number: int) -> None:
        if number in self._copies and not any(self._places[index].tensor == number for index in self.missing):
            self.tensors[number].detach().copy_(self._copies.pop(number))


def _places(tensors: list[Tensor]) -> Iterator[Place]:
    size = staging.CHUNK_BYTES
    for number, tensor in enumerate(tensors):
        for start in range(0, tensor.nbytes, size):
            yield Place(number, start, min(start + size, tensor.nbytes))
