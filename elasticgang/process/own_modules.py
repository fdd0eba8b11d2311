"""How a process of the package's own is started.

OWN-PATH  The working directory, which `python -m` searches first, is not searched: a file in it may have the name of a
          module of the standard library, such as `queue.py`. It is, after all, where the package itself lies there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
# The first statement comes before any import: `-P` would do the same, but Python 3.10 has none.
_WITHOUT = "import sys; sys.path[0] or sys.path.pop(0); "
_RUN = "import sys, runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def command_of(module: str, *args: str) -> list[str]:
    """The command that runs `module` as a program, like `python -m` (OWN-PATH)."""
    return [sys.executable, "-c", _RUN if _lies_here() else _WITHOUT + _RUN, module, *args]


def _lies_here() -> bool:
    try:
        return os.path.samefile(_ROOT, os.getcwd())
    except OSError:  # the working directory was deleted
        return False
