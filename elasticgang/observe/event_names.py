"""The names of the events in `events.jsonl`, of which the type of `EventLog.write` takes no other, and of kinds."""

from __future__ import annotations

from typing import Literal

EventName = Literal[
    "started",
    "spawned",
    "entered",
    "spare",
    "healed",
    "saved",
    "unsaved",
    "reported",
    "generation",
    "generation_change",
    "exit_began",
    "exited",
    "retired",
    "fenced",
    "requested",
    "join noticed",
    "coordinator died",
    "coordinator reachable",
    "coordinator unreachable",
    "host lost",
    "host left",
    "hung",
    "standstill",
    "collective_timed_out",
    "data_worker_lost",
    "device_fault",
    "state_differs",
    "warned",
    "tls_renewed",
    "accept failed",
    "truncated",
    "signal",
    "ended",
    "failed",
    "exiting",
]

# How data workers are lost. "failed": one cannot be started, or sends what cannot be read.
DATA_WORKER_LOSSES = ("died", "hung", "failed")
