"""Figures that the tests of a device measure. `scripts/gpu` shows them once all tests have run."""

from __future__ import annotations

import json
import os

FILE = "ELASTICGANG_GPU_FIGURES"


def note(name: str, **values: object) -> None:
    """Append one line of JSON to the file that the environment names, if it does, and print it."""
    line = json.dumps({"figure": name, **values})
    print(line)
    if path := os.environ.get(FILE):
        with open(path, "a", encoding="utf-8") as file:
            file.write(line + "\n")
