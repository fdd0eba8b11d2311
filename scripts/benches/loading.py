"""What loading data costs a step: `eg.DataLoader` with worker processes beside batches that are there already.

One rank, in turns. A sample takes `--sample-ms` to fetch, a step computes for about `--step-ms`. Prints one JSON line
per figure: p50 of the step's seconds with and without loading, their ratio, and the ratio without workers.

With `--stream`, `eg.StreamLoader` reads the samples from splits, whose states have `--state-bytes` each. A further line
has p50 of the milliseconds that the exchange of these states takes in a step. To measure it between ranks, run

    elasticgang run --nproc-per-node 4 scripts/benches/loading.py --stream

Rank 0 prints.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

import elasticgang as eg


class Slow:
    """`busy`: the processor works for that time, as for decoding; otherwise it waits, as for storage."""

    def __init__(self, num_samples: int, seconds: float, busy: bool) -> None:
        self._num_samples, self._seconds, self._busy = num_samples, seconds, busy

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> torch.Tensor:
        end = time.perf_counter() + self._seconds
        if not self._busy:
            time.sleep(self._seconds)
        while time.perf_counter() < end:
            pass
        return torch.full((1024,), float(index))


class SlowSplit:
    """The samples of a split, each as `Slow` fetches it. Its state has `state_bytes` beside the place."""

    def __init__(self, samples: Slow, state_bytes: int) -> None:
        self._samples, self._padding, self._place = samples, "x" * state_bytes, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self._place < len(self._samples):
            self._place += 1
            yield self._samples[self._place - 1]
        self._place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self._place, "padding": self._padding}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._place = state["place"]


def pairs_of(slots: Any, root: eg.Gang, exchanges: list[float]) -> Iterator[tuple[Any, torch.Tensor]]:
    """The slots and batches. `exchanges`: gets the seconds from the last batch to the end of the loop, once all ranks
    have come so far."""
    left, begun = len(slots), 0.0
    if not left:
        root.barrier()
    for pair in slots:
        yield pair
        left -= 1
        if not left:
            root.barrier()
            begun = time.perf_counter()
    if begun:
        exchanges.append(time.perf_counter() - begun)


def compute(matrix: torch.Tensor, seconds: float) -> None:
    """The same work in every step, of about `seconds`."""
    for _ in range(round(seconds / compute.each)):  # type: ignore[attr-defined]
        matrix @ matrix


def calibrate(matrix: torch.Tensor) -> None:
    matrix @ matrix
    begun = time.perf_counter()
    for _ in range(50):
        matrix @ matrix
    compute.each = (time.perf_counter() - begun) / 50  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120, help="(default: %(default)s)")
    parser.add_argument("--num-workers", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--samples", type=int, default=16, help="of a step (default: %(default)s)")
    parser.add_argument("--sample-ms", type=float, default=5.0, help="(default: %(default)s)")
    parser.add_argument("--step-ms", type=float, default=100.0, help="(default: %(default)s)")
    parser.add_argument("--busy", action="store_true", help="fetching a sample takes a processor")
    parser.add_argument("--stream", action="store_true", help="read from streams")
    parser.add_argument("--state-bytes", type=int, default=1000, help="of a split (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    slot = max(1, args.samples // 4)
    dataset = Slow(4096, args.sample_ms / 1000, args.busy)
    batches = eg.GlobalBatch(len(dataset), size=slot * 4, slot=slot)
    ready = torch.zeros(slot, 1024)
    parameter = torch.nn.Parameter(torch.zeros(1024))
    matrix = torch.rand(384, 384)
    calibrate(matrix)
    manager = eg.join()
    optim = eg.Optimizer(manager, torch.optim.SGD([parameter], lr=0.1))
    state: dict[str, Any] = {"parameter": torch.nn.ParameterList([parameter]), "optim": optim}
    loaders: dict[str, Any] = {}
    for kind, num_workers in (("workers", args.num_workers), ("no_workers", 0)):
        if args.stream:
            state[kind] = loaders[kind] = eg.StreamLoader(
                manager,
                lambda number: SlowSplit(dataset, args.state_bytes),
                num_splits=2 * batches.num_slots,
                size=batches.size,
                slot=slot,
                num_workers=num_workers,
            )
        else:
            loaders[kind] = eg.DataLoader(dataset, batches, num_workers=num_workers)
    manager.register_state(**state)
    kinds = ("workers", "ready", "no_workers")
    exchanges: list[float] = []
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    turn = 10  # steps in a row of one kind; the first two of a turn do not count
    for step in manager.steps(args.steps):
        with step:
            kind = kinds[step.index // turn % len(kinds)]
            begun = time.perf_counter()
            if kind in loaders:
                pairs = pairs_of(loaders[kind].slots(step), manager.gangs.root, exchanges)
            else:
                pairs = ((slot, ready) for slot in batches.slots(step))
            for _, batch in pairs:
                compute(matrix, args.step_ms / 4000)
                (parameter * batch).sum().backward()  # type: ignore[no-untyped-call]
            optim.step(weight=1.0)
            if step.index % turn >= 2:
                seconds[kind].append(time.perf_counter() - begun)
    if manager.gangs.root.rank:
        return
    p50 = {kind: statistics.median(found) for kind, found in seconds.items()}
    for kind, value in p50.items():
        print(json.dumps({"figure": f"step_{kind}", "p50_ms": round(value * 1000, 1), "steps": len(seconds[kind])}))
    if args.stream:
        print(json.dumps({"figure": "exchange_of_states", "p50_ms": round(statistics.median(exchanges) * 1000, 3)}))
    print(json.dumps({"figure": "workers_over_ready", "ratio": round(p50["workers"] / p50["ready"], 3)}))
    print(json.dumps({"figure": "no_workers_over_ready", "ratio": round(p50["no_workers"] / p50["ready"], 3)}))


if __name__ == "__main__":
    main()
