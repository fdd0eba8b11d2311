"""A small job, explored exhaustively: what can members do between and across generation changes, and what survives?

It knows nothing of `resolve` and `action` but their signatures: a `Rule` is handed in, its answers are carried out and
checked against what the members really hold. A tip names the whole history of a state, because the model makes sure
that an attempt is only ever applied to the state that it was computed from.

In a sharded job each member has a part of the model, for life, and a state is whole while every part of it is held;
there, `shards_model.py` asks `recovery.py`.

What it allows is more than a real job can do, so that nothing is missed: a member prepares without waiting for the
others to begin; one that is left out of a proposal goes on in its old generation for as long as its vote may succeed;
a record is entered late, by some, or never; an agent's `known` is heard or not, whatever the member's fate. A vote
succeeds once every active member of its generation has prepared; one that is prepared but never votes is covered by
the vote that nobody hears. Who of the voters reads the outcome is open too: the ranks of a host whose first rank
dies before it has given them the outcome are members that commit nothing (SUMS-1). What it takes for granted:

MODEL-1  A member that has asked does nothing more in its old generation (RULE-9).
MODEL-2  A generation prepares a step once. (After a failed vote the next try needs every active member's gradient
    again, so that it cannot be prepared while somebody is in doubt about the former.)
MODEL-3  A learner becomes active by a vote that all active members take part in, and from the next step on.
MODEL-4  A proposal is undecided while a seated member may live elsewhere, if it holds no witness (RECOVERY-1) or no
    holder of the truth.
MODEL-5  State that is not undecided by MODEL-4 and without a holder is rolled back, and what was above it is lost.

The scenarios in `golden/` are written in the words of `Op`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from elasticgang.protocol.commit import Action, Attempt, Fate, Standing

FIRST = Attempt(0, 1)

JOINER, ACTIVE, LEARNER = "joiner", "active", "learner"
FATES = PRESENT, AWAY, DIES = "present", "away", "dies"


class Mem(NamedTuple):
    """One slot for a member: `generation` and `role` are those it entered, `seat` and `seated` what the last record
    it is part of makes of it. It is `running` in its generation until it asks."""

    tip: Attempt | None = None
    pending: Attempt | None = None
    generation: int = 0
    role: str = JOINER
    running: bool = False
    seat: int = 0
    seated: str = JOINER
    part: int = 0

    @property
    def is_new(self) -> bool:
        return self.generation == 0 and self == Mem(part=self.part)

    def is_active(self, generation: int) -> bool:
        """By its seat in the record of `generation`, or because it became active within it."""
        if self.seat != generation:
            return False
        return self.seated == ACTIVE or (self.generation == generation and self.role == ACTIVE)

    def is_witness(self, generation: int) -> bool:
        """It knows how far it came in `generation`: not when it is torn."""
        return self.is_active(generation) and (self.tip is not None or self.generation < generation)


class Rec(NamedTuple):
    """A record: `loads` says that the state was lost and everyone starts from a checkpoint."""

    committed: Attempt
    loads: bool = False


class World(NamedTuple):
    """`base` maps an attempt to the state it was computed from, `voters` a generation to the number of its active
    members, `votes` an attempt to its yes votes; `passed` attempts had all; `committed` ones have been applied by
    somebody; `rolled_back` is the last generation that began with a loss. `given_up`: in a sharded job, those of the
    committed that were dropped. `num_missing`: an outcome needs all yes votes but so many; SUMS-1: none."""

    mems: tuple[Mem, ...]
    records: tuple[Rec, ...]
    voters: Mapping[int, int]
    base: Mapping[Attempt, Attempt] = MappingProxyType({})
    votes: Mapping[Attempt, int] = MappingProxyType({})
    passed: frozenset[Attempt] = frozenset()
    committed: frozenset[Attempt] = frozenset()
    rolled_back: int = 0
    num_parts: int = 1
    given_up: frozenset[Attempt] = frozenset()
    num_missing: int = 0

    @property
    def generation(self) -> int:
        return len(self.records)

    @property
    def record(self) -> Rec:
        return self.records[-1]


class Op(NamedTuple):
    """One line of a scenario. `mems`: whom it is about; `fates`: what a proposal finds each member to be."""

    kind: str
    mem: int = -1
    other: int = -1
    fates: tuple[str, ...] = ()
    heard: Attempt | None = None
    pending: Attempt | None = None

    def __str__(self) -> str:
        if self.kind == "propose":
            by_fate = {fate: [f"r{i}" for i, f in enumerate(self.fates) if f == fate] for fate in (PRESENT, AWAY, DIES)}
            words = [" ".join(["propose", *by_fate[PRESENT]])]
            words += [f"{fate} {' '.join(by_fate[fate])}" for fate in (AWAY, DIES) if by_fate[fate]]
            words += [f"heard {format_attempt(self.heard)}"] if self.heard else []
            return " ; ".join(words)
        words = [f"r{self.mem}", self.kind]
        words += [f"r{self.other}"] if self.other >= 0 else []
        words += [format_attempt(self.pending)] if self.pending else []
        return " ".join(words)


def parse(line: str) -> Op:
    """What `str` of an `Op` gives."""
    first, *rest = (clause.split() for clause in line.split(";"))
    if first[0] != "propose":
        name, kind, *about = first
        attempts = [parse_attempt(word) for word in about if "@" in word]
        others = [int(word[1:]) for word in about if "@" not in word]
        return Op(kind, int(name[1:]), others[0] if others else -1, pending=attempts[0] if attempts else None)
    clauses = {words[0]: words[1:] for words in (["present", *first[1:]], *rest)}
    heard = clauses.pop("heard", [])
    fates = {int(name[1:]): fate for fate, names in clauses.items() for name in names}
    return Op(
        "propose", fates=tuple(fates[at] for at in sorted(fates)), heard=parse_attempt(heard[0]) if heard else None
    )


class Violation(Exception):
    """A promise of `commit.py` is broken. Its text says which."""


class Impossible(Exception):
    """The proposal decides nothing."""


def format_attempt(attempt: Attempt | None) -> str:
    return "-" if attempt is None else f"{attempt.step}@{attempt.generation}"


def parse_attempt(word: str) -> Attempt:
    step, generation = word.split("@")
    return Attempt(int(step), int(generation))


def start(num_active: int, num_joiners: int = 0, num_parts: int = 1) -> World:
    """The parts go round."""
    active = Mem(FIRST, None, 1, ACTIVE, True, 1, ACTIVE)
    learner = Mem(None, None, 1, LEARNER, True, 1, LEARNER)
    mems = (active,) * num_active + (learner,) * num_joiners
    parts = tuple(mem._replace(part=at % num_parts) for at, mem in enumerate(mems))
    return World(parts, (Rec(FIRST),), {1: num_active}, num_parts=num_parts)


def history(world: World, attempt: Attempt) -> tuple[Attempt, ...]:
    """`attempt` and all that it builds on, newest first."""
    out = [attempt]
    while out[-1] in world.base:
        out.append(world.base[out[-1]])
    return tuple(out)


# --- what a member does within its generation


def prepare(world: World, at: int) -> World:
    mem = world.mems[at]
    if not mem.running or mem.pending or mem.tip is None or mem.role == JOINER:
        raise Impossible("only a whole, running member prepares, and one step at a time")
    attempt = Attempt(mem.tip.step + 1, mem.generation)
    if world.base.get(attempt, mem.tip) != mem.tip:
        raise Violation(f"{format_attempt(attempt)} names two gradients")
    world = _with(world, at, mem._replace(pending=attempt))._replace(base={**world.base, attempt: mem.tip})
    if mem.role != ACTIVE:
        return world
    votes = world.votes.get(attempt, 0) + 1
    passed = (
        world.passed | {attempt} if votes == max(world.voters[mem.generation] - world.num_missing, 1) else world.passed
    )
    return world._replace(votes={**world.votes, attempt: votes}, passed=passed)


def reduce(world: World, at: int, attempt: Attempt) -> World:
    """A learner whose state is not whole has the reduced gradient of a step that the active members are in."""
    mem = world.mems[at]
    if not (mem.running and mem.role == LEARNER and mem.tip is None and mem.pending != attempt):
        raise Impossible("only a healing learner")
    if attempt.generation != mem.generation or attempt not in world.votes:
        raise Impossible("nobody is in that step")
    return _with(world, at, mem._replace(pending=attempt))


def commit(world: World, at: int) -> World:
    mem = _voted(world, at)
    assert mem.pending is not None
    return _with(world, at, mem._replace(tip=mem.pending, pending=None))._replace(
        committed=world.committed | {mem.pending}
    )


def tear(world: World, at: int) -> World:
    """Fails while it applies what was voted."""
    mem = _voted(world, at)
    assert mem.pending is not None
    return _with(world, at, mem._replace(tip=None, pending=None, running=False))._replace(
        committed=world.committed | {mem.pending}
    )


def _voted(world: World, at: int) -> Mem:
    mem = world.mems[at]
    if not mem.running or mem.pending not in world.passed or mem.tip is None:
        raise Impossible("no vote to act on")
    if world.base[mem.pending] != mem.tip:
        raise Impossible("it lags behind")
    return mem


def heal(world: World, at: int, source: int) -> World:
    mem, holder = world.mems[at], world.mems[source]
    if not (mem.running and mem.role == LEARNER and mem.tip is None):
        raise Impossible("only a healing learner")
    if not (
        holder.part == mem.part
        and holder.generation == mem.generation
        and holder.role == ACTIVE
        and holder.tip is not None
    ):
        raise Impossible("not a source")
    pending = mem.pending if mem.pending and world.base[mem.pending] == holder.tip else None
    return _with(world, at, mem._replace(tip=holder.tip, pending=pending))


def activate(world: World, at: int) -> World:
    mem = world.mems[at]
    if not (mem.running and mem.role == LEARNER and mem.pending is None and mem.tip in world.passed):
        raise Impossible("only a whole learner, at the boundary that a vote announced")
    assert mem.tip is not None
    if mem.tip.generation != mem.generation or Attempt(mem.tip.step + 1, mem.generation) in world.votes:
        raise Impossible("too late for this boundary")
    voters = {**world.voters, mem.generation: world.voters[mem.generation] + 1}
    return _with(world, at, mem._replace(role=ACTIVE))._replace(voters=voters)


# --- the generation change


class Outcome(NamedTuple):
    """What becomes of the step in doubt, and what each present member makes of it. `is_lost`: the state is gone, and
    all begin anew from one before it."""

    committed: Attempt
    actions: dict[int, Action]
    is_lost: bool = False


@dataclass(frozen=True)
class Rule:
    """What is under test: `resolve` and `action` of `commit.py`, or a simpler pair."""

    name: str
    resolve: Callable[[Attempt, int, Collection[Standing], Iterable[Attempt]], Fate]
    action: Callable[[Attempt | None, Attempt | None, Attempt], Action]

    def decide(self, world: World, fates: Sequence[str], heard: Attempt | None) -> Outcome:
        """Checked against what the members hold. Raises Impossible."""
        return _decide(world, self, fates, heard)


def _decide(world: World, rule: Rule, fates: Sequence[str], heard: Attempt | None) -> Outcome:
    generation, record = len(world.records), world.records[-1]
    absent = [mem for mem, fate in zip(world.mems, fates, strict=True) if fate == AWAY]
    seat_is_absent = any(mem.seat == generation for mem in absent)
    view = _View.of(world)
    here = [at for at, fate in enumerate(fates) if fate == PRESENT]
    if not here or (seat_is_absent and not any(view.is_witness[at] for at in here)):
        raise Impossible("no witness")
    present = {at: world.mems[at] for at in here}
    standings = [view.standings[at] for at in here]
    fate = rule.resolve(record.committed, generation, standings, () if heard is None else (heard,))
    actions = {at: rule.action(mem.tip, mem.pending, fate.committed) for at, mem in present.items()}
    check_actions(world, fate.committed, actions)
    is_lost = all(answer is Action.HEAL for answer in actions.values())
    if is_lost:
        if seat_is_absent:
            raise Impossible("a holder may live")
        absent = []  # as far as the record can tell, all that is left is here
    check_truth(world, fate.committed, [*present.values(), *absent])
    if not is_lost:
        return Outcome(fate.committed, actions)
    before = world.base.get(world.record.committed, world.record.committed)  # that, or anew
    return Outcome(before if before.step else Attempt(0, generation + 1), actions, is_lost=True)


def check_actions(world: World, committed: Attempt, actions: Mapping[int, Action]) -> None:
    for at, answer in actions.items():
        mem = world.mems[at]
        if answer is Action.KEEP and mem.tip != committed:
            raise Violation(
                f"COMMIT-2: r{at} keeps {format_attempt(mem.tip)}, but the truth is {format_attempt(committed)}"
            )
        if answer is Action.APPLY and not _can_apply(world, mem, committed):
            raise Violation(
                f"RULE-4: r{at} applies {format_attempt(mem.pending)} to {format_attempt(mem.tip)} for "
                f"{format_attempt(committed)}"
            )


class _View:
    """What follows from a world alone, kept while proposals to it are tried one after the other."""

    latest: _View | None = None

    def __init__(self, world: World) -> None:
        generation = len(world.records)
        self.world = world
        self.is_witness = [mem.is_witness(generation) for mem in world.mems]
        self.standings = [Standing(mem.tip, mem.pending, mem.is_active(generation)) for mem in world.mems]
        self._histories: dict[Attempt, tuple[Attempt, ...]] = {}

    @staticmethod
    def of(world: World) -> _View:
        view = _View.latest
        if view is None or view.world is not world:
            view = _View.latest = _View(world)
        return view

    def history(self, attempt: Attempt) -> tuple[Attempt, ...]:
        found = self._histories.get(attempt)
        if found is None:
            found = self._histories[attempt] = history(self.world, attempt)
        return found


def check_truth(world: World, committed: Attempt, living: Sequence[Mem]) -> None:
    view = _View.of(world)
    past, record = view.history(committed), world.records[-1]
    if world.rolled_back and any(
        attempt.generation < world.rolled_back for attempt in set(past) - set(view.history(record.committed))
    ):
        raise Violation(
            f"COMMIT-4: {format_attempt(committed)} was given up for {format_attempt(record.committed)}, and comes back"
        )
    if not world.given_up.isdisjoint(past):
        raise Violation(f"COMMIT-4: {format_attempt(committed)} builds on what was given up")
    for attempt in world.committed:
        if attempt in past or attempt.generation < world.rolled_back:
            continue  # the latter was lost with all who had it, as far as the record could tell
        held = {mem.part for mem in living if mem.tip and attempt in view.history(mem.tip)}
        parts = held | {mem.part for mem in living if _can_apply(world, mem, attempt)}
        if len(parts) == world.num_parts:
            how = "held" if len(held) == world.num_parts else "prepared"
            raise Violation(
                f"COMMIT-1: {format_attempt(attempt)} was committed and is {how}, but the truth is "
                f"{format_attempt(committed)}"
            )


def _can_apply(world: World, mem: Mem, attempt: Attempt) -> bool:
    return mem.pending == attempt and mem.tip is not None and world.base[attempt] == mem.tip


def propose(world: World, rule: Rule, fates: Sequence[str], heard: Attempt | None) -> World:
    committed, actions, is_lost = rule.decide(world, fates, heard)
    generation = len(world.records) + 1
    begun: set[int] = set()
    num_active = 0
    mems = [Mem(part=mem.part) if fate == DIES else mem for mem, fate in zip(world.mems, fates, strict=True)]
    for at, answer in actions.items():
        loads = is_lost and (committed.step > 0 or mems[at].part not in begun)
        seated = ACTIVE if loads or answer is not Action.HEAL else LEARNER
        num_active += seated == ACTIVE
        begun.add(mems[at].part)
        mems[at] = mems[at]._replace(running=False, seat=generation, seated=seated)
    return world._replace(
        mems=tuple(mems),
        records=(*world.records, Rec(committed, is_lost)),
        voters={**world.voters, generation: num_active},
        rolled_back=generation if is_lost else world.rolled_back,
        given_up=world.given_up | (world.committed - {*history(world, committed)} if world.num_parts > 1 else set()),
    )


def enter(world: World, rule: Rule, at: int, torn: bool = False) -> World:
    """Acts on the record it is seated in, which need not be the newest."""
    mem = world.mems[at]
    if mem.seat <= mem.generation or mem.running:
        raise Impossible("nothing to enter")
    record = world.records[mem.seat - 1]
    applies = rule.action(mem.tip, mem.pending, record.committed) is Action.APPLY
    if torn and not applies:
        raise Impossible("nothing to tear")
    tip = None if torn or mem.seated == LEARNER else record.committed
    world = _with(world, at, Mem(tip, None, mem.seat, mem.seated, not torn, mem.seat, mem.seated, mem.part))
    return world._replace(committed=world.committed | {record.committed}) if applies else world


# --- one scenario

_ACTS = {Action.KEEP: "keeps", Action.APPLY: "applies", Action.HEAL: "heals"}


def replay(scenario: Sequence[str], rule: Rule) -> list[str]:
    """What `rule` decides at each proposal of a scenario, up to the first violation."""
    first, *lines = scenario
    active, *learners = (clause.split()[1:] for clause in first.split(";"))
    world = start(len(active), sum(map(len, learners)))
    told = []
    for line in lines:
        op = parse(line)
        try:
            if op.kind == "propose":
                committed, actions, _ = rule.decide(world, op.fates, op.heard)
                acts = ", ".join(f"r{at} {_ACTS[answer]}" for at, answer in actions.items())
                told.append(f"generation {world.generation + 1}  {format_attempt(committed)}  {acts}")
            world = perform(world, rule, op)
        except Violation as violation:
            return [*told, str(violation)]
    return told


def perform(world: World, rule: Rule, op: Op) -> World:
    if op.kind == "propose":
        return propose(world, rule, op.fates, op.heard)
    if op.kind == "enters":
        return enter(world, rule, op.mem)
    if op.kind == "tears-entering":
        return enter(world, rule, op.mem, torn=True)
    if op.kind == "heals":
        return heal(world, op.mem, op.other)
    if op.kind == "reduces":
        assert op.pending is not None
        return reduce(world, op.mem, op.pending)
    return {"prepares": prepare, "commits": commit, "tears": tear, "activates": activate}[op.kind](world, op.mem)


def _with(world: World, at: int, mem: Mem) -> World:
    return world._replace(mems=(*world.mems[:at], mem, *world.mems[at + 1 :]))
