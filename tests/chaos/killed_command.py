"""The command line, in a process that gets SIGKILL when it reaches a place and a file is there.

python -m tests.chaos.killed_command PLACE FILE run ...
"""

from __future__ import annotations

import sys
from pathlib import Path

from elasticgang import testing
from elasticgang.launch.cli import main

if __name__ == "__main__":
    place, armed = sys.argv[1], Path(sys.argv[2])
    testing.fail_at(place, lambda: armed.exists() and testing.kill_this_process())
    sys.exit(main(sys.argv[3:]))
