"""What a run did, from what its ranks wrote.

Pure: no clock, file or torch.

AUDIT-1  A committed step is named by its attempt, as the ranks' own "committed" lines name it.
AUDIT-2  Its samples and its loss are what all members prepared in exactly that attempt.
AUDIT-3  What cannot be measured is left out and counted, never guessed.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from scripts.demo_job.row_digest import sum_of
from scripts.demo_job.run_log import Entered, Part, Prepared, RunLog, Sizes, StepAttempt, parts_of


class CommittedRun:
    """The committed steps of a run, and what was tried for nothing.

    `attempts`: by step, all attempts that somebody says are committed; more than one is an error. `committed_at`: when
    the first member said so. `shares`: by attempt and member, what went in.
    """

    def __init__(self, run_log: RunLog) -> None:
        self.attempts: dict[int, list[StepAttempt]] = {}
        self.committed_at: dict[StepAttempt, float] = {}
        self.shares: dict[StepAttempt, dict[str, Prepared]] = defaultdict(dict)
        for prepared in run_log.prepared:
            # A member that tries an attempt again has dropped what it prepared before: the last one counts.
            self.shares[prepared.attempt][prepared.member] = prepared
        for committed in sorted(run_log.committed, key=lambda line: line.t):
            self.committed_at.setdefault(committed.attempt, committed.t)
        for attempt in sorted(self.committed_at):
            self.attempts.setdefault(attempt.step, []).append(attempt)

    @property
    def dropped(self) -> list[StepAttempt]:
        """Attempts that somebody had prepared and nobody committed."""
        return sorted(attempt for attempt in self.shares if attempt not in self.committed_at)

    @property
    def torn(self) -> list[int]:
        """Steps that were committed in two different attempts (AUDIT-1)."""
        return [step for step, attempts in self.attempts.items() if len(attempts) > 1]

    def samples(self, step: int, part: Part = ()) -> Counter[int]:
        """The samples that `part` of the model, a (pp, tp), saw in the committed attempts of `step` (AUDIT-2); with two
        attempts, those of both."""
        shares = (share for attempt in self.attempts.get(step, ()) for share in self.shares[attempt].values())
        return Counter(sample for share in shares if share.of_samples == part for sample in share.samples)

    def sample_parts(self, step: int) -> set[Part]:
        """Each (pp, tp) of the layout in which `step` was committed; empty if its ranks did not say which."""
        shares = (share for attempt in self.attempts.get(step, ()) for share in self.shares[attempt].values())
        sizes = {share.sizes for share in shares if share.sizes is not None}
        return {part[:1] + part[2:] for each in sizes for part in parts_of(each)}

    @property
    def layouts(self) -> list[Sizes]:
        """The sizes of the layouts in which steps were committed, in order, without repetition."""
        found = []
        for _, attempts in sorted(self.attempts.items()):
            found += [share.sizes for share in self.shares[attempts[0]].values() if share.sizes is not None][:1]
        return [sizes for sizes, _ in itertools.groupby(found)]

    def loss(self, attempt: StepAttempt) -> float:
        """The mean over the tokens of `attempt`."""
        shares = self.shares[attempt].values()
        num_tokens = sum(share.tokens for share in shares)
        return math.fsum(share.loss_sum for share in shares) / num_tokens if num_tokens else math.nan

    @property
    def curve(self) -> dict[int, float]:
        """The loss of each committed step."""
        return {step: self.loss(attempts[0]) for step, attempts in sorted(self.attempts.items())}

    @property
    def num_tokens(self) -> int:
        """Trained on, in all committed steps."""
        return sum(share.tokens for attempt in self.committed_at for share in self.shares[attempt].values())

    def strength(self, attempt: StepAttempt) -> int:
        """Members that voted in `attempt`."""
        return min((share.active for share in self.shares[attempt].values()), default=0)


@dataclass(frozen=True)
class Audit:
    """Samples that no committed attempt of their step holds, and samples that it holds more often than it should."""

    lost: int
    duplicate: int


def audit(committed_run: CommittedRun, expected: Sequence[Iterable[int]], parts: Collection[Part] = ((),)) -> Audit:
    """Compare with `expected`, the samples of each step in an undisturbed run. Each of `parts`, the (pp, tp) of the
    layout, sees all of them; or of the layout in which the step was committed, if its ranks say that."""
    lost = duplicate = 0
    for step in sorted({*range(len(expected)), *committed_run.attempts}):
        for part in sorted(committed_run.sample_parts(step) or parts):
            due = Counter(expected[step]) if step < len(expected) else Counter[int]()
            seen = committed_run.samples(step, part)
            lost += (due - seen).total()
            duplicate += (seen - due).total()
    return Audit(lost, duplicate)


@dataclass(frozen=True)
class Kill:
    """A SIGKILL that was sent. `step`: under way then."""

    member: str
    local_rank: int
    pid: int
    t: float
    step: int


@dataclass(frozen=True)
class Phases:
    """Where a recovery's time went, in ms; they add up to the whole. The agent ends the first phase, and the slowest
    survivor each other one.

    detect: until the agent knows of the death. leave: the survivor has left the old generation. abort: its comm process
    is gone. quorum: the next generation is agreed. configure: a step in doubt is resolved, the groups are up.
    first_commit: the next step is committed.
    """

    detect: float
    leave: float
    abort: float
    quorum: float
    configure: float
    first_commit: float


@dataclass(frozen=True)
class Recovery:
    """What followed a kill. None: it cannot be measured (AUDIT-3), because the run ended before, or because the victim
    had no seat yet, so that the others had nothing to recover from (`seated`)."""

    kill: Kill
    seated: bool
    recovery_ms: float | None
    rejoin_ms: float | None
    phases: Phases | None


def recoveries(run_log: RunLog, committed_run: CommittedRun, kills: Iterable[Kill], ranks: int) -> list[Recovery]:
    """Recovery is from the kill to the first step committed in a generation after the victim's last one; rejoin is from
    the kill to the first such step that all `ranks` ranks voted for."""
    in_order = sorted(committed_run.committed_at.items(), key=lambda item: item[1])
    found = []
    for kill in kills:
        seated = run_log.generation_of(kill.member) > 0
        generation = _last_generation(run_log, kill)
        after = [(attempt, t) for attempt, t in in_order if t > kill.t and attempt.generation > generation]
        first = after[0] if seated and after else None
        whole = next((t for attempt, t in after if committed_run.strength(attempt) >= ranks), None)
        found.append(
            Recovery(
                kill,
                seated,
                recovery_ms=None if first is None else (first[1] - kill.t) * 1e3,
                rejoin_ms=None if whole is None else (whole - kill.t) * 1e3,
                phases=None if first is None else _phases(run_log, kill, *first),
            )
        )
    return found


def _last_generation(run_log: RunLog, kill: Kill) -> int:
    """The last one that the victim, or before it an earlier member of its rank, was seated in."""
    until = run_log.spawned[kill.member].t
    return max(
        run_log.generation_of(spawned.member)
        for spawned in run_log.spawned.values()
        if spawned.local_rank == kill.local_rank and spawned.t <= until
    )


def _phases(run_log: RunLog, kill: Kill, attempt: StepAttempt, committed_at: float) -> Phases | None:
    survivors = {entered.member for entered in run_log.entered if entered.configured < kill.t} - {kill.member}
    ways: list[Entered] = [
        entered
        for entered in run_log.entered
        if entered.generation == attempt.generation and entered.member in survivors
    ]
    if not ways:
        return None
    left_at = max(way.began for way in ways)
    ends = [
        kill.t,
        min(run_log.noticed.get(kill.member, left_at), left_at),
        left_at,
        max(way.aborted for way in ways),
        max(way.agreed for way in ways),
        max(way.configured for way in ways),
        committed_at,
    ]
    return Phases(*((end - begin) * 1e3 for begin, end in pairwise(ends)))


@dataclass(frozen=True)
class Rejoin:
    """A restarted member's first share in a committed step."""

    member: str
    local_rank: int
    step: int
    t: float


def rejoins(run_log: RunLog, committed_run: CommittedRun) -> list[Rejoin]:
    """The members that took the place of an earlier one and came as far as a share in a committed step."""
    first_of_rank: dict[int, str] = {}
    for spawned in run_log.spawned.values():
        first_of_rank.setdefault(spawned.local_rank, spawned.member)
    found: dict[str, Rejoin] = {}
    for step, attempts in sorted(committed_run.attempts.items()):
        for attempt in attempts:
            for member, share in committed_run.shares[attempt].items():
                who = run_log.spawned.get(member)
                if who is None or not share.samples or member in found or first_of_rank[who.local_rank] == member:
                    continue
                found[member] = Rejoin(member, who.local_rank, step, committed_run.committed_at[attempt])
    return list(found.values())


def percentile(values: Sequence[float], percent: float) -> float | None:
    """By nearest rank, so that it is one of `values`; None for none."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


@dataclass(frozen=True)
class Difference:
    """How far two loss curves are apart where they are farthest. `size` is infinite where one has no value."""

    size: float
    step: int


def largest_difference(curve: Mapping[int, float], reference: Mapping[int, float]) -> Difference:
    """Step by step over the steps of both; one that only one of them has counts as infinitely far."""
    largest = Difference(0.0, 0)
    for step in sorted({*curve, *reference}):
        size = abs(curve.get(step, math.nan) - reference.get(step, math.nan))
        if not math.isfinite(size):
            return Difference(math.inf, step)
        if size > largest.size:
            largest = Difference(size, step)
    return largest


@dataclass(frozen=True)
class Outcome:
    """What decides whether a run has passed. `failure`: why the job itself failed. `digests`: of the parameters with
    which the ranks of each part of the model ended. `difference`: from the reference; None when there is none.
    `reference_digest`: of the parameters that must be the same, bit by bit; None if they need not be. `hosts_asked`:
    how often the second host was to be lost; `fallbacks`: how often the job took a fallback layout."""

    failure: str | None
    steps_asked: int
    steps: int
    audit: Audit
    torn: Sequence[int]
    digests: Mapping[Part, Sequence[str]]
    difference: Difference | None
    tolerance: float
    kills_asked: int
    kills: int
    reference_digest: str | None = None
    hosts_asked: int = 0
    fallbacks: int = 0


def final_digests(run_log: RunLog, parts: Iterable[Part] = ((),)) -> dict[Part, list[str]]:
    """Of the parameters with which the ranks of each part ended. `parts`: of the model, if the ranks do not say."""
    last = next((finished.sizes for finished in run_log.finished if finished.sizes is not None), None)
    digests: dict[Part, list[str]] = {part: [] for part in (parts if last is None else parts_of(last))}
    for finished in run_log.finished:
        digests.setdefault(finished.part, []).append(finished.digest)
    return digests


def whole_digest(digests: Mapping[Part, Sequence[str]]) -> str | None:
    """Of the whole model. None: a part has no digest, or several."""
    found = [set(of_part) for of_part in digests.values()]
    if not found or any(len(of_part) != 1 for of_part in found):
        return None
    parts = [digest for (digest,) in found]
    return parts[0] if len(parts) == 1 else sum_of(parts)


def faults(outcome: Outcome) -> list[str]:
    """Everything that is wrong, in sentences; empty for a run that has passed."""
    found = []
    if outcome.failure is not None:
        found.append(f"the job failed: {outcome.failure}")
    if outcome.steps != outcome.steps_asked:
        found.append(f"{outcome.steps} steps are committed, not {outcome.steps_asked}")
    if outcome.torn:
        found.append(f"steps {_listed(outcome.torn)} were committed in two different attempts")
    if outcome.audit.lost:
        found.append(f"{outcome.audit.lost} samples were lost")
    if outcome.audit.duplicate:
        found.append(f"{outcome.audit.duplicate} samples were seen twice")
    for part, digests in outcome.digests.items():
        whose = f" of the part {part}" if part else ""
        if not digests:
            found.append(f"no rank{whose} finished")
        elif len(set(digests)) > 1:
            found.append(f"the ranks{whose} ended with {len(set(digests))} different sets of parameters")
    if outcome.reference_digest is not None and whole_digest(outcome.digests) not in (None, outcome.reference_digest):
        found.append("the ranks ended with other bits than one undisturbed rank")
    if outcome.difference is not None and not outcome.difference.size <= outcome.tolerance:
        found.append(
            f"the loss curve leaves the undisturbed run's by {outcome.difference.size:.2g} at step "
            f"{outcome.difference.step}, more than the {outcome.tolerance:g} that summation order explains"
        )
    if outcome.kills < outcome.kills_asked:
        found.append(f"{outcome.kills} kills happened, fewer than the {outcome.kills_asked} asked for")
    if outcome.fallbacks < outcome.hosts_asked:
        found.append(
            f"the job took a fallback layout {outcome.fallbacks} times, fewer than the {outcome.hosts_asked} hosts lost"
        )
    return found


def _listed(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:5]))
    return shown if len(steps) <= 5 else f"{shown} and {len(steps) - 5} more"
