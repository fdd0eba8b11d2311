"""Train an image classifier on images that are made here.

    elasticgang run --nproc-per-node 4 examples/image_classifier.py

Kill ranks while it trains (`pkill -KILL -x eg-rank-2`), or data workers: it ends with the same parameters. With plain
`python`, it trains alone.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional

import elasticgang as eg

SIZE, NUM_CLASSES = 16, 4


class Stripes:
    """Noisy images of stripes, whose direction is the label. A sample depends on its index alone."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        label = index % NUM_CLASSES
        row, column = torch.arange(SIZE).view(-1, 1), torch.arange(SIZE)
        phase = torch.rand((), generator=generator) * 6.0
        image = torch.sin((row, column, row + column, row - column)[label] + phase).expand(SIZE, SIZE)
        return (image + 2.0 * torch.randn(SIZE, SIZE, generator=generator))[None], label


def make_model() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * (SIZE // 4) ** 2, NUM_CLASSES)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    manager = eg.join()
    model = eg.DistributedDataParallel(manager, make_model(), reduction="reproducible")
    optim = eg.Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=2e-3))
    images = Stripes(2048)
    batches = eg.GlobalBatch(len(images), size=64, slot=8)
    loader = eg.DataLoader(images, batches, num_workers=2)
    manager.register_state(model=model, optim=optim)

    for step in manager.steps(args.steps):
        with step:
            loss_sum = 0.0
            slots = loader.slots(step)  # this rank's share of the global batch
            for slot, (image, label) in slots:
                with model.accumulate(last=slot.last):
                    loss = functional.cross_entropy(model(image), label, reduction="sum")
                    loss.backward()  # type: ignore[no-untyped-call]
                loss_sum += loss.item()
            sums = {"loss": loss_sum}  # over all ranks, with the vote
            if optim.step(weight=slots.num_samples, max_norm=1.0, sums=sums):
                mean = optim.sums["loss"] / batches.size
                manager.report(loss=mean)  # `elasticgang status` shows it
                if manager.is_leader and step.index % 20 == 0:
                    print(f"loss {mean:.3f}", flush=True)

    loader.close()
    if manager.is_leader:
        more = Stripes(len(images) + 512)
        unseen = [more[index] for index in range(len(images), len(more))]
        with torch.no_grad():
            found = model(torch.stack([image for image, _ in unseen])).argmax(-1).tolist()
        num_right = sum(label == given for (_, label), given in zip(unseen, found, strict=True))
        print(f"{num_right} of {len(unseen)} images that it has not seen are classified correctly", flush=True)


if __name__ == "__main__":
    main()
