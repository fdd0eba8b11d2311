"""A writer of checkpoints that is killed before its n-th call that changes the store, which is a directory or a URL:
`python checkpoint_writer.py ROOT N [BYTES]`.

It saves step 20 beside step 10, with two shares, and keeps one checkpoint. N = 0: it is not killed. Prints how many
calls there were. With BYTES, the kernel kills it once it writes more than so many bytes to a file.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elasticgang import testing
from elasticgang.checkpoint import writer
from elasticgang.checkpoint.plan import directory_name
from elasticgang.checkpoint.shard import Block, Shard
from elasticgang.protocol.commit import Attempt

if TYPE_CHECKING:
    from elasticgang.checkpoint.capture import Captured  # imports torch, which the killed writers do without

ROWS = 6


def directory(step: int) -> str:
    return directory_name(Attempt(step, 1), f"{step:016x}")


def requests(root: Path | str, step: int) -> list[tuple[dict[str, Any], bytes]]:
    """Two shares of a tensor of bytes that all are `step`, and of a scalar; the second share commits."""
    made = []
    for number in (1, 0):
        blocks = [Block("model.w", (ROWS, 2), "uint8", "", (number * ROWS // 2, 0), (ROWS // 2, 2))]
        if number == 0:
            blocks.append(Block("model.step", (), "uint8", "", (), ()))
        spec = {"dict": [["model", {"dict": [["w", {"tensor": "model.w"}], ["step", {"tensor": "model.step"}]]}]]}
        empty: dict[str, Any] = {"dict": []}
        objects = {"parameters": spec, "buffers": empty, "optimizers": empty, "others": empty}
        shard = Shard("0-0-0", number, 2, tuple(blocks), objects if number == 0 else None)
        request = request_of(root, step, shard, commit_of(step, ["0-0-0"], {}) if number == 0 else None)
        made.append((request, bytes([step]) * shard.num_bytes))
    return made


def commit_of(step: int, places: Sequence[str], layout: dict[str, int]) -> dict[str, Any]:
    return {
        "places": list(places),
        "attempt": [step, 1],
        "job": "job",
        "record": "digest",
        "layout": layout,
        "keep": 1,
        "is_alone": True,
    }


def request_of(root: Path | str, step: int, shard: Shard, commit: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "root": str(root),
        "directory": directory(step),
        "shard": shard.to_json(),
        "commit": commit,
        "lost": [],
    }


def save(root: Path | str, step: int) -> str:
    problem = ""
    for request, data in requests(root, step):
        problem = problem or save_share(request, data)
    return problem


def save_captured(root: Path, captured: Captured, commit: dict[str, Any] | None) -> None:
    """A share of step 10."""
    data = bytearray(captured.shard.num_bytes)
    assert captured.copy_to(memoryview(data), lambda: False)
    assert save_share(request_of(root, 10, captured.shard, commit), data) == ""


def save_share(request: dict[str, Any], data: bytes | bytearray) -> str:
    memory = os.memfd_create("share")
    os.write(memory, data)
    problem = writer.save(memory, request).problem
    os.close(memory)
    return problem


def main(argv: Sequence[str]) -> int:
    root, last = argv[1], int(argv[2])
    if len(argv) > 3:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(argv[3]), int(argv[3])))
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1
        if calls == last:
            testing.kill_this_process()

    testing.fail_at("checkpoint_io", count)
    problem = save(root, 20)
    print(calls)
    if problem:
        print(problem, file=sys.stderr)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
