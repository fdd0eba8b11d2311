"""A training job in which one bit of the state flips on one rank, once. Each rank ends with a line of what it has:
`digest SDP NUMBER`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import zlib
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import elasticgang as eg
from elasticgang import testing
from elasticgang.errors import PeerLostError
from elasticgang.state.dtensor import local
from tests.support import wait_until


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--flip", type=json.loads, help="[local rank, step, 'parameter' or 'optimizer']")
    parser.add_argument(
        "--kill", type=json.loads, default=[], help="[local rank, number of the sum after the flip], ..."
    )
    parser.add_argument(
        "--lose", type=int, help="the number of the sum after the flip that this host's ranks do not get"
    )
    parser.add_argument("--catches", action="store_true")
    parser.add_argument("--back-by", type=int, help="the step that waits for a rank that is restarted")
    parser.add_argument("--break-after", type=int, help="the step after which each rank leaves its loop")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, help="steps from one checkpoint to the next")
    parser.add_argument("--layout", type=json.loads, default={})
    parser.add_argument("--output-dir", type=Path, required=True)
    args = parser.parse_args()

    torch.set_num_threads(1)
    rank = int(os.environ["LOCAL_RANK"])
    manager = eg.join(layout=eg.ParallelLayout(**args.layout))

    def build(_: eg.ModelCoordinates) -> dict[str, object]:
        torch.manual_seed(0)
        # The averages of BatchNorm are of a rank's own samples.
        model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
        if manager.layout.sdp > 1:
            fully_shard(model, mesh=manager.gangs.device_mesh("sdp"))
            model = eg.ShardedDataParallel(manager, model)
        else:
            model = eg.DistributedDataParallel(manager, model)
        return {"model": model, "optim": eg.Optimizer(manager, torch.optim.AdamW(model.parameters()))}

    state = manager.build(build)
    if args.every:
        manager.checkpoints(every_steps=args.every)
    num_sums = 0

    def sum_received() -> None:
        nonlocal num_sums
        num_sums += flipped.exists()
        if num_sums == args.lose:
            raise PeerLostError("as if a peer had died")
        for killed, number in args.kill:
            with contextlib.suppress(FileExistsError):
                if (rank, num_sums) == (killed, number):
                    (args.output_dir / f"killed-{rank}").touch(exist_ok=False)
                    testing.kill_this_process()

    testing.fail_at("states_compared", sum_received)
    data = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    batches = eg.GlobalBatch(len(data), size=16, slot=4)
    num_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    flipped = args.output_dir / "flipped"

    def flip(what: str) -> None:
        flipped.touch()
        first = next(iter(state.model.parameters()))
        tensor = first if what == "parameter" else state.optim.optim.state[first]["exp_avg_sq"]
        local(tensor).numpy().view("int32").flat[5] ^= 1 << 20  # behind the back of torch

    def train() -> None:
        for step in manager.steps(args.steps):
            with step:
                if args.flip and args.flip[:2] == [rank, step.index] and not flipped.exists():
                    flip(args.flip[2])
                if step.index == args.back_by:
                    wait_until(
                        lambda: manager.num_members == num_ranks or manager.join_noticed or manager.poisoned,
                        "the rank that is restarted",
                    )
                slots = batches.slots(step)
                for slot in slots:
                    with state.model.accumulate(last=slot.last):
                        state.model(data[slot.index]).square().sum().backward()
                state.optim.step(weight=slots.num_samples, max_norm=1.0)
            if step.index == args.break_after:
                break

    try:
        train()
    except Exception as exc:
        if not args.catches:
            raise
        print(f"caught {type(exc).__name__}", flush=True)
        with contextlib.suppress(eg.InvalidOperationError):
            train()
        return
    parameters = b"".join(local(each).numpy().tobytes() for each in state.model.parameters())
    print(f"digest {manager.gangs.sdp.rank} {zlib.crc32(parameters)}", flush=True)


if __name__ == "__main__":
    main()
