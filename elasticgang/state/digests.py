"""The digests by which a healer checks the chunks that it receives, and their computation at a holder.

DIGEST-1  Where a secret alone authenticates a connection, the digest is SHA-256: whoever is on the path can change the
    bytes of a chunk, but find no others of the same digest. With TLS, and with neither, it is XXH3, which finds
    corruption: TLS protects every byte, and without credentials nobody is authenticated.
DIGEST-2  One thread at a time computes the digests of an attempt, for all that want them. The others wait for it, or
    until it gives up.
DIGEST-3  It divides them among `NUM_DIGESTERS` threads. If one of these fails, the others end with their present chunk,
    and `of` raises the first error once all have ended: none reads the state after that, beside an apply.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import xxhash
from torch import Tensor

from elasticgang.errors import WireError
from elasticgang.protocol.commit import Attempt
from elasticgang.session.credentials import Credentials
from elasticgang.state.peer_memory import is_lendable
from elasticgang.state.staging import Chunks

NUM_DIGESTERS = 2  # threads
TELL_S = 5.0
_STOPPED_POLL_S = 0.02

Digest: TypeAlias = Callable[[memoryview], str]
Tell: TypeAlias = Callable[[int], object]
_CHARS = 32  # 128 bits


def digest_for(credentials: Credentials) -> Digest:
    """DIGEST-1. Both release the interpreter's lock for large chunks."""
    is_by_secret_alone = credentials.secret is not None and credentials.tls is None
    return _sha256 if is_by_secret_alone else xxhash.xxh3_128_hexdigest


def _sha256(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()[:_CHARS]


class Digests:
    """The chunk digests of one attempt, kept for further healers."""

    def __init__(self, digest: Digest) -> None:
        self.digest = digest
        self._changed = threading.Condition()
        self._known: tuple[Attempt, list[str]] | None = None
        self._begun: Attempt | None = None  # a thread computes those of this one
        self._found: list[list[str]] = []  # by that thread and those beside it
        self._is_stopped = threading.Event()

    def known(self, attempt: Attempt) -> list[str] | None:
        with self._changed:
            return self._known[1] if self._known is not None and self._known[0] == attempt else None

    def are_begun(self, attempt: Attempt) -> bool:
        return self._begun == attempt or self.known(attempt) is not None

    def of(
        self,
        attempt: Attempt,
        tensors: Sequence[Tensor],
        chunks: Chunks,
        stopped: threading.Event | None = None,
        tell: Tell = lambda num: None,
    ) -> list[str]:
        """`chunks`: of `tensors`. `tell`: gets the number of digests that there are, every `TELL_S`. Raises WireError:
        `stop` was called meanwhile, or `stopped` is set."""
        while True:  # DIGEST-2
            with self._changed:
                if self._known is not None and self._known[0] == attempt:
                    return self._known[1]
                if self._begun is None:
                    self._begun = attempt
                    break
                self._changed.wait(TELL_S if stopped is None else _STOPPED_POLL_S)
                num = sum(map(len, self._found))
            if stopped is not None and stopped.is_set():
                raise WireError("the digests of the state were stopped for an apply")
            tell(num)
        known = None
        try:
            found = self._digest_all(tensors, chunks, stopped or self._is_stopped, tell)
            known = attempt, found
            return found
        finally:
            with self._changed:
                self._begun, self._known = None, known
                self._changed.notify_all()

    def _digest_all(self, tensors: Sequence[Tensor], chunks: Chunks, stopped: threading.Event, tell: Tell) -> list[str]:
        num_threads = NUM_DIGESTERS if all(map(is_lendable, tensors)) else 1  # PINNED-1
        parts = [
            range(len(chunks) * k // num_threads, len(chunks) * (k + 1) // num_threads) for k in range(num_threads)
        ]
        found: list[list[str]] = [[] for _ in parts]
        self._found = found
        errors: list[Exception] = []

        def digest_part(chunks: Chunks, numbers: range, found: list[str], tell: Tell | None = None) -> None:
            try:
                self._digest_part(chunks, numbers, found, tell, lambda: stopped.is_set() or bool(errors))
            except Exception as exc:
                errors.append(exc)

        begun = []
        try:
            for each in zip(parts[1:], found[1:], strict=True):
                thread = threading.Thread(target=digest_part, args=(Chunks(tensors, None), *each), daemon=True)
                thread.start()
                begun.append(thread)
        except RuntimeError as exc:  # no thread is left
            errors.append(exc)
        digest_part(chunks, parts[0], found[0], tell)
        for thread in begun:  # DIGEST-3
            thread.join(TELL_S)
            while thread.is_alive():
                try:
                    tell(sum(map(len, found)))
                except Exception as exc:
                    errors.append(exc)
                thread.join(TELL_S)
        if errors:
            raise errors[0]
        digests = list(itertools.chain.from_iterable(found))
        if len(digests) < len(chunks):
            raise WireError("the digests of the state were stopped for an apply")
        return digests

    def _digest_part(
        self, chunks: Chunks, numbers: range, found: list[str], tell: Tell | None, is_over: Callable[[], bool]
    ) -> None:
        told_at = time.monotonic()
        for number in numbers:
            if self._is_stopped.is_set() or is_over():
                return
            found.append(self.digest(chunks[number]))
            if tell is not None and time.monotonic() - told_at >= TELL_S:
                told_at = time.monotonic()
                tell(sum(map(len, self._found)))

    def stop(self) -> None:
        """End `of` soon, until `forget` (SNAPSHOT-3)."""
        self._is_stopped.set()

    def forget(self) -> None:
        """The state is about to change, and has no readers."""
        with self._changed:
            self._known = None
        self._is_stopped.clear()
