"""Hosts with several network interfaces, in network namespaces: a rank heals by all of them, and by those that work."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticgang.state.transport import PATH_TIMEOUT_S
from tests.chaos.interfaces_job import NUM_BYTES
from tests.chaos.network import Network
from tests.chaos.several import SLOW_S, Coordinator, secret_options
from tests.support import REPOSITORY, Job, wait_until

pytestmark = pytest.mark.timeout(600)

SCRIPT = Path(__file__).parent / "interfaces_job.py"
LOADED_S = 10.0


@pytest.fixture
def network() -> Iterator[Network]:
    """Two hosts with eth0, eth1 and eth2, and the coordinator's host with eth0."""
    with Network(["c", "a", "b"]) as made:
        for host in "ab":
            assert [made.add_interface(host, number) for number in (1, 2)] == ["eth1", "eth2"]
        yield made


class Hosts:
    """A rank on a that trains, and one on b that is to heal from it."""

    def __init__(self, directory: Path, network: Network, held: contextlib.ExitStack, waits: str) -> None:
        self.notes, self._directory, self._network, self._held = directory / "notes", directory, network, held
        self.notes.mkdir()
        self._secret, self._waits = secret_options(directory), waits
        self._coordinator = held.enter_context(
            Coordinator(
                directory / "coordinator",
                host=network.addresses["c"],
                credentials=self._secret,
                prefix=network.on("c"),
            )
        )

    def start(self, host: str, interfaces: str) -> Job:
        options = ["--coordinator", self._coordinator.address, "--nnodes", "1:2", "--job-id", "job", *self._secret]
        options += ["--heal-interfaces", interfaces]
        arguments = [str(self.notes), self._waits]
        return self._held.enter_context(
            Job(self._directory / host, SCRIPT, *arguments, ranks=1, options=options, prefix=self._network.on(host))
        )

    def noted(self, name: str) -> None:
        wait_until((self.notes / name).exists, name, SLOW_S)

    def wait_for_same_bits(self) -> None:
        def told() -> list[Path]:
            found = [path for path in self.notes.glob("sum-*") if path.suffix != ".part"]
            return found if len(found) == 2 else []

        texts = {path.read_text() for path in wait_until(told, "the sums of both", SLOW_S)}
        assert len(texts) == 1, texts

    def sent(self) -> dict[str, int]:
        return {name: self._network.bytes_sent("a", name) for name in ("eth0", "eth1", "eth2")}


@pytest.fixture
def held() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as made:
        yield made


# HEALADDR-1
def test_each_interface_sends_a_part_of_the_state(tmp_path: Path, network: Network, held: contextlib.ExitStack) -> None:
    hosts = Hosts(tmp_path, network, held, "paths")
    hosts.start("a", f"eth1,{'10.78.2.2'}")
    hosts.noted("trained")
    before = hosts.sent()
    hosts.start("b", "eth1,eth2")
    hosts.wait_for_same_bits()
    sent = {name: num - before[name] for name, num in hosts.sent().items()}
    assert sent["eth1"] > NUM_BYTES // 10
    assert sent["eth2"] > NUM_BYTES // 10
    assert sent["eth1"] + sent["eth2"] > NUM_BYTES
    assert sent["eth0"] < NUM_BYTES // 10


# HEALADDR-1, STATELISTEN-3
@pytest.mark.parametrize("how", ["cable", "source", "healer"])
def test_an_interface_that_goes_down_in_the_middle_of_a_heal_is_replaced_by_the_other(
    how: str, tmp_path: Path, network: Network, held: contextlib.ExitStack
) -> None:
    """A cable is pulled, which nobody is told; or a host takes its interface down."""
    hosts = Hosts(tmp_path, network, held, "test")
    source = hosts.start("a", "eth1,eth2")
    hosts.noted("trained")
    healer = hosts.start("b", "eth1,eth2")
    hosts.noted("healing")
    if how == "cable":
        network.cut_interface("a", "eth1")
    else:
        network.set_interface("a" if how == "source" else "b", "eth1", "down")
    (hosts.notes / "go_on").touch()
    cut_at = time.monotonic()
    hosts.wait_for_same_bits()
    assert time.monotonic() - cut_at < 2 * PATH_TIMEOUT_S + LOADED_S
    for job in (source, healer):
        generations = [event for event in job.events() if event["event"] == "generation"]
        assert generations[-1]["generation"] == 2, "the heal has ended in the generation in which it began"


# HEALADDR-1
def test_interfaces_that_are_down_are_left_out(tmp_path: Path, network: Network, held: contextlib.ExitStack) -> None:
    """Also all of them: the address on the main network is left."""
    hosts = Hosts(tmp_path, network, held, "nothing")
    hosts.start("a", "eth1,eth2")
    hosts.noted("trained")
    for name in ("eth1", "eth2"):
        network.set_interface("a", name, "down")
    before = hosts.sent()
    hosts.start("b", "eth1,eth2")
    hosts.wait_for_same_bits()
    assert hosts.sent()["eth0"] - before["eth0"] > NUM_BYTES


@pytest.mark.parametrize(
    ("interfaces", "told"),
    [
        ("eth1,eth7", "--heal-interfaces: this host has no interface 'eth7': it has eth0, eth1, eth2, lo"),
        ("10.78.9.9", "--heal-interfaces: this host has no address 10.78.9.9: it has 10.77.0.2, 10.78.1.2, "),
        ("eth1,10.78.1.2", "--heal-interfaces: 'eth1' and '10.78.1.2' are both 10.78.1.2"),
    ],
)
def test_interfaces_that_are_not_there_are_refused(interfaces: str, told: str, network: Network) -> None:
    options = ["--coordinator", "127.0.0.1:1", "--heal-interfaces", interfaces, str(SCRIPT)]
    command = [*network.on("a"), sys.executable, "-m", "elasticgang", "run", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SLOW_S, cwd=REPOSITORY)
    assert done.returncode == 2
    assert told in done.stderr


def test_an_interface_may_have_an_ipv6_address_alone() -> None:
    show = "from elasticgang.session.host_addresses import addresses_of as of; print(of(['eth0']), of(['fd77:0::1']))"
    with Network(["a"], has_ipv6=True) as network:
        done = subprocess.run(
            [*network.on("a"), sys.executable, "-c", show],
            capture_output=True,
            text=True,
            timeout=SLOW_S,
            cwd=REPOSITORY,
        )
    assert done.stdout == "['fd77::1'] ['fd77::1']\n", done.stderr


# CRED-LOCAL
def test_interfaces_without_credentials_are_refused(network: Network) -> None:
    options = ["--coordinator", "127.0.0.1:1", "--heal-interfaces", "eth1", str(SCRIPT)]
    command = [*network.on("a"), sys.executable, "-m", "elasticgang", "run", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SLOW_S, cwd=REPOSITORY)
    assert done.returncode == 2
    assert "without a secret or TLS ranks serve their state on loopback only, not at '10.78.1.2'" in done.stderr
