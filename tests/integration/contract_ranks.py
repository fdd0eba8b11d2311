"""The four ranks of a static gang, of which rank 0 has the store: `python contract_ranks.py PORT`; and, run as a script
under `elasticgang run`, one rank of an elastic one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from elasticgang.errors import InvalidOperationError, LayoutError
from elasticgang.gang import GangGrid, ProcessGroupGang, create_fsdp_gangs, create_parallel_gangs
from tests.integration import contract
from tests.integration.forked_ranks import fork_ranks


def static(port: str) -> int:
    """`RANK` and `WORLD_SIZE` are set."""
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
        del os.environ[name]
    os.environ["MASTER_PORT"] = port
    root = ProcessGroupGang.create_default_process_group(torch.device("cpu"), timeout=timedelta(seconds=45))
    contract.same_on_every_rank(root)
    contract.one_to_another(root)
    contract.refusals(root)
    contract.sub_gangs(root)
    contract.joined_parts(root)
    contract.callbacks_that_wait(root)
    contract.any_strides(root)
    contract.strides_of_messages(root)
    _as_gloo_has_it(root)
    gangs = create_parallel_gangs(root, tp_size=2)
    for gang in (gangs.tp, gangs.dp):
        assert gang.size == root.size // 2
        contract.one_to_another(gang)
    assert (gangs.tp.rank, gangs.dp.rank) == (root.rank % 2, root.rank // 2)
    piped = create_parallel_gangs(root, pp_size=2)
    assert (piped.pp.rank, piped.dp.rank) == (root.rank // 2, root.rank % 2)
    contract.one_to_another(piped.pp)
    hybrid = create_fsdp_gangs(create_parallel_gangs(root), 2)
    assert (hybrid.sdp.rank, hybrid.rdp.rank) == (root.rank % 2, root.rank // 2)
    contract.one_to_another(hybrid.sdp)
    contract.one_to_another(hybrid.rdp)
    _uneven(root)
    _grid(root)
    _named(root)
    again = ProcessGroupGang(piped.pp.as_process_group(), root.device)
    piped.pp.close()
    for call in (again.barrier, again.as_process_group, lambda: piped.device_mesh("pp", "dp")):
        with pytest.raises(InvalidOperationError, match="closed"):  # its group has ended
            call()
    root.close()
    for gang in (gangs.tp, piped.pp, hybrid.sdp):  # they ended with the root
        gang.close()
    print("contract kept", flush=True)
    return 0


def _as_gloo_has_it(root: ProcessGroupGang) -> None:
    """Where Gloo's results are right for strided tensors (without gaps, and of the same strides on all ranks), they are
    ours: values and strides."""
    value = torch.arange(48.0).view(2, 4, 3, 2) * (root.rank + 1)
    pg = root.as_process_group()
    for layout in contract.LAYOUTS:
        if layout is contract._columns:
            continue
        calls: dict[str, tuple[Callable[[Tensor], object], Callable[[Tensor], object]]] = {
            "all_reduce": (lambda t: root.all_reduce(t, contract.SUM), lambda t: dist.all_reduce(t, group=pg)),
            "broadcast": (lambda t: root.broadcast(t, 1), lambda t: dist.broadcast(t, 1, group=pg)),
            "reduce": (lambda t: root.reduce(t, contract.SUM, 1), lambda t: dist.reduce(t, 1, group=pg)),
        }
        for name, (ours, theirs) in calls.items():
            ours(mine := layout(value))
            theirs(expected := layout(value))
            assert mine.stride() == expected.stride()
            assert (name == "reduce" and root.rank != 1) or torch.equal(mine, expected), (name, layout)


def _uneven(root: ProcessGroupGang) -> None:
    """Gangs out of gangs whose ranks are in different numbers of others. fairseq2 makes none out of a sub-gang; and
    `new_group` with `use_local_synchronization` waits for ever here, because the names that it agrees on count the
    groups of each rank."""
    root.create_gang([0, 1])
    others = root.create_gang([3, 2, 1])
    if others is None:
        return
    again = ProcessGroupGang(others.as_process_group(), root.device)  # another object over the same group
    pairs = [others.create_gang([0, 1]), again.create_gang([1, 2]), others.create_gang([0, 2])]
    expected = [(1, 2), (2, 3), (1, 3)]
    for pair, members in zip(pairs, expected, strict=True):
        assert (pair is not None) == (root.rank in members)
        if pair is not None:
            assert pair.rank == members.index(root.rank)
            contract.one_to_another(pair)
    grid = GangGrid([3], ["cp"], root=others)
    cp = grid.create_gang("cp", timeout=timedelta(seconds=30), group_desc="three of four")
    assert cp is not None
    assert cp.description == cp.as_process_group().group_desc == "three of four"
    contract.one_to_another(cp)


def _named(root: ProcessGroupGang) -> None:
    """`Gangs` as one grid, with further axes by name."""
    grid = GangGrid([2, 2], ["cp", "sdp"], root=root)
    grid.register_view("expert", [4], ["ep"])
    gangs = grid.create_gangs()
    assert gangs is not None
    assert list(gangs) == ["root", "dp", "rdp", "sdp", "tp", "pp", "cp", "ep"]
    assert gangs["root"] is root
    assert gangs.dp is gangs.sdp
    assert (gangs["cp"].rank, gangs.sdp.rank, gangs["ep"].rank) == (root.rank % 2, root.rank // 2, root.rank)
    for name in ("cp", "sdp", "ep"):
        contract.one_to_another(gangs[name])
    mesh = gangs.device_mesh("sdp", "cp")
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
    assert mesh.get_group("cp") is gangs["cp"].as_process_group()
    part = GangGrid([3], ["cp"], root=root).create_gangs()
    assert (part is None) == (root.rank == 3)
    if part is not None:
        assert part.root is part["cp"]


def _grid(root: ProcessGroupGang) -> None:
    """HyperCommGrid's calls on real groups; a rank outside the grid gets None."""
    grid = GangGrid([2, 1], ["tp", "dp"], rank_offset=2)
    outside = root.rank < 2
    made = grid.create_gang(["dp", "tp"])
    assert grid.get_gang(["tp", "dp"]) is made
    assert (made is None) == outside
    for call in (grid.create_gang, lambda dims: grid.get_gang("dp")):
        with pytest.raises(KeyError):
            call(["tp", "dp"])
    whole = GangGrid([2, 2], ["tp", "dp"])
    whole.register_view("expert", [2, 2], ["tp", "ep"], ["tp"])
    tp = whole.create_gang("tp", group_desc="tensor")
    assert whole.get_gang("tp", view="expert") is tp
    ep = whole.create_gang("ep", view="expert")
    assert tp is not None
    assert ep is not None
    contract.one_to_another(tp)
    contract.one_to_another(ep)
    with pytest.raises(LayoutError, match="world"):
        GangGrid([8], ["dp"])


def elastic() -> None:
    import elasticgang as eg

    manager = eg.join()
    for step in manager.steps(1):
        with step:
            root = manager.gangs.root
            contract.same_on_every_rank(root)
            contract.one_to_another(root)
            contract.refusals(root)
            contract.same_on_every_rank(manager.gangs.tp)
            contract.joined_parts(root)
            contract.callbacks_that_wait(root)
            contract.any_strides(root)
            contract.strides_of_messages(root)
            contract.any_strides_in_a_process_group(root.as_process_group(), root.rank)
            manager.commit(1.0, lambda total: None)
    print("contract kept")


if __name__ == "__main__":
    if sys.argv[1:]:
        sys.exit(fork_ranks(4, lambda rank, store: static(sys.argv[1])))
    elastic()
