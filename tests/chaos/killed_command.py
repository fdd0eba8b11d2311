"""The command line, in a process that gets SIGKILL when it reaches a place and a file is there.

python -m tests.chaos.killed_command PLACE FILE run ...
"""

from __future__ import annotations

import sys
from pathlib import Path

from elasticgang import testing
from elasticgang.launch.cli import main


def kill_if_armed() -> None:
    if Path(sys.argv[2]).exists():
        testing.kill_this_process()


if __name__ == "__main__":
    testing.fail_at(sys.argv[1], kill_if_armed)
    sys.exit(main(sys.argv[3:]))
