"""Determines the committed attempt at a generation change: from the reports of present members, and from what absent
ones may hold.

Pure. `commit.py` decides the fate of the attempt in doubt; this module decides whether a whole copy of it exists.

RECOVERY-1  The proposal is undecided while an absent agent may know more, or may hold missing state: until it requests
    too, or is known to have ended.
RECOVERY-2  A seat is active only if its member holds, or can apply, the committed attempt for the seat's model
    coordinates.
RECOVERY-3  State from before the first committed step carries no samples. Without a holder it is designated anew, under
    a new attempt, so that a holder of the former one does not match and heals.
RECOVERY-4  A committed attempt is dropped only if no whole copy of it is left, and the record says so (`rolled_back`).
    The exception is one step at most that no live agent knows of.
RECOVERY-5  A job begins with the newest durable checkpoint that any agent can load, if there is one.
RECOVERY-6  A record that goes back to a durable checkpoint names it by its manifest's digest, and has no holder: state
    of the same attempt in memory may be of another checkpoint.
RECOVERY-7  State is whole if the present members hold all parts of one layout of the job, whichever it is, also of what
    they keep aside. Parts of several layouts do not add up.
RECOVERY-8  The job goes back beyond the newest checkpoint that the record names only if no absent agent may load it, or
    if it was tried before.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from elasticgang.layout import ModelCoordinates, Plan
from elasticgang.protocol.commit import Action, Attempt, Standing, action, resolve
from elasticgang.protocol.record import (
    ACTIVE,
    LEARNER,
    SPARE,
    CheckpointRef,
    Holder,
    MemberReport,
    Model,
    Record,
    Report,
    Seat,
    Undecided,
    Unrecoverable,
)


@dataclass(frozen=True)
class CommittedState:
    """`designated`: no member holds the state yet; the `rdp = 0` seats of the new plan become its holders
    (RECOVERY-3). `checkpoint`: the digest of the manifest of the checkpoint that all members load (RECOVERY-6).
    `layout`: the number of the layout of which all parts are held (RECOVERY-7)."""

    committed: Attempt
    rolled_forward: bool = False
    rolled_back: bool = False
    designated: bool = False
    checkpoint: str = ""
    layout: int = 0

    @staticmethod
    def of(checkpoint: CheckpointRef) -> CommittedState:
        return CommittedState(checkpoint.attempt, rolled_back=True, checkpoint=checkpoint.digest)

    def statuses(self, planned: Plan, holds: Mapping[str, ModelCoordinates]) -> dict[str, str]:
        """RECOVERY-2: of the members with a seat in `planned`. `holds`: as from the method of that name."""
        coordinates = itertools.product(*map(range, planned.shape))  # in rank order
        return {
            member.id: ACTIVE if (rdp == 0 if self.designated else holds.get(member.id) == (pp, sdp, tp)) else LEARNER
            for member, (pp, rdp, sdp, tp) in zip(planned.seats, coordinates, strict=True)
        }

    def holds(self, reports: Sequence[Report], layout: int) -> dict[str, ModelCoordinates]:
        """The part of the committed state, in the layout of this number, that each member holds, or can apply. What it
        keeps aside does not count."""
        if self.designated or self.checkpoint:  # RECOVERY-6
            return {}
        parts: dict[Model, ModelCoordinates] = {}  # few, of many members
        held: dict[str, ModelCoordinates] = {}
        for member in (member for report in reports for member in report.members):
            model = member.holds
            if model is not None and _holds(member, self.committed, model, layout):
                if model not in parts:
                    parts[model] = ModelCoordinates(*model)
                held[member.id] = parts[model]
        return held

    def holders(self, reports: Sequence[Report]) -> dict[str, Holder]:
        """The members from which all parts of the committed state can be had, in the layout `layout`."""
        if self.designated or self.checkpoint:
            return {}
        found = {}
        for member in (member for report in reports for member in report.members):
            aside = None if member.former is None else member.former.model
            for model in (member.holds, aside):
                if model is not None and _can_give(member, self.committed, model, self.layout):
                    found[member.id] = Holder(member.id, self.layout, model)
        return found


def without_witness(record: Record | None, reports: Sequence[Report], lost: Collection[str] = ()) -> Undecided | None:
    """RECOVERY-1: without a witness of the recorded generation, what was committed in it may be unknown here."""
    if record is None:
        return None
    if any(_is_witness(record, member) for report in reports for member in report.members):
        return None
    living = [seat.member for seat in _absent(record, reports, lost) if seat.status != SPARE]
    return _wait_for(f"no witness of generation {record.generation} is here", living) if living else None


def _is_witness(record: Record, member: MemberReport) -> bool:
    """Whether the member knows how its last vote ended: an active member that is not torn, or that never entered the
    generation."""
    return _is_active(record, member) and (member.tip is not None or member.entered < record.generation)


def _is_active(record: Record, member: MemberReport) -> bool:
    """Active by the record, or a learner that became active within its generation."""
    seat = record.seat(member.id)
    if seat is None or seat.status == SPARE:
        return False
    return seat.status == ACTIVE or (member.active and member.entered == record.generation)


def recover(
    record: Record | None, reports: Sequence[Report], known: Sequence[Attempt], lost: Collection[str] = ()
) -> CommittedState | Undecided | Unrecoverable:
    """The committed state when the agents of `reports` go on together. `known`: attempts that agents report as
    committed. `lost`: agents whose members are not waited for."""
    if record is None:
        checkpoint = newest_checkpoint(reports)
        if checkpoint is not None:  # RECOVERY-5
            return CommittedState.of(checkpoint)
        return CommittedState(Attempt(0, 1), designated=True)
    absent = _absent(record, reports, lost)
    return _recover(record, reports, [member for report in reports for member in report.members], known, absent)


def _recover(
    record: Record,
    reports: Sequence[Report],
    members: Sequence[MemberReport],
    known: Sequence[Attempt],
    absent: Sequence[Seat],
) -> CommittedState | Undecided | Unrecoverable:
    standings: list[Standing] = []  # neighbours are alike: told once
    for member in members:
        standing = Standing(member.tip, member.pending, _is_active(record, member))
        if not standings or standings[-1] != standing:
            standings.append(standing)
    fate = resolve(record.committed, record.generation, standings, known)
    missing = _missing(record, members, fate.committed, record.in_force)
    is_blind = _is_blind(record, reports)
    whole = _whole_in(record, members, fate.committed)
    if whole is not None:
        return CommittedState(fate.committed, fate.rolled_forward, rolled_back=is_blind, layout=whole)
    if living := _may_hold_all(record, absent, missing):
        return _wait_for(f"nobody here holds {_name(fate.committed)}", living)
    if fate.rolled_forward:  # no present member has applied it, and no whole copy of it is left
        dropped = [replace(m, pending=None) if m.pending == fate.committed else m for m in members]
        return _recover(record, reports, dropped, known, absent)
    if fate.committed.step == 0 and not is_blind:
        return CommittedState(Attempt(0, record.generation + 1), designated=True)
    return _roll_back(record, reports, members, fate.committed, absent)


def _is_blind(record: Record, reports: Sequence[Report]) -> bool:
    """Whether no present agent knows how far the recorded generation came. An agent whose members voted in it knows of
    all its steps but the last; the others know of none."""
    voted = {seat.agent for seat in record.seats if seat.status != SPARE}
    return not any(report.agent in voted for report in reports)


def _roll_back(
    record: Record,
    reports: Sequence[Report],
    members: Sequence[MemberReport],
    committed: Attempt,
    absent: Sequence[Seat],
) -> CommittedState | Undecided | Unrecoverable:
    """RECOVERY-4: a part of `committed` is lost, so go back to an earlier attempt that is whole. The candidates are the
    attempts known to be committed in the recorded generation, the recorded attempt, and then the checkpoint."""
    checkpoint = newest_checkpoint(reports)
    unread = _unread(record, checkpoint)
    able = [seat.member for seat in absent] if unread is not None else []
    tips = {member.tip for member in members if member.tip is not None and member.tip.generation == record.generation}
    for attempt in sorted({record.committed, *tips}, reverse=True):
        if attempt >= committed or (checkpoint is not None and attempt < checkpoint.attempt):
            continue
        if unread is not None and attempt < unread.attempt and able:
            break
        whole = _whole_in(record, members, attempt)
        if whole is not None:
            return CommittedState(attempt, rolled_back=True, layout=whole)
        missing = _missing(record, members, attempt, record.in_force)
        if living := _may_hold_all(record, absent, missing):
            return _wait_for(f"{_name(committed)} is lost, and nobody here holds {_name(attempt)}", living)
    if unread is not None and able:  # RECOVERY-8
        return _wait_for(f"nobody here can load the checkpoint of step {unread.attempt.step}", able)
    if checkpoint is not None:
        return CommittedState.of(checkpoint)
    if committed.step == 0 or (unread is None and _is_blind(record, reports)):  # how far they came, nobody knows
        return Unrecoverable(
            f"all that took part in generation {record.generation} are lost, and there is no checkpoint"
        )
    if unread is not None:
        return Unrecoverable(
            f"no live member holds {_name(committed)}, and no rank that is left can load the checkpoint of step "
            f"{unread.attempt.step}: its directory must be one that all hosts share"
        )
    return Unrecoverable(f"no live member holds {_name(committed)} and there is no checkpoint")


def newest_checkpoint(reports: Sequence[Report]) -> CheckpointRef | None:
    """The newest that an agent can load."""
    return max((report.checkpoint for report in reports if report.checkpoint is not None), default=None)


def _unread(record: Record, checkpoint: CheckpointRef | None) -> CheckpointRef | None:
    """The checkpoint that the record names, if it is newer than `checkpoint`, the newest that a present agent can load,
    and has not been tried in the recorded generation."""
    saved = record.saved
    if (
        saved is None
        or saved.digest == record.checkpoint
        or (checkpoint is not None and saved.attempt <= checkpoint.attempt)
    ):
        return None
    return saved


def _whole_in(record: Record, members: Sequence[MemberReport], committed: Attempt) -> int | None:
    """RECOVERY-7: the number of a layout of which the present members hold all parts of `committed`; the one in force,
    if there are several."""
    numbers = sorted(range(len(record.layouts)), key=lambda number: number != record.in_force)
    return next((number for number in numbers if not _missing(record, members, committed, number)), None)


def _missing(record: Record, members: Sequence[MemberReport], committed: Attempt, number: int) -> list[Model]:
    """The model coordinates of `committed` that no present member holds or can apply, in the layout of this number."""
    layout = record.layouts[number]
    return [
        model
        for model in itertools.product(range(layout.pp), range(layout.sdp), range(layout.tp))
        if not any(_can_give(member, committed, model, number) for member in members)
    ]


def _can_give(member: MemberReport, committed: Attempt, model: Model, layout: int) -> bool:
    return member.former == (committed, layout, model) or _holds(member, committed, model, layout)


def _holds(member: MemberReport, committed: Attempt, model: Model, layout: int) -> bool:
    if member.holds != model or member.layout != layout:
        return False
    return member.tip == committed or action(member.tip, member.pending, committed) is not Action.HEAL


def _may_hold_all(record: Record, absent: Sequence[Seat], missing: Sequence[Model]) -> list[str]:
    """The `absent` members that may hold some of `missing`; none if one part cannot have a holder."""
    holders = [_may_hold(record, absent, model) for model in missing]
    return list(dict.fromkeys(itertools.chain(*holders))) if all(holders) else []


def _may_hold(record: Record, absent: Sequence[Seat], model: Model) -> list[str]:
    """The `absent` members that may hold the model coordinates `model`. Learners and spares may hold any part from an
    earlier seat, and holders what they keep aside."""
    return [
        seat.member
        for seat in absent
        if seat.status != ACTIVE or record.holders or record.model_coordinates(seat.member) == model
    ]


def _absent(record: Record, reports: Sequence[Report], lost: Collection[str]) -> list[Seat]:
    """Seats of members that are neither present nor known to have ended."""
    accounted = {member.id for report in reports for member in report.members}
    accounted.update(gone for report in reports for gone in report.exited)
    return [seat for seat in record.seats if seat.member not in accounted and seat.agent not in lost]


def _wait_for(what: str, living: Sequence[str]) -> Undecided:
    """RECOVERY-1: undecided because of `what`, which `living` may hold."""
    return Undecided(f"{what}, but {', '.join(living)} may live")


def _name(attempt: Attempt) -> str:
    return f"step {attempt.step} of generation {attempt.generation}"
