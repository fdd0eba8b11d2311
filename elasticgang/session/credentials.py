"""The credentials by which the processes of a job authenticate each other: a secret, TLS, or both.

CRED-LOCAL  Without credentials, only loopback addresses are used, unless `insecure` is set.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elasticgang.errors import OperationalError
from elasticgang.session.secret import Secret
from elasticgang.session.tls import Tls, tls_from_json


@dataclass(frozen=True)
class Credentials:
    """`insecure`: allow addresses beyond loopback without credentials."""

    secret: Secret | None = None
    tls: Tls | None = None
    insecure: bool = False

    @property
    def are_given(self) -> bool:
        return self.secret is not None or self.tls is not None

    @property
    def key(self) -> bytes:
        """The key of the session handshake; empty without a secret."""
        return b"" if self.secret is None else self.secret.reveal()

    @property
    def missing(self) -> str:
        """The options of a secret that these lack, and that a coordinator which refuses them may need. Empty: none."""
        if self.secret is not None:
            return ""
        return "--secret-file" if self.tls is not None else "--secret-file or --tls-cert"

    def is_open_at(self, host: str) -> bool:
        """Whether unauthenticated peers could connect at `host`. Raises OSError or UnicodeError: `host` cannot be
        resolved."""
        return not (self.are_given or is_loopback(host))

    def check_address(self, host: str, what: str) -> None:
        """Raises OperationalError: unauthenticated peers on other hosts could connect at `host` (CRED-LOCAL). `what`:
        the clause of the message that names the process and the address."""
        if not self.insecure and self.is_open_at(host):
            raise OperationalError(
                f"without a secret or TLS {what}: give `--secret-file` or `--tls-cert`, or `--insecure` in a network "
                "that you trust"
            )

    def to_json(self) -> dict[str, Any]:
        """For a child process, over a socket that only the two hold. Contains the secret and the private key."""
        return {
            "secret": self.key.hex(),
            "tls": None if self.tls is None else self.tls.to_json(),
            "insecure": self.insecure,
        }


def credentials_from_json(fields: Mapping[str, Any]) -> Credentials:
    secret = bytes.fromhex(fields["secret"])
    return Credentials(
        Secret(secret) if secret else None,
        None if fields["tls"] is None else tls_from_json(fields["tls"]),
        bool(fields["insecure"]),
    )


def is_loopback(host: str) -> bool:
    """Raises OSError: `host` cannot be resolved."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.split("%")[0]).is_loopback
    addresses = {info[4][0] for info in socket.getaddrinfo(host or "0.0.0.0", None)}
    return all(ipaddress.ip_address(str(address).split("%")[0]).is_loopback for address in addresses)
