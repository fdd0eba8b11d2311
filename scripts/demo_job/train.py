"""Train a small byte-level transformer on English text that every CPython carries.

Runs under `elasticgang run`, and by itself. With --output-dir every rank writes what it did to a file of its own, as it
does it, so that a reader can tell afterwards which samples each committed step was made of.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor, nn
from torch.nn import functional

import elasticgang as eg
from elasticgang.state.dtensor import local


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        heads = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, dim))
        mixed: Tensor = x + self.mlp(self.mlp_norm(x))
        return mixed


class ByteTransformer(nn.Module):
    def __init__(self, *, dim: int = 208, num_layers: int = 2, num_heads: int = 4, context: int = 48) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, dim), nn.Embedding(context, dim)
        self.blocks = nn.Sequential(*(Block(dim, num_heads) for _ in range(num_layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def load_text(context: int) -> Tensor:
    """`pydoc_data.topics`, the text of Python's `help()`, cut into samples: uint8 `[num_samples, context + 1]`."""
    from pydoc_data.topics import topics

    text = torch.frombuffer(bytearray("\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8)
    num_samples = (len(text) - 1) // context
    return torch.stack([text[i * context : (i + 1) * context + 1] for i in range(num_samples)])


class History:
    """What this member prepared, before each vote, and what it knows committed, after. A line is in the page cache
    once written, and so survives the SIGKILL of its writer."""

    def __init__(self, directory: str | None, member: str) -> None:
        self._file: TextIO | None = None
        if directory is not None:
            path = Path(directory) / "history" / f"{member.replace('/', '-')}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", buffering=1)

    def write(self, kind: str, **fields: object) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"kind": kind, "t": time.monotonic(), **fields}) + "\n")


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--dim", type=int, default=208)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--keep", action="store_true", help="the gradients of slots, when a step is tried again")
    parser.add_argument("--hold-bytes", type=int, default=0, help="memory that each rank holds besides, all written")
    return parser.parse_args(argv)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of every job of the demo."""
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=8, help="samples in a global batch")
    parser.add_argument("--slot", type=int, default=1, help="samples in a microbatch")
    parser.add_argument("--context", type=int, default=48, help="bytes in a sample")
    # At 1e-3 the loss falls faster, but the rounding differences between two runs grow with the steps.
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--reduction", choices=["sum", "reproducible"], default="sum", help="of the gradients")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that each rank sleeps in each step")
    parser.add_argument("--output-dir", help="write each rank's history and the final parameters' digest here")


def make_batches(args: argparse.Namespace, num_samples: int) -> eg.GlobalBatch:
    return eg.GlobalBatch(num_samples, size=args.batch_size, slot=args.slot, seed=args.seed)


def digest_of(model: nn.Module) -> str:
    import hashlib

    digest = hashlib.sha256()  # of what this rank holds of them
    for parameter in model.parameters():
        digest.update(local(parameter).numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)  # the same kernels, whatever the number of ranks
    torch.manual_seed(args.seed)
    manager = eg.join(layout=eg.ParallelLayout())
    data = load_text(args.context)
    held = torch.ones(args.hold_bytes, dtype=torch.uint8)
    transformer = ByteTransformer(dim=args.dim, num_layers=args.layers, context=args.context)
    model = eg.DistributedDataParallel(manager, transformer, reduction=args.reduction, keep=args.keep)
    adam = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    optim = eg.Optimizer(manager, adam)
    warmup = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: min(1.0, (step + 1) / 20))
    batches = make_batches(args, len(data))
    manager.register_state(model=model, optim=optim, warmup=warmup)
    history = History(args.output_dir, manager.member)
    losses: dict[tuple[int, int], float] = {}  # by step and slot

    for step in manager.steps(args.steps):
        with step:
            slots = batches.slots(step)
            losses = {key: loss for key, loss in losses.items() if key[0] == step.index}
            tokens = slots.num_samples * args.context
            for slot in slots:
                with model.accumulate(last=slot.last):
                    samples = data[slot.index].long()
                    logits = model(samples[:, :-1])
                    loss = functional.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten(), reduction="sum")
                    loss.backward()  # type: ignore[no-untyped-call]
                    losses[step.index, slot.number] = loss.item()
            mine = (*slots.kept, *slots)
            loss_sum = sum(losses[step.index, slot.number] for slot in mine)
            time.sleep(args.pause)
            history.write(
                "prepared",
                step=step.index,
                generation=step.generation,
                loss_sum=loss_sum,
                tokens=tokens,
                active=manager.num_active,
                samples=[int(sample) for slot in mine for sample in slot.index],
            )
            if optim.step(weight=tokens, max_norm=1.0):
                assert manager.tip is not None
                manager.report(tokens=tokens, **({"loss": loss_sum / tokens} if tokens else {}))
                history.write("committed", step=step.index, generation=manager.tip.generation, pid=os.getpid())
                warmup.step()

    history.write("finished", digest=digest_of(model), steps=manager.committed_steps)
    del held  # until here


if __name__ == "__main__":
    main()
