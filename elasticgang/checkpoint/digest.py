"""The digest of a checkpoint's bytes. It finds corruption; it authenticates nobody."""

from __future__ import annotations

from typing import Protocol

import xxhash

DIGEST_CHARS = 32


class Digest(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


def new_digest() -> Digest:
    digest: Digest = xxhash.xxh3_128()
    return digest


def digest_of(data: bytes | memoryview) -> str:
    digest = new_digest()
    digest.update(data)
    return digest.hexdigest()
