"""One live line on a terminal; elsewhere a plain line every few seconds."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

from tqdm import tqdm

_PLAIN_INTERVAL_S = 5.0
_LIVE_INTERVAL_S = 0.3


@dataclass(frozen=True)
class Status:
    """`loss`: of the last committed step. `seated`: of the `ranks`, in the generation. `recovery_ms`: of the last kill
    that the job has recovered from."""

    steps: int
    loss: float
    seated: int
    ranks: int
    kills: int
    recovery_ms: float | None

    def __str__(self) -> str:
        recovery = "" if self.recovery_ms is None else f", last recovery {self.recovery_ms:.0f} ms"
        return f"loss {self.loss:.3f}, {self.seated} of {self.ranks} ranks, {self.kills} kills{recovery}"


class Progress:
    """Shows how far a job of `num_steps` is. Used as a context manager."""

    def __init__(self, label: str, num_steps: int) -> None:
        self._label, self._num_steps = label, num_steps
        self._is_live = sys.stdout.isatty()
        self._next = 0.0

    def __enter__(self) -> Progress:
        if self._is_live:
            tqdm.monitor_interval = 0  # no thread: jobs are forked from this process
            self._bar = tqdm(
                total=self._num_steps,
                desc=f"{self._label}: starting",
                bar_format="{desc} {bar} step {n_fmt}/{total_fmt} [{elapsed}]",
                file=sys.stdout,
                dynamic_ncols=True,
                mininterval=0,
            )
        else:
            print(f"{self._label}: starting", flush=True)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_live:
            self._bar.close()

    @property
    def is_due(self) -> bool:
        """Whether it is time to show something new."""
        return time.monotonic() >= self._next

    def show(self, status: Status) -> None:
        self._next = time.monotonic() + (_LIVE_INTERVAL_S if self._is_live else _PLAIN_INTERVAL_S)
        if self._is_live:
            self._bar.desc = f"{self._label}: {status}"
            self._bar.n = status.steps
            self._bar.refresh()
        else:
            print(f"{self._label}: step {status.steps}/{self._num_steps}, {status}", flush=True)
