"""The samples of each step of train.py under these arguments, as JSON: by the Python there, whose text it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "demo_job"))

import train


def main() -> None:
    args = train.parse_args()
    batches = train.make_batches(args, len(train.load_text(args.context)))
    print(json.dumps([batches.samples(step).tolist() for step in range(args.steps)]))


if __name__ == "__main__":
    main()
