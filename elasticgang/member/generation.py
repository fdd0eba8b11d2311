"""One generation of a rank, and the process groups of its gangs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from elasticgang.comm.group_set import Configuration
from elasticgang.errors import (
    GangError,
)
from elasticgang.member.sums import Sums
from elasticgang.protocol.record import Record, Seat

if TYPE_CHECKING:
    from elasticgang.comm.data_groups import DataConfiguration


@dataclass(frozen=True)
class Generation:
    """One generation of this rank. The first error of its configuration ends it (GROUPS-2)."""

    record: Record
    seat: Seat
    rank: int
    groups: Configuration
    sums: Sums
    data: DataConfiguration | None = None  # None: `groups` carry the gangs' data too

    @property
    def prefix(self) -> str:
        """As of the record."""
        return self.record.prefix

    @property
    def error(self) -> GangError | None:
        """The first error, which has ended the generation for this rank."""
        return self.groups.error

    def fail(self, error: GangError) -> None:
        """End the generation for this rank, and wait until none of its collectives accesses a tensor any more."""
        self.groups.fail(error)
        if self.data is not None:
            self.data.fail(error)

    def check(self) -> None:
        """The device has done what was started: end the generation if a collective has failed although its `wait` has
        returned (DATA-5)."""
        error = None if self.data is None or self.error is not None else self.data.failure()
        if error is not None:
            self.fail(error)
