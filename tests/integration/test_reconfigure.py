"""torch's interface for reconfigurable groups, on the backend "elasticgang", over real processes and a real SIGKILL."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from elasticgang.comm.static_group import StaticProcessGroup
from elasticgang.errors import ClosedError, InvalidOperationError, NotSupportedError
from tests.integration.reconfigure_ranks import options_of
from tests.support import Command

pytestmark = pytest.mark.timeout(300)  # processes import torch, on whatever the machine has left

Members = dict[str, Command]


@pytest.fixture
def hub() -> TCPStore:
    """By which the members exchange handles; as a coordinator of the user's own would."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=200))


@contextlib.contextmanager
def members(directory: Path, case: str, hub: TCPStore, *names: str) -> Iterator[Members]:
    command = [sys.executable, "-m", "tests.integration.reconfigure_ranks", case, str(hub.port)]
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(Command(directory / name, [*command, name], preloaded=True)) for name in names}


def seen(command: Command) -> dict[str, Any]:
    assert command.wait() == 0, command.stderr[-4000:]
    found: dict[str, Any] = json.loads(command.stdout)
    return found


def test_survivors_of_a_kill_go_on_and_a_newcomer_joins(tmp_path: Path, hub: TCPStore) -> None:
    """The one that is killed is rank 0, and serves the group's first store."""
    with members(tmp_path, "kill", hub, "0", "1", "2", "3") as ranks:
        hub.wait([f"ready/{name}" for name in "012"])
        os.kill(int(hub.get("ready/0")), signal.SIGKILL)
        assert ranks["0"].wait() == -signal.SIGKILL
        found = {name: seen(ranks[name]) for name in "123"}
    everybody = ["2", "3", "1"]
    for rank, name in enumerate("12"):
        assert found[name]["founded"] == [rank + 1, 3, 7.0, ["0", "1", "2"], 0.0]
        assert found[name]["lost"] is True
        assert found[name]["survivors"] == [rank, 2, 6.0, ["1", "2"], 1.0]
    assert found["3"]["alone"] == [0, 1, 8.0, ["3"], 3.0]
    for rank, name in enumerate(everybody):
        assert found[name]["joined"] == [rank, 3, 14.0, everybody, 2.0]
        assert found[name]["same uuid"] is True
        assert found[name]["old handles"] is True
        assert found[name]["still joined"] == found[name]["joined"]
        assert sorted(found[name]["of a set"]) == [0, 1, 2]
    assert len({tuple(found[name]["of a set"]) for name in everybody}) == 1


# MEMBERSHIP-3
def test_a_member_that_does_not_come_is_left_out_of_the_next_try(tmp_path: Path, hub: TCPStore) -> None:
    with members(tmp_path, "absent", hub, "0", "1", "2") as ranks:
        found = [seen(ranks[name]) for name in "012"]
    for rank in (0, 1):
        assert found[rank]["absent"] == [rank, 3]  # as before
        assert found[rank]["same handle"] is True
        assert found[rank]["between"] is True
        assert found[rank]["without it"] == [rank, 2, 3.0, ["0", "1"], 0.0]


# STATIC-3
def test_other_groups_end_with_a_pending_collective_only(tmp_path: Path, hub: TCPStore) -> None:
    with members(tmp_path, "others", hub, "0", "1") as ranks:
        found = [seen(ranks[name]) for name in "01"]
    assert found[0]["idle"] == found[1]["idle"] == 2.0
    assert found[0]["pending"] == "StaleGenerationError"
    assert found[0]["single"] == "StaleGenerationError"
    assert found[0]["alone"] == [0, 1, 2.0]
    assert [each["own"] for each in found] == [[rank, 2, 3.0, ["0", "1"], 0.0] for rank in (0, 1)]


@pytest.mark.skipif(not hasattr(dist, "_reconfigure"), reason="torch has these functions since 2.15")
def test_torchs_own_functions_drive_it(tmp_path: Path, hub: TCPStore) -> None:
    with members(tmp_path, "interface", hub, "0", "1", "2") as ranks:
        found = [seen(ranks[name]) for name in "012"]
    for rank in range(3):
        assert "call `reconfigure` first" in found[rank]["unconfigured"]
        assert found[rank]["configured"] == [rank, 3, 7.0, ["0", "1", "2"], 0.0]


def test_a_group_that_was_made_for_it_waits_for_its_first_members() -> None:
    """`enable_reconfigure` of torch 2.15: no other rank is there, and none is waited for."""
    pg: Any = StaticProcessGroup(HashStore(), 1, 4, 30.0, connects=False)
    try:
        assert pg.supports_reconfigure
        backend = pg._get_backend("cpu")
        assert backend.supports_reconfigure
        with pytest.raises(InvalidOperationError, match="call `reconfigure` first"):
            pg.barrier()
        pg.abort()  # of nothing
        handle = backend.get_reconfigure_handle()
        assert handle == pg.get_reconfigure_handle()
        assert backend.reconfigure(options_of(1, [handle])).wait()
        assert (pg.rank(), pg.size()) == (0, 1)
        assert pg.get_reconfigure_handle() != handle
        pg.barrier().wait()
        pg.abort()
        with pytest.raises(RuntimeError, match="aborted"):
            pg.barrier().wait()
        assert pg.reconfigure(options_of(2, [pg.get_reconfigure_handle()])).wait()
        pg.barrier().wait()
        with pytest.raises(NotSupportedError, match="cannot be split"):
            pg.split_group([0])
    finally:
        pg.shutdown()
    with pytest.raises(ClosedError):
        pg.get_reconfigure_handle()
    with pytest.raises(ClosedError):
        pg.reconfigure(options_of(3, [handle]))


def source_elsewhere() -> str:
    """This host's address on its default route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this host has no default route")
        return str(probe.getsockname()[0])


def address_in_handle(store: Any) -> str:
    group: Any = StaticProcessGroup(store, 0, 2, 30.0, connects=False)
    try:
        return str(group.get_reconfigure_handle()).split(":")[3]
    finally:
        group.shutdown()


def test_a_handle_has_no_loopback_address_where_the_hosts_name_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Debian, whose /etc/hosts says 127.0.1.1. The resolver is replaced, the addresses are this host's own."""
    own = source_elsewhere()
    look_up = socket.getaddrinfo

    def resolve(host: str, *args: Any, **options: Any) -> Any:
        return look_up("127.0.1.1" if host == "trainer-7" else host, *args, **options)

    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert address_in_handle(HashStore()) == own
    assert address_in_handle(Named("127.0.0.1", 0, is_master=True, wait_for_workers=False)) == own


class Named(TCPStore):
    """A store that its users name "trainer-7"."""

    @property
    def host(self) -> str:
        return "trainer-7"


def test_a_handle_has_the_loopback_address_of_a_store_that_was_named_by_one() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert address_in_handle(store) == "127.0.0.1"
