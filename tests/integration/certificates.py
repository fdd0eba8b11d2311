"""Certificates for tests, made by a CA of the test's own."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import trustme

from elasticgang.session.tls import Tls, read_tls


class Files(NamedTuple):
    cert: Path
    key: Path
    ca: Path

    @property
    def options(self) -> list[str]:
        return ["--tls-cert", str(self.cert), "--tls-key", str(self.key), "--tls-ca", str(self.ca)]

    def read(self, *, is_client: bool = True) -> Tls:
        tls = read_tls(*self, is_client=is_client)
        assert tls is not None
        return tls

    def load(self) -> Tls:
        """Without the checks of `read`."""
        return Tls(self.cert.read_text(), self.key.read_text(), self.ca.read_text(), str(self.cert))


class Authority:
    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._authority, self._directory, self._name = trustme.CA(), directory, name
        self.ca = directory / f"{name}.pem"
        self._authority.cert_pem.write_to_path(self.ca)

    def issue(self, *names: str, expired: bool = False) -> Files:
        """A certificate for `names`, by default for the loopback address."""
        end = datetime(2001, 1, 1, tzinfo=timezone.utc) if expired else None
        issued = self._authority.issue_cert(*(names or ("127.0.0.1",)), not_after=end)
        stem = f"{self._name}-{names[0] if names else 'host'}{'-expired' if expired else ''}"
        cert, key = self._directory / f"{stem}.pem", self._directory / f"{stem}-key.pem"
        cert.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        key.touch(mode=0o600)
        issued.private_key_pem.write_to_path(key)
        return Files(cert, key, self.ca)
