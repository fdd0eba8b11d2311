"""The addresses of this host's network interfaces."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

import psutil

from elasticgang.errors import OperationalError


def addresses_of(names: Sequence[str]) -> list[str]:
    """The address of each of `names`, which are interfaces of this host, or addresses of them. Of an interface, the
    first IPv4 address, or else the first IPv6 address that is not link-local.

    Raises:
        OperationalError: there is no such interface or address here, or an interface has no address; or two names have
            the same address.
    """
    here = {
        name: [
            each.address
            for family in (socket.AF_INET, socket.AF_INET6)
            for each in addresses
            if each.family == family and not ipaddress.ip_address(each.address).is_link_local
        ]
        for name, addresses in psutil.net_if_addrs().items()
    }
    found: dict[str, str] = {}
    for name in names:
        address = _address(name, here)
        if address in found:
            raise OperationalError(f"{found[address]!r} and {name!r} are both {address}")
        found[address] = name
    return list(found)


def _address(name: str, here: dict[str, list[str]]) -> str:
    if name in here:
        if not here[name]:
            raise OperationalError(f"the interface {name!r} has no address")
        return here[name][0]
    try:
        name = str(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        raise OperationalError(f"this host has no interface {name!r}: it has {', '.join(sorted(here))}") from None
    if not any(name in addresses for addresses in here.values()):
        known = ", ".join(address for _, addresses in sorted(here.items()) for address in addresses)
        raise OperationalError(f"this host has no address {name}: it has {known}")
    return name
