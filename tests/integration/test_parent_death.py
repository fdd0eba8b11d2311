"""A process that gets a signal when its parent is killed, across an exec."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys

import psutil
import pytest

from tests.support import REPOSITORY

GUARD_S = 60.0

# The child says when it runs: its parent is killed only after the exec.
PARENT = """
import functools, signal, subprocess, sys
from elasticgang.process.parent_death import signal_at_parent_death

def set_both(first, last):
    signal_at_parent_death(first)
    signal_at_parent_death(last)

child = subprocess.Popen(
    [sys.executable, "-c", "import sys, time; print('here', flush=True); time.sleep(1000)"],
    preexec_fn=functools.partial(set_both, *map(int, sys.argv[1:])), stdout=subprocess.PIPE,
)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("last", [signal.SIGTERM, signal.SIGKILL, 0])
def test_the_last_signal_that_was_asked_for_comes(last: int) -> None:
    command = [sys.executable, "-c", PARENT, str(int(signal.SIGUSR1)), str(int(last))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        child = psutil.Process(pid)
        pidfd = os.pidfd_open(pid)
        try:
            parent.kill()
            parent.wait()
            if last:
                assert select.select([pidfd], [], [], GUARD_S)[0]
            else:  # the parent is gone, and with it the moment of a signal
                assert child.is_running()
                assert child.status() != psutil.STATUS_ZOMBIE
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
