"""What the benchmarks print, one line of JSON for each figure, and where they keep their files."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

EXIT_INTERRUPTED = 130


def print_figures(
    bench: str,
    setting: Mapping[str, Any],
    figures: Iterable[Mapping[str, Any]],
    errors: tuple[type[Exception], ...] = (),
) -> int:
    """Each figure as soon as it is measured, with the setting before it and the machine's load after it. Returns the
    exit code: 1 when measuring raises one of `errors`, 130 when it is interrupted."""
    try:
        for figure in figures:
            load = round(os.getloadavg()[0], 2)
            print(json.dumps({"bench": bench, **setting, **figure, "load": load}), flush=True)
    except errors as error:
        print(f"scripts/bench {bench}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


def check_output_dir(parser: argparse.ArgumentParser, directory: Path | None) -> None:
    """Ends the command when the files of an earlier run are in `directory`."""
    if directory is not None and directory.exists() and any(directory.iterdir()):
        parser.error(f"--output-dir {directory} is not empty; name a new folder")
