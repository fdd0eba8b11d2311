"""Rules that are not ours: a part is left out or weakened, to show that the simulation finds what that breaks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from elasticgang.errors import GangError
from elasticgang.layout import Plan, plan
from elasticgang.protocol import agent_lifecycle, agent_state, member_state, next_record, recovery, slot_division
from elasticgang.protocol import member_instructions as do
from elasticgang.protocol.agent_events import (
    AgentInstruction,
    Exit,
    Fail,
    Fence,
    Instruction,
    KillRanks,
    NotStarted,
    RecordRequested,
    Restart,
    Started,
    StartRank,
    StopHelpers,
)
from elasticgang.protocol.agent_lifecycle import AgentLifecycle
from elasticgang.protocol.commit import Action, Attempt, Fate, Standing, action, resolve
from elasticgang.protocol.member_instructions import Do
from elasticgang.protocol.member_lifecycle import MemberLifecycle, Next, Routine
from elasticgang.protocol.record import SPARE, MemberReport, Record, Report, Seat, Undecided
from elasticgang.simulation.cluster import Cluster
from elasticgang.simulation.rank import Rank
from tests.unit.coordinator_mutants import COORDINATOR_MUTANTS
from tests.unit.patches import Patch, always

_recover = recovery._recover
_roll_back = recovery._roll_back
_begin_apply = member_state.MemberState.begin_apply
_count = member_state.MemberState.count
_answered = agent_state.AgentState._record_answered
_not_started = AgentLifecycle._not_started
_enter = member_state.MemberState.enter
_left = agent_state.AgentState._member_left
_report = agent_state.AgentState.report
_exit_began = agent_state.AgentState._exit_began
_record_requested = agent_state.AgentState._record_requested
_started = AgentLifecycle._started
_fence = AgentLifecycle._fence
_timers = AgentLifecycle.timers
_reduce = MemberLifecycle._reduce
_vote = MemberLifecycle._vote
_next_generation = MemberLifecycle._next_generation
_resolve_in_step = MemberLifecycle._resolve_in_step
_at_boundary = MemberLifecycle.at_boundary
_end = MemberLifecycle.end
_end_rank = Rank.end
_moves = Rank.moves


def _resolve_unrecorded(_: Attempt, generation: int, present: Collection[Standing], __: Iterable[Attempt] = ()) -> Fate:
    tips = [standing.tip for standing in present if standing.tip is not None]
    return resolve(max([Attempt(0, 1), *tips]), generation, present)


def _resolve_never_forward(
    recorded: Attempt, generation: int, present: Collection[Standing], known: Iterable[Attempt] = ()
) -> Fate:
    heard = [*known, *(standing.tip for standing in present if standing.tip is not None)]
    return Fate(max((recorded, *(attempt for attempt in heard if attempt.generation == generation))), False)


def _resolve_without_learners(
    recorded: Attempt, generation: int, present: Collection[Standing], known: Iterable[Attempt] = ()
) -> Fate:
    if any(standing.active for standing in present):
        return resolve(recorded, generation, present, known)
    return resolve(recorded, generation, [Standing(standing.tip, None, False) for standing in present], known)


def _resolve_untold(
    recorded: Attempt, generation: int, present: Collection[Standing], _: Iterable[Attempt] = ()
) -> Fate:
    return resolve(recorded, generation, present)


def _resolve_any_generation(
    recorded: Attempt, generation: int, present: Collection[Standing], known: Iterable[Attempt] = ()
) -> Fate:
    told = [*known, *(standing.tip for standing in present if standing.tip is not None)]
    return resolve(max((recorded, *told)), generation, present, known)


def _recover_under_one_name(record: Record, *given: Any) -> Any:
    state = _recover(record, *given)
    is_new = isinstance(state, recovery.CommittedState) and state.designated
    return recovery.CommittedState(record.committed, designated=True) if is_new else state


def _roll_back_in_silence(*given: Any) -> Any:
    state = _roll_back(*given)
    return replace(state, rolled_back=False) if isinstance(state, recovery.CommittedState) else state


def _holds_any_part(member: MemberReport, committed: Attempt, *_: object) -> bool:
    return member.holds is not None and action(member.tip, member.pending, committed) is not Action.HEAL


def _enter_and_keep_pending(self: member_state.MemberState, record: Record, seat: Seat) -> None:
    pending = self.pending
    _enter(self, record, seat)
    self.pending = pending


def _enter_and_forget_part(self: member_state.MemberState, record: Record, seat: Seat) -> None:
    _enter(self, record, seat)
    if seat.status == SPARE:
        self.holds = None


def _begin_apply_as_if_whole(self: member_state.MemberState) -> Attempt:
    tip = self.tip
    attempt = _begin_apply(self)
    self.torn, self.tip = False, tip
    return attempt


def _count_own_alone(self: member_state.MemberState, attempt: Attempt, sums: Sequence[float], draining: bool) -> Any:
    active = set(self.active)
    outcome = _count(self, attempt, sums, draining)
    self.active = active | (self.active & {self.member})
    return outcome


def _may_always_ask(self: agent_state.AgentState) -> bool:
    return bool(self._in(agent_state._Phase.REQUESTING)) and not (
        self.record is None and self._waits_for_start and self._is_starting()
    )


def _left_in_order(self: agent_state.AgentState, member: str, finished: bool, _: bool) -> list[Instruction]:
    return _left(self, member, finished, True)


def _abort_for_a_newcomer(self: agent_state.AgentState) -> list[Instruction]:
    return self._abort("a rank joins")


def _answered_for_the_last_step(self: agent_state.AgentState, answer: Any) -> list[Instruction]:
    return [] if isinstance(answer, Undecided) and not answer.refused else _answered(self, answer)


def _plan_whoever_holds(*given: Any, holds: object, **others: Any) -> Plan:
    return plan(*given, **others)


def _report_without_spares(self: agent_state.AgentState) -> Report:
    return replace(_report(self), num_seats=None)


def _exit_began_unkilled(self: agent_state.AgentState, member: str) -> list[Instruction]:
    return [one for one in _exit_began(self, member) if not isinstance(one, KillRanks)]


def _exit_began_in_silence(self: agent_state.AgentState, member: str) -> list[Instruction]:
    return [KillRanks((member,))] if _exit_began(self, member) else []


def _exit_began_and_restart(self: agent_state.AgentState, member: str) -> list[Instruction]:
    out = _exit_began(self, member)
    return [*out, Restart(self._ranks[member].local_rank, 0.0)] if out else []


def _requested_whoever_exits(self: agent_state.AgentState, event: RecordRequested) -> list[Instruction]:
    rank = self._ranks.get(event.member)
    if rank is not None and rank.phase is agent_state._Phase.EXITING:
        rank.phase = agent_state._Phase.SEATED
    return _record_requested(self, event)


def _moves_with_early_notice(self: Rank, cluster: Cluster) -> list[str]:
    moves = _moves(self, cluster)
    return moves if self.alive or self.is_noticed else ["is noticed", *moves]


def _end_unread(self: Rank, status: int) -> None:
    _end_rank(self, status)
    self.sent.clear()


def _fence_without_kill(self: AgentLifecycle, reason: str) -> list[AgentInstruction]:
    return [Fence(()) for _ in _fence(self, reason)]


def _started_unkilled(self: AgentLifecycle, event: Started) -> list[AgentInstruction]:
    done = _started(self, event)
    return [] if self._phase is agent_lifecycle._Phase.FENCED else done


def _rejoins_at_once(self: AgentLifecycle, reason: str) -> list[AgentInstruction]:
    return [*_fence(self, reason), *self._rejoin()] if self._phase is agent_lifecycle._Phase.SERVING else []


def _start_all(self: AgentLifecycle) -> list[AgentInstruction]:
    starts: list[AgentInstruction] = [StartRank(local_rank) for local_rank in self._to_start]
    self._forking = self._to_start[-1] if self._to_start else self._forking
    self._to_start.clear()
    return starts


def _num_coming_but_restarts(self: AgentLifecycle) -> int:
    return (self._forking is not None) + len(self._to_start)


def _try_the_first_start_again(self: AgentLifecycle, event: NotStarted) -> list[AgentInstruction]:
    self._has_started_all = True
    return _not_started(self, event)


def _without(timer: str) -> Callable[[AgentLifecycle], dict[str, float]]:
    return lambda self: {name: at_s for name, at_s in _timers(self).items() if name.split()[0] != timer}


def _fail_with_code_0(self: AgentLifecycle, code: int, reason: str) -> list[AgentInstruction]:
    return [Fail(code, reason), *self._exit(self._code)]


def _exit_as_if_unsignalled(self: AgentLifecycle, code: int, why: str = "") -> list[AgentInstruction]:
    self._phase = agent_lifecycle._Phase.EXITED
    return [StopHelpers(), Exit(0 if self._signal else code)]


def _resolve_in_step_without_sums(self: MemberLifecycle) -> Routine[None]:
    assert self._step is not None
    self._step.sums = ()
    yield from _resolve_in_step(self)


def _reduce_own_numbers(self: MemberLifecycle, *args: Any) -> Routine[Any]:
    totals = yield from _reduce(self, *args)
    return totals and [*totals[:2], *args[2], *totals[3:]]


def _edited(
    inner: Routine[Any], drops: type[do.Instruction] | None = None, edit: Callable[[Any], Any] | None = None
) -> Routine[Any]:
    """`inner` without the instructions of the kind `drops`. `edit`: changes the sums that it gets."""
    outcome: Any = None
    error: Exception | None = None
    while True:
        try:
            instruction = inner.send(outcome) if error is None else inner.throw(error)
        except StopIteration as end:
            return end.value
        outcome = error = None
        if drops is not None and isinstance(instruction, drops):
            continue
        try:
            outcome = yield instruction
        except Exception as failure:
            error = failure
        if edit is not None and instruction is Do.AWAIT_SUMS and error is None:
            outcome = edit(outcome)


def _apply_then_report(self: MemberLifecycle, attempt: Attempt) -> Routine[None]:
    if self.state.passed(attempt):
        yield from self._apply()
    yield do.ReportCommitted(attempt, True)


def _reduce_whoever_failed(self: MemberLifecycle, *args: Any) -> Routine[Any]:
    return _edited(_reduce(self, *args), edit=lambda sums: [sums[0], 0.0, *sums[2:]])


def _forget_when_the_vote_fails(self: MemberLifecycle, *args: Any) -> Routine[bool]:
    try:
        passed = yield from _vote(self, *args)
    except GangError:
        self.state.pending = None
        raise
    return passed


def _vote_or_raise(self: MemberLifecycle, *args: Any) -> Routine[bool]:
    """A vote that cannot begin ends there."""
    inner, outcome = _vote(self, *args), None
    while True:
        try:
            outcome = yield inner.send(outcome)
        except StopIteration as end:
            return bool(end.value)


def _end_unrestored(self: MemberLifecycle, error: BaseException | None) -> Routine[bool]:
    inner, outcome = _end(self, error), None
    while True:
        try:
            instruction = inner.send(outcome)
        except StopIteration as end:
            return bool(end.value)
        if isinstance(instruction, do.EndStep):
            instruction = replace(instruction, restores=False)
        outcome = yield instruction


def _request_first(self: MemberLifecycle) -> Routine[None]:
    state = self.state
    yield do.SendRequest(state.report(self._local_rank, self._address, self.observed.draining), self.observed.error)
    yield from _edited(_next_generation(self), drops=do.SendRequest)


def _in_doubt_goes_on(_: MemberLifecycle) -> Routine[None]:
    yield from ()


def _vote_alone(self: MemberLifecycle, attempt: Attempt, total: float = 0.0, measured: Sequence[float] = ()) -> Any:
    yield do.MakeReady(total, tuple(measured))
    return True


def _do_not_heal(_: MemberLifecycle, __: object) -> Routine[None]:
    yield from ()


def _leaves_at_once(self: MemberLifecycle, num_steps: int) -> Next:
    self._may_leave = True
    return _at_boundary(self, num_steps)


def _nothing(*_: object, **__: object) -> list[Any]:
    return []


MUTANTS: dict[str, tuple[Patch, ...]] = {
    "decision not in the record": ((recovery, "resolve", _resolve_unrecorded),),
    "never rolled forward": ((recovery, "resolve", _resolve_never_forward),),
    "what was told does not count": ((recovery, "resolve", _resolve_untold),),
    "all that is lost begins anew": ((recovery, "_is_blind", always(False)),),
    "any part will do": ((recovery, "_holds", _holds_any_part),),
    "a torn state has a share": ((member_state.MemberState, "fails", False),),  # MEMBER-3
    "what is pending stays so": ((member_state.MemberState, "enter", _enter_and_keep_pending),),
    "a spare forgets its part": ((member_state.MemberState, "enter", _enter_and_forget_part),),
    "an agent asks while its ranks run": ((agent_state.AgentState, "may_request", _may_always_ask),),
    "an agent without ranks is silent": ((agent_state.AgentState, "is_awaited", always(False)),),
    "whoever holds the state sits anywhere": ((next_record, "plan", _plan_whoever_holds),),
    "a step without shares counts": ((member_state.MemberState, "only_heals", False),),  # MEMBER-5
    "a seat is asked for each member": ((agent_state.AgentState, "report", _report_without_spares),),
    "a fenced agent's ranks run on": ((AgentLifecycle, "_fence", _fence_without_kill),),
    "an agent exits before its restarts": ((AgentLifecycle, "num_coming", property(_num_coming_but_restarts)),),
    "an agent that ends starts ranks": ((AgentLifecycle, "_is_over", False),),
    "a script that has raised is waited for": ((AgentLifecycle, "timers", _without("exit")),),
    "ranks that start are waited for": ((AgentLifecycle, "timers", _without("start")),),
    "a failure exits with code 0": ((AgentLifecycle, "_fail", _fail_with_code_0),),
    "a signal exits with code 0": ((AgentLifecycle, "_exit", _exit_as_if_unsignalled),),
    "two ranks are forked at once": ((AgentLifecycle, "_start_next", _start_all),),
    "a commit is applied before it is reported": ((MemberLifecycle, "_committed", _apply_then_report),),
    "a rank has sums only of what it has counted": (  # MANAGER-15
        (MemberLifecycle, "_resolve_in_step", _resolve_in_step_without_sums),
    ),
    "a rank has its own numbers for sums": ((MemberLifecycle, "_reduce", _reduce_own_numbers),),  # MANAGER-15
    "a rank prepares whoever failed": ((MemberLifecycle, "_reduce", _reduce_whoever_failed),),
    "a vote that cannot begin makes nothing ready": ((MemberLifecycle, "_vote", _vote_or_raise),),
    "a rank requests before it is fenced": ((MemberLifecycle, "_next_generation", _request_first),),
    "a failed vote drops what is prepared": ((MemberLifecycle, "_vote", _forget_when_the_vote_fails),),
    "a rank in doubt begins another step": ((MemberLifecycle, "_resolve_in_step", _in_doubt_goes_on),),
    "a draining rank leaves without a vote": ((MemberLifecycle, "at_boundary", _leaves_at_once),),
    "who does not fit is let in": ((next_record, "_differences", lambda *_: iter(())),),
    "a rank forked while its agent is fenced runs on": ((AgentLifecycle, "_started", _started_unkilled),),
    "an agent rejoins at once": ((AgentLifecycle, "_fence", _rejoins_at_once),),
    "failed starts never give up": ((agent_state, "_MAX_NOT_STARTED", 1_000),),
    "all leave in order": ((agent_state.AgentState, "_member_left", _left_in_order),),
    "what was given up counts": ((recovery, "resolve", _resolve_any_generation),),
    "the first state has one name": ((recovery, "_recover", _recover_under_one_name),),
    "a rollback is not said": ((recovery, "_roll_back", _roll_back_in_silence),),
    "draining members count like others": ((next_record, "_draining_members", always(())),),
    "a torn state is whole": ((member_state.MemberState, "begin_apply", _begin_apply_as_if_whole),),
    "each learner is active for itself": ((member_state.MemberState, "count", _count_own_alone),),
    "a step commits without a vote": ((MemberLifecycle, "_vote", _vote_alone),),
    "the last holder leaves": ((member_state.MemberState, "_may_leave", always(True)),),
    "learners do not heal": ((MemberLifecycle, "_heal", _do_not_heal),),
    "a death ends no generation": ((agent_state.AgentState, "_abort", _nothing),),
    "a newcomer ends the generation": ((agent_state.AgentState, "_notice_join", _abort_for_a_newcomer),),
    "ranks that start are not waited for": ((agent_state.AgentState, "waits_for_start", False),),
    "the last step is waited for": ((agent_state.AgentState, "_record_answered", _answered_for_the_last_step),),
    "a first start is tried again": ((AgentLifecycle, "_not_started", _try_the_first_start_again),),
    "a grace period does not end": ((AgentLifecycle, "timers", _without("grace")),),
    "learners never decide": ((recovery, "resolve", _resolve_without_learners),),
    "a rank whose exit has begun runs on": ((agent_state.AgentState, "_exit_began", _exit_began_unkilled),),
    "an exit that has begun ends no generation": ((agent_state.AgentState, "_exit_began", _exit_began_in_silence),),
    "a rank is restarted before it is gone": ((agent_state.AgentState, "_exit_began", _exit_began_and_restart),),
    "a rank whose exit has begun is heard": ((agent_state.AgentState, "_record_requested", _requested_whoever_exits),),
    "an exit is noticed before messages are read": ((Rank, "moves", _moves_with_early_notice),),
    "what a dead rank sent is not read": ((Rank, "end", _end_unread),),
    "a dropped step keeps what forward changed": ((MemberLifecycle, "end", _end_unrestored),),
    "gradients of another state are kept": ((slot_division.Basis, "allows", always(True)),),
    "one rank of a group keeps a run for all": ((slot_division, "_is_whole", always(True)),),
    **COORDINATOR_MUTANTS,
}


# Those that no story shows, and how many random schedules find each, at most (see tests/integration/test_mutants.py).
FOUND = {
    "equal numbers are one term": 40,
    "reports of earlier generations count": 40,
    "gradients of another state are kept": 60,
    "one rank of a group keeps a run for all": 300,
}


def mutated(name: str) -> contextlib.AbstractContextManager[None]:
    """While the rules are those of `name`."""
    return patched(MUTANTS[name])


@contextlib.contextmanager
def patched(patches: Sequence[Patch]) -> Iterator[None]:
    originals = [(owner, attribute, vars(owner)[attribute]) for owner, attribute, _ in patches]
    try:
        for owner, attribute, value in patches:
            setattr(owner, attribute, value)
        yield
    finally:
        for owner, attribute, value in originals:
            setattr(owner, attribute, value)
