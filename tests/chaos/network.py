"""Hosts on this machine: network namespaces on a bridge of their own, whose cables can be pulled, and containers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Sequence
from types import TracebackType

import psutil
import pytest

from tests.preloaded import CONTAINED, IN_NAMESPACE


class Network:
    """`hosts` have the addresses 10.77.0.1, 10.77.0.2, ... As a context manager, leaves nothing behind."""

    def __init__(self, hosts: Sequence[str], *, has_ipv6: bool = False) -> None:
        """Skips the test where namespaces are not to be had. `has_ipv6`: the addresses are fd77::1, fd77::2, ... and
        there are no others."""
        if shutil.which("ip") is None:
            pytest.skip("needs iproute2 (`ip netns`)")
        _delete_what_dead_tests_left()
        self._mark = f"eg{os.getpid()}x{uuid.uuid4().hex[:4]}"
        self._made: list[str] = []
        self._switches: set[int] = set()
        self._num_moved = 0
        self._has_ipv6 = has_ipv6
        subnet = "fd77::" if has_ipv6 else "10.77.0."
        self.addresses = {host: f"{subnet}{number}" for number, host in enumerate(hosts, 1)}
        try:
            self._make(self._mark)
            for host in hosts:
                self._make(self._name(host))
        except subprocess.CalledProcessError as error:
            self.close()
            pytest.skip(f"`ip netns add` is not permitted here: {error.stderr.decode().strip()}")
        try:
            self._connect(hosts)
        except BaseException:
            self.close()
            raise

    def on(self, host: str) -> list[str]:
        """The beginning of a command that runs there."""
        return [*IN_NAMESPACE, self._name(host)]

    def contained(self, host: str) -> list[str]:
        """The beginning of a command that is process 1 of a container there: with process identifiers, shared memory,
        a host name and System V objects of its own, as `docker run` gives them. Skips the test where there are none."""
        container = [*self.on(host), *CONTAINED, host]
        tried = subprocess.run([*container, "true"], capture_output=True, text=True, timeout=20)
        if tried.returncode:
            pytest.skip(f"containers are not permitted here: {tried.stderr.strip()}")
        return container

    def add_interface(self, host: str, number: int) -> str:
        """Interfaces of one number are on a network of their own. Returns the new one's name."""
        name, subnet = f"eth{number}", f"10.78.{number}"
        there, switch, cable = ["-n", self._name(host)], f"switch{number}", f"{name}-{host}"
        if number not in self._switches:
            self._switches.add(number)
            _ip("-n", self._mark, "link", "add", switch, "type", "bridge")
            _ip("-n", self._mark, "link", "set", switch, "up")
        ends = ["link", "add", cable, "type", "veth", "peer", "name", name, "netns", self._name(host)]
        _ip("-n", self._mark, *ends)
        _ip("-n", self._mark, "link", "set", cable, "master", switch, "up")
        last = self.addresses[host].rpartition(".")[2]
        _ip(*there, "address", "add", f"{subnet}.{last}/24", "dev", name)
        _ip(*there, "link", "set", name, "up")
        return name

    def cut_interface(self, host: str, name: str) -> None:
        """As `cut`, for one that `add_interface` has made."""
        _ip("-n", self._mark, "link", "set", f"{name}-{host}", "down")

    def set_interface(self, host: str, name: str, state: str) -> None:
        """Up or down, on the host itself, which loses the routes by it when it goes down."""
        _ip("-n", self._name(host), "link", "set", name, state)

    def bytes_sent(self, host: str, name: str) -> int:
        command = ["ip", "-n", self._name(host), "-json", "-statistics", "link", "show", "dev", name]
        shown = subprocess.run(command, check=True, capture_output=True, timeout=20).stdout
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])

    def cut(self, host: str) -> None:
        """Nothing reaches it, or leaves it, from now on; nobody is told."""
        _ip("-n", self._mark, "link", "set", f"to-{host}", "down")

    def reconnect(self, host: str) -> None:
        _ip("-n", self._mark, "link", "set", f"to-{host}", "up")

    def drop(self, host: str, other: str) -> None:
        """What `host` sends to `other` is dropped from now on, as by a firewall; nobody is told."""
        nowhere = ["lladdr", "02:00:00:00:00:01", "nud", "permanent"]
        _ip("-n", self._name(host), "neighbor", "replace", self.addresses[other], "dev", "eth0", *nowhere)

    def pass_on(self, host: str, other: str) -> None:
        """No more."""
        _ip("-n", self._name(host), "neighbor", "delete", self.addresses[other], "dev", "eth0")

    def refuse(self, host: str, other: str) -> None:
        """What `host` sends to `other` comes back at once as undeliverable from now on."""
        _ip("-n", self._name(host), "route", "add", "unreachable", f"{self.addresses[other]}/32")

    def lose_large_packets(self, host: str, other: str) -> None:
        """Between both, by a cable of their own. Of what `host` sends, packets beyond 100 bytes are lost: those of the
        jobs for tests are small. Nobody is told."""
        ends = {host: (f"to-{other}", "1500"), other: (f"to-{host}", "100")}
        cable, _ = ends[host]
        there = ["peer", "name", ends[other][0], "netns", self._name(other)]
        _ip("-n", self._name(host), "link", "add", cable, "type", "veth", *there)
        for one, (name, mtu) in ends.items():
            at = ["-n", self._name(one)]
            _ip(*at, "link", "set", name, "up", "mtu", mtu, "gso_max_segs", "1")  # a larger one is cut at the other end
            far = self.addresses[other if one == host else host]
            _ip(*at, "route", "add", f"{far}/32", "dev", name, "src", self.addresses[one], "advmss", "1460")

    def move(self, host: str) -> None:
        """It has an address of its own still, but another one: `addresses` knows."""
        there = ["-n", self._name(host), "address"]
        _ip(*there, "delete", f"{self.addresses[host]}/24", "dev", "eth0")
        self._num_moved += 1
        self.addresses[host] = f"10.77.0.{100 + self._num_moved}"
        _ip(*there, "add", f"{self.addresses[host]}/24", "dev", "eth0")

    def _name(self, host: str) -> str:
        return f"{self._mark}-{host}"

    def _make(self, namespace: str) -> None:
        _ip("netns", "add", namespace)
        self._made.append(namespace)

    def _connect(self, hosts: Sequence[str]) -> None:
        switch = ["-n", self._mark]
        _ip(*switch, "link", "add", "switch", "type", "bridge")
        _ip(*switch, "link", "set", "switch", "up")
        for host in hosts:
            there = ["-n", self._name(host)]
            cable = f"to-{host}"
            _ip(*switch, "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", self._name(host))
            _ip(*switch, "link", "set", cable, "master", "switch", "up")
            prefix = ["64", "nodad"] if self._has_ipv6 else ["24"]
            _ip(*there, "address", "add", f"{self.addresses[host]}/{prefix[0]}", "dev", "eth0", *prefix[1:])
            _ip(*there, "link", "set", "eth0", "up")
            _ip(*there, "link", "set", "lo", "up")

    def close(self) -> None:
        for namespace in reversed(self._made):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", namespace)

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _delete_what_dead_tests_left() -> None:
    """A test process that was killed could not do it."""
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True, timeout=20).stdout
    for namespace in re.findall(r"^(eg\d+x\S+)", listed, re.MULTILINE):
        if not psutil.pid_exists(int(namespace[2:].partition("x")[0])):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", namespace)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)
