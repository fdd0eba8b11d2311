"""The demo's training in plain torch: DistributedDataParallel on Gloo, under torchrun. Rank 0 notes each step."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.distributed import destroy_process_group, get_rank, get_world_size, init_process_group
from torch.nn import functional

from elasticgang.protocol.member_state import Share
from scripts.demo_job.train import ByteTransformer, load_text, make_batches
from scripts.demo_job.train import parse_args as train_args


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    own, rest = parser.parse_known_args()
    args = train_args(rest)
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    init_process_group("gloo")
    data = load_text(args.context)
    model = ByteTransformer(dim=args.dim, num_layers=args.layers, context=args.context)
    ddp = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    adam = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    batches, share = make_batches(args, len(data)), Share(get_rank(), get_world_size())
    tokens = args.batch_size * args.context  # of all ranks: it is constant, so that nobody needs to sum it
    with own.output.open("w", buffering=1) if get_rank() == 0 else contextlib.nullcontext() as output:
        for step in range(args.steps):
            slots = batches.share(step, share)
            loss_sum = 0.0
            for slot in slots:
                with contextlib.nullcontext() if slot.last else ddp.no_sync():
                    samples = data[slot.index].long()
                    logits = ddp(samples[:, :-1])
                    loss = functional.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten(), reduction="sum")
                    loss.backward()  # type: ignore[no-untyped-call]
                    loss_sum += loss.item()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(get_world_size() / tokens)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            adam.step()
            adam.zero_grad()
            if output is not None:
                output.write(json.dumps({"step": step, "t": time.monotonic(), "loss_sum": loss_sum}) + "\n")
    destroy_process_group()
    os._exit(0)  # torch's threads abort now and then when the interpreter ends


if __name__ == "__main__":
    main()
