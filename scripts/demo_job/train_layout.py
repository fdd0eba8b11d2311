"""Train a small Llama whose parts are divided among the ranks, in the layout of `elasticgang run --layout`: along `sdp`
by FSDP2, along `tp` by `parallelize_module`, along `pp` by a 1F1B pipeline, or along several of these. Without one, a
single rank computes the same losses up to rounding; with `--reduction reproducible` and no axis but `sdp`, it ends in
the same bits.

It writes what `train.py` writes, with each rank's part of the model and the sizes of the layout beside it. Each part of
the model sees every sample once; the loss is written by the ranks that alone know it: of the last stage, the first of
each tp gang.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional

import elasticgang as eg
from elasticgang.train import Slots
from scripts.demo_job.llama import Llama, LlamaConfig
from scripts.demo_job.row_digest import digest_of_rows
from scripts.demo_job.train import History, add_arguments, digest_of, load_text, make_batches


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add_arguments(parser)
    parser.set_defaults(slot=2)  # each costs tens of collectives under tp
    parser.add_argument("--layers", type=int, default=LlamaConfig.num_layers)
    parser.add_argument("--dim", type=int, default=LlamaConfig.dim)
    return parser.parse_args(argv)


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    manager = eg.join()
    # What any of the job's layouts divides is a DTensor in all of them, so that its state moves between them.
    is_sharded, is_split = (any(getattr(each, axis) > 1 for each in manager.layouts) for axis in ("sdp", "tp"))
    data = load_text(args.context)
    config = LlamaConfig(dim=args.dim, num_layers=args.layers, context=args.context)
    batches = make_batches(args, len(data))

    def build(seat: eg.ModelCoordinates) -> dict[str, object]:
        mesh, layout = manager.gangs.device_mesh("sdp", "tp"), manager.layout
        llama = Llama(config, seat.pp, layout.pp, seed=args.seed)
        if is_split:
            parallelize_module(llama, mesh["tp"], llama.tp_plan, src_data_rank=None)
        if is_sharded:
            for part in (*llama.layers.values(), llama):
                fully_shard(part, mesh=mesh["sdp"])
        if layout.pp > 1:
            hidden = torch.empty(args.slot, args.context, config.dim, device="meta")
            model: eg.ShardedDataParallel = eg.PipelineParallel(
                manager,
                llama,
                inputs=torch.empty(args.slot, args.context, dtype=torch.int64, device="meta")
                if seat.pp == 0
                else hidden,
                outputs=hidden if seat.pp < layout.pp - 1 else hidden.new_empty(*hidden.shape[:2], config.vocabulary),
                loss_sum=loss_sum,
            )
        else:
            model = eg.ShardedDataParallel(manager, llama, reduction=args.reduction)
        adam = torch.optim.AdamW(model.parameters(), lr=args.lr)
        warmup = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: min(1.0, (step + 1) / 20))
        optim = eg.Optimizer(manager, adam, replicated={"tp": llama.norms})
        return {"model": model, "optim": optim, "warmup": warmup}

    state = manager.build(build)
    history = History(args.output_dir, manager.member)
    for step in manager.steps(args.steps):
        with step:
            slots, layout = batches.slots(step), manager.layout
            losses = run_pipeline(state.model, slots, data) if layout.pp > 1 else run_slots(state.model, slots, data)
            gangs = manager.gangs
            part, sizes = [gangs.pp.rank, gangs.sdp.rank, gangs.tp.rank], [layout.pp, layout.sdp, layout.tp]
            knows_loss = gangs.pp.rank == layout.pp - 1 and gangs.tp.rank == 0
            tokens = slots.num_samples * args.context
            time.sleep(args.pause)
            history.write(
                "prepared",
                step=step.index,
                generation=step.generation,
                part=part,
                sizes=sizes,
                loss_sum=sum(losses) if knows_loss else 0.0,
                tokens=tokens if knows_loss else 0,
                active=manager.num_active,
                samples=[int(sample) for slot in slots for sample in slot.index],
            )
            if state.optim.step(weight=tokens, max_norm=1.0):
                where = {"generation": step.generation, "part": part, "sizes": sizes}
                history.write("committed", step=step.index, **where, pid=os.getpid())
                state.warmup.step()

    # Of one model, whatever `sdp` is: compared with that of a rank that holds all of it.
    rows = digest_of_rows(state.model.named_parameters()) if args.reduction == "reproducible" else None
    digest = digest_of(state.model) if rows is None else rows
    history.write("finished", digest=digest, part=part, sizes=sizes, steps=manager.committed_steps)


def run_slots(model: eg.ShardedDataParallel, slots: Slots, data: Tensor) -> list[float]:
    losses = []
    for slot in slots:
        with model.accumulate(last=slot.last):
            samples = data[slot.index].long()
            loss = loss_sum(model(samples[:, :-1]), samples[:, 1:])
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.item())
    return losses


def run_pipeline(model: eg.PipelineParallel, slots: Slots, data: Tensor) -> list[float]:
    index = torch.cat([slot.index for slot in slots]) if slots else torch.empty(0, dtype=torch.int64)
    samples = data[index].long()
    return [loss.item() for loss in model.run(slots, samples[:, :-1], samples[:, 1:])]


if __name__ == "__main__":
    main()
