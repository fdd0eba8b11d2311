"""The digests by which a healer checks the chunks that it receives.

DIGEST-1  Where a secret alone authenticates a connection, the digest is SHA-256: whoever is on the path can change the
    bytes of a chunk, but find no others of the same digest. With TLS, and with neither, it is XXH3, which finds
    corruption: TLS protects every byte, and without credentials nobody is authenticated.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeAlias

import xxhash

from elasticgang.session.credentials import Credentials

Digest: TypeAlias = Callable[[memoryview], str]
_CHARS = 32  # 128 bits


def digest_for(credentials: Credentials) -> Digest:
    """DIGEST-1. Both release the interpreter's lock for large chunks."""
    is_by_secret_alone = credentials.secret is not None and credentials.tls is None
    return _sha256 if is_by_secret_alone else xxhash.xxh3_128_hexdigest


def _sha256(data: memoryview) -> str:
    return hashlib.sha256(data).hexdigest()[:_CHARS]
