"""A script for fairseq2's gangs, with nothing of ours but the name in its imports.

There they read `from fairseq2.gang import ...`, and `get_default_device` and `get_world_size` come from where its
documentation has them. It uses what that documentation shows: a gang for one process or many, collectives, gangs for
parallelism, hybrid sharding, current and default gangs, flags and sums, and errors. It prints what each rank has seen.

    torchrun --nproc-per-node 4 fairseq2_example.py            or alone: python fairseq2_example.py
"""

from __future__ import annotations

import json
from datetime import timedelta

import torch

from elasticgang import (
    FakeGang,
    Gang,
    GangError,
    Gangs,
    InvalidOperationError,
    OperationalError,
    ProcessGroupGang,
    ReduceOperation,
    all_sum,
    broadcast_flag,
    create_fake_gangs,
    create_fsdp_gangs,
    create_parallel_gangs,
    get_current_gangs,
    get_default_device,
    get_default_gangs,
    get_world_size,
    raise_operational_gang_error,
    set_default_gangs,
    set_gangs,
)

SEEN: dict[str, object] = {}


def collectives(gang: Gang) -> None:
    """One interface for all, whatever is beneath."""
    ones = torch.ones(2, 3, device=gang.device)
    gang.all_reduce(ones, ReduceOperation.SUM)
    SEEN["sum of ones"] = ones[0, 0].item()

    largest = torch.tensor([float(gang.rank)], device=gang.device)
    if gang.size > 1:
        gang.all_reduce(largest, ReduceOperation.MAX)
    SEEN["largest rank"] = largest.item()

    mine = torch.full((2,), gang.rank * 10.0, device=gang.device)
    gathered = torch.empty(gang.size, 2, device=gang.device)
    gang.all_gather(gathered, mine)
    SEEN["gathered"] = gathered[:, 0].tolist()

    parts = [torch.empty_like(mine) for _ in range(gang.size)]
    gang.all_gather_to_list(parts, mine)
    SEEN["in a list"] = [part[1].item() for part in parts]

    weights = torch.full((3,), float(gang.rank + 1), device=gang.device)
    gang.broadcast(weights)
    SEEN["of rank 0"] = weights.tolist()

    settings: list[object] = [{"lr": 0.5}, "adamw"] if gang.rank == 0 else [None, None]
    gang.broadcast_objects(settings, source_rank=0)
    SEEN["settings"] = settings

    gang.barrier()


def some_of_them(root: Gang) -> None:
    """A gang of the even ranks; the others are not in it."""
    even = root.create_gang(list(range(0, root.size, 2)))
    if even is None:
        SEEN["among the even"] = None
        return
    total = torch.ones(1, device=even.device)
    even.all_reduce(total, ReduceOperation.SUM)
    SEEN["among the even"] = [even.rank, even.size, total.item()]


def fit(gangs: Gangs) -> None:
    """Data parallelism by hand: w of y = 3x, each rank of `dp` with samples of its own."""
    weight = torch.zeros((), device=gangs.device)
    x = torch.arange(1.0, 9.0, device=gangs.device)[gangs.dp.rank :: gangs.dp.size]
    num_steps = 0
    while True:
        error = weight * x - 3.0 * x
        loss = all_sum(gangs.dp, (error**2).sum().item())
        if broadcast_flag(gangs.root, bool(loss < 1e-6)):
            break
        gradient = (2.0 * error * x).sum()
        gangs.dp.all_reduce(gradient, ReduceOperation.SUM)
        weight -= gradient / 8.0 / 60.0
        num_steps += 1
    SEEN["fitted"] = [round(weight.item(), 3), num_steps]


def nested() -> str:
    """Deep inside, nobody has passed the gangs."""
    gangs = get_current_gangs()
    return f"tp {gangs.tp.rank}/{gangs.tp.size} dp {gangs.dp.rank}/{gangs.dp.size}"


def current(gangs: Gangs) -> None:
    default = get_default_gangs()
    assert default is get_default_gangs()
    assert get_current_gangs() is default
    outside = nested()
    with gangs:
        assert get_current_gangs() is gangs
        inside = nested()
        with set_gangs(default):
            assert nested() == outside
        assert nested() == inside
    assert get_current_gangs() is default
    SEEN["nested"] = [outside, inside]

    set_default_gangs(gangs)
    assert get_default_gangs(gangs.device) is gangs
    with create_fake_gangs(gangs.device):
        assert nested() == outside
    assert nested() == inside


def errors(root: Gang) -> None:
    for ranks in ([-1], [0, 0], [root.size + 1]):
        try:
            root.create_gang(ranks)
        except ValueError:
            continue
        raise AssertionError(ranks)
    if isinstance(root, ProcessGroupGang):
        try:
            ProcessGroupGang.create_default_process_group(root.device)
        except InvalidOperationError:
            SEEN["a second root"] = "refused"
    try:
        raise_operational_gang_error(GangError("a peer is gone"))
    except OperationalError as error:
        SEEN["translated"] = str(error.__cause__)


def main() -> None:
    device = get_default_device()
    root: Gang
    if get_world_size() == 1:
        root = FakeGang(device)
    else:
        root = ProcessGroupGang.create_default_process_group(device, timeout=timedelta(seconds=60))
    SEEN["root"] = [root.rank, root.size, root.supports_process_group]

    collectives(root)
    some_of_them(root)

    gangs = create_parallel_gangs(root, tp_size=2 if root.size > 1 else 1)
    for name, gang in (("dp", gangs.dp), ("tp", gangs.tp), ("pp", gangs.pp)):
        SEEN[name] = [gang.rank, gang.size]
    number = torch.tensor([float(root.rank)], device=device)
    gangs.tp.all_reduce(number, ReduceOperation.SUM)
    SEEN["sum over tp"] = number.item()
    fit(gangs)

    whole = create_parallel_gangs(root)
    sharded = create_fsdp_gangs(whole)
    assert sharded.sdp is sharded.dp
    assert sharded.rdp.size == 1
    if root.size > 1:
        hybrid = create_fsdp_gangs(whole, intra_node_size=2)
        SEEN["hybrid"] = [hybrid.rdp.rank, hybrid.rdp.size, hybrid.sdp.rank, hybrid.sdp.size]

    current(gangs)
    errors(root)
    print(json.dumps(SEEN))
    root.close()


if __name__ == "__main__":
    main()
