"""Starts commands that end with this process, however it ends."""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from elasticgang.process.parent_death import signal_at_parent_death

ELASTICGANG = Path(sys.executable).with_name("elasticgang")


def start_command(arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start `elasticgang ARGUMENTS` with its output appended to `log`. The kernel ends it when this process dies."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [str(ELASTICGANG), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a Ctrl-C in the terminal comes to this process, which ends the job in order
            preexec_fn=functools.partial(signal_at_parent_death, signal.SIGTERM),
        )
