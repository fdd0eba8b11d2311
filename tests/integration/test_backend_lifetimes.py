"""A rank that leaves a group as soon as it is made keeps no peer from making it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from torch._C._distributed_c10d import TCPStore

from elasticgang.comm.comm_process import GroupSpec
from tests.integration.conftest import Rings, Worlds
from tests.support import Command, reserved_port

SIZE = 4
ROUNDS = 6


@contextlib.contextmanager
def ranks(directory: Path, case: str, store: str) -> Iterator[list[Command]]:
    command = [sys.executable, "-m", "tests.integration.lifetime_ranks", case, store]
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(reserved_port())
        env = {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(SIZE)}
        yield [
            stack.enter_context(
                Command(
                    directory / str(rank),
                    [*command, str(rank), str(SIZE)],
                    env={**env, "RANK": str(rank)},
                    preloaded=True,
                )
            )
            for rank in range(SIZE)
        ]


# STATIC-1, WORKER-4
@pytest.mark.timeout(300)  # eight processes import torch, on whatever the machine has left
@pytest.mark.parametrize("case", ["destroy", "exit", "same store"])
def test_backend_groups_can_be_left_as_soon_as_they_are_made(case: str, tmp_path: Path, store: str) -> None:
    with ranks(tmp_path, case, store) as commands:
        codes = [command.wait() for command in commands]
        assert codes == [0] * SIZE, "\n".join(command.stderr[-2000:] for command in commands)


@pytest.mark.parametrize("leave", ["abort", "shutdown"])
def test_an_isolated_group_can_be_left_as_soon_as_it_is_configured(leave: str, rings: Rings) -> None:
    ring = rings(SIZE)
    for _ in range(ROUNDS):
        address = ring.next_address()

        def come_and_go(rank: int, address: str = address) -> None:
            ring[rank].configure(address, "replica", rank, SIZE)
            getattr(ring[rank], leave)()

        ring.each(come_and_go)


def test_an_isolated_group_can_be_configured_anew_as_soon_as_it_is_configured(rings: Rings) -> None:
    ring = rings(SIZE)
    addresses = [ring.next_address() for _ in range(3 * ROUNDS)]

    def configure_all(rank: int) -> None:
        for address in addresses:
            ring[rank].configure(address, "replica", rank, SIZE)

    ring.each(configure_all)
    assert ring.sums() == [SIZE] * SIZE


def test_a_comm_process_can_be_closed_as_soon_as_it_has_one_more_group(worlds: Worlds) -> None:
    for number in range(ROUNDS):
        world = worlds(SIZE, names=None)

        def come_and_go(rank: int, name: str = f"gang-{number}") -> None:
            world.comms[rank].add_group(f"lifetimes/{name}", GroupSpec(name, rank, SIZE))  # noqa: B023
            world.comms[rank].close()  # noqa: B023

        world.each(come_and_go)


# WORKER-8
def test_groups_that_are_added_use_one_client_of_the_store_in_turn(worlds: Worlds, store: str) -> None:
    world = worlds(2, names=None)
    port = int(store.rpartition(":")[2])

    def num_clients(rank: int) -> int:
        found = psutil.Process(world.comms[rank].pid).net_connections("tcp")
        return sum(bool(each.raddr) and each.raddr.port == port for each in found)

    before = num_clients(0)
    for number in range(3):

        def add(rank: int, name: str = f"gang-{number}") -> None:
            world.comms[rank].add_group(f"clients/{name}", GroupSpec(name, rank, 2))

        world.each(add)
        assert num_clients(0) == before + 1


# WORKER-8
def test_a_group_is_added_with_a_server_that_has_taken_the_place_of_the_one_before(worlds: Worlds) -> None:
    world = worlds(2, names=None)
    with reserved_port() as port:
        for number in range(2):
            server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)

            def add(rank: int, name: str = f"gang-{number}") -> None:
                spec = GroupSpec(name, rank, 2)
                world.comms[rank].add_group(f"servers/{name}", spec, store=f"127.0.0.1:{port}")

            world.each(add)
            del server
