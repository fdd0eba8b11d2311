"""The digest of a checkpoint's bytes. It finds corruption; it authenticates nobody."""

from __future__ import annotations

from typing import Protocol

from elasticgang.errors import NotSupportedError

DIGEST_CHARS = 32


class Digest(Protocol):
    def update(self, data: bytes | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


def new_digest() -> Digest:
    """Raises NotSupportedError: the package xxhash is missing."""
    try:
        import xxhash
    except ImportError as exc:
        raise NotSupportedError("checkpoints need xxhash: pip install 'elasticgang[checkpoint]'") from exc
    digest: Digest = xxhash.xxh3_128()
    return digest


def digest_of(data: bytes | memoryview) -> str:
    digest = new_digest()
    digest.update(data)
    return digest.hexdigest()
