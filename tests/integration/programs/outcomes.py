"""Starts the runner until every program had its turn, and compares what the programs gave."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.integration.programs.catalog import MODULES
from tests.integration.programs.runner import Outcome, read, started_file
from tests.support import REPOSITORY, Command

RUNNER = str(REPOSITORY / "tests" / "integration" / "programs" / "runner.py")
# A step counts as lost after 30 s, as a collective of the static modes does: some programs may hang.
JOB = ("-m", "elasticgang", "run", "--collective-timeout", "30", "--hang-timeout", "30", "--nproc-per-node")
HANG_S = 240.0  # without any outcome: then the processes are killed; a guard against a hang


class Outcomes:
    """Of `names` on `size` ranks in `mode`, by name, a list of the ranks'."""

    def __init__(self, mode: str, names: Sequence[str], size: int, directory: Path) -> None:
        self._output = directory / "outcomes"
        self._output.mkdir(parents=True)
        self.failure = ""  # why some programs had no turn
        remaining = list(names)
        while remaining and not self.failure:
            remaining = remaining[self._start(mode, remaining, size, directory / f"from-{remaining[0]}") :]
        self.by_name = {name: [read(self._output, name, rank) for rank in range(size)] for name in names}

    def _start(self, mode: str, names: Sequence[str], size: int, directory: Path) -> int:
        """How many of `names` had their turn: after a program that ended differently on some ranks, nothing goes on."""
        launcher = [*JOB, str(size)] if mode == "run" else []
        arguments = [RUNNER, "--mode", mode, "--size", str(size), "--output", str(self._output), *names]
        command_line = [sys.executable, *launcher, *arguments]
        with Command(directory, command_line, preloaded=True, imports=MODULES, ends_at_once=True) as command:
            code = self._wait(command)
        started = [number for number, name in enumerate(names, 1) if started_file(self._output, name).exists()]
        if not started:
            how = "hung" if code is None else f"ended with {code}"
            self.failure = f"{mode}: the processes {how} before {names[0]}\n{command.stderr[-4000:]}"
        return max(started, default=0)

    def _wait(self, command: Command) -> int | None:
        """The exit code; None: the command hangs."""
        seen, since = -1, time.monotonic()
        while (code := command.process.poll()) is None:
            present = len(list(self._output.iterdir()))
            if present != seen:
                seen, since = present, time.monotonic()
            elif time.monotonic() - since > HANG_S:
                return None
            time.sleep(0.01)
        return code


def differences(found: Sequence[Outcome | None], expected: Sequence[Outcome | None], rtol: float) -> list[str]:
    """Between the ranks' outcomes and the expected ones."""
    lines = []
    for rank, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if mine is None or theirs is None:
            lines.append(f"rank {rank}: the program did not come to its end{'' if theirs else ' over Gloo'}")
        elif bool(mine.error) != bool(theirs.error):
            lines.append(f"rank {rank}: {mine.error or 'no error'}\ninstead of\n{theirs.error or theirs.values}")
        elif not mine.error:
            lines += [f"rank {rank}, {line}" for line in _compare("values", mine.values, theirs.values, rtol)]
    return lines


def _compare(key: str, found: Any, expected: Any, rtol: float) -> list[str]:
    if type(found) is not type(expected):
        return [f"{key}: {found!r} instead of {expected!r}"]
    if isinstance(found, dict):
        if list(found) != list(expected):
            return [f"{key}: the keys {list(found)} instead of {list(expected)}"]
        return [line for name in found for line in _compare(f"{key}[{name!r}]", found[name], expected[name], rtol)]
    if isinstance(found, list | tuple):
        if len(found) != len(expected):
            return [f"{key}: {len(found)} items instead of {len(expected)}"]
        pairs = enumerate(zip(found, expected, strict=True))
        return [line for index, (one, other) in pairs for line in _compare(f"{key}[{index}]", one, other, rtol)]
    if isinstance(found, float):
        found, expected = torch.tensor(found, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64)
    if isinstance(found, Tensor):
        try:
            torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol, equal_nan=True)
        except AssertionError as error:
            return [f"{key}: {error}".replace("\n", " ")]
        return []
    return [] if found == expected else [f"{key}: {found!r} instead of {expected!r}"]
