"""What a job does, as TensorBoard scalars over its steps. It needs `pip install 'elasticgang[tensorboard]'`.

SCALARS-1  An error, such as a full disk, ends the writing with one warning. Nothing else of the job is affected.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter


class ScalarWriter:
    """Writes to `directory`, which is made."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._writer: EventFileWriter | None = None
        self._key: tuple[int, int, int] | None = None
        self._has_failed = False

    def add(self, status: Mapping[str, Any]) -> None:
        """What `Summary.report` returns. Nothing is written while there is no further step or generation change."""
        key = status["step"], status["generation"], sum(status["num_changes"].values())
        if self._has_failed or not status["generation"] or key == self._key:
            return
        self._key = key
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars_of(status)]
        try:
            if self._writer is None:
                self._writer = EventFileWriter(str(self._directory))
            self._writer.add_event(Event(wall_time=status["wall"], step=status["step"], summary=Summary(value=values)))
            self._writer.flush()
        except Exception as exc:  # SCALARS-1; of any kind, from a thread of the writer
            self._has_failed = True
            print(f"elasticgang: warning: no more scalars are written to {self._directory}: {exc}", file=sys.stderr)


def scalars_of(status: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Tags and values. The names are those of the metrics, a label is a further part of the tag."""
    yield "elasticgang/generation", status["generation"]
    for name in ("steps_per_s", "tokens_per_s", "goodput"):
        is_known = name != "steps_per_s" or status["last_commit_age_s"] is not None  # the rank pages can be read
        if is_known and status[name] is not None:
            yield f"elasticgang/{_TAGS[name]}", status[name]
    yield "elasticgang/healing_received_bytes", status["healed_bytes"]
    if status["checkpoint"] is not None:
        yield "elasticgang/checkpoint_step", status["checkpoint"]["step"]
    for name in ("seats", "num_changes", "lost_s", "phase_s", "data_workers_lost"):
        for label, value in status[name].items():
            yield f"elasticgang/{_TAGS[name]}/{label}", value
    for label, value in status["numbers"].items():
        yield f"reported/{label}", float(value)


_TAGS = {
    "steps_per_s": "steps_per_second",
    "tokens_per_s": "tokens_per_second",
    "goodput": "goodput_ratio",
    "seats": "seats",
    "num_changes": "generation_changes",
    "lost_s": "lost_seconds",
    "phase_s": "generation_change_phase_seconds",
    "data_workers_lost": "data_workers_lost",
}
