"""Connects to a host that may have several addresses.

ADDRESS-ALL   Each address is tried in the resolver's order. The error names every address, and is a
              ConnectionRefusedError only if every address refused the connection.
ADDRESS-TIME  An address that does not answer leaves time for the others. `open_socket` (`open_socket.py`) begins with
              the next one while it waits, and has begun with all of them after `STAGGER_S`. `probe` gives each an equal
              part of its time.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterable
from typing import Any

from elasticgang.errors import reason_of


def probe(host: str, port: int, timeout_s: float) -> None:
    """Connect to `port` of `host`, and close the connection. Raises OSError (ADDRESS-ALL): nothing accepts it in
    time."""
    deadline_s = time.monotonic() + timeout_s
    errors: dict[str, OSError] = {}
    addresses = distinct(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    for number, address in enumerate(addresses):
        part_s = (deadline_s - time.monotonic()) / (len(addresses) - number)  # ADDRESS-TIME
        try:
            return socket.create_connection((address, port), max(0.05, part_s)).close()
        except OSError as exc:
            errors[address] = exc
    raise failure_of(errors)


def address_of(host: str, port: int) -> str:
    """As it is written for a person: an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_and_port(address: str) -> tuple[str, str]:
    """Of `HOST:PORT`. An IPv6 address may be in brackets. Both are empty if there is no colon."""
    host, separator, port = address.rpartition(":")
    return (host.strip("[]"), port) if separator else ("", "")


def family_of(host: str) -> socket.AddressFamily:
    """For a listener at `host`, an address or a name."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_address_here(host: str) -> bool:
    """Whether this machine has the address `host`."""
    with socket.socket(family_of(host), socket.SOCK_STREAM) as tried:
        try:
            tried.bind((host, 0))
        except OSError as exc:
            return exc.errno != errno.EADDRNOTAVAIL
    return True


def distinct(found: Iterable[tuple[Any, ...]]) -> list[str]:
    return list(dict.fromkeys(str(info[4][0]) for info in found))


def failure_of(errors: dict[str, OSError]) -> OSError:
    """ADDRESS-ALL"""
    (first, *others) = errors.values()
    if not others:
        return first
    reasons = "; ".join(f"{address}: {_reason(exc)}" for address, exc in errors.items())
    if all(isinstance(exc, ConnectionRefusedError) for exc in errors.values()):
        return ConnectionRefusedError(f"every address refuses: {reasons}")
    return OSError(f"no address answers: {reasons}")


def _reason(error: OSError) -> str:
    return "Connection refused" if isinstance(error, ConnectionRefusedError) else reason_of(error)


def listen_failure(host: str, port: int, error: OSError) -> str:
    """What to say if nothing can listen there. The functions that listen put the address into `strerror`."""
    reason = os.strerror(error.errno) if error.errno and error.errno > 0 else reason_of(error)
    return f"cannot listen on {address_of(host, port)}: {reason}"
