"""Certificates for tests, made by a CA of the test's own."""

from __future__ import annotations

import shutil
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import NamedTuple

import trustme

from elasticgang.session.tls import Tls, TlsContents, TlsFiles, read_tls


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
        contents = TlsContents(self.cert.read_text(), self.key.read_text(), self.ca.read_text())
        return Tls(TlsFiles(str(self.cert), str(self.key), str(self.ca)), contents)


class Mounted:
    """Files as Kubernetes mounts a secret: links to a link to a directory, which is replaced as a whole."""

    def __init__(self, directory: Path, files: Files) -> None:
        self._directory, self._num_swaps = directory, 0
        directory.mkdir()
        self.files = Files(*(directory / name for name in ("tls.crt", "tls.key", "ca.crt")))
        self.swap(files)
        for path in self.files:
            path.symlink_to(Path("..data") / path.name)

    def swap(self, files: Files) -> None:
        self._num_swaps += 1
        version = self._directory / f"..version-{self._num_swaps}"
        version.mkdir()
        for path, new in zip(self.files, files, strict=True):
            shutil.copy(new, version / path.name)
        link = self._directory / "..data_tmp"
        link.symlink_to(version.name)
        link.replace(self._directory / "..data")
        shutil.rmtree(self._directory / f"..version-{self._num_swaps - 1}", ignore_errors=True)


class Authority:
    def __init__(self, directory: Path, name: str = "ca", parent: Authority | None = None) -> None:
        """`parent`: has signed it; the certificates bring the chain, and `ca` is the parent's."""
        self._authority: trustme.CA = trustme.CA(None if parent is None else parent._authority)
        self._directory, self._name, self._num_issued = directory, name, 0
        self.ca: Path = directory / f"{name}.pem" if parent is None else parent.ca
        if parent is None:
            self._authority.cert_pem.write_to_path(self.ca)

    def issue(
        self,
        *names: str,
        expired: bool = False,
        begins_in: timedelta | None = None,
        ends_in: timedelta | None = None,
    ) -> Files:
        """A certificate for `names`, by default for the loopback address. `begins_in`, `ends_in`: from now."""
        now = datetime.now(timezone.utc)
        begin = None if begins_in is None else now + begins_in
        end = datetime(2001, 1, 1, tzinfo=timezone.utc) if expired else None
        end = end if ends_in is None else now + ends_in
        issued = self._authority.issue_cert(*(names or ("127.0.0.1",)), not_before=begin, not_after=end)
        self._num_issued += 1
        stem = f"{self._name}-{names[0] if names else 'host'}-{self._num_issued}"
        cert, key = self._directory / f"{stem}.pem", self._directory / f"{stem}-key.pem"
        cert.write_bytes(b"".join(pem.bytes() for pem in issued.cert_chain_pems))
        key.touch(mode=0o600)
        issued.private_key_pem.write_to_path(key)
        return Files(cert, key, self.ca)
