"""Groups that torch finds by name: functional collectives, DTensor, and one more dimension of a mesh."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, _resolve_process_group
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torchft.process_group import ProcessGroup

import elasticgang as eg
from elasticgang.collectives.collective import Collective
from elasticgang.comm import ProcessGroupIsolatedGloo, SwallowingProcessGroup, create_process_group, extend_device_mesh
from elasticgang.errors import InvalidOperationError
from elasticgang.gang import ElasticGang, torch_registry
from elasticgang.gang.elastic import Binding
from elasticgang.gang.torch_process_group import GangProcessGroup
from tests.integration.extended_ranks import model, train
from tests.support import Command

DEADLINE_S = 100


@pytest.fixture
def default_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def mesh(default_group: None) -> DeviceMesh:
    return init_device_mesh("cpu", (1, 1), mesh_dim_names=("shard", "tp"))


KINDS: dict[str, Callable[[], ProcessGroup]] = {
    "isolated": lambda: ProcessGroupIsolatedGloo(30.0),
    "swallowing": lambda: SwallowingProcessGroup(ProcessGroupIsolatedGloo(30.0)),
    "gloo": lambda: create_process_group("gloo", 30.0),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_registered_group_is_found_by_its_name_until_it_is_not(kind: str, store: str, default_group: None) -> None:
    pg: Any = KINDS[kind]()
    with pytest.raises((InvalidOperationError, ValueError), match="name"):
        _ = pg.group_name
    registered: Any = pg.register(f"found-{kind}")
    assert registered is pg
    pg.configure(f"{store}/registered-{kind}", "replica", 0, 1)
    assert _resolve_process_group(pg.group_name) is pg
    assert dist.get_process_group_ranks(pg) == [0]
    tensor = torch.full((3,), 2.0)
    assert functional.all_reduce(tensor, "sum", pg).tolist() == [2.0] * 3
    dist.all_reduce(tensor, group=pg)
    dist.barrier(group=pg)
    objects = [{"a": 1}]
    dist.broadcast_object_list(objects, group=pg)
    assert objects == [{"a": 1}]
    name = pg.group_name
    registered.unregister()
    with pytest.raises(RuntimeError):
        _resolve_process_group(name)
    pg.shutdown()


def test_a_group_becomes_a_dimension(store: str, mesh: DeviceMesh) -> None:
    pg: Any = ProcessGroupIsolatedGloo(30.0)
    with pytest.raises(InvalidOperationError, match="register"):
        extend_device_mesh(mesh, pg)
    pg.register("dimension")
    pg.configure(f"{store}/dimension", "replica", 0, 1)
    for dim, names in enumerate([("dp", "shard", "tp"), ("shard", "dp", "tp"), ("shard", "tp", "dp")]):
        extended = eg.extend_device_mesh(mesh, pg, "dp", dim)
        assert extended.mesh_dim_names == names
        assert extended.get_group("dp") is pg
        assert extended["tp"].get_group() is mesh.get_group("tp")
    assert extend_device_mesh(mesh, pg).mesh_dim_names == ("dp", "shard", "tp")
    pg.unregister()
    pg.shutdown()


@pytest.mark.parametrize(
    ("name", "dim", "message"),
    [
        ("tp", 0, r"`name` must be another one than the mesh's \['shard', 'tp'\], but is 'tp'"),
        ("dp", -1, "`dim` must be at least 0 and at most 2, but is -1"),
        ("dp", 3, "`dim` must be at least 0 and at most 2, but is 3"),
    ],
)
def test_a_dimension_that_cannot_be_is_refused(name: str, dim: int, message: str, mesh: DeviceMesh) -> None:
    with pytest.raises(ValueError, match=message):
        extend_device_mesh(mesh, ProcessGroupIsolatedGloo(30.0), name, dim)


def test_a_mesh_without_names_is_refused(default_group: None) -> None:
    with pytest.raises(ValueError, match="must have names"):
        extend_device_mesh(init_device_mesh("cpu", (1,)), ProcessGroupIsolatedGloo(30.0))


@pytest.mark.timeout(260)
def test_hsdp_over_an_extended_mesh_trains_as_one_process_does(store: str, tmp_path: Path) -> None:
    """Two replicas of two shards. The group's true size scales the gradients; the mesh says 1."""
    command = [sys.executable, "-m", "tests.integration.extended_ranks", store]
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                Command(tmp_path / f"{replica}-{shard}", [*command, str(replica), str(shard)], preloaded=True)
            )
            for replica in range(2)
            for shard in range(2)
        ]
        assert [rank.wait() for rank in ranks] == [0] * 4, [rank.stderr for rank in ranks]
        found = [json.loads(rank.stdout) for rank in ranks]
    alone = train(model(), range(1), 0)
    for attempt in range(2):
        parts = [each[f"losses{attempt}"] for each in found]
        assert [sum(step) / 4 for step in zip(*parts, strict=True)] == pytest.approx(alone, rel=1e-5)
        for each in found:
            assert each[f"sum{attempt}"] == [2.0] * 3
            assert each[f"gathered{attempt}"] == [0.0, 1.0]
            assert each[f"dtensor{attempt}"] == [0.0, 1.0, 2.0, 3.0]


def test_scalar_helpers_over_a_swallowing_group_that_has_failed_raise(store: str, default_group: None) -> None:
    pg: Any = KINDS["swallowing"]()
    pg.register("steering")
    pg.configure(f"{store}/steering", "replica", 0, 1)
    gang = eg.ProcessGroupGang(pg, "cpu")
    assert (eg.all_sum(gang, 1).item(), eg.broadcast_flag(gang, True)) == (1, True)
    pg.abort()
    gang.all_reduce(torch.ones(1), eg.ReduceOperation.SUM)
    with pytest.raises(eg.StepAborted, match="all_sum"):
        eg.all_sum(gang, 1)
    with pytest.raises(eg.StepAborted, match="broadcast_flag"):
        eg.broadcast_flag(gang, True)
    pg.unregister()
    pg.shutdown()


by_ranks = pytest.mark.filterwarnings("ignore:The combination of ranks:FutureWarning")


@pytest.fixture
def root() -> Iterator[eg.FakeGang]:
    """A gang of one, whose group is torch's default one."""
    gang = eg.FakeGang("cpu")
    eg.set_default_process_group(gang)
    yield gang
    gang.close()


# REGISTRY-2
@by_ranks
def test_functional_collectives_find_the_default_gang_by_its_ranks(root: eg.FakeGang) -> None:
    found = distributed_c10d._find_pg_by_ranks_and_tag("", [0])
    assert found is root.as_process_group()
    assert functional.all_reduce(torch.ones(2), "sum", [0]).tolist() == [1.0, 1.0]


@by_ranks
def test_the_groups_beside_a_gang_that_ends_are_still_found_by_their_ranks(root: eg.FakeGang) -> None:
    made, ending = dist.new_group([0]), dist.new_group([0])
    assert isinstance(made, dist.ProcessGroup)
    assert isinstance(ending, GangProcessGroup)

    def registered() -> dict[str, list[dist.ProcessGroup]]:
        return {tag: list(groups) for tag, groups in distributed_c10d._world.tags_to_pg.items() if groups}

    before = registered()
    torch_registry.unregister(ending)
    expected = {tag: [group for group in groups if group is not ending] for tag, groups in before.items()}
    assert registered() == {tag: groups for tag, groups in expected.items() if groups}
    assert functional.all_reduce(torch.ones(2), "sum", made).tolist() == [1.0, 1.0]
    assert functional.all_reduce(torch.ones(2), "sum", [0]).tolist() == [1.0, 1.0]
    torch_registry.unregister(made)  # type: ignore[arg-type]
    assert functional.all_reduce(torch.ones(2), "sum", [0]).tolist() == [1.0, 1.0]


# REGISTRY-3
def test_the_group_of_an_elastic_gang_has_no_store_on_which_each_rank_goes_on_alone() -> None:
    gang = ElasticGang("dp", torch.device("cpu"))
    gang.bind(Binding(0, (0,), None))
    eg.set_default_process_group(gang)
    made = dist.new_group([0])
    calls: tuple[Callable[[Any], object], ...] = (
        lambda store: store.add("count", 1),
        lambda store: store.set("key", "value"),
        lambda store: store.get("key"),
        lambda store: store.wait(["key"]),
        lambda store: store.num_keys(),
        lambda store: store.delete_key("key"),
    )
    for store in (distributed_c10d._get_default_store(), distributed_c10d._get_process_group_store(made)):
        for call in calls:
            with pytest.raises(InvalidOperationError, match="has no store"):
                call(store)
    dist.barrier(made)
    gang.close()
    dist.destroy_process_group()


class _Group:
    """Of a generation, to which no rank sends anything."""

    is_poisoned = False

    def getBackendName(self) -> str:
        return "silent"

    def check(self) -> None: ...

    def start(self, collective: Collective) -> NoReturn:
        raise AssertionError("nothing is sent")


# REGISTRY-5
def test_groups_of_generations_that_have_ended_do_not_stay_in_torchs_registry() -> None:
    root = ElasticGang("root", torch.device("cpu"))
    made: list[dist.ProcessGroup] = []
    sizes, kept = [], set()
    for generation in range(6):
        root.bind(Binding(0, (0, 1), _Group(), lambda name, ranks: _Group()))
        assert torch_registry.follow_root(root.as_process_group(), [root])
        if generation == 3:  # of the generation before, whose groups a script may destroy in this one
            dist.destroy_process_group(made[-1])
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))
        group = dist.new_group([0, 1])
        assert isinstance(group, dist.ProcessGroup)
        made += [*mesh.get_all_groups(), group]
        assert dist.get_process_group_ranks(group) == [0, 1]
        sizes.append(len(distributed_c10d._world.pg_map))
        kept.add(len(distributed_c10d._world.tags_to_pg))
        root.bind(None)
    assert sizes[0] < sizes[1] == sizes[2] == max(sizes)
    assert len(kept) <= 3
    dist.destroy_process_group()
