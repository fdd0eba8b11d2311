"""Gangs for parallelism: whose they are, their names, and what is refused. Fake gangs show each rank's part."""

from __future__ import annotations

import copy
import inspect
import itertools
import pickle
from collections.abc import Callable, Sequence
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from elasticgang.errors import InternalError, InvalidOperationError, LayoutError
from elasticgang.gang import (
    FakeGang,
    Gang,
    GangGrid,
    Gangs,
    ReduceOperation,
    create_fake_gangs,
    create_fsdp_gangs,
    create_parallel_gangs,
)

CPU = torch.device("cpu")
SIX = ("root", "dp", "rdp", "sdp", "tp", "pp")


class Recording(FakeGang):
    """Keeps what gangs were asked of it, in order."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(CPU, rank=rank, size=size)
        self.asked: list[tuple[int, ...]] = []

    def create_gang(self, ranks: Sequence[int]) -> FakeGang | None:
        self.asked.append(tuple(ranks))
        return super().create_gang(ranks)


def places(gangs: Gangs) -> dict[str, tuple[int, int]]:
    return {name: (gangs[name].rank, gangs[name].size) for name in gangs}


# -- how a root is split


@pytest.mark.parametrize("rank", range(8))
def test_pp_is_outermost_and_tp_is_adjacent(rank: int) -> None:
    """fairseq2 leaves `pp` a fake gang, whatever is asked for."""
    gangs = create_parallel_gangs(FakeGang(CPU, rank=rank, size=8), tp_size=2, pp_size=2)
    at = {"pp": (rank // 4, 2), "dp": (rank // 2 % 2, 2), "tp": (rank % 2, 2)}
    assert places(gangs) == {"root": (rank, 8), "rdp": at["dp"], "sdp": (0, 1), **at}
    assert gangs.rdp is gangs.dp


@pytest.mark.parametrize(("sizes", "families"), [((1, 1), "dp"), ((4, 1), "tp"), ((1, 4), "pp")])
def test_a_gang_of_all_ranks_is_the_root_and_one_of_a_single_rank_is_fake(
    sizes: tuple[int, int], families: str
) -> None:
    root = FakeGang(CPU, rank=2, size=4)
    gangs = create_parallel_gangs(root, tp_size=sizes[0], pp_size=sizes[1])
    for name in ("dp", "tp", "pp"):
        assert (gangs[name] is root) == (name == families)
        assert name == families or places(gangs)[name] == (0, 1)


# GANGS-2
def test_gangs_are_made_in_one_order_on_every_rank() -> None:
    """Otherwise real ones wait for each other for ever. By axis, then by the lowest rank."""
    roots = [Recording(rank, 8) for rank in range(8)]
    for root in roots:
        create_parallel_gangs(root, tp_size=2, pp_size=2)
    pp, dp, tp = [(0, 4), (1, 5), (2, 6), (3, 7)], [(0, 2), (1, 3), (4, 6), (5, 7)], [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert all(root.asked == pp + dp + tp for root in roots)
    roots = [Recording(rank, 8) for rank in range(8)]
    for root in roots:
        create_fsdp_gangs(create_parallel_gangs(root), 4)
    assert all(root.asked == [(0, 4), (1, 5), (2, 6), (3, 7), (0, 1, 2, 3), (4, 5, 6, 7)] for root in roots)


@pytest.mark.parametrize("rank", range(4))
def test_sharding_within_runs_of_adjacent_ranks(rank: int) -> None:
    whole = create_parallel_gangs(FakeGang(CPU, rank=rank, size=4))
    hybrid = create_fsdp_gangs(whole, 2)
    assert (places(hybrid)["sdp"], places(hybrid)["rdp"]) == ((rank % 2, 2), (rank // 2, 2))
    fully = create_fsdp_gangs(whole)
    assert fully.sdp is fully.dp
    assert places(fully)["rdp"] == (0, 1)
    assert create_fsdp_gangs(whole, intra_node_size=4).sdp is whole.dp


def test_sizes_that_do_not_divide_are_refused() -> None:
    root = FakeGang(CPU, size=8)
    for sizes in ({"tp_size": 0}, {"pp_size": 0}, {"tp_size": -1}):
        with pytest.raises(ValueError, match="must be an integer of at least 1, but is"):
            create_parallel_gangs(root, **sizes)
    for sizes in ({"tp_size": 3}, {"tp_size": 4, "pp_size": 4}):
        with pytest.raises(ValueError, match=r"must be a multiple of .* but is 8"):
            create_parallel_gangs(root, **sizes)
    gangs = create_parallel_gangs(root)
    for size, complaint in ((1, "greater than 1, but is 1"), (0, "but is 0"), (3, r"a multiple of .*\(3\), but is 8")):
        with pytest.raises(ValueError, match=complaint):
            create_fsdp_gangs(gangs, size)


def test_a_rank_in_no_gang_of_an_axis_is_our_mistake() -> None:
    class Lost(Recording):
        def create_gang(self, ranks: Sequence[int]) -> None:
            return None

    with pytest.raises(InternalError, match="rank 1 is in no gang of dp"):
        create_parallel_gangs(Lost(1, 4), tp_size=2)


# -- as a set with names


def test_gangs_have_their_names() -> None:
    cp = FakeGang(CPU)
    gangs = replace(create_fake_gangs(CPU), further={"cp": cp})
    assert gangs["cp"] is cp
    for name in SIX:
        assert gangs[name] is getattr(gangs, name)
    assert list(gangs) == [*SIX, "cp"]
    assert "cp" in gangs
    assert "ep" not in gangs
    with pytest.raises(KeyError, match="no gang 'ep' here, only root, dp, rdp, sdp, tp, pp, cp"):
        gangs["ep"]
    with pytest.raises(KeyError, match="no gang 'further'"):
        gangs["further"]


def test_gangs_are_frozen_and_by_keyword() -> None:
    gangs = create_fake_gangs(CPU)
    with pytest.raises(FrozenInstanceError):
        gangs.tp = FakeGang(CPU)  # type: ignore[misc]
    with pytest.raises(TypeError):
        gangs.further["cp"] = FakeGang(CPU)  # type: ignore[index]
    with pytest.raises(TypeError):
        Gangs(*[FakeGang(CPU)] * 6)  # type: ignore[call-arg]
    given = {"cp": FakeGang(CPU)}
    taken = replace(gangs, further=given)
    given.clear()
    assert "cp" in taken
    assert len({gangs, taken, replace(taken)}) == 2


def test_further_gangs_are_kept_by_what_makes_gangs_of_gangs() -> None:
    gangs = replace(create_fake_gangs(CPU), further={"cp": FakeGang(CPU)})
    assert create_fsdp_gangs(gangs)["cp"] is gangs["cp"]
    for again in (copy.deepcopy(gangs), pickle.loads(pickle.dumps(gangs))):
        assert list(again) == list(gangs)
        assert again["cp"] is not gangs["cp"]
    assert copy.copy(gangs) == gangs


@pytest.mark.parametrize("name", SIX)
def test_a_further_gang_has_a_name_of_its_own(name: str) -> None:
    with pytest.raises(ValueError, match=f"other gangs than root, .* but names '{name}'"):
        replace(create_fake_gangs(CPU), further={name: FakeGang(CPU)})


@pytest.mark.parametrize("name", ["dp", "tp", "pp", "cp"])
def test_rank_0_of_all_is_rank_0_of_each(name: str) -> None:
    """In fairseq2 `tp` or `pp` alone may differ: `and` binds there before `or`."""
    six: dict[str, Any] = {each: FakeGang(CPU) for each in SIX} | {"root": FakeGang(CPU, size=4)}
    wrong: Gang = FakeGang(CPU, rank=1, size=2)
    gangs = six | ({name: wrong} if name in SIX else {"further": {name: wrong}})
    with pytest.raises(ValueError, match=f"Rank 0 of `root` must be rank 0 of `{name}`, but is rank 1 of it instead"):
        Gangs(**gangs)
    Gangs(**(gangs | {"root": FakeGang(CPU, rank=1, size=4)}))


def test_closing_closes_each_once_and_the_root_last() -> None:
    closed: list[str] = []

    class Closing(FakeGang):
        def __init__(self, name: str) -> None:
            super().__init__(CPU)
            self.name = name

        def close(self) -> None:
            closed.append(self.name)

    root, dp, cp = Closing("root"), Closing("dp"), Closing("cp")
    Gangs(root=root, dp=dp, rdp=dp, sdp=root, tp=root, pp=root, further={"cp": cp}).close()
    assert closed == ["cp", "dp", "root"]


# -- out of a grid


def test_a_grid_is_used_as_hyper_comm_grid() -> None:
    """But that options are given by keyword, where it creates."""
    wanted: dict[Callable[..., Any], str] = {
        GangGrid: "shape, dim_names, rank_offset=0, backend=None",
        GangGrid.register_view: "self, name, shape, dim_names, shared_dims=None",
        GangGrid.rank_groups: "self, dims",
        GangGrid.create_gang: "self, dims, *, timeout=None, pg_options=None, group_desc=None",
        GangGrid.get_gang: "self, dims",
        GangGrid.create_pg: "self, dims, *, view=None",
        GangGrid.get_pg: "self, dims, *, view=None",
        GangGrid.get_rank_enum: "self, dims, *, view=None",
        GangGrid.is_current_rank_in_grid: "self",
        GangGrid.destroy: "self",
    }
    for function, text in wanted.items():
        theirs = list(inspect.signature(eval(f"lambda {text}: None")).parameters.values())
        ours = [each.replace(annotation=each.empty) for each in inspect.signature(function).parameters.values()]
        assert ours[: len(theirs)] == theirs
        assert all(each.kind is each.KEYWORD_ONLY and each.default is not each.empty for each in ours[len(theirs) :])


def grid(shape: Sequence[int], names: Sequence[str], rank: int, world: int | None = None, offset: int = 0) -> GangGrid:
    root = FakeGang(CPU, rank=rank, size=world or torch.Size(shape).numel())
    return GangGrid(shape, names, offset, root=root)


@pytest.mark.parametrize("rank", range(16))
def test_a_grid_of_the_four_axes_and_further_ones(rank: int) -> None:
    made = grid([2, 2, 2, 1, 2], ["tp", "cp", "sdp", "rdp", "pp"], rank)
    made.register_view("expert", [4, 2, 2], ["ep", "edp", "pp"], ["pp"])
    gangs = made.create_gangs()
    assert gangs is not None
    tp, cp, sdp, pp = (rank >> bit & 1 for bit in range(4))
    at = {"tp": (tp, 2), "cp": (cp, 2), "sdp": (sdp, 2), "rdp": (0, 1), "dp": (sdp, 2), "pp": (pp, 2)}
    assert places(gangs) == {"root": (rank, 16), **at, "ep": (rank % 4, 4), "edp": (rank // 4 % 2, 2)}
    assert gangs["cp"] is made.get_gang("cp")
    assert gangs.pp is made.get_gang("pp", view="expert")


def test_a_grid_as_hyper_comm_grid_names_its_axes() -> None:
    gangs = grid([2, 2, 2], ["tp", "cp", "dp"], 5).create_gangs()
    assert gangs is not None
    assert places(gangs) == {"root": (5, 8), "dp": (1, 2), "rdp": (1, 2), "sdp": (0, 1), "tp": (1, 2), "pp": (0, 1)} | {
        "cp": (0, 2)
    }
    assert gangs.rdp is gangs.dp


def test_dp_is_along_both_of_its_axes() -> None:
    gangs = grid([2, 3], ["sdp", "rdp"], 4).create_gangs()
    assert gangs is not None
    assert places(gangs)["dp"] == (4, 6)
    assert (places(gangs)["sdp"], places(gangs)["rdp"]) == ((0, 2), (2, 3))
    sharded = grid([4], ["sdp"], 1).create_gangs()
    assert sharded is not None
    assert sharded.dp is sharded.sdp
    assert places(sharded)["rdp"] == (0, 1)


def test_what_exists_is_taken_and_names_that_are_taken_are_qualified() -> None:
    made = grid([2, 4], ["tp", "dp"], 3)
    made.register_view("one", [4, 2], ["tp", "ep"])
    made.register_view("two", [2, 4], ["ep", "sdp"])
    tp = made.create_gang("tp", group_desc="with options")
    gangs = made.create_gangs()
    assert gangs is not None
    assert gangs.tp is tp
    assert list(gangs) == [*SIX, "one/tp", "ep", "two/ep", "two/sdp"]
    assert places(gangs)["sdp"] == (0, 1)
    again = made.create_gangs()
    assert again is not None
    assert all(again[name] is gangs[name] for name in ("tp", "dp", "one/tp", "ep", "two/ep", "two/sdp"))


@pytest.mark.parametrize("rank", range(6))
def test_a_grid_of_some_ranks_has_a_root_of_its_own(rank: int) -> None:
    gangs = grid([2, 2], ["tp", "cp"], rank, world=6, offset=2).create_gangs()
    assert (gangs is None) == (rank < 2)
    if gangs is not None:
        assert places(gangs)["root"] == (rank - 2, 4)


@pytest.mark.parametrize("names", [["dp", "sdp"], ["rdp", "dp"], ["root", "tp"]])
def test_axes_that_cannot_be_gangs_are_refused(names: list[str]) -> None:
    with pytest.raises(LayoutError, match="`dp`, or `rdp` and `sdp`, and no `root`, but is"):
        grid([2, 2], names, 0).create_gangs()


def test_a_closed_grid_has_closed_its_gangs() -> None:
    made = grid([2, 2], ["tp", "cp"], 0)
    gangs = made.create_gangs()
    assert gangs is not None
    made.close()
    for name in ("tp", "cp"):
        with pytest.raises(InvalidOperationError):
            gangs[name].barrier()
    gangs.root.barrier()
    with pytest.raises(KeyError):
        made.get_gang("tp")


# -- fake gangs refuse nothing that real ones do


def test_a_fake_gang_broadcasts_from_any_rank() -> None:
    """fairseq2's refuses every source but its own rank."""
    for rank, source in itertools.product(range(3), repeat=2):
        gang = FakeGang(CPU, rank=rank, size=3)
        gang.broadcast(tensor := torch.ones(2), source)
        objects: list[object] = [1]
        gang.broadcast_objects(objects, source)
        assert (tensor.tolist(), objects) == ([1.0, 1.0], [1])


def test_a_gang_on_cuda_without_an_index_takes_tensors_of_any() -> None:
    """A tensor is on "cuda:0" even where "cuda" was asked for."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        tensor = torch.zeros(2, device="cuda:1")
        assert tensor.device == torch.device("cuda:1")
        for device in ("cuda", "cuda:1"):
            FakeGang(torch.device(device), size=2).all_reduce(tensor, ReduceOperation.SUM)
        with pytest.raises(ValueError, match=r"must be on the gang's device \(cuda:0\), but is on cuda:1 instead"):
            FakeGang(torch.device("cuda:0")).all_reduce(tensor, ReduceOperation.SUM)
    FakeGang(torch.device("cpu:0")).all_reduce(torch.zeros(2), ReduceOperation.SUM)
