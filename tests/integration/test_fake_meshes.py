"""Meshes of fake gangs of any size, what becomes of the default group that they set, and meshes with further axes."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import elasticgang as eg
from elasticgang.gang.elastic import Binding, ElasticGang
from tests.support import run_preloaded

pytestmark = pytest.mark.usefixtures("no_default_group")

TORCHS_OWN = dist.init_process_group  # as it is while the tests are collected
CPU = torch.device("cpu")
DEADLINE_S = 120


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun sets, for one process."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("rank", range(8))
def test_fake_gangs_of_parallel_sizes_are_a_mesh(rank: int) -> None:
    gangs = eg.create_parallel_gangs(eg.FakeGang(CPU, rank=rank, size=8), tp_size=2, pp_size=2)
    mesh = gangs.device_mesh("pp", "rdp", "tp")
    assert mesh.mesh.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert mesh.get_coordinate() == (rank // 4, rank // 2 % 2, rank % 2)
    assert (dist.get_rank(), dist.get_world_size()) == (rank, 8)
    for name in ("pp", "rdp", "tp"):
        assert mesh.get_group(name) is gangs[name].as_process_group()
        assert dist.get_process_group_ranks(mesh.get_group(name)) == mesh[name].mesh.tolist()
    sharded = distribute_tensor(torch.arange(8.0), mesh["tp"], [Shard(0)], src_data_rank=None)
    assert sharded.to_local().tolist() == ([0.0, 1.0, 2.0, 3.0] if rank % 2 == 0 else [4.0, 5.0, 6.0, 7.0])


@pytest.mark.parametrize("rank", [0, 3, 6])
def test_fake_gangs_that_shard_are_a_mesh(rank: int) -> None:
    gangs = eg.create_fsdp_gangs(eg.create_parallel_gangs(eg.FakeGang(CPU, rank=rank, size=8), tp_size=2), 2)
    mesh = gangs.device_mesh("rdp", "sdp", "tp")
    assert mesh.mesh.tolist() == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert gangs.device_mesh("dp", "tp").mesh.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    back = eg.Gangs.from_device_mesh(mesh)
    for name in ("root", "dp", "rdp", "sdp", "tp", "pp"):
        assert (back[name].rank, back[name].size) == (gangs[name].rank, gangs[name].size), name


def test_a_part_of_a_fake_root_is_the_root_of_a_mesh() -> None:
    grid = eg.GangGrid([2, 2], ["tp", "cp"], 4, root=eg.FakeGang(CPU, rank=6, size=8))
    gangs = grid.create_gangs()
    assert gangs is not None
    assert gangs.root.size == 4
    assert gangs.device_mesh("cp", "tp").mesh.tolist() == [[0, 1], [2, 3]]
    assert repr(gangs["cp"]) == "FakeGang('cp', rank 1 of 2)"
    assert gangs["cp"].as_process_group().group_desc == "cp"
    assert "'cp'" in repr(gangs["cp"].as_process_group())


def test_fake_gangs_that_have_nothing_to_do_with_each_other_are_none() -> None:
    other = eg.create_parallel_gangs(eg.FakeGang(CPU, rank=1, size=8), tp_size=2).tp
    one = eg.FakeGang(CPU, rank=5, size=8)
    gangs = eg.Gangs(root=one, dp=one, rdp=one, sdp=one, tp=other, pp=eg.FakeGang(CPU))
    with pytest.raises(eg.NotSupportedError, match="FakeGang of size 2"):
        gangs.device_mesh("tp")


# -- the default group


# REGISTRY-1
def test_a_fake_default_gives_way_to_torchs_own(store: None) -> None:
    gangs = eg.create_parallel_gangs(eg.FakeGang(CPU, size=4), tp_size=2)
    gangs.device_mesh("rdp", "tp")
    assert dist.get_world_size() == 4
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    assert (dist.get_world_size(), dist.get_backend()) == (1, "gloo")
    assert dist.init_process_group is dist.distributed_c10d.init_process_group is TORCHS_OWN
    with pytest.raises(ValueError, match="twice"):
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    with pytest.raises(eg.InvalidOperationError, match="is another one, of 1 ranks"):
        gangs.device_mesh("rdp", "tp")
    dist.all_reduce(total := torch.ones(1))
    assert total.item() == 1.0
    dist.destroy_process_group()
    assert gangs.device_mesh("rdp", "tp").shape == (2, 2)


def test_a_fake_default_gives_way_to_a_gangs_own_and_comes_back_to_none(store: None) -> None:
    eg.create_fake_gangs(CPU).device_mesh("tp")
    root = eg.ProcessGroupGang.create_default_process_group(CPU)
    assert dist.get_backend() == "gloo"
    assert dist.group.WORLD is root.as_process_group()
    with pytest.raises(eg.InvalidOperationError, match="initialized already"):
        eg.ProcessGroupGang.create_default_process_group(CPU)
    root.close()


def test_a_fake_default_gives_way_to_an_elastic_root_and_takes_the_place_of_none() -> None:
    fakes = eg.create_fake_gangs(CPU)
    fakes.device_mesh("tp")
    root = ElasticGang("root", CPU)
    root.bind(Binding(0, (0,), None))
    eg.set_default_process_group(root)
    assert dist.group.WORLD is root.as_process_group()
    for use in (lambda: fakes.device_mesh("tp"), lambda: eg.set_default_process_group(fakes.root)):
        with pytest.raises(eg.InvalidOperationError, match="torch's default process group is another one"):
            use()
    assert dist.group.WORLD is root.as_process_group()
    root.close()


def test_one_fake_default_follows_another() -> None:
    for size in (4, 8):
        eg.create_parallel_gangs(eg.FakeGang(CPU, size=size), tp_size=2).device_mesh("rdp", "tp")
        assert dist.get_world_size() == size


# -- further axes


@pytest.mark.parametrize("rank", range(8))
def test_a_mesh_has_further_gangs_and_back(rank: int) -> None:
    gangs = eg.GangGrid([2, 2, 2], ["tp", "cp", "rdp"], root=eg.FakeGang(CPU, rank=rank, size=8)).create_gangs()
    assert gangs is not None
    for names in (("rdp", "cp"), ("rdp", "cp", "tp"), ("cp",)):
        back = eg.Gangs.from_device_mesh(gangs.device_mesh(*names))
        assert list(back.further) == ["cp"]
        for name in ("cp", *names):
            assert (back[name].rank, back[name].size) == (gangs[name].rank, gangs[name].size), name
        assert back["cp"].as_process_group() is gangs["cp"].as_process_group()
        assert back.root.size == 2 ** len(names)
        assert back.dp.size == (2 if "rdp" in names else 1)
    mesh = gangs.device_mesh("rdp", "cp")
    mapped = eg.Gangs.from_device_mesh(mesh, sdp="rdp", rdp="cp")
    assert (mapped.sdp.rank, mapped.rdp.rank, list(mapped.further)) == (gangs.rdp.rank, gangs["cp"].rank, [])


@pytest.mark.parametrize("name", ["replicate", "dp", "dp_shard", "root"])
def test_a_dimension_that_may_be_of_data_parallelism_must_be_named(name: str) -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=(name, "cp"))
    with pytest.raises(ValueError, match=f"{name!r} does not; name it"):
        eg.Gangs.from_device_mesh(mesh)
    with pytest.raises(ValueError, match="names one of them twice"):
        eg.Gangs.from_device_mesh(mesh, rdp="cp", sdp="cp", pp=name)
    assert list(eg.Gangs.from_device_mesh(mesh, rdp=name).further) == ["cp"]


LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "tests.integration.forked_ranks", "4"],
    "elasticgang": [sys.executable, "-m", "elasticgang", "run", "--nproc-per-node", "4"],
}


@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_further_axes_of_four_ranks_go_to_a_mesh_and_back(launcher: str) -> None:
    command = [*LAUNCHERS[launcher], "-m", "tests.integration.test_fake_meshes", launcher]
    done = run_preloaded(command, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("mesh kept") == 4


def check(root: eg.Gang | None) -> None:
    gangs = eg.GangGrid([2, 2], ["cp", "rdp"], root=root).create_gangs()
    assert gangs is not None
    back = eg.Gangs.from_device_mesh(gangs.device_mesh("rdp", "cp"))
    rank = gangs.root.rank
    for name, wanted in {"cp": 11 if rank < 2 else 1100, "rdp": 101 if rank % 2 == 0 else 1010, "root": 1111}.items():
        back[name].all_reduce(total := torch.tensor([10**rank]), eg.ReduceOperation.SUM)
        assert total.item() == wanted, name
    assert list(back.further) == ["cp"]


def main() -> None:
    if sys.argv[1] == "torchrun":
        eg.create_fake_gangs(CPU).device_mesh("tp")  # gives way
        check(eg.ProcessGroupGang.create_default_process_group(CPU))
        dist.destroy_process_group()
        gc.collect()  # a Gloo group that outlives the interpreter can end it by SIGABRT
    else:
        eg.create_fake_gangs(CPU).device_mesh("tp")
        manager = eg.join()
        for step in manager.steps(1):
            with step:
                assert dist.get_world_size() == 4
                check(None)
                manager.commit(1.0, lambda total: None)
    print("mesh kept")


if __name__ == "__main__":
    main()


def test_a_wrapper_that_a_library_put_around_init_process_group_stays() -> None:
    own = dist.init_process_group

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs)

    try:
        dist.init_process_group = wrapped
        gangs = eg.create_fake_gangs("cpu")
        gangs.device_mesh("rdp")
        assert dist.init_process_group is wrapped
        gangs.close()
        assert dist.init_process_group is wrapped
    finally:
        dist.init_process_group = own
