"""Train a small language model, with dropout, on sentences that are made here.

    elasticgang run --nproc-per-node 4 examples/language_model.py

Kill ranks while it trains (`pkill -KILL -x eg-rank-2`), or data workers: it goes on. With plain `python`, it trains
alone.
"""

from __future__ import annotations

import argparse
import random

import torch
from torch import Tensor, nn
from torch.nn import functional

import elasticgang as eg

LENGTH, DIM = 32, 64
SUBJECTS, VERBS, OBJECTS = ("a cat", "the dog", "my bird"), ("sees", "hears", "follows"), ("a tree", "the car", "you")


class Sentences:
    """Sentences of `LENGTH` + 1 bytes. A sample depends on its index alone."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Tensor:
        choice = random.Random(index).choice
        sentence = f"{choice(SUBJECTS)} {choice(VERBS)} {choice(OBJECTS)}."
        return torch.tensor(list(sentence.ljust(LENGTH + 1).encode()))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(128, DIM), nn.Embedding(LENGTH, DIM)
        layer = nn.TransformerEncoderLayer(DIM, nhead=4, dim_feedforward=4 * DIM, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(DIM, 128)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = self.layers(self.bytes(tokens) + self.positions.weight, mask=mask, is_causal=True)
        logits: Tensor = self.head(hidden)
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    manager = eg.join()
    model = eg.DistributedDataParallel(manager, LanguageModel())
    adam = torch.optim.AdamW(model.parameters(), lr=2e-3)
    optim = eg.Optimizer(manager, adam)
    warmup = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: min(1.0, (step + 1) / 20))
    sentences = Sentences(4096)
    batches = eg.GlobalBatch(len(sentences), size=32, slot=4)
    loader = eg.DataLoader(sentences, batches, num_workers=2)
    manager.register_state(model=model, optim=optim, warmup=warmup)

    for step in manager.steps(args.steps):
        with step:
            loss_sum = 0.0
            slots = loader.slots(step)  # this rank's share of the global batch
            for slot, tokens in slots:
                with model.accumulate(last=slot.last):  # dropout has the slot's own random numbers
                    logits = model(tokens[:, :-1])
                    error = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
                    error.backward()  # type: ignore[no-untyped-call]
                loss_sum += error.item()
            sums = {"loss": loss_sum, "bytes": slots.num_samples * LENGTH}  # over all ranks, with the vote
            if optim.step(weight=slots.num_samples * LENGTH, max_norm=1.0, sums=sums):
                warmup.step()
                loss = optim.sums["loss"] / optim.sums["bytes"]
                manager.report(loss=loss, tokens=slots.num_samples * LENGTH)  # `elasticgang status` shows them
                if manager.is_leader and step.index % 20 == 0:
                    print(f"loss {loss:.3f}", flush=True)
    loader.close()


if __name__ == "__main__":
    main()
