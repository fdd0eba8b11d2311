"""How long `elasticgang run` takes to its session with a coordinator, to the first line of the script, and to a commit.

Beside it, in turns, how long Python takes to import what the script needs. Prints one JSON line per figure: p50 and max
in milliseconds since the start of the command; of `first_commit_ms` also how many times `imports_ms` its median is.

  session_ms        to the agent's authenticated session with a coordinator that runs already
  script_ms         to the first line of a script that imports nothing, of one rank, with that coordinator, and with an
                    embedded one
  first_commit_ms   to the first committed step of four ranks that train a small model with AdamW
  imports_ms        of a Python process that has that script's imports, to its end
  first_update_ms   of a Python process that updates that model once, to its end: torch imports more then
  import_torch_ms   of `python -c "import torch"`, to its end
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from elasticgang.coordinator.decision_server import CoordinatorServer, ServerOptions
from elasticgang.session.connection import Connection

_SCRIPT = 'import time\nprint("first line at", time.monotonic())\n'
_IMPORTS = "import torch, elasticgang as eg; eg.join, eg.DistributedDataParallel, eg.Optimizer, eg.GlobalBatch"
_UPDATE = """import torch, elasticgang as eg
model = torch.nn.Linear(32, 32)
adam = torch.optim.AdamW(model.parameters())
model(torch.ones(8, 32)).sum().backward()
adam.step()
"""
_TRAIN = """import time, torch, elasticgang as eg
manager = eg.join(layout=eg.ParallelLayout())
torch.manual_seed(0)
model = eg.DistributedDataParallel(manager, torch.nn.Linear(32, 32))
optim = eg.Optimizer(manager, torch.optim.AdamW(model.parameters()))
batches = eg.GlobalBatch(64, size=64, slot=8, seed=0)
manager.register_state(model=model, optim=optim)
for step in manager.steps(1):
    with step:
        slots = batches.slots(step)
        for slot in slots:
            with model.accumulate(last=slot.last):
                model(torch.ones(8, 32)).sum().backward()
        optim.step(weight=slots.num_samples)
print("first line at", time.monotonic())
"""
_RANKS = 4
_LIMIT_S = 120.0


class StampingServer(CoordinatorServer):
    """Notes when the newest session was opened."""

    opened_s = 0.0

    def opened(self, connection: Connection) -> None:
        self.opened_s = time.monotonic()
        super().opened(connection)


async def run(*arguments: str) -> tuple[float, str]:
    """When the command was started, and what it wrote."""
    began_s = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _LIMIT_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise RuntimeError(f"{arguments} exited with code {process.returncode}: {output.decode()}")
    return began_s, output.decode()


def first_line_s(output: str) -> float:
    """Of the first process that says so."""
    return min(float(line.rpartition(" ")[2]) for line in output.splitlines() if "first line at" in line)


async def measure(script: str, train: str, num: int) -> dict[str, list[float]]:
    loop = asyncio.get_running_loop()
    failed = loop.create_future()
    server = StampingServer(ServerOptions(founds=True), lambda line: None, failed.set_exception)
    port = await server.start("127.0.0.1", 0)
    found: dict[str, list[float]] = defaultdict(list)
    where = f"127.0.0.1:{port}"
    try:
        for number in range(num + 1):
            times: dict[str, float] = {}
            began_s, _ = await run("-c", "import torch")
            times["import_torch_ms"] = time.monotonic() - began_s
            began_s, output = await run("-m", "elasticgang", "run", script)
            times["script_ms embedded"] = first_line_s(output) - began_s
            began_s, output = await run("-m", "elasticgang", "run", "--nproc-per-node", str(_RANKS), train)
            times["first_commit_ms"] = first_line_s(output) - began_s
            for name, code in (("imports_ms", _IMPORTS), ("first_update_ms", _UPDATE)):
                began_s, _ = await run("-c", code)
                times[name] = time.monotonic() - began_s
            began_s, output = await run(
                "-m", "elasticgang", "run", "--coordinator", where, "--job-id", str(number), script
            )
            times["session_ms running"] = server.opened_s - began_s
            times["script_ms running"] = first_line_s(output) - began_s
            for name, seconds in times.items():
                if number > 0:  # the first turn fills the caches of the file system
                    found[name].append(1000 * seconds)
    finally:
        await server.stop()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/bench start", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=10, help="(default: %(default)s)")
    args = parser.parse_args()
    if args.turns < 1:
        parser.error("there must be a turn at least")
    with tempfile.TemporaryDirectory() as directory:
        script = Path(directory) / "script.py"
        script.write_text(_SCRIPT)
        train = Path(directory) / "train.py"
        train.write_text(_TRAIN)
        found = asyncio.run(measure(str(script), str(train), args.turns))
    for name, ms in found.items():
        figure, _, coordinator = name.partition(" ")
        shape = {"bench": "start", "figure": figure, **({"coordinator": coordinator} if coordinator else {})}
        figures: dict[str, float] = {"count": len(ms), "p50": round(statistics.median(ms)), "max": round(max(ms))}
        if figure == "first_commit_ms":
            ratio = statistics.median(ms) / statistics.median(found["imports_ms"])
            figures |= {"ratio": round(ratio, 3), "asked": 1.15}
        print(json.dumps({**shape, **figures, "load": round(os.getloadavg()[0], 2)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
