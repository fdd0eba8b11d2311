"""TLS 1.3 between the processes of a job: the files, the contexts, and one end of a connection, as bytes in, bytes out.

TLS-BOTH  Each end requires the other's certificate and checks it against its own `--tls-ca`. Every certificate of this
          CA authenticates a member: use a CA that signs nothing else.
TLS-NAME  An agent also checks that the coordinator's certificate is for the host that it connects to, unless that is a
          loopback address. Ranks do not check each other's names.
TLS-SELF  At its start a process performs one handshake with itself, in memory. It fails for a certificate that has
          expired or that the process's own CA does not accept. `tls_watch.py` checks new files likewise.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import re
import ssl
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from elasticgang.errors import OperationalError
from elasticgang.session.secret import read_private
from elasticgang.session.tls_rotation import Life

_MAX_FILE_BYTES = 1 << 20
_READ_BYTES = 1 << 16
_CERTIFICATES = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_RECORD_STARTS = (b"\x15\x03", b"\x16\x03")  # a TLS alert, a TLS handshake

# Why a certificate is refused and what to do, by OpenSSL's verify code.
_ADVICE = {
    9: "it is not valid yet: compare the clocks of both hosts",
    10: "it has expired: issue a new one",
    18: "it is self-signed: both ends need certificates of one CA, and this CA as `--tls-ca`",
    19: "another CA has signed it: both ends need certificates of one CA, and this CA as `--tls-ca`",
    20: "another CA has signed it: both ends need certificates of one CA, and this CA as `--tls-ca`",
    21: "another CA has signed it: both ends need certificates of one CA, and this CA as `--tls-ca`",
    26: "its purpose is limited: leave out the extended key usage, or allow both server and client authentication",
    62: "it is for another host: issue one with this name as a subjectAltName",
    64: "it is for another address: issue one with this address as a subjectAltName",
}
_ALERTS = {
    "UNKNOWN_CA": "another CA has signed it: both ends need certificates of one CA, and this CA as `--tls-ca`",
    "CERTIFICATE_EXPIRED": "it has expired: issue a new one",
    "CERTIFICATE_REQUIRED": "it got none: give `--tls-cert` and `--tls-key`",
    "UNSUPPORTED_CERTIFICATE": _ADVICE[26],
    "PROTOCOL_VERSION": "both ends need TLS 1.3",
}


class TlsFiles(NamedTuple):
    """Absolute paths, whose symbolic links are followed at each reading."""

    cert: str
    key: str
    ca: str


@dataclass(frozen=True, repr=False)
class TlsContents:
    """The contents of the three files, as PEM."""

    cert: str
    key: str
    ca: str

    @functools.cached_property
    def server_context(self) -> ssl.SSLContext:
        return self.make_server_context(checks_client=True)

    def make_server_context(self, *, checks_client: bool) -> ssl.SSLContext:
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # no session resumption
        if not checks_client:
            context.verify_mode = ssl.CERT_NONE
        return context

    @functools.cached_property
    def client_context(self) -> ssl.SSLContext:
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    @functools.cached_property
    def nameless_client_context(self) -> ssl.SSLContext:
        """It does not check the server's name."""
        context = self._context(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        return context

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED  # TLS-BOTH
        context.load_verify_locations(cadata=self.ca)
        with contextlib.closing(
            _MemoryFile(f"{self.cert}\n{self.key}")
        ) as file:  # `ssl` loads certificates from files only
            context.load_cert_chain(file.path, password=_refuse_password)
        return context

    def __reduce__(self) -> str:
        raise TypeError("a private key is not pickled")


class Tls:
    """The TLS identity of a process: its files, and what it uses of them, which `use` replaces while it runs. Any
    thread may call it."""

    def __init__(
        self, files: TlsFiles, contents: TlsContents, life: Life | None = None, *, is_client: bool = True
    ) -> None:
        """`life`: of the certificate that ends first; None: not known. `is_client`: as of `read_tls`."""
        self.files, self.is_client = files, is_client
        self._used = contents, life

    @property
    def path(self) -> str:
        """Of the certificate, for messages."""
        return self.files.cert

    @property
    def contents(self) -> TlsContents:
        return self._used[0]

    @property
    def life(self) -> Life | None:
        return self._used[1]

    def use(self, contents: TlsContents, life: Life) -> None:
        """For every handshake from now on (TLS-NEWEST). The caller has checked them. Makes the contexts, which an event
        loop would wait for. Raises OSError: no descriptor is left; what was used stays."""
        _ = contents.server_context, contents.client_context, contents.nameless_client_context
        self._used = contents, life

    def server_context(self) -> ssl.SSLContext:
        """For the next handshake. Do not keep it for later ones."""
        return self.contents.server_context

    def client_context(self, *, checks_name: bool) -> ssl.SSLContext:
        """For the next handshake. Do not keep it for later ones."""
        return self.contents.client_context if checks_name else self.contents.nameless_client_context

    def to_json(self) -> dict[str, Any]:
        contents, life = self._used
        return {
            "files": list(self.files),
            "contents": asdict(contents),
            "life": life and asdict(life),
            "is_client": self.is_client,
        }

    def __repr__(self) -> str:
        return f"Tls({self.path!r})"

    def __reduce__(self) -> str:
        raise TypeError("a private key is not pickled")


class _MemoryFile:
    """A file with a path and no directory entry: the private key stays in memory."""

    def __init__(self, text: str) -> None:
        self._fd = os.memfd_create("tls", os.MFD_CLOEXEC)
        os.write(self._fd, text.encode())
        self.path = f"/proc/self/fd/{self._fd}"

    def close(self) -> None:
        os.close(self._fd)


def _refuse_password() -> str:
    raise OperationalError("it is encrypted: give one without a passphrase")


def read_tls(cert: Path | None, key: Path | None, ca: Path | None, *, is_client: bool) -> Tls | None:
    """Read and check the three files; None if none is given. `is_client`: this process also connects to others with its
    certificate.

    Raises:
        OperationalError: a file is missing or cannot be used, other users may read the key, or the CA does not accept
            the certificate (TLS-SELF).
    """
    given = {"--tls-cert": cert, "--tls-key": key, "--tls-ca": ca}
    missing = [option for option, path in given.items() if path is None]
    if cert is None or key is None or ca is None:
        if len(missing) == len(given):
            return None
        raise OperationalError(f"TLS needs --tls-cert, --tls-key and --tls-ca, but {' and '.join(missing)} is missing")
    files = TlsFiles(*map(os.path.abspath, (cert, key, ca)))  # not resolved: links may point elsewhere later
    contents = read_contents(files)
    return Tls(files, contents, check_contents(files, contents, is_client=is_client), is_client=is_client)


def read_contents(files: TlsFiles) -> TlsContents:
    """Raises OperationalError: a file cannot be read or is not PEM, or other users may read the key."""
    contents = TlsContents(
        _read(files.cert, "certificate file"),
        read_private(Path(files.key), "key file", _MAX_FILE_BYTES).decode(errors="replace"),
        _read(files.ca, "CA file"),
    )
    for option, path, text, kind in (
        ("--tls-cert", files.cert, contents.cert, "CERTIFICATE"),
        ("--tls-key", files.key, contents.key, "PRIVATE KEY"),
        ("--tls-ca", files.ca, contents.ca, "CERTIFICATE"),
    ):
        if f"{kind}-----" not in text:
            raise OperationalError(f"{option} {path} holds no {kind.lower()} in PEM")
    return contents


def check_contents(files: TlsFiles, contents: TlsContents, *, is_client: bool) -> Life:
    """TLS-SELF. Returns when the first certificate between this process's own and the CA's ends.

    Raises:
        OperationalError: the contents cannot be used, or the CA does not accept the certificate.
    """
    cert, key, ca = files
    try:
        server, client = contents.make_server_context(checks_client=is_client), contents.nameless_client_context
    except OperationalError as exc:
        raise OperationalError(f"--tls-key {key} cannot be used: {exc}") from exc
    except (ssl.SSLError, ValueError) as exc:
        if getattr(exc, "reason", "") == "KEY_VALUES_MISMATCH":
            raise OperationalError(f"--tls-key {key} is not the key of --tls-cert {cert}") from exc
        raise OperationalError(f"--tls-cert {cert}, --tls-key {key} or --tls-ca {ca} cannot be read: {exc}") from exc
    ends = TlsStream(client, is_server=False), TlsStream(server, is_server=True)
    try:
        while not (ends[0].is_open and ends[1].is_open):
            ends[0].receive(b"")
            ends[1].receive(ends[0].outgoing())
            ends[0].receive(ends[1].outgoing())
    except ssl.SSLCertVerificationError as exc:
        why = _ADVICE.get(exc.verify_code, exc.verify_message)
        raise OperationalError(f"--tls-ca {ca} does not accept --tls-cert {cert}: {why}") from exc
    except ssl.SSLError as exc:
        raise OperationalError(f"--tls-cert {cert} cannot be used: {exc}") from exc
    return _first_end(files, contents, ends[0].peer_certificate())


def _first_end(files: TlsFiles, contents: TlsContents, certificate: dict[str, Any]) -> Life:
    """Follows the issuers' names. Of several certificates with one name, the last to end counts: a renewed CA is beside
    the one before."""
    issuers = [("the CA certificate in", path, each) for path, each in _authorities(files, contents)]
    first = _life_of("the certificate", files.cert, certificate)
    name, passed = certificate.get("issuer"), []
    while name not in passed:
        passed.append(name)
        named = [each for each in issuers if each[2].get("subject") == name]
        if not named:
            break
        newest = max(named, key=lambda each: _life_of(*each).ends_s)
        first = min(first, _life_of(*newest), key=lambda life: life.ends_s)
        name = newest[2].get("issuer")
    return first


def _authorities(files: TlsFiles, contents: TlsContents) -> list[tuple[str, dict[str, Any]]]:
    """The CA certificates in the files of the certificate and the CA, with the file of each."""
    found: list[tuple[str, dict[str, Any]]] = []
    for path, text in ((files.cert, contents.cert), (files.ca, contents.ca)):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        with contextlib.suppress(ssl.SSLError, ValueError):  # the check takes more than this does
            context.load_verify_locations(cadata="\n".join(_CERTIFICATES.findall(text)))
        found += [(path, each) for each in context.get_ca_certs()]
    return found


def _life_of(what: str, path: str, certificate: Mapping[str, Any]) -> Life:
    begins_s, ends_s = (float(ssl.cert_time_to_seconds(certificate[end])) for end in ("notBefore", "notAfter"))
    return Life(f"{what} {path}", begins_s, ends_s)


def _read(path: str, what: str) -> str:
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise OperationalError(f"the {what} {path} cannot be read: {exc.strerror}") from exc
    if len(data) > _MAX_FILE_BYTES:
        raise OperationalError(f"the {what} {path} is over {_MAX_FILE_BYTES} bytes")
    return data.decode(errors="replace")


def tls_from_json(fields: Mapping[str, Any]) -> Tls:
    life = fields["life"]
    return Tls(
        TlsFiles(*fields["files"]),
        TlsContents(**fields["contents"]),
        None if life is None else Life(**life),
        is_client=fields["is_client"],
    )


def name_to_check(host: str) -> str | None:
    """The name that the certificate of a coordinator at `host` must have; None for any name (TLS-NAME)."""
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host.split("%")[0]).is_loopback:
            return None
    return host


class TlsStream:
    """One end of a connection. The caller moves bytes between its socket and `receive` and `outgoing`, and sets the
    deadline of the handshake."""

    def __init__(self, context: ssl.SSLContext, *, is_server: bool, name: str | None = None) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._ssl = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server, server_hostname=name)
        self.is_open = False

    def receive(self, data: bytes) -> bytes:
        """Decrypt received bytes. Raises ssl.SSLError; `outgoing` then returns the alert for the peer."""
        self._incoming.write(data)
        parts = []
        with contextlib.suppress(ssl.SSLWantReadError):
            if not self.is_open:
                self._ssl.do_handshake()
                self.is_open = True
            while part := self._ssl.read(_READ_BYTES):
                parts.append(part)
        return b"".join(parts)

    def send(self, data: bytes) -> None:
        """Encrypt `data`, for `outgoing`."""
        view = memoryview(data)
        while view:
            view = view[self._ssl.write(view) :]

    def outgoing(self) -> bytes:
        """The bytes to write to the socket. Removes them."""
        return self._outgoing.read()

    def peer_certificate(self) -> dict[str, Any]:
        """As `ssl.SSLObject.getpeercert` has it, after the handshake; empty if this end does not check it."""
        return dict(self._ssl.getpeercert() or {})


def looks_like_tls(start: bytes) -> bool:
    """Whether `start` begins a TLS record."""
    return start[:2] in _RECORD_STARTS


def explain(error: ssl.SSLError, peer: str, own: str) -> str:
    """Why TLS with `peer` failed, and what to do. `own`: the path of this end's certificate."""
    if isinstance(error, ssl.SSLCertVerificationError):
        why = _ADVICE.get(error.verify_code, error.verify_message)
        return f"the certificate of {peer} is refused: {why}"
    reason = error.reason or type(error).__name__
    if "PEER_DID_NOT_RETURN_A_CERTIFICATE" in reason:
        return f"{peer} shows no certificate: it needs `--tls-cert` and `--tls-key`"
    if "ALERT" in reason or "CERTIFICATE" in reason:
        alert = next((why for name, why in _ALERTS.items() if name in reason), reason.lower().replace("_", " "))
        return f"{peer} refuses the certificate {own}: {alert}"
    return f"{peer} does not speak TLS 1.3 ({reason.lower().replace('_', ' ')}): both ends need `--tls-cert`"
