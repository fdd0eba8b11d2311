"""Addresses as they are given and written, of both families."""

from __future__ import annotations

import socket

import pytest

from elasticgang.session.addresses import address_of, family_of, host_and_port


@pytest.mark.parametrize("host", ["10.0.0.1", "trainer", "fd00::1", "::"])
def test_an_address_that_was_written_is_read(host: str) -> None:
    assert host_and_port(address_of(host, 29400)) == (host, "29400")
    assert host_and_port(f"{host}:29400") == (host, "29400")
    assert family_of(host) == (socket.AF_INET6 if ":" in host else socket.AF_INET)


def test_an_ipv6_address_is_written_in_brackets() -> None:
    assert address_of("fd00::1", 80) == "[fd00::1]:80"
    assert address_of("10.0.0.1", 80) == "10.0.0.1:80"


def test_an_address_without_a_port_is_none() -> None:
    assert host_and_port("trainer") == ("", "")
