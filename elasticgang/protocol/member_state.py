"""The committed and the prepared attempt of one rank: the member's side of `commit.py`.

Pure. `member_lifecycle.py` decides what the rank does.

MEMBER-1  `tip` names the attempt in this rank's state; while an apply runs it is None (RULE-10).
MEMBER-2  A prepared attempt is kept until a counted vote or a record decides its fate (RULE-4).
MEMBER-3  A gradient that was computed on a torn state is never used (RULE-5).
MEMBER-4  All members that count the same round of votes have the same active members afterwards.
MEMBER-5  A step in which no member has slots commits nothing: learners heal in it, and it is tried again (RULE-5).
MEMBER-6  The last holder of a shard leaves only after another rank has copied it: a draining member stays while all
    active members of its model coordinates drain and another could still get the state from them. That is a learner
    there, a rank that waits to join, or a *successor*: a spare, or a rank that is being started. A draining learner
    does not become active. With fallback layouts, it also stays until a record knows that all of them drain: that
    record may take a layout that the other members fill.
MEMBER-7  A member that the record names as a holder keeps the committed state of its former layout for its peers, until
    a later attempt is committed or a record does not name it any more. If spares keep state, all members request the
    next record once everybody has fetched, so that the spares need not keep it any longer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from elasticgang.errors import InternalError, StateLostError
from elasticgang.protocol.commit import Action, Attempt, action
from elasticgang.protocol.record import ACTIVE, LEARNER, FormerState, Holder, MemberReport, Record, Seat
from elasticgang.protocol.seat_index import SeatIndex

_NOTHING = Attempt(0, 0)


@dataclass(frozen=True)
class Share:
    """This rank's part of a step's slots: part `index` of `count`. A learner has none. Each `group_size` consecutive
    parts, which belong to one replica group, have equal sizes."""

    index: int
    count: int
    group_size: int = 1


@dataclass(frozen=True)
class VoteOutcome:
    """The result of a vote. `passed`: the attempt is committed. `regroups`: all members request the next generation at
    the next boundary, because a rank joins, leaves, or is replaced by a spare. `leaves`: this rank leaves then.
    `loses_part`: all that hold some part of the state leave then."""

    passed: bool
    regroups: bool
    leaves: bool
    loses_part: bool = False


class ActiveMembers:
    """What follows from a record and those of its members that are active when this is made."""

    def __init__(self, record: Record, active: set[str]) -> None:
        self.record, self._active, self._num = record, active, len(active)
        plan = record.plan
        ranks = [rank for member, rank in plan.ranks.items() if member in active]
        seated = Counter(map(plan.replica_group, ranks))
        whole = sorted(rdp for rdp, num_active in seated.items() if num_active == record.layout.unit)
        self.whole_groups = tuple(whole)  # the replica groups whose seats are all active, by their `rdp`
        self.first = plan.seats[ranks[0]].id if ranks else None  # of the lowest rank

    def is_of(self, record: Record | None, active: set[str]) -> bool:
        """In a generation members only become active, so that their number says whether they are the same."""
        return self.record is record and self._active is active and self._num == len(active)

    def share(self, member: str) -> Share | None:
        """The slots of a seated member. The whole replica groups divide them; in a group, its `sdp` ranks do."""
        at = self.record.plan.coordinates(member)
        index = bisect_left(self.whole_groups, at["rdp"])
        if self.whole_groups[index : index + 1] != (at["rdp"],):
            return None
        return self._share_of(index, at["sdp"])

    @cached_property
    def shares(self) -> tuple[Share | None, ...]:
        """The slots of each rank of the dp gang, in order."""
        sdp = self.record.layout.sdp
        found: list[Share | None] = [None] * (self.record.plan.size // self.record.layout.unit * sdp)
        for index, group in enumerate(self.whole_groups):
            for place in range(sdp):
                found[group * sdp + place] = self._share_of(index, place)
        return tuple(found)

    def _share_of(self, index: int, place: int) -> Share:
        """Of the rank at `place` along sdp, in the whole group of that index."""
        sdp = self.record.layout.sdp
        return Share(index * sdp + place, len(self.whole_groups) * sdp, sdp)


@dataclass
class MemberState:
    """`committed`: the newest attempt known to be committed. `entered`: the generation entered last. `holds`: the model
    coordinates of the state in `tip` and `pending`, in the layout of the number `layout`. `former`: what this rank
    keeps for its peers besides. `was_whole`: whether the rank had a whole state when the step under
    way began."""

    member: str
    tip: Attempt | None = None
    pending: Attempt | None = None
    committed: Attempt = _NOTHING
    active: set[str] = field(default_factory=set)
    entered: int = 0
    record: Record | None = None
    holds: tuple[int, int, int] | None = None
    layout: int = 0
    former: FormerState | None = None
    torn: bool = False
    was_whole: bool = False
    _index: SeatIndex | None = field(default=None, repr=False, compare=False)
    _active: ActiveMembers | None = field(default=None, repr=False, compare=False)

    @property
    def is_active(self) -> bool:
        """Whether this rank votes in the present generation."""
        return self.member in self.active

    def report(self, local_rank: int, address: str, draining: bool) -> MemberReport:
        """The report that goes with a request for a record. `draining`: this rank drains."""
        return MemberReport(
            id=self.member,
            local_rank=local_rank,
            address=address,
            tip=self.tip,
            pending=self.pending,
            holds=self.holds,
            entered=self.entered,
            active=self.is_active,
            draining=draining,
            layout=self.layout,
            former=self.former,
        )

    def holders(self) -> tuple[tuple[Seat, Holder], ...]:
        """The members that keep the committed state of another layout, with their seats."""
        assert self.record is not None
        named = [(self.record.seat(holder.member), holder) for holder in self.record.holders]
        return tuple((seat, holder) for seat, holder in named if seat is not None)

    def sources(self) -> tuple[Seat, ...]:
        """The other members that hold this rank's part of the committed state."""
        there = self._seats.of_part(self.holds)
        return tuple(seat for seat in there if seat.member in self.active and seat.member != self.member)

    def first_of_part(self) -> tuple[Seat, ...]:
        """The rank that is the first of those with this rank's part of the model, whatever they hold. Empty: it is this
        rank."""
        assert self.record is not None
        ranks = self.record.plan.ranks
        first = min(self._seats.of_part(self.holds), key=lambda seat: ranks[seat.member])
        return () if first.member == self.member else (first,)

    # -- one step

    def attempt(self) -> Attempt:
        """The step under way."""
        return Attempt(self.committed.step + 1, self.entered)

    def begin(self) -> None:
        """Begin a step. Its gradients are computed on the present state."""
        self.was_whole = self.tip is not None

    @property
    def fails(self) -> bool:
        """MEMBER-3: whether this rank computed its gradients on a torn state, so that they must not be used."""
        return self.is_active and not self.was_whole

    def begin_heal(self) -> None:
        """A peer's state is about to be written over this rank's, which no job can begin with then. Before the first
        committed step a heal writes to memory of its own (HEALER-4)."""
        self.torn = self.torn or self.committed.step > 0

    def healed(self) -> None:
        """This rank has loaded the committed state from a peer."""
        self.tip, self.torn = self.committed, False

    def damaged(self) -> None:
        """Nobody may take this rank's state, although it has applied every step (COMPARE-5)."""
        self.torn, self.tip = True, None

    def comparing(self) -> list[tuple[str, ...]]:
        """The active members of each part of the model, in one order on all members."""
        assert self.record is not None
        found: dict[tuple[int, int, int], list[str]] = {part: [] for part in self._seats.parts}
        for member in sorted(self.active, key=self.record.plan.ranks.__getitem__):
            found[self.record.model_coordinates(member)].append(member)
        return [tuple(members) for members in found.values()]

    def prepare(self, attempt: Attempt) -> None:
        """The gradients of `attempt` are reduced, and this rank can apply them without its peers. It needs a whole
        state."""
        self.pending = attempt

    def ballot(self, attempt: Attempt, join_noticed: bool, draining: bool, num_successors: int = 0) -> list[float]:
        """This rank's part of the vote on `attempt`, to be summed over all seats. Learners take part, so that all know
        when they become active, but do not vote. `draining`: this rank is asked to; `num_successors`: those it knows
        of."""
        is_whole = self.pending is not None or (self.only_heals and self.tip is not None)
        failed = float(self.is_active and not is_whole)
        learners_going = float(draining and not self.is_active)
        seats, going, whole = self._seats, {}, {}
        if draining and self.is_active and self.holds is not None:
            going[seats.number_of(self.holds)] = 1
        if not self.is_active and is_whole and not draining:
            whole[seats.learners.index(self.member)] = 1
        counts = [*seats.counts_of_parts.pack(going), *seats.counts_of_learners.pack(whole)]
        named = [1.0, float(attempt.step), float(attempt.generation)]
        return [failed, float(join_noticed), float(num_successors), *named, learners_going, *counts]

    def count(self, attempt: Attempt, sums: Sequence[float], draining: bool) -> VoteOutcome:
        """The outcome of the vote on `attempt`. A failed vote drops the prepared attempt (MEMBER-2). All members get
        the same `sums`, so that they agree on the active ones (MEMBER-4). `draining`: as in this rank's ballot.

        Raises:
            InternalError: the ranks voted on different attempts. Nothing has changed.
        """
        num_failed, joins, num_successors, size, steps, generations, learners_going, *rest = sums
        if [steps, generations] != [size * attempt.step, size * attempt.generation]:
            raise InternalError(f"the ranks voted on different attempts: mine is {attempt}, the sums are {list(sums)}")
        seats = self._seats
        of_parts = seats.counts_of_parts.unpack(rest[: seats.counts_of_parts.num_numbers])
        going = {seats.parts[number]: num for number, num in of_parts.items()}
        if num_failed and not self.only_heals:
            self.pending = None
            passed = False
        else:
            passed = not self.only_heals
            whole = seats.counts_of_learners.unpack(rest[seats.counts_of_parts.num_numbers :])
            self.active.update(seats.learners[number] for number in whole)
        is_wanted = joins > 0.0 or num_successors > 0.0
        leaving = [part for part, num in going.items() if self._may_leave(part, num, is_wanted)]
        leaves = draining and (not self.is_active or self.holds in leaving)
        stay = [part for part in going if part not in leaving]
        awaited = any(self._is_awaited_by_absent(part, going[part]) for part in stay)
        awaited = awaited or self._have_spares_kept()
        regroups = joins > 0.0 or learners_going > 0.0 or bool(leaving) or awaited
        return VoteOutcome(passed, regroups, leaves, any(going[part] == self._num_active(part) for part in leaving))

    def _have_spares_kept(self) -> bool:
        """MEMBER-7: whether spares keep state that everybody has fetched, now that everybody votes."""
        assert self.record is not None
        return any(self.record.part_of(seat) is None for seat, _ in self.holders())

    def _may_leave(self, part: tuple[int, int, int], num_going: int, is_wanted: bool) -> bool:
        """Whether the draining active members of `part` may leave (MEMBER-6). `is_wanted`: a rank without a seat needs
        their state."""
        num_active, num_there = self._num_active(part), len(self._seats.of_part(part))
        return num_going < num_active or not (is_wanted or num_active < num_there or self._is_new(part, num_going))

    def _num_active(self, part: tuple[int, int, int]) -> int:
        return sum(seat.member in self.active for seat in self._seats.of_part(part))

    def _is_awaited_by_absent(self, part: tuple[int, int, int], num_going: int) -> bool:
        """Whether spares, or another layout, may relieve `num_going` draining members of `part` that must stay, of whom
        the record does not know yet."""
        if self._is_new(part, num_going):
            return True
        return self._is_untold(part, num_going) and self._seats.has_spares

    def _is_new(self, part: tuple[int, int, int], num_going: int) -> bool:
        """Whether the next record may take another layout, because it knows that `num_going` members drain."""
        assert self.record is not None
        return len(self.record.layouts) > 1 and self._is_untold(part, num_going)

    def _is_untold(self, part: tuple[int, int, int], num_going: int) -> bool:
        """Whether the record knows of fewer draining members of `part`."""
        return num_going > self._seats.num_draining(part)

    @property
    def _seats(self) -> SeatIndex:
        """Of the record of the generation entered last."""
        assert self.record is not None
        if self._index is None or self._index.record is not self.record:
            self._index = SeatIndex(self.record)
        return self._index

    @property
    def awaits_learners(self) -> bool:
        """Whether a member of the generation has yet to become active."""
        assert self.record is not None
        return len(self.active) < self.record.plan.size

    @property
    def prepares_digests(self) -> bool:
        """Whether this rank computes digests of its state before learners of the generation request them: of the
        holders of its part on its host the first one does. A learner on another host requests them of each."""
        assert self.record is not None
        here = self.record.seat(self.member)
        alike = self._seats.of_part(self.holds)
        hosts = {seat.host for seat in alike if seat.status == LEARNER}
        if here is None or not hosts:
            return False
        first = next((seat for seat in alike if seat.status == ACTIVE and seat.host == here.host), here)
        return first == here or hosts != {here.host}

    def passed(self, attempt: Attempt) -> bool:
        """The vote on `attempt` has passed. Returns whether this rank applies it. Otherwise it now has no state."""
        self.committed, self.former = attempt, None  # MEMBER-7
        if self.pending is None:
            self.tip = None
        return self.pending is not None

    def has(self, attempt: Attempt) -> bool:
        """Whether this rank's objects have `attempt`, or had it when it began to keep them for its peers."""
        return attempt == self.tip or (self.former is not None and attempt == self.former.attempt)

    def begin_apply(self) -> Attempt:
        """The attempt to apply now (MEMBER-1). Until `end_apply` the state is torn."""
        assert self.pending is not None
        attempt, self.pending = self.pending, None
        self.torn, self.tip = True, None
        return attempt

    def end_apply(self, attempt: Attempt) -> None:
        self.torn, self.tip = False, attempt

    def share(self) -> Share | None:
        """This rank's slots."""
        return self.active_members.share(self.member)

    @property
    def only_heals(self) -> bool:
        """Whether no replica group is whole, so that no rank has slots."""
        return not self.active_members.whole_groups

    @property
    def active_members(self) -> ActiveMembers:
        """Of the generation entered last."""
        assert self.record is not None
        if self._active is None or not self._active.is_of(self.record, self.active):
            self._active = ActiveMembers(self.record, self.active)
        return self._active

    # -- from generation to generation

    def action_for(self, record: Record) -> Action:
        """What this rank does with its state before `enter`."""
        return Action.HEAL if record.checkpoint else action(self.tip, self.pending, record.committed)

    def enter(self, record: Record, seat: Seat) -> None:
        """Take `seat`, after the action of `action_for`. A prepared attempt that was not applied is dropped.

        Raises:
            StateLostError: the peers are to copy this rank's state, and it is torn. Only `pending` has changed.
        """
        self.pending = None
        self.former = self._kept(record)
        if seat.status == LEARNER or self.tip != record.committed or record.checkpoint:  # RECOVERY-6
            # RECOVERY-3: before the first committed step, an active seat is where the state is taken from.
            fresh = seat.status == ACTIVE and record.committed.step == 0
            if fresh and self.torn:
                raise StateLostError("the only state left was torn while the first step was applied, or by a heal")
            self.tip = record.committed if fresh else None
        self.committed = record.committed
        self.entered, self.record = record.generation, record
        self.active = set(record.members(ACTIVE))
        if seat.member in record.plan.ranks:
            self.holds, self.layout = record.model_coordinates(self.member), record.in_force
        elif self.tip is None:  # a spare that holds state keeps it, and says of which part
            self.holds = None

    def _kept(self, record: Record) -> FormerState | None:
        """MEMBER-7."""
        named = record.holder(self.member)
        if named is None:
            return None
        kept = FormerState(record.committed, named.layout, named.model)
        has_it = self.former == kept or (self.tip, self.layout, self.holds) == kept
        return kept if has_it else None
