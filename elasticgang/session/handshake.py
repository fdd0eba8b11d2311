"""The handshake by which both ends of a session prove that they hold the job's secret. Pure: bytes in, bytes out.

    client -> server   hello: wire version, protocol version, job, role, the client's nonce
    server -> client   challenge: the server's nonce
    client -> server   proof: HMAC(secret, "client", transcript)
    server -> client   proof: HMAC(secret, "server", transcript)

AUTH-MUTUAL  Neither end sends or accepts a message before it has checked the other's proof.
AUTH-BOUND   The transcript contains both nonces, the job, the role and both versions, each with its length. A proof is
             valid for this transcript only.
AUTH-KEYS    Each direction has its own key, derived from the secret and the transcript.
AUTH-EQUAL   A client cannot distinguish an unknown job from a wrong secret.

Without a secret, every client passes, and the MACs detect damage only. `credentials.py` restricts that to loopback.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Callable
from dataclasses import dataclass

from elasticgang.errors import WireError

WIRE_VERSION = 3
NONCE_BYTES = 32
PROOF_BYTES = 32
MAX_HANDSHAKE_BYTES = 1024
_MAX_JOB_BYTES = 256

AGENT, RANK, OPERATOR = ROLES = ("agent", "rank", "operator")


@dataclass(frozen=True)
class Identity:
    """The job, the role and the protocol version of a client. Its proof covers them."""

    job: str
    role: str
    protocol: int

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise WireError(f"the role must be one of {', '.join(ROLES)}, but is {self.role!r}")
        try:
            num_bytes = len(self.job.encode())
        except UnicodeEncodeError as exc:  # JSON may name a half of a surrogate pair
            raise WireError("a job's name must be Unicode text without surrogates") from exc
        if not 0 < num_bytes <= _MAX_JOB_BYTES:
            raise WireError(f"a job's name must have 1 to {_MAX_JOB_BYTES} bytes")


@dataclass(frozen=True)
class SessionKeys:
    to_server: bytes
    to_client: bytes


class ClientHandshake:
    """`server`: the name of the other end in messages."""

    def __init__(self, identity: Identity, secret: bytes, nonce: bytes, server: str = "the coordinator") -> None:
        self._identity, self._secret, self._nonce, self._server = identity, secret, nonce, server
        self._transcript = b""

    def hello(self) -> bytes:
        i = self._identity
        fields = {
            "wire": WIRE_VERSION,
            "protocol": i.protocol,
            "job": i.job,
            "role": i.role,
            "nonce": self._nonce.hex(),
        }
        return json.dumps(fields, separators=(",", ":")).encode()

    def answer(self, challenge: bytes) -> bytes:
        if len(challenge) != NONCE_BYTES:
            raise WireError("the server sent no challenge")
        self._transcript = _transcript(self._identity, self._nonce, challenge)
        return _proof(self._secret, b"client", self._transcript)

    def finish(self, proof: bytes) -> SessionKeys:
        """`proof`: beyond `PROOF_BYTES`, padding. Raises WireError: it is wrong."""
        if not hmac.compare_digest(proof[:PROOF_BYTES], _proof(self._secret, b"server", self._transcript)):
            raise WireError(f"{self._server} does not hold the secret of this job")
        return _keys(self._secret, self._transcript)


class ServerHandshake:
    """`secret_of`: returns the secret of a job, or None for an unknown job. `decoy`: random bytes, drawn once per
    process, used in place of an unknown job's secret (AUTH-EQUAL). `roles`: the accepted roles."""

    def __init__(
        self, secret_of: Callable[[str], bytes | None], nonce: bytes, decoy: bytes, roles: tuple[str, ...] = ROLES
    ) -> None:
        self._secret_of, self._nonce, self._decoy, self._roles = secret_of, nonce, decoy, roles
        self._secret = decoy
        self._transcript = b""
        self.identity: Identity | None = None

    def challenge(self, hello: bytes) -> bytes:
        self.identity, client_nonce = _read_hello(hello)
        if self.identity.role not in self._roles:
            raise WireError(f"role {self.identity.role} is not accepted here")
        secret = self._secret_of(self.identity.job)
        self._secret = self._decoy if secret is None else secret
        self._transcript = _transcript(self.identity, client_nonce, self._nonce)
        return self._nonce

    def finish(self, proof: bytes) -> tuple[bytes, SessionKeys]:
        """The server's proof, and the keys. `proof`: as of `ClientHandshake`. Raises WireError: it is wrong."""
        if not hmac.compare_digest(proof[:PROOF_BYTES], _proof(self._secret, b"client", self._transcript)):
            raise WireError("a client does not hold the secret of the job that it names")
        return _proof(self._secret, b"server", self._transcript), _keys(self._secret, self._transcript)


def _read_hello(hello: bytes) -> tuple[Identity, bytes]:
    try:
        fields = json.loads(hello)
        wire, nonce = fields["wire"], bytes.fromhex(fields["nonce"])
        job, role, protocol = fields["job"], fields["role"], fields["protocol"]
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise WireError("the first frame is not a hello") from exc
    if wire != WIRE_VERSION:
        raise WireError(f"the client's wire version is {wire!r}, but must be {WIRE_VERSION}")
    if not (isinstance(job, str) and isinstance(role, str) and type(protocol) is int and 0 <= protocol < 1 << 32):
        raise WireError("a field of the hello has a wrong type")
    if len(nonce) != NONCE_BYTES:
        raise WireError(f"the client's nonce must have {NONCE_BYTES} bytes, but has {len(nonce)}")
    return Identity(job, role, protocol), nonce


def _transcript(identity: Identity, client_nonce: bytes, server_nonce: bytes) -> bytes:
    parts = (
        b"elasticgang",
        WIRE_VERSION.to_bytes(4, "big"),
        identity.protocol.to_bytes(4, "big"),
        identity.job.encode(),
        identity.role.encode(),
        client_nonce,
        server_nonce,
    )
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def _proof(secret: bytes, side: bytes, transcript: bytes) -> bytes:
    return hmac.digest(secret, b"proof " + side + transcript, hashlib.sha256)


def _keys(secret: bytes, transcript: bytes) -> SessionKeys:
    return SessionKeys(
        hmac.digest(secret, b"key to the server" + transcript, hashlib.sha256),
        hmac.digest(secret, b"key to the client" + transcript, hashlib.sha256),
    )
