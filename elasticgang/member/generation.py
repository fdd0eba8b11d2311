"""One generation as a rank lives it, and the process groups of its gangs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticgang.comm.group_set import Configuration
from elasticgang.errors import (
    GangError,
)
from elasticgang.protocol.record import Record, Seat

if TYPE_CHECKING:
    from elasticgang.comm.data_groups import DataConfiguration


@dataclass(frozen=True)
class Generation:
    """One generation as this rank lives it. Its configuration's first error ends it (GROUPS-2)."""

    record: Record
    seat: Seat
    rank: int
    groups: Configuration
    data: DataConfiguration | None = None  # None: the gangs' data goes over `groups` too

    @property
    def prefix(self) -> str:
        """Of the store's keys of this generation (RULE-1)."""
        return f"{self.record.job}/{self.record.generation}/{self.record.digest}"

    @property
    def error(self) -> GangError | None:
        """Its first error, which ended it for this rank."""
        return self.groups.error

    def fail(self, error: GangError) -> None:
        """End it for this rank, and wait until nothing of it touches a tensor any more."""
        self.groups.fail(error)
        if self.data is not None:
            self.data.fail(error)
