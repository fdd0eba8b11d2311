"""The samples of each step of train.py under these arguments, as JSON: by the Python there, whose text it is."""

from __future__ import annotations

import json

from scripts.demo_job import train


def main() -> None:
    args = train.parse_args()
    batches = train.make_batches(args, len(train.load_text(args.context)))
    print(json.dumps([batches.samples(step).tolist() for step in range(args.steps)]))


if __name__ == "__main__":
    main()
