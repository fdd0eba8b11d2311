"""The gangs of one rank, and which of them are current.

G1  The current gangs are a stack per thread: `with gangs:` in one thread does not show in another.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields
from types import TracebackType

import torch

from elasticgang.gang.base import Gang
from elasticgang.gang.fake import FakeGang

_local = threading.local()


@dataclass(frozen=True, kw_only=True)
class Gangs:
    """All gangs of one rank. As a context manager, makes them the current ones of this thread.

    `manager.gangs` is a snapshot of one generation; the gang objects in it keep their identity from generation to
    generation and are reconfigured beneath.
    """

    root: Gang
    dp: Gang
    rdp: Gang
    sdp: Gang
    tp: Gang
    pp: Gang

    def __post_init__(self) -> None:
        for field in fields(self):
            gang = getattr(self, field.name)
            if self.root.rank == 0 and gang.rank != 0:
                raise ValueError(
                    f"Rank 0 of `root` must be rank 0 of `{field.name}`, but is rank {gang.rank} of it instead."
                )

    def __enter__(self) -> Gangs:
        _stack().append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _stack().pop()

    def close(self) -> None:
        for field in fields(self):
            getattr(self, field.name).close()


def create_fake_gangs(device: torch.device) -> Gangs:
    """Gangs of one rank, without processes."""
    return Gangs(**{field.name: FakeGang(device) for field in fields(Gangs)})


def maybe_get_current_gangs() -> Gangs | None:
    """The gangs of the innermost `with gangs:` of this thread, or None outside."""
    stack = _stack()
    return stack[-1] if stack else None


def _stack() -> list[Gangs]:
    if not hasattr(_local, "stack"):
        _local.stack = []
    stack: list[Gangs] = _local.stack
    return stack
