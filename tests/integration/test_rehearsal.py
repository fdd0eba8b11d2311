"""What a fork server does before it forks coordinators: it leads a job, and nothing of that is left."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from tests.support import REPOSITORY, without_network

REHEARSES = """
    import asyncio, gc, json, os, resource, signal, warnings
    from elasticgang.coordinator.rehearsal import rehearse
    from elasticgang.process import code_layout

    def state():
        return {
            "threads": len(os.listdir("/proc/self/task")),
            "files": sorted(os.listdir("/proc/self/fd")),
            "interrupts": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
            "collections": gc.get_threshold(),
            "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        }
    before = state()
    for _ in range(10):  # it gives up after a second, however little of that it has run
        with code_layout.recording() as called:
            rehearse()
        names = sorted({code.co_name for code in called.codes.values() if "elasticgang" in code.co_filename})
        if "exchange_keys" in names:
            break
    gc.collect()
    pid = os.fork()
    if not pid:
        warnings.simplefilter("ignore")  # newer Pythons deprecate it
        asyncio.get_event_loop().close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    print(json.dumps({"names": names, "before": before, "after": state()}))
"""


def rehearsed(*prefix: str) -> dict[str, Any]:
    command = [*prefix, sys.executable, "-c", textwrap.dedent(REHEARSES)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["after"] == found["before"]
    return found


def test_a_job_is_led_through_three_generations_and_nothing_is_left_of_it() -> None:
    found = rehearsed()
    decides = {"next_record", "plan", "_decide", "exchange_keys", "_carry_out"}
    assert decides <= set(found["names"])


def test_it_is_done_without_where_there_is_no_loopback_interface() -> None:
    prefix = without_network()
    if not prefix:
        pytest.skip("needs a network namespace of its own")
    assert "next_record" not in rehearsed(*prefix)["names"]
