"""The rendezvous of a job of one process."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from elasticgang.errors import GangError, LayoutError
from elasticgang.gang import FakeGang, Gang, create_fake_gangs
from elasticgang.gang.bans import Ban, Bans
from elasticgang.layout import Member, ParallelLayout, plan
from elasticgang.member.drain import Drain
from elasticgang.member.torch_environment import TorchEnvironment
from elasticgang.process.status_page import StatusPage
from elasticgang.protocol import member_instructions as do
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.member_instructions import Do, Instruction, Observed
from elasticgang.protocol.record import ACTIVE, LEARNER, CheckpointRef, Record, Seat


class LocalRendezvous:
    """The only member of a job without agent, coordinator or subprocess."""

    member = "alone"
    local_rank = 0
    compare_state = 0  # with nobody
    num_collectives = 0  # those of fake gangs always have a result

    def __init__(self, layout: ParallelLayout, device: torch.device) -> None:
        fitting = [option for option in layout.options if option.num_needed == 1]
        if not fitting:
            raise LayoutError(
                f"the layout ({layout.sizes}) needs {layout.num_needed} ranks, but this process is alone; start it "
                f"with `elasticgang run --nproc-per-node {layout.num_needed} ...`."
            )
        self._layouts, layout = layout.options, fitting[0]
        self._layout = layout
        self._job = f"alone-{uuid.uuid4().hex[:12]}"
        self._planned = plan([Member(self.member, "localhost")], layout)
        fakes = {name: FakeGang(device) for name in layout.further_axes}
        self.gangs = replace(create_fake_gangs(device), further=fakes)
        self._bans = Bans()
        for name in self.gangs:
            fake = self.gangs[name]
            assert isinstance(fake, FakeGang)
            fake.bans = self._bans
        self.error: GangError | None = None
        self.page = StatusPage()
        self.drain = Drain(self.page)
        self.record: Record | None = None
        self._torch_environment = TorchEnvironment()

    def observe(self) -> Observed:
        return Observed(self.error, draining=self.drain.requested, by_signal=self.drain.by_signal)

    def tell_saved(self, ref: CheckpointRef, path: str, num_bytes: int, duration_s: float) -> None:
        """There is no agent."""

    def tell_unsaved(self, step: int) -> None:
        """There is no agent."""

    def perform(self, instruction: Instruction) -> Record | None:
        match instruction:
            case Do.LEAVE_GENERATION:
                self.error = None
            case do.SendRequest(report, _, checkpoint):
                loads = report.tip is None and checkpoint is not None
                seat = Seat(self.member, self.member, "localhost", 0, "", LEARNER if loads else ACTIVE)
                saved, digest = checkpoint or (Attempt(0, 1), "")
                self.record = Record(
                    self._job,
                    1,
                    "",
                    self._layout,
                    self._planned,
                    (seat,),
                    (self.member,),
                    report.tip or saved,
                    rolled_back=loads,
                    checkpoint=digest if loads else "",
                    layouts=self._layouts,
                )
            case Do.AWAIT_RECORD:
                return self.record
            case do.Configure():
                self._torch_environment.follow(self.gangs, "localhost")
        return None

    def start_sum(self, values: Sequence[float]) -> Callable[[], list[float]]:
        return lambda: list(values)

    def reduction(self, family: str) -> Gang:
        return self.gangs.dp

    def empty(self, num: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num, dtype=dtype, device="cpu")

    def ban(self, ban: Ban | None) -> Ban | None:
        return self._bans.replace(ban)

    def data_worker_lost(self, loss: dict[str, Any]) -> None:
        """Does nothing: nobody writes events."""

    def poison(self, error: GangError) -> None:
        self.error = self.error or error

    def check_reduction(self) -> None:
        """Does nothing: collectives of fake gangs do not fail."""
