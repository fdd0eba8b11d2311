"""One replica group of one rank under torchft's own Manager, in-process Gloo: the peer's side of a bench.

Writes a line for every step that its manager commits: when, which, in which quorum, and with how many participants.

Gradients go through `Manager.allreduce` itself: torchft 0.2.0's DistributedDataParallel asserts, and so ends the
survivors, where an all-reduce fails as it is started.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import TCPStore
from torch.nn import functional
from torchft import Manager, ProcessGroupGloo
from torchft.optim import OptimizerWrapper

from scripts.demo_job.train import ByteTransformer, load_text


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--timeout", type=float, required=True)
    parser.add_argument("--dim", type=int, default=32)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--context", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=2, help="of this rank")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = load_text(args.context)
    model = ByteTransformer(dim=args.dim, num_layers=args.layers, context=args.context)
    adam = torch.optim.AdamW(model.parameters(), fused=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        adam.load_state_dict(state["adam"])

    timeout = timedelta(seconds=args.timeout)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "adam": adam.state_dict()},
        min_replica_size=1,
        timeout=timeout,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=args.lighthouse,
        replica_id=args.name,
        hostname="127.0.0.1",
    )
    optim = OptimizerWrapper(manager, adam)
    with args.output.open("w", buffering=1) as output:
        while True:
            step = manager.current_step()
            optim.zero_grad()
            start = step * args.batch_size % (len(data) - args.batch_size)
            samples = data[start : start + args.batch_size].long()
            logits = model(samples[:, :-1])
            loss = functional.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            manager.allreduce(flat).wait()
            parts = torch.split(flat, [gradient.numel() for gradient in gradients])
            for gradient, reduced in zip(gradients, parts, strict=True):
                gradient.copy_(reduced.view_as(gradient))
            optim.step()
            if manager.current_step() > step:
                quorum, participants = manager._quorum_id, manager.num_participants()
                line = {"t": time.monotonic(), "step": step, "quorum": quorum, "participants": participants}
                output.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
