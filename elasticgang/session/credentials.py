"""By what the processes of a job authenticate each other: a secret, TLS, or both.

CRED-LOCAL  Without either, addresses of this host's loopback only, unless `insecure` says otherwise.
"""

from __future__ import annotations

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
    """`insecure`: addresses beyond loopback are used without any."""

    secret: Secret | None = None
    tls: Tls | None = None
    insecure: bool = False

    @property
    def are_given(self) -> bool:
        return self.secret is not None or self.tls is not None

    @property
    def key(self) -> bytes:
        """For the handshake of a session; empty without a secret."""
        return b"" if self.secret is None else self.secret.reveal()

    def is_open_at(self, host: str) -> bool:
        """Whether anybody who reaches `host` could take part. Raises OSError or UnicodeError: it is no name of a
        host."""
        return not (self.are_given or is_loopback(host))

    def check_address(self, host: str, what: str) -> None:
        """Raises OperationalError: sessions at `host` would be open to other hosts (CRED-LOCAL)."""
        if not self.insecure and self.is_open_at(host):
            raise OperationalError(
                f"without a secret or TLS {what}: give `--secret-file` or `--tls-cert`, or `--insecure` in a network "
                "that you trust"
            )

    def to_json(self) -> dict[str, Any]:
        """For a process that this one starts, over a socket that nobody else holds."""
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
    """Raises OSError: it is no name of a host."""
    addresses = {info[4][0] for info in socket.getaddrinfo(host or "0.0.0.0", None)}
    return all(ipaddress.ip_address(str(address).split("%")[0]).is_loopback for address in addresses)
