"""What scripts written for torchrun find in an elastic job: torch.distributed, RANK, WORLD_SIZE, MASTER_ADDR."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.support import Job, run_preloaded

DEADLINE_S = 120

# Rank 2 kills itself in step 2, once. `found` is what each process saw, a line for each step that it committed.
PREAMBLE = """
    import json, os, pathlib, signal, sys, time
    import torch
    import torch.distributed as dist
    from torch import nn
    import elasticgang as eg

    here, local_rank = pathlib.Path(sys.argv[1]), int(os.environ["LOCAL_RANK"])
    found = (here / f"found-{local_rank}").open("a", buffering=1)

    def die_once(step, at=2, rank=2):
        killed = here / "killed"
        if step.index == at and local_rank == rank and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
"""


def script(directory: Path, text: str) -> Path:
    path = directory / "script.py"
    path.write_text(textwrap.dedent(PREAMBLE) + textwrap.dedent(text))
    return path


def found(directory: Path, local_rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / f"found-{local_rank}").read_text().splitlines()]


# The job ends once four ranks are back.
FOLLOWS = """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.distributed_c10d import _get_default_store
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    while local_rank == 2 and (here / "killed").exists() and not (here / "went-on").exists():
        time.sleep(0.005)  # the others go on without it first
    assert not dist.is_initialized() and not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & set(os.environ)
    manager = eg.join()
    model = eg.DistributedDataParallel(manager, nn.Linear(2, 1))
    optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
    manager.register_state(model=model, optim=optim)

    def raises(call, text):
        try:
            call()
        except eg.InvalidOperationError as error:
            return text in str(error)
        return False

    made, whole_table = None, torch.arange(8.0).view(4, 2)
    for step in manager.steps(100_000):
        with step:
            root, stale = manager.gangs.root, []
            assert manager.gangs is manager.gangs
            assert dist.is_initialized() and dist.group.WORLD is root.as_process_group()
            if made is None or made[0] != step.generation:
                if made is not None:
                    _, pair, whole, mesh = made
                    mine = [pg for pg in (pair, whole, mesh and mesh.get_group()) if isinstance(pg, dist.ProcessGroup)]
                    stale = [raises(lambda pg=pg: dist.barrier(pg), "ended with its generation") for pg in mine]
                pair, whole = dist.new_group([0, 1]), dist.new_group(list(range(root.size)))
                mesh = None
                if root.size == 4:
                    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
                    mesh = grid["inner"]
                    table = 2 * distribute_tensor(whole_table, grid, [Shard(0), Shard(0)])
                    first = 2 * mesh.get_local_rank()
                    part = table.redistribute(placements=[Replicate(), Shard(0)]).to_local()
                    assert part.equal(2 * whole_table[first : first + 2]), (root.rank, part)
                    assert table.sum().full_tensor().item() == 2 * whole_table.sum()
                made = (step.generation, pair, whole, mesh)
            objects = [None] * dist.get_world_size()
            dist.all_gather_object(objects, os.environ["RANK"], group=made[2])
            assert objects == [str(rank) for rank in range(len(objects))]
            assert raises(lambda: _get_default_store().add("count", 1), "has no store")
            die_once(step)
            model(torch.ones(1, 2)).sum().backward()
            if optim.step(weight=1.0):
                print(json.dumps({
                    "index": step.index, "of_dist": [dist.get_rank(), dist.get_world_size()],
                    "of_env": [int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])],
                    "of_gang": [root.rank, root.size], "master": os.environ["MASTER_ADDR"], "stale": stale,
                }), file=found)
                if step.index == 2:
                    (here / "went-on").touch()
                if root.size == 4 and (here / "killed").exists():
                    manager.leave()
    root = manager.gangs.root
    assert (dist.get_rank(), dist.get_world_size()) == (root.rank, root.size)
    for call in (root.barrier, dist.barrier, lambda: root.all_reduce(torch.ones(1), eg.ReduceOperation.SUM)):
        assert raises(call, "is closed")
    print(json.dumps({"after": [root.rank, root.size]}), file=found)
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def follows(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """By local rank, what it found in the committed steps of a job of four in which rank 2 is killed and comes back."""
    directory = tmp_path_factory.mktemp("follows")
    with Job(directory, script(directory, FOLLOWS), str(directory), ranks=4) as job:
        assert job.wait() == 0, job.stderr
        assert "Traceback" not in job.stderr
    return {local_rank: found(directory, local_rank) for local_rank in range(4)}


# TORCHGROUP-2, TORCHENV-1, REGISTRY-4
def test_torch_distributed_has_the_rank_and_size_of_the_root_gang_in_every_generation(
    follows: dict[int, list[dict[str, Any]]],
) -> None:
    for steps in follows.values():
        for step in steps[:-1]:
            assert step["of_dist"] == step["of_env"] == step["of_gang"]
            assert step["master"] == "127.0.0.1"
    sizes = {step["of_dist"][1] for step in follows[0][:-1]}
    assert sizes == {3, 4}
    by_index: dict[int, set[int]] = {}
    for steps in follows.values():
        for step in steps[:-1]:
            by_index.setdefault(step["index"], set()).add(step["of_dist"][0])
    assert by_index[0] == {0, 1, 2, 3}
    assert by_index[2] == {0, 1, 2}


def test_groups_and_meshes_of_a_former_generation_raise(follows: dict[int, list[dict[str, Any]]]) -> None:
    for local_rank in (0, 1, 3):
        said = [outcome for step in follows[local_rank][:-1] for outcome in step["stale"]]
        assert said
        assert all(said)
    assert len([outcome for step in follows[0][:-1] for outcome in step["stale"]]) >= 3


def test_after_the_loop_rank_and_size_stay_and_collectives_raise(follows: dict[int, list[dict[str, Any]]]) -> None:
    assert sorted(steps[-1]["after"] for steps in follows.values()) == [[rank, 4] for rank in range(4)]


CHECKPOINTS = """
    from torch.distributed import checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    manager = eg.join()
    model = eg.DistributedDataParallel(manager, nn.Linear(2, 1))
    optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
    manager.register_state(model=model, optim=optim)
    for step in manager.steps(4):
        with step:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            whole = torch.arange(12.0).reshape(12, 1) + 100 * step.index
            state = {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "of_all": whole.clone()}
            path = here / f"checkpoint-{step.index}-{step.generation}"
            saving = dcp.async_save(state, checkpoint_id=here / f"beside-{path.name}", process_group=dist.new_group())
            die_once(step)
            saving.result()
            dcp.save(state, checkpoint_id=path)
            former = here / f"checkpoint-{step.index - 1}"  # of as many ranks as there were then
            places = [path, here / f"beside-{path.name}", *([former] if former.exists() else [])]
            for place in places:
                loaded = {
                    "sharded": distribute_tensor(torch.zeros(12, 1), mesh, [Shard(0)]), "of_all": torch.zeros(12, 1),
                }
                dcp.load(loaded, checkpoint_id=place)
                expected = whole - 100 * (place == former)
                assert loaded["sharded"].full_tensor().equal(expected) and loaded["of_all"].equal(expected)
            model(torch.ones(1, 2)).sum().backward()
            if optim.step(weight=1.0):
                seen = {"path": str(path), "size": dist.get_world_size(), "loaded": len(places)}
                print(json.dumps(seen), file=found)
                if dist.get_rank() == 0:
                    (here / f"checkpoint-{step.index}").symlink_to(path)
"""


def test_a_distributed_checkpoint_has_the_part_of_every_rank_before_and_after_a_change(tmp_path: Path) -> None:
    with Job(tmp_path, script(tmp_path, CHECKPOINTS), str(tmp_path), ranks=4) as job:
        assert job.wait() == 0, job.stderr
    steps = found(tmp_path, 0)
    assert [step["size"] for step in steps[:2]] == [4, 4]
    assert [step["loaded"] for step in steps] == [2, 3, 3, 3]
    for step in steps:
        parts = sorted(path.name for path in Path(step["path"]).glob("*.distcp"))
        assert parts == [f"__{rank}_0.distcp" for rank in range(step["size"])]


STEERS = """
    manager = eg.join()
    model = eg.DistributedDataParallel(manager, nn.Linear(2, 1))
    optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
    manager.register_state(model=model, optim=optim)
    for step in manager.steps(6):
        with step:
            root = manager.gangs.root
            if step.index == 2 and not (here / "seen").exists():
                (here / f"at-{local_rank}").touch()
                while local_rank == 2 and not all((here / f"at-{rank}").exists() for rank in (0, 1)):
                    time.sleep(0.001)
                die_once(step)
                while manager.error is None and root.size == 3:  # until the runtime has learned of the death
                    time.sleep(0.001)
            try:
                flag, total = eg.broadcast_flag(root, root.rank != 0, 0), eg.all_sum(root, 1).item()
            except eg.StepAborted:
                print(json.dumps({"aborted": step.index}), file=found)
                (here / "seen").touch()
                raise
            assert (flag, total) == (False, root.size)
            model(torch.ones(1, 2)).sum().backward()
            optim.step(weight=1.0)
    print(json.dumps({"steps": manager.committed_steps}), file=found)
"""


def test_no_flag_or_sum_is_returned_that_the_ranks_do_not_share(tmp_path: Path) -> None:
    """Rank 0 always says False. Its word is asked for where a peer is known to be dead, too."""
    with Job(tmp_path, script(tmp_path, STEERS), str(tmp_path), ranks=3) as job:
        assert job.wait() == 0, job.stderr
        assert "AssertionError" not in job.stderr
    for local_rank in (0, 1):
        said = found(tmp_path, local_rank)
        assert {"aborted": 2} in said
        assert said[-1] == {"steps": 6}


# -- scripts that are no ranks


def test_a_script_that_asks_for_its_world_size_before_it_joins_is_told_to_join(tmp_path: Path) -> None:
    """fairseq2's own example would make four jobs of one."""
    text = """
        if eg.get_world_size() == 1:
            gang = eg.FakeGang("cpu")
        else:
            gang = eg.ProcessGroupGang.create_default_process_group("cpu")
    """
    with Job(tmp_path, script(tmp_path, text), str(tmp_path), ranks=2) as job:
        assert job.wait() == 1
    assert "has no world size before its first step: call `manager = elasticgang.join()`" in job.stderr


def test_a_script_that_makes_its_own_default_group_is_told_to_join(tmp_path: Path) -> None:
    text = "    gang = eg.ProcessGroupGang.create_default_process_group('cpu')\n"
    with Job(tmp_path, script(tmp_path, text), str(tmp_path), ranks=2) as job:
        assert job.wait() == 1
    assert "is a rank of the elastic job" in job.stderr
    assert "call `manager = elasticgang.join()`" in job.stderr


def test_a_script_that_never_joins_is_named_once(tmp_path: Path) -> None:
    stale = {"RANK": "5", "WORLD_SIZE": "9"}  # what the agent was started with says nothing of the job
    text = "    assert not {'RANK', 'WORLD_SIZE'} & set(os.environ)\n"
    with Job(tmp_path, script(tmp_path, text), str(tmp_path), ranks=4, env=stale) as job:
        assert job.wait() == 0
    (line,) = [line for line in job.stderr.splitlines() if "elasticgang.join" in line]
    assert "exited with code 0 and never called `elasticgang.join`" in line


# REGISTRY-1, TORCHENV-2
def test_a_default_group_of_the_script_stays_and_one_line_says_that_it_does_not_follow(tmp_path: Path) -> None:
    text = """
        manager = eg.join()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        model = eg.DistributedDataParallel(manager, nn.Linear(2, 1))
        optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
        manager.register_state(model=model, optim=optim)
        for step in manager.steps(6):
            with step:
                die_once(step)
                model(torch.ones(1, 2)).sum().backward()
                optim.step(weight=1.0)
                assert dist.get_world_size() == 1
    """
    with Job(tmp_path, script(tmp_path, text), str(tmp_path), ranks=3) as job:
        assert job.wait() == 0, job.stderr
    lines = [line for line in job.stderr.splitlines() if "do not follow the job" in line]
    assert 3 <= len(lines) <= 4  # once a process


def test_a_script_that_joins_under_torchrun_is_refused(tmp_path: Path) -> None:
    text = "    manager = eg.join()\n"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run_preloaded([*command, str(script(tmp_path, text)), str(tmp_path)])
    assert done.returncode != 0
    assert "WORLD_SIZE is 2, but `elasticgang run` did not start this process as a rank" in done.stderr


def test_a_job_of_one_has_torch_distributed_too(tmp_path: Path) -> None:
    text = """
        manager = eg.join()
        model = eg.DistributedDataParallel(manager, nn.Linear(2, 1))
        optim = eg.Optimizer(manager, torch.optim.SGD(model.parameters(), lr=0.1))
        manager.register_state(model=model, optim=optim)
        assert not dist.is_initialized()
        for step in manager.steps(2):
            with step:
                assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
                assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("0", "1")
                assert manager.gangs is manager.gangs and dist.group.WORLD is manager.gangs.root.as_process_group()
                dist.barrier(dist.new_group([0]))
                objects = [None]
                dist.all_gather_object(objects, "mine")
                assert objects == ["mine"]
                model(torch.ones(1, 2)).sum().backward()
                optim.step(weight=1.0)
        assert (dist.get_rank(), manager.gangs.root.size) == (0, 1)
    """
    command = [sys.executable, str(script(tmp_path, text)), str(tmp_path)]
    done = run_preloaded(command, env={"LOCAL_RANK": "0"}, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
