"""How a job's speed and loss went, in a bounded number of points. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MAX_POINTS = 512


class History:
    """`points`: (seconds since the start, step, steps a second, loss or None), over the whole time that was seen. Once
    there are too many, every other one goes, and further ones are taken half as often."""

    def __init__(self) -> None:
        self.points: list[tuple[float, int, float, float | None]] = []
        self._encoded: list[str] = []  # each point once: all of them, each second, would cost more than the rest
        self._every = 1
        self._num_seen = 0

    def add(self, status: Mapping[str, Any]) -> None:
        """What `Summary.report` returns."""
        self._num_seen += 1
        if self._num_seen % self._every:
            return
        loss = status["numbers"].get("loss")
        known = float(loss) if isinstance(loss, int | float) else None
        self.points.append((round(status["elapsed_s"], 1), status["step"], status["steps_per_s"], known))
        self._encoded.append(json.dumps(self.points[-1]))
        if len(self.points) >= MAX_POINTS:
            self.points, self._encoded = self.points[1::2], self._encoded[1::2]
            self._every *= 2

    @property
    def json(self) -> str:
        return f"[{', '.join(self._encoded)}]"
