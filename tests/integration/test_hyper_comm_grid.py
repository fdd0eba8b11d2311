"""`GangGrid` as a program for Megatron-LM's HyperCommGrid uses it: its names, its arguments, its errors.

What is expected was derived by hand from what Megatron-LM documents."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import elasticgang as eg
from tests.support import run_preloaded

CPU = torch.device("cpu")
DEADLINE_S = 120
LAUNCHERS = {
    "torchrun": [sys.executable, "-m", "tests.integration.forked_ranks", "4"],
    "elasticgang": [sys.executable, "-m", "elasticgang", "run", "--nproc-per-node", "4"],
}


def grid(shape: Any, names: Any, rank: int = 0, offset: Any = 0, world: int | None = None) -> eg.GangGrid:
    root = eg.FakeGang(CPU, rank=rank, size=world or int(np.prod(shape)))
    return eg.GangGrid(shape, names, offset, root=root)


@pytest.mark.parametrize(
    ("dims", "groups"),
    [
        ("tp", [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]),
        (["dp"], [[0, 6], [1, 7], [2, 8], [3, 9], [4, 10], [5, 11]]),
        (["cp", "dp"], [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]),
        (["dp", "cp"], [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]),  # the order of the names does not count
        (["tp", "dp"], [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]),
        (["tp", "cp", "dp"], [list(range(12))]),
    ],
)
def test_the_enumeration_is_that_of_the_process_groups(dims: Any, groups: list[list[int]]) -> None:
    for rank in range(12):
        made = grid([2, 3, 2], ["tp", "cp", "dp"], rank)
        assert made.get_rank_enum(dims) == groups
        pg = made.create_pg(dims)
        mine = next(group for group in groups if rank in group)
        assert isinstance(pg, dist.ProcessGroup)
        assert (pg.rank(), pg.size()) == (mine.index(rank), len(mine))
        assert made.get_pg(dims) is pg
        made.destroy()


# GRID-2
def test_a_group_is_created_once_until_the_grid_is_destroyed() -> None:
    made = grid([2, 2], ["tp", "dp"])
    with pytest.raises(KeyError, match="Process group for dp-tp hasn't been created"):
        made.get_pg(["tp", "dp"])
    pg = made.create_pg(["tp", "dp"])
    assert made.get_pg(["dp", "tp"]) is pg
    with pytest.raises(KeyError, match=r"Process group \['dp', 'tp'\] has already been created"):
        made.create_pg(["dp", "tp"])
    gang = made.create_gang("dp")
    assert gang is not None
    assert made.get_pg("dp") is gang.as_process_group()
    with pytest.raises(KeyError, match="has already been created"):
        made.create_pg("dp")
    made.destroy()
    with pytest.raises(KeyError, match="hasn't been created"):
        made.get_pg("dp")
    assert made.create_pg("dp") is not pg
    made.destroy()


@pytest.mark.parametrize(("rank", "is_in"), [(0, False), (1, False), (2, True), (5, True), (6, False)])
def test_a_rank_outside_the_grid_has_no_group(rank: int, is_in: bool) -> None:
    made = grid([2, 2], ["tp", "dp"], rank, offset=2, world=7)
    assert made.is_current_rank_in_grid() == is_in
    pg = made.create_pg("tp")
    assert (pg is not None) == is_in
    assert made.get_pg("tp") is pg
    assert made.get_rank_enum("dp") == [[2, 4], [3, 5]]
    made.destroy()


def test_views_have_the_base_by_name_and_groups_of_their_own() -> None:
    made = grid([2, 2, 2], ["tp", "dp", "pp"], rank=5)
    made.register_view("expert", [1, 4, 2], ["etp", "ep", "pp"], ["pp"])
    assert made.get_rank_enum("ep", view="expert") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert made.get_rank_enum("pp", view="base") == made.get_rank_enum("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    pp = made.create_pg("pp", view="expert")
    assert made.get_pg("pp") is pp is made.get_pg("pp", view="base")
    ep = made.create_pg("ep", view="expert")
    assert ep is not None
    assert (ep.rank(), ep.size()) == (1, 4)
    with pytest.raises(KeyError, match="Process group for expert/etp hasn't been created"):
        made.get_pg("etp", view="expert")
    for call in (made.create_pg, made.get_pg, made.get_rank_enum):
        with pytest.raises(KeyError, match="View 'other' is not registered"):
            call("tp", view="other")
    with pytest.raises(ValueError, match="'ep'"):
        made.get_rank_enum("ep")
    made.register_view("plain", [8], ["all"], None)
    with pytest.raises(ValueError, match="'base' is the grid itself"):
        made.register_view("base", [8], ["all"])
    made.destroy()


def test_what_callers_read_is_as_theirs() -> None:
    made = grid([2, 2], ["tp", "dp"])
    assert (made.shape, made.dim_names, made.backend) == ([2, 2], ["tp", "dp"], None)
    enumerate_ranks = made._gen_rank_enum  # as Megatron-LM calls it
    assert enumerate_ranks(["tp"]) == [[0, 1], [2, 3]]
    assert enumerate_ranks(["tp", "dp"]) == made.rank_groups(["tp", "dp"], ordered_as_given=True)
    for shape, names in ((4, ["tp"]), ([4], None)):
        with pytest.raises(ValueError, match="must be a list"):
            grid(shape, names)
    made.destroy()


def test_what_is_too_large_is_a_runtime_error_and_a_layout_error() -> None:
    for kind in (RuntimeError, ValueError, eg.LayoutError, eg.GridTooLargeError):
        with pytest.raises(kind, match="must fit into the world"):
            grid([4, 3], ["tp", "dp"], offset=1, world=12)
    with pytest.raises(ValueError, match="at least 0") as caught:
        grid([2], ["tp"], offset=-1)
    assert not isinstance(caught.value, RuntimeError)
    with pytest.raises(ValueError, match="one size for each"):
        grid([2, 2], ["tp"])


@pytest.fixture
def no_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    present = dist.group.WORLD
    dist.distributed_c10d._update_default_pg(None)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    yield monkeypatch
    dist.distributed_c10d._update_default_pg(present)


def test_a_grid_may_come_before_the_default_group(no_world: pytest.MonkeyPatch) -> None:
    for kind in (RuntimeError, eg.InvalidOperationError, eg.NoWorldError):
        with pytest.raises(kind, match="no default process group, and WORLD_SIZE is not set"):
            eg.GangGrid([2], ["tp"])
    no_world.setenv("WORLD_SIZE", "1")
    made = eg.GangGrid([1, 1], ["tp", "dp"], 0, "gloo")
    assert made.get_rank_enum("dp") == [[0]]
    with pytest.raises(RuntimeError, match="must fit into the world"):
        eg.GangGrid([2], ["tp"])
    with pytest.raises(eg.InvalidOperationError, match="no default process group"):
        made.create_pg("tp")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    pg = made.create_pg("tp", timeout=timedelta(seconds=9), group_desc="tensor")
    assert pg is not None
    assert (pg.group_desc, dist.get_backend(pg)) == ("tensor", "gloo")
    made.destroy()
    dist.destroy_process_group()


# -- numpy's integers

NUMBERS: dict[str, Callable[[int], Any]] = {"int64": np.int64, "uint8": np.uint8, "int": int, "tensor": torch.tensor}


@pytest.mark.parametrize("kind", list(NUMBERS))
def test_every_integer_counts_as_one(kind: str) -> None:
    number = NUMBERS[kind]
    made = grid([number(2), number(2)], ["tp", "dp"], number(3), number(2), 6)
    assert (made.shape, made.rank_offset) == ([2, 2], 2)
    assert all(type(each) is int for each in (*made.shape, made.rank_offset, made.size))
    assert made.get_rank_enum("dp") == [[2, 4], [3, 5]]
    layout = eg.ParallelLayout(pp=number(2), sdp=number(2), tp=number(1), min_replicas=number(3))
    assert layout == eg.ParallelLayout(pp=2, sdp=2, min_replicas=3)
    assert all(type(size) is int for size in (layout.pp, layout.sdp, layout.tp, layout.unit))
    root = eg.FakeGang(CPU, rank=number(5), size=number(8))
    assert (root.rank, root.size) == (5, 8)
    gangs = eg.create_parallel_gangs(root, tp_size=number(2), pp_size=number(2))
    assert (gangs.tp.rank, gangs.dp.rank, gangs.pp.rank) == (1, 0, 1)
    gangs = eg.create_fsdp_gangs(eg.create_parallel_gangs(root), number(4))
    assert (gangs.rdp.rank, gangs.sdp.rank) == (1, 1)
    sub = root.create_gang([number(7), number(5), number(0)])
    assert sub is not None
    assert (sub.rank, sub.size) == (1, 3)
    sub.broadcast(torch.ones(1), number(1))
    sub.broadcast_objects([1], number(1))
    sub.send(torch.ones(1), number(2), number(4))
    sub.recv(received := torch.zeros(1), number(2), 4)
    assert received.item() == 1.0


def test_an_array_of_ranks_is_a_list_of_them() -> None:
    root = eg.FakeGang(CPU, rank=2, size=4)
    for ranks in (np.array([2, 3]), torch.tensor([2, 3]), range(2, 4), (3, 2)):
        gang = root.create_gang(ranks)  # type: ignore[arg-type]
        assert gang is not None
        assert (gang.rank, gang.size) == (0, 2)


@pytest.mark.parametrize("bad", [True, np.True_, 2.0, np.float64(2.0), "2", None], ids=repr)
def test_what_is_no_integer_is_none(bad: Any) -> None:
    root = eg.FakeGang(CPU, size=4)
    calls: dict[str, Callable[[], object]] = {
        "shape": lambda: grid([bad], ["tp"], world=4),
        "rank_offset": lambda: grid([2], ["tp"], offset=bad, world=4),
        "pp": lambda: eg.ParallelLayout(pp=bad),
        "min_replicas": lambda: eg.ParallelLayout(min_replicas=bad),
        "tp_size": lambda: eg.create_parallel_gangs(root, tp_size=bad),
        "rank": lambda: eg.FakeGang(CPU, rank=bad, size=4),
        "size": lambda: eg.FakeGang(CPU, size=bad),
        "ranks": lambda: root.create_gang([0, bad]),
        "source_rank": lambda: root.broadcast(torch.ones(1), bad),
        "tag": lambda: root.send(torch.ones(1), 1, bad),
    }
    if bad is not None:
        calls["intra_node_size"] = lambda: eg.create_fsdp_gangs(eg.create_parallel_gangs(root), bad)
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"`{name}"):
            call()


# -- in processes


# GRID-3
@pytest.mark.parametrize("launcher", list(LAUNCHERS))
def test_four_ranks_use_the_grid_as_megatron_does(launcher: str) -> None:
    command = [*LAUNCHERS[launcher], "-m", "tests.integration.test_hyper_comm_grid", launcher]
    done = run_preloaded(command, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("grid kept") == 4


def check(backend: str | None) -> None:
    """On four ranks: the last three are a grid of their own."""
    rank = dist.get_rank()
    whole = eg.GangGrid([2, 2], ["tp", "dp"], 0, backend)
    tp = whole.create_pg("tp", group_desc="TENSOR")
    assert tp is whole.get_pg("tp")
    assert tp is not None
    assert tp.group_desc == "TENSOR"
    gang = whole.create_gang("dp", group_desc="DATA")
    assert gang is not None
    assert gang.as_process_group().group_desc == "DATA"
    dist.all_reduce(total := torch.tensor([10.0**rank]), group=tp)
    assert total.item() == (11.0 if rank < 2 else 1100.0)
    dist.all_reduce(total := torch.tensor([10.0**rank]), group=whole.get_pg("dp"))
    assert total.item() == (101.0 if rank % 2 == 0 else 1010.0)
    objects: list[object] = [rank]
    gang.broadcast_objects(objects, np.int64(1))
    assert objects == [2 + rank % 2]
    sub = gang.create_gang(np.array([0, 1]))  # type: ignore[arg-type]
    assert sub is not None
    sub.broadcast(total := torch.tensor([rank]), np.int64(1))
    assert total.item() == 2 + rank % 2
    rest = eg.GangGrid([3], ["cp"], 1, backend)
    assert rest.is_current_rank_in_grid() == (rank > 0)
    cp = rest.create_pg("cp")
    assert (cp is None) == (rank == 0)
    if cp is not None:
        dist.all_reduce(total := torch.tensor([10.0**rank]), group=cp)
        assert total.item() == 1110.0
    rest.destroy()
    whole.destroy()
    with pytest.raises(KeyError, match="hasn't been created"):
        whole.get_pg("tp")
    with pytest.raises(RuntimeError):
        eg.GangGrid([4, 2], ["tp", "dp"])


def main() -> None:
    if sys.argv[1] == "torchrun":
        dist.init_process_group("gloo")
        check("gloo")
        dist.destroy_process_group()
        gc.collect()  # a Gloo group that outlives the interpreter can end it by SIGABRT
    else:
        manager = eg.join()
        for step in manager.steps(1):
            with step:
                check(None)
                manager.commit(1.0, lambda total: None)
    print("grid kept")


if __name__ == "__main__":
    main()
