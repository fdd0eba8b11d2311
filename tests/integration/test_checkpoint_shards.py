"""Checkpoints of layouts in which ranks hold parts of the model: saved by one division, loaded by another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import elasticgang as eg
from elasticgang.checkpoint import listing, plan
from elasticgang.checkpoint.capture import capture
from elasticgang.checkpoint.export import export
from elasticgang.checkpoint.loader import read_state
from elasticgang.checkpoint.locations import storage_at
from elasticgang.checkpoint.placed import Seated, place, place_state
from elasticgang.checkpoint.saved_objects import ModelMismatch
from elasticgang.errors import CheckpointError, NotSupportedError
from elasticgang.protocol.commit import Attempt
from elasticgang.state.dtensor import local
from elasticgang.state.registered_state import RegisteredState
from elasticgang.torch_private import forget_meshes
from tests.integration.checkpoint_writer import commit_of, save_captured

pytestmark = pytest.mark.usefixtures("no_default_group")

COLUMNS = torch.arange(24.0).view(4, 6)
ROWS = torch.arange(10.0).view(5, 2)
NORM = torch.arange(3.0)
WHOLE = {"columns": COLUMNS, "rows": ROWS, "norm": NORM}
PLACEMENTS: dict[str, Placement] = {"columns": Shard(1), "rows": Shard(0), "norm": Replicate()}


def mesh_of(rank: int, tp: int) -> Any:
    forget_meshes()  # of another rank, which are equal
    root = eg.FakeGang(torch.device("cpu"), rank=rank, size=tp)
    return eg.create_parallel_gangs(root, tp_size=tp).device_mesh("tp")


def state_of(rank: int, tp: int, scale: float, plain: Tensor | None = None) -> dict[str, Any]:
    """The registered state of a rank: DTensors if `tp` is above 1. Those of the optimizer are 10 times as large."""

    def part(name: str, tensor: Tensor) -> Tensor:
        if tp == 1:
            return tensor.clone()
        return distribute_tensor(tensor.clone(), mesh, [PLACEMENTS[name]], src_data_rank=None)

    mesh = mesh_of(rank, tp) if tp > 1 else None
    parameters = {name: part(name, tensor * scale) for name, tensor in WHOLE.items()}
    moments = {
        index: {"exp_avg": part(name, tensor * scale * 10), "step": torch.tensor(scale)}
        for index, (name, tensor) in enumerate(WHOLE.items())
    }
    groups = [{"lr": 0.1, "params": [0, 1, 2]}]
    if plain is not None:
        parameters["plain"] = plain
    return {
        "parameters": {"model": parameters},
        "buffers": {"model": {}},
        "optimizers": {"optim": {"state": moments, "param_groups": groups}},
        "others": {"counter": {"steps": int(scale)}},
        "owned": {"optim": list(parameters.values())[:3]},
        "keys": {"model": {name: name for name in parameters}},
    }


def test_objects_are_made_for_the_first_writer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MIN_SHARE_BYTES", 1)
    state, seated = state_of(0, 1, 1.0), Seated(eg.ParallelLayout(), (0, 0, 0))
    objects, placed = place_state(state, seated)
    none, same = place_state(state, seated, has_objects=False)
    assert objects.keys() == {"parameters", "buffers", "optimizers", "others", "keys", "frozen"}
    assert none == {}
    names, wanted = ({kind: [each.name for each in found[kind]] for kind in found} for found in (same, placed))
    assert names == wanted
    first, second = (capture(state_of(0, 1, 1.0), seated, number, 2) for number in (0, 1))
    assert first is not None
    assert second is not None
    assert first.shard.objects == objects
    assert second.shard.objects is None


def save(root: Path, tp: int, plain: bool = False, replicas: int = 1, alike: bool = False) -> None:
    """By all ranks of `replicas` replica groups, of which each writes its share. `plain`: with a plain tensor, which is
    the same on all ranks if `alike`."""
    layout = eg.ParallelLayout(tp=tp)
    for rank in reversed(range(tp)):
        for number in reversed(range(replicas)):
            state = state_of(rank, tp, 1.0, torch.full((2,), 3.0 if alike else float(rank)) if plain else None)
            captured = capture(state, Seated(layout, (0, 0, rank)), number, replicas)
            assert captured is not None
            commit = commit_of(10, [Seated(layout, (0, 0, each)).place for each in range(tp)], {"tp": tp})
            save_captured(root, captured, commit if (rank, number) == (0, 0) else None)
    (found,) = listing.scan(storage_at(root))
    assert found.attempt == Attempt(10, 1)
    assert found.manifest is not None, found.problem
    listing.verify(found.folder, found.manifest)


def load(root: Path, rank: int, tp: int, plain: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is read, and the state as it should be."""
    (found,) = listing.scan(storage_at(root))
    assert found.manifest is not None
    state = state_of(rank, tp, 0.0, torch.zeros(2) if plain else None)
    read, _ = read_state(found.folder, found.manifest, state, Seated(eg.ParallelLayout(tp=tp), (0, 0, rank)))
    return read, state_of(rank, tp, 1.0, torch.full((2,), float(rank)) if plain else None)


@pytest.mark.parametrize("rows", [8, 4])
@pytest.mark.parametrize("sdp_rank", range(2))
@pytest.mark.parametrize("tp_rank", range(2))
def test_a_shard_of_fsdp_over_tensor_parallelism_is_one_block(rows: int, sdp_rank: int, tp_rank: int) -> None:
    """Both divide the rows: a shard is a part of the rank's own rows of tensor parallelism."""
    dist.init_process_group("fake", rank=2 * sdp_rank + tp_rank, world_size=4, store=FakeStore())
    forget_meshes()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sdp", "tp"))
    whole = torch.arange(3.0 * rows).view(rows, 3)
    linear = torch.nn.Linear(3, rows, bias=False)
    linear.weight = torch.nn.Parameter(whole.clone())
    parallelize_module(linear, mesh["tp"], ColwiseParallel(), src_data_rank=None)
    fully_shard(linear, mesh=mesh["sdp"])
    assert isinstance(linear.weight, DTensor)
    assert not isinstance(linear.weight.placements[0], Shard)
    placed = place("weight", linear.weight, Seated(eg.ParallelLayout(sdp=2, tp=2), (0, sdp_rank, tp_rank)))
    assert (placed.whole, placed.name, placed.is_owner) == ((rows, 3), "weight", True)
    assert torch.equal(placed.tensor, whole[placed.start[0] : placed.start[0] + placed.shape[0]])
    assert placed.start[0] == tp_rank * rows // 2 + sdp_rank * rows // 4


def test_uneven_rows_of_fsdp_over_tensor_parallelism_are_refused() -> None:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    forget_meshes()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sdp", "tp"))
    linear = torch.nn.Linear(3, 6, bias=False)
    parallelize_module(linear, mesh["tp"], ColwiseParallel(), src_data_rank=None)
    fully_shard(linear, mesh=mesh["sdp"])
    with pytest.raises(NotSupportedError, match="a checkpoint cannot hold weight: it is a DTensor of"):
        place("weight", linear.weight, Seated(eg.ParallelLayout(sdp=2, tp=2), (0, 0, 0)))


# PLACED-1
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("after", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("before", [1, 2, 4])
def test_any_division_loads_what_another_has_saved(
    tmp_path: Path, before: int, after: int, replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """7 ranks: some have no row or column."""
    monkeypatch.setattr(plan, "MIN_SHARE_BYTES", 1)
    save(tmp_path, before, replicas=replicas)
    for rank in range(after):
        read, expected = load(tmp_path, rank, after)
        parameters = expected["parameters"]["model"]
        moments = expected["optimizers"]["optim"]["state"]
        assert read["large"]["parameters"]["model"].keys() == parameters.keys()
        for name, tensor in read["large"]["parameters"]["model"].items():
            assert torch.equal(tensor, local(parameters[name])), name
        for index, each in read["large"]["optimizers"]["optim"]["state"].items():
            assert torch.equal(each["exp_avg"], local(moments[index]["exp_avg"]))
            assert each["step"] == 1
        assert read["large"]["optimizers"]["optim"]["param_groups"] == [{"lr": 0.1, "params": [0, 1, 2]}]
        assert read["small"]["others"] == {"counter": {"steps": 1}}


def state_with_one_element(rank: int, tp: int, value: float) -> dict[str, Any]:
    """The registered state of a rank whose parameter has one element. Its optimizer keeps an average in the placement
    of the parameter, and, if the parameter is sharded, a count that is a plain tensor."""
    one, keeps = torch.full((1,), value), {"count": torch.full((1,), value)} if tp > 1 else {}
    if tp > 1:
        one = distribute_tensor(one, mesh_of(rank, tp), [Shard(0)], src_data_rank=None)
    return {
        "parameters": {"model": {"one": one}},
        "buffers": {"model": {}},
        "optimizers": {
            "optim": {"state": {0: {"exp_avg": one.clone(), **keeps}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        },
        "others": {},
        "owned": {"optim": [one]},
        "keys": {"model": {"one": "one"}},
    }


# LOADER-5
@pytest.mark.parametrize("after", [1, 2, 4])
@pytest.mark.parametrize("before", [1, 2, 4])
def test_what_an_optimizer_keeps_of_one_element_is_sharded_as_it_was_saved(
    tmp_path: Path, before: int, after: int
) -> None:
    for rank in reversed(range(before)):
        captured = capture(
            state_with_one_element(rank, before, 3.0), Seated(eg.ParallelLayout(tp=before), (0, 0, rank)), 0, 1
        )
        assert captured is not None
        commit = commit_of(10, [f"0-0-{each}" for each in range(before)], {"tp": before})
        save_captured(tmp_path, captured, None if rank else commit)
    (found,) = listing.scan(storage_at(tmp_path))
    assert found.manifest is not None, found.problem
    for rank in range(after):
        state = state_with_one_element(rank, after, 0.0)
        read, _ = read_state(found.folder, found.manifest, state, Seated(eg.ParallelLayout(tp=after), (0, 0, rank)))
        (kept,) = read["large"]["optimizers"]["optim"]["state"].values()
        assert read["large"]["parameters"]["model"]["one"].tolist() == ([] if rank else [3.0])
        assert kept["exp_avg"].tolist() == ([] if rank else [3.0])
        assert before == 1 or kept["count"].tolist() == [3.0]


# PLACED-1
@pytest.mark.parametrize("after", [1, 2])
@pytest.mark.parametrize("before", [1, 2])
def test_any_division_loads_buffers_that_another_has_saved(tmp_path: Path, before: int, after: int) -> None:
    """DTensors, as `distribute_module` makes them of buffers: the first rank saves those that all have alike."""
    for rank in reversed(range(before)):
        captured = capture(registered_buffers(rank, before, 1.0).tree(), seat(rank, before), 0, 1)
        assert captured is not None
        commit = commit_of(10, [seat(each, before).place for each in range(before)], {"tp": before})
        save_captured(tmp_path, captured, None if rank else commit)
    (found,) = listing.scan(storage_at(tmp_path))
    assert found.manifest is not None, found.problem
    for rank in range(after):
        registered = registered_buffers(rank, after, 0.0)
        read, _ = read_state(found.folder, found.manifest, registered.tree(), seat(rank, after))
        registered.load(read)
        expected = registered_buffers(rank, after, 1.0).small.live()["buffers"]["model"]
        for name, buffer in registered.small.live()["buffers"]["model"].items():
            assert type(buffer) is type(expected[name])
            assert torch.equal(local(buffer), local(expected[name]))


def seat(rank: int, tp: int) -> Seated:
    return Seated(eg.ParallelLayout(tp=tp), (0, 0, rank))


def registered_buffers(rank: int, tp: int, scale: float) -> RegisteredState:
    module = torch.nn.Module()
    for name, tensor in WHOLE.items():
        module.register_buffer(name, tensor * scale)
        if tp > 1:
            buffer = distribute_tensor(tensor * scale, mesh_of(rank, tp), [PLACEMENTS[name]], src_data_rank=None)
            module.register_buffer(name, buffer)
    registered = RegisteredState()
    registered.register(model=module)
    registered.small.keep()
    return registered


WITH_VIEW = eg.ParallelLayout(sdp=4, views=(eg.Axes((2, 2), ("ep", "rest")),))


def registered_over_a_view(rank: int, placements: dict[str, Placement], whole: Tensor) -> RegisteredState:
    """Of one of 4 ranks. Its tensor is placed along the dims of the view that `placements` names."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
    forget_meshes()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rest", "ep"))[tuple(placements)]
    module = torch.nn.Module()
    weight = distribute_tensor(whole.clone(), mesh, list(placements.values()), src_data_rank=None)
    module.register_parameter("weight", torch.nn.Parameter(weight))
    registered = RegisteredState()
    registered.register(model=module)
    registered.small.keep()
    return registered


# PLACED-1
@pytest.mark.parametrize(
    "placements",
    [
        {"rest": Shard(0), "ep": Shard(1)},
        {"rest": Replicate(), "ep": Shard(0)},
        {"rest": Replicate(), "ep": Replicate()},
        {"ep": Replicate()},
    ],
    ids=str,
)
def test_weights_over_the_dims_of_a_view_are_saved(tmp_path: Path, placements: dict[str, Placement]) -> None:
    for rank in reversed(range(4)):
        state = registered_over_a_view(rank, placements, COLUMNS).tree()
        captured = capture(state, Seated(WITH_VIEW, (0, rank, 0)), 0, 1)
        assert captured is not None
        commit = commit_of(10, [f"0-{each}-0" for each in range(4)], {"sdp": 4})
        save_captured(tmp_path, captured, None if rank else commit)
    (found,) = listing.scan(storage_at(tmp_path))
    assert found.manifest is not None, found.problem
    for rank in range(4):
        registered = registered_over_a_view(rank, placements, torch.zeros_like(COLUMNS))
        read, _ = read_state(found.folder, found.manifest, registered.tree(), Seated(WITH_VIEW, (0, rank, 0)))
        registered.load(read)
        (expected,) = registered_over_a_view(rank, placements, COLUMNS).large()["parameters"]["model"].values()
        assert torch.equal(registered.large()["parameters"]["model"]["weight"], expected)
    whole = state_of_one(COLUMNS)
    read, _ = read_state(found.folder, found.manifest, whole, Seated(eg.ParallelLayout(), (0, 0, 0)))
    assert torch.equal(read["large"]["parameters"]["model"]["weight"], COLUMNS)


def state_of_one(whole: Tensor) -> dict[str, Any]:
    module = torch.nn.Module()
    module.register_parameter("weight", torch.nn.Parameter(torch.zeros_like(whole)))
    registered = RegisteredState()
    registered.register(model=module)
    return registered.tree()


def test_weights_over_a_part_of_an_axis_have_no_place_in_a_checkpoint() -> None:
    state = registered_over_a_view(0, {"ep": Shard(0)}, COLUMNS).tree()
    with pytest.raises(
        NotSupportedError, match=r"cannot hold model\.weight: it is sharded over ep, a part of a model ax"
    ):
        capture(state, Seated(WITH_VIEW, (0, 0, 0)), 0, 1)


# PLACED-1
def test_only_its_seat_loads_a_plain_tensor_of_a_divided_model(tmp_path: Path) -> None:
    save(tmp_path, 2, plain=True)
    for rank in range(2):
        read, _ = load(tmp_path, rank, 2, plain=True)
        assert torch.equal(read["large"]["parameters"]["model"]["plain"], torch.full((2,), float(rank)))
    for tp in (1, 4):
        with pytest.raises(ModelMismatch, match=r"model\.plain is a plain tensor of which each seat has its own"):
            load(tmp_path, 0, tp, plain=True)
    with pytest.raises(CheckpointError, match=r"model\.plain is a plain tensor of which each seat has its own"):
        export(tmp_path, tmp_path / "weights.pt")


# LOADER-3
@pytest.mark.parametrize("after", [1, 2, 4])
@pytest.mark.parametrize("before", [1, 2])
def test_any_division_loads_a_plain_tensor_that_all_seats_have_alike(tmp_path: Path, before: int, after: int) -> None:
    save(tmp_path, before, plain=True, alike=True)
    for rank in range(after):
        read, _ = load(tmp_path, rank, after, plain=True)
        assert torch.equal(read["large"]["parameters"]["model"]["plain"], torch.full((2,), 3.0))
    export(tmp_path, tmp_path / "weights.pt")
    assert torch.load(tmp_path / "weights.pt", weights_only=True)["plain"].tolist() == [3.0, 3.0]


def test_a_divided_model_is_exported_whole(tmp_path: Path) -> None:
    save(tmp_path, 4)
    export(tmp_path, tmp_path / "weights.pt")
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert weights.keys() == WHOLE.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in WHOLE.items())


def test_partial_sums_have_no_place_in_a_checkpoint() -> None:
    tensor = DTensor.from_local(torch.ones(2), mesh_of(0, 2), [Partial()], run_check=False)
    with pytest.raises(NotSupportedError, match=r"a checkpoint cannot hold model\.w: it is a DTensor of"):
        place("model.w", tensor, Seated(eg.ParallelLayout(tp=2), (0, 0, 0)))
