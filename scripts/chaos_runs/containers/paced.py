"""train.py, at most four steps a second until there is a file `hurry` in its --output-dir.

So that the job is not done before what is to happen to it has happened, however fast the machine.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import elasticgang as eg
from elasticgang.member.step import Step
from elasticgang.train.data import Slots
from scripts.demo_job import train

_STEP_S = 0.25


class PacedBatch(eg.GlobalBatch):
    hurry: Path

    def slots(self, step: Step) -> Slots:
        if not self.hurry.exists():
            time.sleep(_STEP_S)
        return super().slots(step)


def make_batches(args: argparse.Namespace, num_samples: int) -> eg.GlobalBatch:
    batches = PacedBatch(num_samples, size=args.batch_size, slot=args.slot, seed=args.seed)
    batches.hurry = Path(args.output_dir) / "hurry"
    return batches


if __name__ == "__main__":
    train.make_batches = make_batches
    train.main()
