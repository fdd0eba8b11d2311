"""Decides which device of the host each rank uses, and when a device is used no more. Pure: the time is an argument.

The agent names a device by its index, as CUDA numbers the devices that this host's processes see. A rank says which
device it has taken, by its UUID.

DEVICE-1  A rank starts on its device again after a fault, `max_faults` times an hour for each device.
DEVICE-2  The next fault quarantines the device: no rank starts on it as long as the agent runs. Its rank moves to the
    first spare device. Without one it is not restarted, and neither is it after the agent has rejoined. A rank that
    does not start again takes no spare device.
DEVICE-3  A step in which devices fault in different generations is the script's fault: the second of them counts as its
    failure. Processes may be gone in another order than their devices faulted, so it does not matter which generation
    is told first. Devices that fault in one generation may have a cause in common, as NVLink.
DEVICE-4  Faults count for the device that the rank has taken, whatever index it has: for its UUID. A rank whose script
    has chosen another device than the agent's is not moved, because it would choose the same one again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elasticgang.protocol.restarts import WINDOW_S


@dataclass(frozen=True)
class Taken:
    """The device that a rank has taken, as it says. `uuid`: "" if it has not joined, or does not know. `is_chosen`: by
    its script, and not by the agent."""

    uuid: str = ""
    is_chosen: bool = False


NOT_JOINED = Taken()


@dataclass(frozen=True)
class Fault:
    """The device of the rank `local_rank` has faulted in `generation` (0: before its first one), and in `step`, the
    last one that the rank began; None: it began none. `restarts`: the rank is to start again; not if it drains."""

    local_rank: int
    step: int | None
    generation: int
    reason: str
    at_s: float
    restarts: bool = True
    taken: Taken = NOT_JOINED


@dataclass(frozen=True)
class FaultOutcome:
    """`number`: the faults within an hour of the device that the rank has taken, with the UUID `uuid`; "" if that is
    unknown. `device`: the one that the agent has given it. `next_device`: where the rank is restarted; None: it is
    not."""

    device: int
    number: int
    is_quarantined: bool
    next_device: int | None
    uuid: str = ""


class Devices:
    """`devices`: their indices; first those of the ranks in order, then the spare ones. A rank beyond them has the
    device of its own number: nothing is known about the host's devices then."""

    def __init__(self, devices: Sequence[int] = (), num_ranks: int = 0, max_faults: int = 2) -> None:
        self.max_faults = max_faults
        self._device_of: dict[int, int | None] = dict(enumerate(devices[:num_ranks]))
        self._spare = list(devices[num_ranks:])
        self._uuid_of: dict[int, str] = {}
        self._faulted_at_s: dict[int | str, list[float]] = {}  # by UUID, or by the index where that is unknown
        self._faulted_in: dict[int, dict[int | str, int]] = {}  # step -> device -> the first generation

    def of(self, local_rank: int) -> int | None:
        """The device of a rank. None: it has none any more."""
        return self._device_of.get(local_rank, local_rank)

    @property
    def num_without(self) -> int:
        """Ranks without a device."""
        return sum(device is None for device in self._device_of.values())

    def faulted(self, fault: Fault) -> FaultOutcome | None:
        """What follows from a fault of the device of a rank that has one. None: the script is at fault."""
        device = self.of(fault.local_rank)
        assert device is not None
        taken = fault.taken
        if taken.uuid and not taken.is_chosen:
            self._uuid_of[device] = taken.uuid
            nameless = self._faulted_at_s.pop(device, [])  # of ranks that had not joined
            self._faulted_at_s[taken.uuid] = sorted(nameless + self._faulted_at_s.get(taken.uuid, []))
        uuid = taken.uuid or self._uuid_of.get(device, "")
        name = uuid or device  # DEVICE-4
        if fault.step is not None:
            faulted = self._faulted_in.setdefault(fault.step, {})
            first = faulted.setdefault(name, fault.generation)
            if any(faulted[other] != first for other in faulted):  # DEVICE-3
                return None
        since_s = fault.at_s - WINDOW_S
        recent = [at_s for at_s in self._faulted_at_s.get(name, ()) if at_s > since_s]
        self._faulted_at_s[name] = recent = [*recent, fault.at_s]
        if len(recent) <= self.max_faults:  # DEVICE-1
            return FaultOutcome(device, len(recent), False, device, uuid)
        may_move = fault.restarts and not taken.is_chosen
        moved = self._spare.pop(0) if self._spare and may_move else None  # DEVICE-2
        self._device_of[fault.local_rank] = moved
        return FaultOutcome(device, len(recent), True, moved, uuid)
